// Chapter: memory
// The caching allocator, without PyTorch: it knows only the driver's memory,
// streams and events, so that it can be tested alone and carried to a chip.
//
// A freed block goes back to the stream it was allocated on, and may be handed
// out there again at once: what that stream does next comes after what it did
// before. Only a block that another stream used as well (recordUse) has to wait
// for events, one on each of these streams.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "openreg/driver/openreg.h"

namespace openreg::caching {

// [memory: sizes]
// All sizes are bytes.
inline constexpr std::size_t kAlignment = 512; // every block's size and address
inline constexpr std::size_t kSmallSize = 1 << 20; // at most: a small block
// Small blocks share segments of this size.
inline constexpr std::size_t kSmallSegment = 2 << 20;
// From here on a block has a segment of its own, of a multiple of the next.
inline constexpr std::size_t kMinLarge = 10 << 20;
inline constexpr std::size_t kRoundLarge = 2 << 20;
// [/memory: sizes]

// [memory: settings]
// What PYTORCH_ALLOC_CONF can set, with PyTorch's defaults.
struct Settings {
  std::size_t largeSegment = 20 << 20; // blocks below kMinLarge share these
  std::size_t maxSplit = SIZE_MAX;     // a block of this size is never split
  std::size_t maxRounding = 20 << 20;  // ... nor lent to one so much smaller
  double collectAbove = 0;             // fraction of the limit; 0: never
  // Requests are rounded up to a power of two divided in so many steps; by
  // the power of two from 1 MiB (index 0) on. 0 or 1: to kAlignment only.
  std::array<std::size_t, 16> divisions{};
};
// [/memory: settings]

// [memory: statistics]
struct Counter {
  std::int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(std::int64_t amount);
  void subtract(std::int64_t amount);
};

// Of all blocks, of the small ones, of the large ones.
enum Kind : std::size_t { kAll, kSmall, kLarge, kKinds };
using Counters = std::array<Counter, kKinds>;

// As c10::CachingDeviceAllocator::DeviceStats names them: "active" is what is
// allocated or still in use by a stream, "inactive split" is what is free but
// cannot go back to the device because a part of its segment is not.
struct Statistics {
  Counters allocations, segments, active, inactiveSplits;
  Counters allocatedBytes, reservedBytes, activeBytes, inactiveSplitBytes;
  Counters requestedBytes;
  Counter oversizeAllocations, oversizeSegments; // above Settings::maxSplit
  std::int64_t retries = 0; // requests that had to empty the cache first
  std::int64_t outOfMemory = 0;
  std::int64_t deviceAllocations = 0, deviceFrees = 0;
  std::int64_t waitsForAll = 0; // times that every pending event was waited for
};
// [/memory: statistics]

// [memory: history]
// Who asked for memory: made by the function given to recordHistory.
using Context = std::shared_ptr<void>;

struct BlockInfo {
  std::uintptr_t address;
  std::size_t size, requested;
  bool allocated;  // held by somebody
  bool active;     // ... or freed, and still used by another stream
  Context context; // of its allocation, if active and history was recorded
};

struct SegmentInfo {
  std::uintptr_t address;
  std::size_t size;
  std::uint64_t stream; // its id: orStreamGetId
  bool small;
  Context context;
  std::vector<BlockInfo> blocks; // without gaps, by address
};

struct Entry {
  enum class Action : std::uint8_t {
    Alloc,
    FreeRequested, // released by its owner
    FreeCompleted, // and, perhaps later, free
    SegmentAlloc,
    SegmentFree,
    Snapshot,
    OutOfMemory, // `address` is the device's free memory, `size` the request
  };
  Action action;
  std::uintptr_t address;
  std::size_t size;
  std::uint64_t stream;
  std::int64_t nanoseconds; // since the epoch
  Context context;
};

struct Snapshot {
  std::vector<SegmentInfo> segments; // by address
  std::vector<Entry> history;        // oldest first
};
// [/memory: history]

struct Block; // one allocation; opaque

// What a failed allocation has to say.
struct Shortage {
  std::size_t requested, rounded;
  std::size_t capacity, deviceFree; // as the driver says
  std::size_t limit; // what this process may take; SIZE_MAX: no limit
  std::size_t allocated, reserved, largestFree; // here
};

// [memory: core]
// The memory of one device. Safe to call from any thread; no call but
// allocate, when memory is short, and emptyCache waits for the device.
class DeviceCache {
 public:
  explicit DeviceCache(int device);
  DeviceCache(const DeviceCache&) = delete;
  DeviceCache& operator=(const DeviceCache&) = delete;

  // A block of at least `bytes` (> 0), for use on `stream` (of this device;
  // never null). Null when the device has not enough, even after everything
  // cached was given back; *shortage then says why, and *error is
  // orErrorOutOfMemory. Any other error of the driver comes back in *error.
  Block* allocate(
      std::size_t bytes, orStream_t stream, orError* error, Shortage* shortage);

  // Give a block back. Never throws and never waits; any thread, any time,
  // also while the process exits or after a fork.
  void free(Block* block) noexcept;

  // `stream` uses the block too: when it is freed, it is not handed out again
  // before what is queued there at that time is done.
  void recordUse(Block* block, orStream_t stream);

  // Give every segment without a used block back to the device, after waiting
  // for the events of blocks that other streams used. Like every call that
  // waits, it reports the device's pending asynchronous error; the cache is
  // emptied all the same.
  [[nodiscard]] orError emptyCache();

  // The most that may be reserved, in bytes; SIZE_MAX: what the device has.
  void setLimit(std::size_t bytes);
  std::size_t limit() const;
  void setSettings(const Settings& settings);

  Statistics statistics() const;
  void resetPeaks();
  void resetAccumulated();

  // Forget the history, and from now on remember the last `entries` events; 0:
  // none. `capture`, which may be null, says who is asking: it is called by
  // allocate, free, emptyCache and snapshot on the calling thread, without the
  // cache's lock, so it may take locks of its own. What it made is dropped
  // without the lock too.
  void recordHistory(std::size_t entries, std::function<Context()> capture);
  Snapshot snapshot();

 private:
  struct Impl;
  Impl* impl_; // never deleted: blocks outlive static destructors
};

void* address(const Block* block);
std::size_t size(const Block* block);  // as rounded
orStream_t stream(const Block* block); // it was allocated on
DeviceCache& owner(const Block* block);
// [/memory: core]

} // namespace openreg::caching
