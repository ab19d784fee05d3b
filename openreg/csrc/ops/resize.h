// Chapter: ops
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstddef>

namespace openreg {

// Give a storage `bytes` bytes, on its own device, keeping what fits of its
// contents. The copy is queued; nothing waits.
void resizeStorage(c10::StorageImpl* storage, std::size_t bytes);

} // namespace openreg
