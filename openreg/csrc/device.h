// Chapter: devices
// The chip's devices, spoken of in PyTorch's terms.
#pragma once

#include <c10/core/Device.h>

#include <source_location>

#include "openreg/driver/openreg.h"

namespace openreg {

// [devices: check]
// Turn a driver error into the exception PyTorch's users expect:
// torch.OutOfMemoryError for memory, torch.AcceleratorError for what failed on
// the device, RuntimeError for the rest. The text is the driver's own sentence.
[[noreturn]] void raise(orError error, const std::source_location& where);

inline void check(
    orError error,
    const std::source_location& where = std::source_location::current()) {
  if (error != orSuccess) [[unlikely]] {
    raise(error, where);
  }
}
// [/devices: check]

// How many devices there are. 0 when the driver cannot say: PyTorch asks from
// places that must not throw, and asks for the reason elsewhere.
c10::DeviceIndex deviceCount() noexcept;

// The calling thread's current device.
c10::DeviceIndex currentDevice();

// Make `index` current; throws if there is no such device.
void setDevice(c10::DeviceIndex index);

// Make `index` current and return the one before.
c10::DeviceIndex exchangeDevice(c10::DeviceIndex index);

} // namespace openreg
