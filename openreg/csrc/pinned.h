// Chapter: hooks
#pragma once

#include <c10/core/Allocator.h>

namespace openreg {

// Gives page-locked host memory, which the device can read and write while
// the host goes on. Never null, lives as long as the process.
c10::Allocator* pinnedAllocator();

} // namespace openreg
