// Chapter: frontend
// Storages whose memory another process has allocated.
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "openreg/csrc/device.h"
#include "openreg/csrc/sharing.h"
#include "openreg/csrc/stream.h"

namespace openreg {
namespace {

// [frontend: imported]
using Key = std::pair<dev_t, ino_t>; // of a memory object

struct Segment { // a mapped object
  char* begin = nullptr;
  std::size_t bytes = 0;
  std::size_t storages = 0;
};

struct Imported { // a storage in it
  Key key;
  char* address;
  int lifeline;
  c10::Device device;
  orStream_t stream; // the one it was opened for, as an allocation has one
  std::vector<orStream_t> alsoUsed; // under the lock
};

struct Table {
  std::mutex mutex; // never held while the device is waited for
  std::map<Key, Segment> segments;
  std::set<int> lifelines;
};
// [/frontend: imported]

Table& table();

// [frontend: imported-fork]
// A fork inherits the lifelines. It cannot use the memory, so it lets go.
void lockTable() {
  table().mutex.lock();
}
void unlockTable() {
  table().mutex.unlock();
}
void dropTable() {
  for (const int lifeline : std::exchange(table().lifelines, {})) {
    close(lifeline);
  }
  table().mutex.unlock();
}

// Never destroyed: storages outlive static destructors.
Table& table() {
  static auto* const instance = [] {
    pthread_atfork(&lockTable, &unlockTable, &dropTable);
    return new Table;
  }();
  return *instance;
}
// [/frontend: imported-fork]

// [frontend: mapping]
// The segment of an object, mapped if it is not, with one more storage in it.
Segment acquire(const Key& key, int descriptor) {
  Table& it = table();
  {
    const std::lock_guard lock(it.mutex);
    if (const auto found = it.segments.find(key); found != it.segments.end()) {
      ++found->second.storages;
      return found->second;
    }
  }
  // Without the lock: when memory is short this waits for engines, and one of
  // them may be releasing a storage.
  void* begin = nullptr;
  Segment fresh;
  check(orMemImport(&begin, &fresh.bytes, descriptor));
  fresh.begin = static_cast<char*>(begin);
  Segment result;
  {
    const std::lock_guard lock(it.mutex);
    Segment& known = it.segments.emplace(key, fresh).first->second;
    ++known.storages;
    result = known;
  }
  if (result.begin != fresh.begin) {
    orFree(begin); // another thread was faster
  }
  return result;
}

// One storage less; the last one's memory goes in the order of `stream`.
void drop(const Key& key, orStream_t stream) {
  Table& it = table();
  void* unmap = nullptr;
  {
    const std::lock_guard lock(it.mutex);
    const auto found = it.segments.find(key);
    if (--found->second.storages == 0) {
      unmap = found->second.begin;
      it.segments.erase(found);
    }
  }
  if (orFreeAsync(unmap, stream) != orSuccess) {
    orFree(unmap); // the stream was destroyed
  }
}
// [/frontend: mapping]

// [frontend: release-imported]
// Called when the device is done with the storage, mostly by an engine.
void finish(void* args) {
  Imported* const it = *static_cast<Imported**>(args);
  bool ours = false;
  {
    const std::lock_guard lock(table().mutex);
    ours = table().lifelines.erase(it->lifeline) > 0;
  }
  if (ours) { // not in a fork
    close(it->lifeline);
    drop(it->key, it->stream);
  }
  delete it;
}

// Not a host function, which a failure on the stream would drop: a kernel's
// arguments are destroyed in any case.
const orKernel kRelease{
    "release of shared memory",
    [](orKernelContext*, void*) {},
    nullptr,
    &finish};

void orderAfter(orStream_t stream, orStream_t other) {
  orEvent_t event = nullptr;
  if (other != stream &&
      orEventCreateWithFlags(&event, orEventDisableTiming) == orSuccess) {
    orEventRecord(event, other);
    orStreamWaitEvent(stream, event);
    orEventDestroy(event);
  }
}

// The stream sanitizer must know when an address means another storage.
void trace(const char* address, bool allocated) {
  if (const auto* python = c10::impl::GPUTrace::get_trace()) [[unlikely]] {
    const auto where = reinterpret_cast<std::uintptr_t>(address);
    if (allocated) {
      (*python)->trace_gpu_memory_allocation(c10::kPrivateUse1, where);
    } else {
      (*python)->trace_gpu_memory_deallocation(c10::kPrivateUse1, where);
    }
  }
}

// The storage's deleter. It waits for nothing and throws nothing.
void release(void* context) {
  auto* it = static_cast<Imported*>(context);
  trace(it->address, false);
  int previous = 0;
  orGetDevice(&previous);
  if (orSetDevice(it->device.index()) == orSuccess) {
    for (const orStream_t other : it->alsoUsed) {
      orderAfter(it->stream, other);
    }
    orSetDevice(previous);
  }
  if (orLaunchKernel(it->stream, &kRelease, &it, sizeof(it)) != orSuccess) {
    finish(&it); // there is nothing to wait for: a fork, an exit, a lost device
  }
}
// [/frontend: release-imported]

Imported* imported(const c10::DataPtr& data) {
  return data.get_deleter() == &release
             ? static_cast<Imported*>(data.get_context())
             : nullptr;
}

} // namespace

// [frontend: open-shared]
c10::Storage openShared(const Place& place, int lifeline) {
  const c10::Device device(
      c10::kPrivateUse1, static_cast<c10::DeviceIndex>(place.device));
  const c10::DeviceGuard guard(device);
  struct stat status;
  TORCH_CHECK(
      fstat(place.memory, &status) == 0,
      "the descriptor of shared openreg memory cannot be used: ",
      std::strerror(errno));
  const Key key(status.st_dev, status.st_ino);
  const orStream_t stream = currentHandle();
  const Segment segment = acquire(key, place.memory);
  if (place.offset > segment.bytes ||
      place.bytes > segment.bytes - place.offset) {
    drop(key, stream);
    TORCH_CHECK(
        false,
        "shared openreg memory of ",
        segment.bytes,
        " bytes has no ",
        place.bytes,
        " bytes at offset ",
        place.offset);
  }
  char* const address = segment.begin + place.offset;
  auto* const it = new Imported{key, address, lifeline, device, stream, {}};
  {
    const std::lock_guard lock(table().mutex);
    table().lifelines.insert(lifeline);
  }
  trace(address, true);
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      place.bytes,
      {address, it, &release, device},
      /*allocator=*/nullptr,
      /*resizable=*/false);
}
// [/frontend: open-shared]

int lifelineOf(const c10::DataPtr& data) {
  const Imported* const it = imported(data);
  if (it == nullptr) {
    return -1;
  }
  const int copy = fcntl(it->lifeline, F_DUPFD_CLOEXEC, 0);
  TORCH_CHECK(
      copy >= 0, "cannot send on shared memory: ", std::strerror(errno));
  return copy;
}

bool recordImportedUse(const c10::DataPtr& data, const c10::Stream& user) {
  Imported* const it = imported(data);
  if (it == nullptr) {
    return false;
  }
  const orStream_t stream = toHandle(user);
  const std::lock_guard lock(table().mutex);
  if (std::find(it->alsoUsed.begin(), it->alsoUsed.end(), stream) ==
      it->alsoUsed.end()) {
    it->alsoUsed.push_back(stream);
  }
  return true;
}

} // namespace openreg
