// Chapter: frontend
// Storages that several processes use. The one that allocated a storage keeps
// it for as long as another holds it; how it learns of that is in sharing.cpp.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>

namespace openreg {

// [frontend: collect-declare]
// Let go of sent storages that no receiver holds any more; how many there were.
// Needs no Python, and must be called without Python's lock.
std::size_t collectShared();
// [/frontend: collect-declare]

// [frontend: imported-declare]
// Where a storage from another process lies.
struct Place {
  int device;         // index, the same in all processes
  int memory;         // descriptor of the memory object; stays the caller's
  std::size_t offset; // of the storage in the object
  std::size_t bytes;  // of the storage
};

// A storage over another process's memory, which cannot be resized: what lies
// behind its end is not its own. `lifeline` is closed when the storage is gone
// and the work queued until then is done; it is the storage's from success on.
// Memory objects are mapped once, however many storages lie in one.
c10::Storage openShared(const Place& place, int lifeline);

// A new descriptor of the lifeline of such a storage; -1 for any other.
int lifelineOf(const c10::DataPtr& data);

// `stream` uses such a storage too, and it must outlive what is queued there
// when it is released. False for any other data.
bool recordImportedUse(const c10::DataPtr& data, const c10::Stream& stream);
// [/frontend: imported-declare]

} // namespace openreg
