// Chapter: devices
#include "openreg/driver/memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <iterator>
#include <utility>

namespace openreg::driver {
namespace {

// Freed ranges of at least this size go back to the system at once; for
// smaller ones the call costs more than the pages are worth.
constexpr std::size_t kReturnToSystem = std::size_t{1} << 20;
constexpr std::uintptr_t kPage = 4096;

std::size_t roundUp(std::size_t bytes) {
  // [frontend: round-to-pages]
  if (bytes >= Heap::kShareable) {
    return (bytes + kPage - 1) / kPage * kPage;
  }
  // [/frontend: round-to-pages]
  return (bytes + Heap::kAlignment - 1) / Heap::kAlignment * Heap::kAlignment;
}

std::uintptr_t address(const void* ptr) {
  return reinterpret_cast<std::uintptr_t>(ptr);
}

// [frontend: skipped]
// What an allocation leaves free at the start of a range to begin with a page.
std::size_t skipped(std::uintptr_t begin, std::size_t wanted) {
  return wanted < Heap::kShareable ? 0 : (kPage - begin % kPage) % kPage;
}
// [/frontend: skipped]

} // namespace

bool Windows::reserve(int devices, std::size_t bytesPerDevice) {
  const std::size_t bytes = static_cast<std::size_t>(devices) * bytesPerDevice;
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* device = mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
  if (device == MAP_FAILED) {
    return false;
  }
  void* backing = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (backing == MAP_FAILED) {
    munmap(device, bytes);
    return false;
  }
  // Large pages save faults where the system has them; it may say no.
  madvise(backing, bytes, MADV_HUGEPAGE);
  device_ = address(device);
  offset_ = static_cast<std::ptrdiff_t>(address(backing) - device_);
  stride_ = bytesPerDevice;
  devices_ = devices;
  return true;
}

int Windows::deviceOf(const void* ptr) const {
  const std::size_t distance = address(ptr) - device_;
  const std::size_t index = distance / stride_;
  return index < static_cast<std::size_t>(devices_) ? static_cast<int>(index)
                                                    : -1;
}

Windows& windows() {
  static Windows* const instance = new Windows; // outlives every thread
  return *instance;
}

void Heap::open(int device, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  total_ = bytes;
  free_.emplace(windows().begin(device), bytes);
}

void* Heap::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::size_t wanted = roundUp(bytes);
  if (wanted < bytes) { // the rounding went past the end of size_t
    return nullptr;
  }
  auto best = free_.end();
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    // [frontend: range-with-pages]
    if (range->second >= wanted &&
        range->second - wanted < skipped(range->first, wanted)) {
      continue;
    }
    // [/frontend: range-with-pages]
    if (range->second >= wanted &&
        (best == free_.end() || range->second < best->second)) {
      best = range;
    }
  }
  if (best == free_.end()) {
    return nullptr;
  }
  auto [begin, size] = std::pair<std::uintptr_t, std::size_t>(*best);
  free_.erase(best);
  // [frontend: whole-pages]
  if (const std::size_t skip = skipped(begin, wanted); skip > 0) {
    free_.emplace(begin, skip);
    begin += skip;
    size -= skip;
  }
  // [/frontend: whole-pages]
  if (size > wanted) {
    free_.emplace(begin + wanted, size - wanted);
  }
  blocks_.emplace(begin, Block{.size = bytes, .retired = false});
  return reinterpret_cast<void*>(begin);
}

bool Heap::retire(const void* ptr) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(address(ptr));
  if (block == blocks_.end() || block->second.retired) {
    return false;
  }
  block->second.retired = true;
  ++retired_;
  return true;
}

void Heap::restore(const void* ptr) {
  const std::lock_guard lock(mutex_);
  blocks_.at(address(ptr)).retired = false;
  --retired_;
}

void Heap::release(const void* ptr) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(address(ptr));
  std::uintptr_t begin = block->first;
  std::size_t size = roundUp(block->second.size);
  // [frontend: detach-object]
  if (block->second.object >= 0 && !detach(ptr, block->second)) {
    return; // stays shared, so nobody else may have it; as good as leaked
  }
  // [/frontend: detach-object]
  blocks_.erase(block);
  --retired_;
  if (size >= kReturnToSystem) {
    // Whole pages only: the system would round the length up, and the rest of
    // the last page may be the start of a neighbour.
    const std::uintptr_t start = address(windows().backing(ptr));
    const std::uintptr_t first = (start + kPage - 1) / kPage * kPage;
    const std::uintptr_t last = (start + size) / kPage * kPage;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && begin + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      size += previous->second;
      free_.erase(previous);
    }
  }
  free_.emplace(begin, size);
}

Heap::Range Heap::find(const void* ptr) {
  const std::lock_guard lock(mutex_);
  auto block = blocks_.upper_bound(address(ptr));
  if (block == blocks_.begin()) {
    return {};
  }
  --block;
  const bool inside = address(ptr) - block->first < block->second.size;
  return inside && !block->second.retired
             ? Range{block->first, block->second.size}
             : Range{};
}

Heap::Usage Heap::usage() {
  const std::lock_guard lock(mutex_);
  Usage result;
  result.total = total_;
  for (const auto& [begin, size] : free_) {
    result.free += size;
    result.largest = size > result.largest ? size : result.largest;
  }
  return result;
}

bool Heap::hasRetired() {
  const std::lock_guard lock(mutex_);
  return retired_ > 0;
}

void* HostMemory::allocate(std::size_t bytes) {
  void* ptr = nullptr;
  if (bytes > SIZE_MAX - 64 || posix_memalign(&ptr, 64, bytes) != 0) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  blocks_.emplace(address(ptr), bytes);
  return ptr;
}

bool HostMemory::owns(const void* ptr) {
  const std::lock_guard lock(mutex_);
  return blocks_.count(address(ptr)) != 0;
}

void HostMemory::release(void* ptr) {
  {
    const std::lock_guard lock(mutex_);
    blocks_.erase(address(ptr));
  }
  std::free(ptr);
}

Heap::Range HostMemory::find(const void* ptr) {
  const std::lock_guard lock(mutex_);
  auto block = blocks_.upper_bound(address(ptr));
  if (block == blocks_.begin()) {
    return {};
  }
  --block;
  return address(ptr) - block->first < block->second
             ? Heap::Range{block->first, block->second}
             : Heap::Range{};
}

HostMemory& hostMemory() {
  static HostMemory* const instance = new HostMemory;
  return *instance;
}

} // namespace openreg::driver
