// Chapter: devices
// What the C API's orKernelContext is.
#pragma once

#include <cstddef>
#include <string>

#include "openreg/driver/openreg.h"

struct orKernelContext {
  int device;
  std::ptrdiff_t offset; // from a device pointer to its backing address
  std::string failure;   // empty unless the kernel failed
};
