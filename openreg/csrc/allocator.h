// Chapter: memory
// PyTorch's device allocator for openreg: the caches of caching.h, one for each
// device, under the interface that c10 asks for.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include "openreg/csrc/caching.h"

namespace openreg {

// The cache of a device. Starts nothing; throws if there is no such device.
caching::DeviceCache& cacheOf(c10::DeviceIndex device);

// Never null, lives as long as the process.
c10::DeviceAllocator* deviceAllocator();

} // namespace openreg
