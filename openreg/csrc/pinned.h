// Chapter: hooks
#pragma once

#include <c10/core/Allocator.h>
// [memory: include-host-allocator]
#include <ATen/core/CachingHostAllocator.h>
// [/memory: include-host-allocator]

namespace openreg {

// Gives page-locked host memory, which the device can read and write while
// the host goes on. Never null, lives as long as the process.
// [hooks: declare-pinned until memory]
//| c10::Allocator* pinnedAllocator();
// [/hooks: declare-pinned]
// [memory: declare-pinned]
at::HostAllocator* pinnedAllocator();
// [/memory: declare-pinned]

} // namespace openreg
