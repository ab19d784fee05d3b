// The caching allocator without PyTorch: each promise of caching.h by itself,
// then random work from many threads.
//
//   allocator_stress [SECONDS [SEED]]
//   allocator_stress --bench
//
// Ends with status 1 and a sentence when a promise is broken. Meant to be built
// with a sanitizer, too: kernels of the random work share plain memory, so a
// block handed out too early is a data race as well.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "openreg/csrc/caching.h"
#include "openreg/driver/openreg.h"

namespace {

using namespace openreg::caching;

constexpr int kDevices = 2;
constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;
constexpr std::size_t kCapacity = 256 * kMiB; // of each device

[[noreturn]] void broken(const std::string& what) {
  static std::mutex once; // never unlocked: the first sentence counts
  once.lock();
  std::fprintf(stderr, "allocator_stress: %s\n", what.c_str());
  std::_Exit(1);
}

void check(orError error, const char* call) {
  if (error != orSuccess) {
    broken(
        std::string(call) + ": " + orGetErrorName(error) + ": " +
        orGetLastErrorMessage());
  }
}

void expect(bool holds, const std::string& otherwise) {
  if (!holds) {
    broken(otherwise);
  }
}

template <typename Value>
void same(Value is, Value wanted, const std::string& what) {
  if (is != wanted) {
    broken(
        what + " is " + std::to_string(is) + " instead of " +
        std::to_string(wanted));
  }
}

// ---------------------------------------------------------------- parts

orStream_t newStream(int device) {
  orStream_t stream = nullptr;
  check(orSetDevice(device), "orSetDevice");
  check(orStreamCreate(&stream), "orStreamCreate");
  check(orSetDevice(0), "orSetDevice");
  return stream;
}

std::size_t freeMemory(int device, bool synchronize = false) {
  std::size_t free = 0;
  std::size_t total = 0;
  check(orSetDevice(device), "orSetDevice");
  if (synchronize) {
    check(orDeviceSynchronize(), "orDeviceSynchronize");
  }
  check(orMemGetInfo(&free, &total), "orMemGetInfo");
  check(orSetDevice(0), "orSetDevice");
  return free;
}

// Holds a stream until it is opened.
class Gate {
 public:
  explicit Gate(orStream_t stream) : stream_(stream) {
    const auto wait = [](void* gate) {
      while (!static_cast<Gate*>(gate)->open_.load()) {
        std::this_thread::yield();
      }
    };
    check(orLaunchHostFunc(stream, wait, this), "orLaunchHostFunc");
  }
  ~Gate() {
    open();
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() {
    open_.store(true);
    check(orStreamSynchronize(stream_), "orStreamSynchronize");
  }
  void openOnly() {
    open_.store(true);
  }

 private:
  orStream_t stream_;
  std::atomic<bool> open_{false};
};

// A cache with streams of its own; everything is given back in the end.
struct Bench {
  explicit Bench(int index = 0)
      : device(index),
        before(freeMemory(index, true)),
        cache(index),
        a(newStream(index)),
        b(newStream(index)),
        c(newStream(index)) {
  }
  ~Bench() {
    check(cache.emptyCache(), "emptyCache");
    const Statistics now = cache.statistics();
    same<long>(now.reservedBytes[kAll].current, 0, "memory kept at the end");
    same<long>(now.segments[kAll].current, 0, "segments kept at the end");
    same<long>(now.active[kAll].current, 0, "blocks in use at the end");
    same(freeMemory(device), before, "the device's free memory at the end");
  }

  Block* get(std::size_t bytes, orStream_t stream) {
    orError error = orErrorSystem;
    Shortage shortage{};
    Block* block = cache.allocate(bytes, stream, &error, &shortage);
    check(error, "allocate");
    expect(block != nullptr, "no error, and no block either");
    expect(size(block) >= bytes, "a block is smaller than was asked for");
    return block;
  }

  Shortage fails(std::size_t bytes, orStream_t stream) {
    orError error = orSuccess;
    Shortage shortage{};
    expect(
        cache.allocate(bytes, stream, &error, &shortage) == nullptr,
        "a request that cannot be met was met");
    expect(error == orErrorOutOfMemory, "a shortage has another error code");
    return shortage;
  }

  void settings(const std::function<void(Settings&)>& change) {
    Settings settings;
    change(settings);
    cache.setSettings(settings);
  }

  const int device;
  const std::size_t before;
  DeviceCache cache;
  orStream_t a, b, c;
};

// No gaps, no two free neighbours, and what the blocks add up to.
struct Sum {
  std::size_t allocated = 0, active = 0, splits = 0, reserved = 0, idle = 0;
  long blocks = 0, splitBlocks = 0;
};

Sum sum(const Snapshot& snapshot) {
  Sum result;
  std::uintptr_t end = 0;
  for (const SegmentInfo& segment : snapshot.segments) {
    expect(segment.address >= end, "segments overlap or are out of order");
    end = segment.address;
    bool wasFree = false;
    for (const BlockInfo& block : segment.blocks) {
      expect(block.address == end, "a snapshot has a gap between two blocks");
      expect(block.address % kAlignment == 0, "a block is not aligned");
      expect(block.active || !block.allocated, "allocated, but not active");
      expect(block.active || !wasFree, "two free neighbours were not merged");
      wasFree = !block.active;
      end += block.size;
      result.allocated += block.allocated ? block.size : 0;
      result.active += block.active ? block.size : 0;
      result.blocks += block.allocated ? 1 : 0;
      const bool whole = segment.blocks.size() == 1;
      if (!block.active) {
        (whole ? result.idle : result.splits) += block.size;
        result.splitBlocks += whole ? 0 : 1;
      }
    }
    expect(
        end == segment.address + segment.size,
        "blocks do not add up to their segment");
    result.reserved += segment.size;
  }
  return result;
}

// What must hold whenever no other thread is at work.
void consistent(Bench& bench) {
  const Sum blocks = sum(bench.cache.snapshot());
  const Statistics s = bench.cache.statistics();
  const auto now = [](const Counters& counters) {
    same(
        counters[kSmall].current + counters[kLarge].current,
        counters[kAll].current,
        "small and large together");
    for (const Counter& counter : counters) {
      expect(counter.peak >= counter.current, "a peak is below its figure");
      same(
          counter.allocated - counter.freed,
          counter.current,
          "allocated less freed");
    }
    return static_cast<std::size_t>(counters[kAll].current);
  };
  same(now(s.allocatedBytes), blocks.allocated, "allocated bytes");
  same(now(s.activeBytes), blocks.active, "active bytes");
  same(now(s.reservedBytes), blocks.reserved, "reserved bytes");
  same(now(s.inactiveSplitBytes), blocks.splits, "inactive split bytes");
  same<long>(s.inactiveSplits[kAll].current, blocks.splitBlocks, "splits");
  same<long>(s.allocations[kAll].current, blocks.blocks, "allocations");
  same(
      now(s.activeBytes) + now(s.inactiveSplitBytes) + blocks.idle,
      now(s.reservedBytes),
      "active, inactive and idle bytes together");
  same(
      s.segments[kAll].current,
      s.deviceAllocations - s.deviceFrees,
      "device allocations less frees");
  expect(
      s.requestedBytes[kAll].current <= s.activeBytes[kAll].current,
      "more was requested than is active");
}

// ---------------------------------------------------------------- checks

void reuse() {
  Bench it;
  for (const std::size_t bytes : {kKiB, 3 * kMiB, 15 * kMiB}) {
    Gate gate(it.a);
    Block* first = it.get(bytes, it.a);
    void* where = address(first);
    expect(stream(first) == it.a, "a block names another stream");
    expect(&owner(first) == &it.cache, "a block names another cache");
    it.cache.free(first);
    Block* second = it.get(bytes, it.a);
    expect(address(second) == where, "no reuse on the stream itself");
    it.cache.free(second);
    Block* other = it.get(bytes, it.b);
    expect(address(other) != where, "reuse on another stream");
    it.cache.free(other);
    consistent(it);
  }
}

void recordUse() {
  Bench it;
  for (const std::size_t bytes : {kKiB, 3 * kMiB, 15 * kMiB}) {
    Block* block = it.get(bytes, it.a);
    void* where = address(block);
    Block* guard = it.get(bytes, it.a);
    Gate first(it.b);
    Gate second(it.c);
    it.cache.recordUse(block, it.b);
    it.cache.recordUse(block, it.c);
    it.cache.recordUse(block, it.b); // again: counts once
    it.cache.free(block);
    for (Gate* gate : {&first, &second}) {
      Block* early = it.get(bytes, it.a);
      expect(address(early) != where, "reuse while another stream uses it");
      same<long>(
          it.cache.statistics().active[kAll].current -
              it.cache.statistics().allocations[kAll].current,
          1,
          "blocks freed and in use");
      consistent(it);
      it.cache.free(early);
      gate->open();
    }
    check(it.cache.emptyCache(), "emptyCache"); // leaves the guard's segment
    if (bytes < kMinLarge) {
      Block* late = it.get(bytes, it.a);
      expect(address(late) == where, "no reuse after the other stream's work");
      it.cache.free(late);
    }
    it.cache.free(guard);
    consistent(it);
  }
  // Without emptyCache: a request that finds nothing else looks at the events.
  check(it.cache.emptyCache(), "emptyCache");
  it.cache.setLimit(20 * kMiB);
  Block* block = it.get(20 * kMiB, it.a);
  {
    const Gate gate(it.b);
    it.cache.recordUse(block, it.b);
    it.cache.free(block);
  }
  it.cache.free(it.get(20 * kMiB, it.a));
  same<long>(it.cache.statistics().retries, 0, "retries where an event did");
  it.cache.setLimit(SIZE_MAX);
}

void recordOwnUse() {
  Bench it;
  const Gate gate(it.a);
  Block* block = it.get(kKiB, it.a);
  void* where = address(block);
  it.cache.recordUse(block, it.a);
  it.cache.free(block);
  const Statistics now = it.cache.statistics();
  same<long>(now.active[kAll].current, 0, "blocks that wait for themselves");
  block = it.get(kKiB, it.a);
  expect(address(block) == where, "a stream waits for itself");
  it.cache.free(block);
}

// A use by a stream of the other device, as in a copy between devices.
void recordForeignUse() {
  Bench it;
  const orStream_t foreign = newStream(1);
  Block* block = it.get(kKiB, it.a);
  Gate gate(foreign);
  it.cache.recordUse(block, foreign);
  it.cache.free(block);
  Block* other = it.get(kKiB, it.a);
  expect(other != block, "reuse while the other device uses it");
  it.cache.free(other);
  gate.open();
}

void splitting() {
  Bench it;
  Block* small[3];
  for (Block*& block : small) {
    block = it.get(kKiB, it.a);
  }
  const auto at = [](Block* block) {
    return reinterpret_cast<std::uintptr_t>(address(block));
  };
  same(at(small[1]), at(small[0]) + kKiB, "the second block's address");
  same(at(small[2]), at(small[0]) + 2 * kKiB, "the third block's address");
  const std::uintptr_t start = at(small[0]);
  // The middle one last, so that it joins both sides, then the other orders.
  for (const auto& order :
       {std::array{0, 2, 1}, std::array{0, 1, 2}, std::array{2, 1, 0}}) {
    for (int i : order) {
      it.cache.free(small[i]);
      consistent(it);
    }
    Block* whole = it.get(kSmallSize, it.a);
    same(at(whole), start, "the address after all was merged");
    it.cache.free(whole);
    for (Block*& block : small) {
      block = it.get(kKiB, it.a);
    }
  }
  for (Block* block : small) {
    it.cache.free(block);
  }
  same<long>(it.cache.statistics().segments[kAll].current, 1, "segments");

  // Large: shared below kMinLarge, and a rest of 1 MiB stays with its block.
  Block* first = it.get(3 * kMiB, it.a);
  Block* second = it.get(3 * kMiB, it.a);
  same(at(second), at(first) + 3 * kMiB, "the second large block's address");
  Block* third = it.get(9 * kMiB, it.a);
  Block* rest = it.get(4 * kMiB, it.a); // of the 5 that are left
  same(size(rest), 5 * kMiB, "the size of a block with a rest of 1 MiB");
  it.cache.free(rest);
  rest = it.get(4 * kMiB - kAlignment, it.a);
  same(size(rest), 4 * kMiB - kAlignment, "the size of a block with more left");
  it.cache.free(rest);
  consistent(it);
  Block* own = it.get(11 * kMiB, it.a);
  same(size(own), 12 * kMiB, "the size of a block with a segment of its own");
  same<long>(it.cache.statistics().segments[kLarge].current, 2, "segments");
  for (Block* block : {first, second, third, own}) {
    it.cache.free(block);
  }
  consistent(it);
}

void rounding() {
  Bench it;
  const auto rounds = [&it](std::size_t bytes, std::size_t to) {
    Block* block = it.get(bytes, it.a);
    same(size(block), to, "the size of " + std::to_string(bytes) + " bytes");
    it.cache.free(block);
  };
  rounds(1, 512);
  rounds(512, 512);
  rounds(513, 1024);
  it.settings([](Settings& s) { s.divisions.fill(4); });
  rounds(1200 * kKiB, 1280 * kKiB);
  rounds(1280 * kKiB, 1280 * kKiB);
  rounds(2 * kMiB, 2 * kMiB);
  rounds(2 * kMiB + 1, 2560 * kKiB);
  rounds(1500, 1536); // too small for steps of a quarter
  rounds(5000, 5120);
  it.settings([](Settings& s) { s.divisions[1] = 2; }); // from 2 MiB on
  rounds(2 * kMiB + 1, 3 * kMiB);
  rounds(1200 * kKiB + 1, 1200 * kKiB + 512);
  rounds(4 * kMiB + 1, 4 * kMiB + 512);
  consistent(it);
}

void oversize() {
  Bench it;
  it.settings([](Settings& s) {
    s.maxSplit = 32 * kMiB;
    s.maxRounding = 8 * kMiB;
  });
  Block* large = it.get(64 * kMiB, it.a);
  const auto counts = [&it](long blocks, long segments) {
    const Statistics now = it.cache.statistics();
    same<long>(now.oversizeAllocations.current, blocks, "oversize blocks");
    same<long>(now.oversizeSegments.current, segments, "oversize segments");
  };
  counts(1, 1);
  void* where = address(large);
  it.cache.free(large);
  counts(0, 1);
  Block* below = it.get(31 * kMiB, it.a);
  expect(address(below) != where, "a small request took an oversize block");
  Block* muchSmaller = it.get(40 * kMiB, it.a);
  expect(address(muchSmaller) != where, "a block was rounded up too far");
  Block* near = it.get(56 * kMiB, it.a);
  expect(address(near) == where, "an oversize block near enough was not taken");
  same(size(near), 64 * kMiB, "an oversize block that was split");
  counts(2, 2);
  for (Block* block : {below, muchSmaller, near}) {
    it.cache.free(block);
  }
  consistent(it);
  // Just below the border: reused, although rounding would reach the border.
  check(it.cache.emptyCache(), "emptyCache");
  for (int i = 0; i < 3; ++i) {
    it.cache.free(it.get(32 * kMiB - kAlignment, it.a));
  }
  same<long>(it.cache.statistics().segments[kAll].current, 1, "segments");
}

void garbage() {
  Bench it;
  it.cache.setLimit(200 * kMiB);
  it.settings([](Settings& s) { s.collectAbove = 0.5; });
  Block* blocks[] = {
      it.get(30 * kMiB, it.a),
      it.get(32 * kMiB, it.b),
      it.get(34 * kMiB, it.c)};
  for (int i : {1, 2, 0}) { // so long idle: b, c, a
    it.cache.free(blocks[i]);
  }
  Block* fourth = it.get(36 * kMiB, it.a); // 132 of 100 MiB: one has to go
  const auto kept = [&it] {
    std::set<std::size_t> result;
    for (const SegmentInfo& segment : it.cache.snapshot().segments) {
      result.insert(segment.size / kMiB);
    }
    return result;
  };
  expect(
      kept() == std::set<std::size_t>{30, 36} ||
          kept() == std::set<std::size_t>{30, 34, 36},
      "garbage collection gave back other segments than the longest idle");
  expect(
      kept() == std::set<std::size_t>{30, 34, 36},
      "garbage collection gave back more than it had to");
  same<long>(it.cache.statistics().retries, 0, "retries");
  it.cache.free(fourth);
}

void limits() {
  Bench it;
  same(it.cache.limit(), SIZE_MAX, "the limit at first");
  it.cache.setLimit(42 * kMiB);
  same(it.cache.limit(), 42 * kMiB, "the limit");
  Block* block = it.get(20 * kMiB, it.a);
  Block* small = it.get(1, it.a);
  const Shortage why = it.fails(24 * kMiB - 1, it.a);
  same(why.requested, 24 * kMiB - 1, "the shortage's request");
  same(why.rounded, 24 * kMiB, "the shortage's rounded request");
  same(why.capacity, kCapacity, "the shortage's capacity");
  same(why.limit, 42 * kMiB, "the shortage's limit");
  same(why.allocated, 20 * kMiB + 512, "the shortage's allocated bytes");
  same(why.reserved, 22 * kMiB, "the shortage's reserved bytes");
  same(why.deviceFree, freeMemory(0), "the shortage's free memory");
  same(why.largestFree, 2 * kMiB - 512, "the shortage's largest free block");
  same<long>(it.cache.statistics().outOfMemory, 1, "out-of-memory count");
  Block* exact = it.get(20 * kMiB, it.a);
  it.fails(2 * kMiB, it.a);
  it.cache.setLimit(SIZE_MAX);
  for (Block* each : {block, small, exact, it.get(2 * kMiB, it.a)}) {
    it.cache.free(each);
  }
  it.fails(SIZE_MAX, it.a);
  it.fails(SIZE_MAX / 2, it.a);
  it.fails(std::size_t{1} << 52, it.a);
  it.fails(kCapacity + 1, it.a);
  consistent(it);
}

void retries() {
  Bench it;
  // One idle segment that is large enough goes back alone ...
  it.cache.free(it.get(100 * kMiB, it.a));
  it.cache.free(it.get(60 * kMiB, it.b));
  it.cache.free(it.get(60 * kMiB, it.c));
  Block* block = it.get(80 * kMiB, it.b);
  same<long>(it.cache.statistics().retries, 0, "retries for one segment");
  same<long>(it.cache.statistics().deviceFrees, 1, "segments given back");
  same<long>(it.cache.statistics().segments[kAll].current, 3, "segments kept");
  it.cache.free(block);
  // ... and all of them when none is, those of pending blocks included.
  block = it.get(20 * kMiB, it.c);
  Gate gate(it.a);
  it.cache.recordUse(block, it.a);
  it.cache.free(block);
  std::thread opener([&] {
    while (it.cache.statistics().waitsForAll == 0) {
      std::this_thread::yield();
    }
    gate.openOnly();
  });
  block = it.get(kCapacity, it.a);
  opener.join();
  same<long>(it.cache.statistics().retries, 1, "retries");
  same<long>(it.cache.statistics().outOfMemory, 0, "out-of-memory count");
  same<int>(orGetLastError(), orSuccess, "the last error after a recovery");
  const Shortage why = it.fails(1, it.b);
  same(why.deviceFree, std::size_t{0}, "the free memory of a full device");
  same(why.limit, SIZE_MAX, "no limit");
  it.cache.free(block);
  // What is left is less than a segment to share.
  check(it.cache.emptyCache(), "emptyCache");
  Block* most = it.get(kCapacity - 6 * kMiB, it.a);
  Block* rest = it.get(5 * kMiB, it.a);
  it.cache.free(most);
  it.cache.free(rest);
  consistent(it);
}

void threads() {
  Bench it;
  Block* block = it.get(kKiB, it.a);
  void* where = address(block);
  std::thread([&] {
    check(orSetDevice(1), "orSetDevice");
    it.cache.free(block);
    block = it.get(kKiB, it.a);
    Block* large = it.get(30 * kMiB, it.b);
    it.cache.free(large);
    check(it.cache.emptyCache(), "emptyCache");
    int device = -1;
    check(orGetDevice(&device), "orGetDevice");
    same(device, 1, "the thread's current device afterwards");
  }).join();
  expect(address(block) == where, "no reuse after another thread's free");
  it.cache.free(block);
}

void devices() {
  Bench first(0);
  Bench second(1);
  Block* block = second.get(kMiB, second.a);
  same(
      freeMemory(1),
      second.before - kSmallSegment,
      "the second device's free memory");
  same(freeMemory(0), first.before, "the first device's free memory");
  orPointerAttributes attributes{};
  check(
      orPointerGetAttributes(&attributes, address(block)),
      "orPointerGetAttributes");
  same(attributes.device, 1, "the block's device");
  same<long>(first.cache.statistics().segments[kAll].current, 0, "segments");
  check(first.cache.emptyCache(), "emptyCache");
  same<long>(second.cache.statistics().segments[kAll].current, 1, "segments");
  second.cache.free(block);
}

void peaks() {
  Bench it;
  Block* first = it.get(kKiB, it.a);
  Block* second = it.get(2 * kKiB, it.a);
  it.cache.free(second);
  Statistics now = it.cache.statistics();
  const Counter& bytes = now.allocatedBytes[kAll];
  same<long>(bytes.current, kKiB, "current");
  same<long>(bytes.peak, 3 * kKiB, "peak");
  same<long>(bytes.allocated, 3 * kKiB, "allocated");
  same<long>(bytes.freed, 2 * kKiB, "freed");
  same<long>(now.allocatedBytes[kLarge].peak, 0, "the large ones' peak");
  same<long>(now.requestedBytes[kSmall].peak, 3 * kKiB, "requested");
  it.cache.resetPeaks();
  now = it.cache.statistics();
  same<long>(bytes.peak, kKiB, "the peak after a reset");
  same<long>(bytes.allocated, 3 * kKiB, "allocated after a reset of peaks");
  it.cache.resetAccumulated();
  now = it.cache.statistics();
  same<long>(bytes.allocated, 0, "allocated after a reset");
  same<long>(bytes.freed, 0, "freed after a reset");
  same<long>(bytes.current, kKiB, "current after a reset");
  same<long>(now.deviceAllocations, 0, "device allocations after a reset");
  it.cache.free(first);
}

void history() {
  Bench it;
  using Action = Entry::Action;
  std::atomic<int> made{0};
  std::atomic<int> ended{0};
  // Both ends use the cache: they hang if they are called under its lock.
  const auto capture = [&]() -> Context {
    it.cache.statistics();
    return {new int(made++), [&](void* number) {
              it.cache.statistics();
              ++ended;
              delete static_cast<int*>(number);
            }};
  };
  it.cache.free(it.get(kKiB, it.a));
  expect(it.cache.snapshot().history.empty(), "history without being asked");
  check(it.cache.emptyCache(), "emptyCache");
  it.cache.recordHistory(100, capture);
  Block* block = it.get(kKiB, it.a);
  const auto where = reinterpret_cast<std::uintptr_t>(address(block));
  Snapshot snapshot = it.cache.snapshot();
  const SegmentInfo& segment = snapshot.segments.at(0);
  expect(segment.context != nullptr, "a segment without its context");
  expect(segment.small, "a small segment that is not");
  std::uint64_t id = 0;
  check(orStreamGetId(it.a, &id), "orStreamGetId");
  same(segment.stream, id, "the segment's stream");
  expect(segment.blocks.at(0).context != nullptr, "a block without context");
  same(segment.blocks[0].requested, kKiB, "the block's request");
  expect(segment.blocks.at(1).context == nullptr, "a free block with context");
  {
    const Gate gate(it.b);
    it.cache.recordUse(block, it.b);
    it.cache.free(block);
    snapshot = it.cache.snapshot();
    const BlockInfo& pending = snapshot.segments.at(0).blocks.at(0);
    expect(pending.active && !pending.allocated, "a block that is not pending");
  }
  check(it.cache.emptyCache(), "emptyCache");
  it.fails(kCapacity + 1, it.a);
  snapshot = it.cache.snapshot();
  const std::vector<Action> wanted{
      Action::SegmentAlloc,
      Action::Alloc,
      Action::Snapshot,
      Action::FreeRequested,
      Action::Snapshot,
      Action::FreeCompleted,
      Action::SegmentFree,
      Action::OutOfMemory,
      Action::Snapshot};
  std::vector<Action> seen;
  std::int64_t time = 0;
  for (const Entry& entry : snapshot.history) {
    seen.push_back(entry.action);
    expect(entry.context != nullptr, "an entry without its context");
    expect(entry.nanoseconds >= time, "history runs backwards");
    time = entry.nanoseconds;
  }
  expect(seen == wanted, "other history than what happened");
  same(snapshot.history[1].address, where, "the address of an allocation");
  same(snapshot.history[1].size, kKiB, "the size of an allocation");
  same(snapshot.history[1].stream, id, "the stream of an allocation");
  same(snapshot.history[6].size, kSmallSegment, "the size of a segment");

  it.cache.recordHistory(5, capture);
  for (int i = 1; i <= 20; ++i) {
    it.cache.free(it.get(static_cast<std::size_t>(i) * kKiB, it.a));
  }
  snapshot = it.cache.snapshot();
  same(snapshot.history.size(), std::size_t{5}, "the entries kept");
  same(snapshot.history[1].size, 20 * kKiB, "the last allocation");
  expect(
      snapshot.history[0].action == Action::FreeCompleted &&
          snapshot.history[1].action == Action::Alloc &&
          snapshot.history[4].action == Action::Snapshot,
      "a full history lost its order");
  it.cache.recordHistory(0, nullptr);
  snapshot = {};
  it.cache.free(it.get(kKiB, it.a));
  check(it.cache.emptyCache(), "emptyCache");
  same(ended.load(), made.load(), "the contexts that ended");
}

// Blocks that are freed by the engine, as a kernel's arguments are, while a
// thread waits for that very kernel.
void freeOnEngine() {
  Bench it;
  struct alignas(16) Owner {
    DeviceCache* cache;
    Block* block;
  };
  static const orKernel kernel{
      "owner",
      [](orKernelContext*, void*) {},
      nullptr,
      [](void* args) {
        const Owner& owner = *static_cast<Owner*>(args);
        owner.cache->free(owner.block);
      }};
  Owner owner{&it.cache, it.get(kKiB, it.a)};
  Block* idle = it.get(30 * kMiB, it.a);
  Block* pending = it.get(30 * kMiB, it.b);
  Gate gate(it.a);
  check(orLaunchKernel(it.a, &kernel, &owner, sizeof(owner)), "owner");
  it.cache.recordUse(pending, it.a);
  it.cache.free(pending);
  it.cache.free(idle);
  std::thread opener([&] {
    while (it.cache.statistics().waitsForAll == 0) {
      std::this_thread::yield();
    }
    gate.openOnly();
  });
  check(it.cache.emptyCache(), "emptyCache");
  opener.join();
  same<long>(it.cache.statistics().active[kAll].current, 0, "active blocks");
}

void emptying() {
  Bench it;
  Block* kept = it.get(kKiB, it.a);
  for (orStream_t stream : {it.a, it.b}) {
    for (const std::size_t bytes : {2 * kKiB, 3 * kMiB, 40 * kMiB}) {
      it.cache.free(it.get(bytes, stream));
    }
  }
  Gate* gate = new Gate(it.b); // its work comes before the memory goes
  std::thread opener([&] {
    while (it.cache.statistics().deviceFrees == 0) {
      std::this_thread::yield();
    }
    gate->openOnly();
  });
  check(it.cache.emptyCache(), "emptyCache");
  same(
      freeMemory(0),
      it.before - kSmallSegment,
      "the device's free memory after emptyCache");
  opener.join();
  delete gate;
  it.cache.free(kept);
  // A stream that was destroyed keeps nothing.
  const orStream_t gone = newStream(0);
  it.cache.free(it.get(kKiB, gone));
  check(orStreamDestroy(gone), "orStreamDestroy");
  check(it.cache.emptyCache(), "emptyCache");
  same(freeMemory(0), it.before, "the free memory after a destroyed stream");

  // A failure elsewhere is reported, and the cache empty all the same.
  static const orKernel fails{
      "fails",
      [](orKernelContext* context, void*) { orKernelFail(context, "so"); },
      nullptr,
      nullptr};
  it.cache.free(it.get(kKiB, it.a));
  check(orLaunchKernel(it.a, &fails, nullptr, 0), "fails");
  expect(
      it.cache.emptyCache() == orErrorKernelFailed,
      "emptyCache kept a kernel's failure to itself");
  same<long>(it.cache.statistics().segments[kAll].current, 0, "segments");
  check(orDeviceSynchronize(), "orDeviceSynchronize");
}

template <typename Function>
void inChild(const char* what, Function function) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    function();
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(status == 0, std::string(what) + ": the child hung or failed");
}

void forks() {
  Bench it;
  Block* cached = it.get(kKiB, it.a);
  Block* block = it.get(kKiB, it.a);
  it.cache.recordUse(block, it.b);
  it.cache.free(cached);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) {
      it.cache.free(it.get(64 * kKiB, it.c));
      it.cache.snapshot();
    }
  });
  for (int i = 0; i < 20; ++i) {
    inChild("after a fork", [&] {
      it.cache.free(block);
      orError error = orSuccess;
      expect(
          it.cache.allocate(kKiB, it.a, &error, nullptr) == nullptr,
          "a forked child was given memory");
      expect(error == orErrorForked, "a forked child got another error");
      it.cache.recordUse(block, it.c);
      expect(it.cache.emptyCache() == orErrorForked, "emptyCache after a fork");
      expect(
          it.cache.statistics().deviceFrees == 0,
          "a forked child gave the parent's memory back");
      sum(it.cache.snapshot());
    });
  }
  stop.store(true);
  busy.join();
  it.cache.free(block);
}

// In a child that has not started the driver yet, for its settings' sake.
void deviceLost() {
  inChild("a lost device", [] {
    setenv("OPENREG_STICKY_ERRORS", "1", 1);
    DeviceCache cache(0);
    const orStream_t a = newStream(0);
    const orStream_t b = newStream(0);
    orError error = orSuccess;
    Block* block = cache.allocate(kKiB, a, &error, nullptr);
    check(error, "allocate");
    cache.recordUse(block, b);
    static const orKernel fails{
        "fails",
        [](orKernelContext* context, void*) { orKernelFail(context, "so"); },
        nullptr,
        nullptr};
    check(orLaunchKernel(b, &fails, nullptr, 0), "fails");
    expect(
        orDeviceSynchronize() == orErrorDeviceLost, "the device is not lost");
    orGetLastError();
    cache.free(block);
    same<long>(cache.statistics().active[kAll].current, 0, "active blocks");
    same<int>(orGetLastError(), orSuccess, "the last error after a free");
  });
}

// The process exits: nothing is waited for, nothing is refused to free().
DeviceCache* lastCache = nullptr;
std::array<Block*, 3> lastBlocks{};

void atExit() {
  for (Block* block : lastBlocks) {
    lastCache->free(block);
  }
  static_cast<void>(lastCache->emptyCache()); // must only return
  same<long>(
      lastCache->statistics().allocations[kAll].current,
      0,
      "blocks allocated after the exit");
}

void leaveBusy() {
  static const orKernel endless{
      "endless",
      [](orKernelContext*, void*) {
        while (true) {
          pause();
        }
      },
      nullptr,
      nullptr};
  lastCache = new DeviceCache(1);
  const orStream_t a = newStream(1);
  const orStream_t b = newStream(1);
  orError error = orSuccess;
  for (Block*& block : lastBlocks) {
    block = lastCache->allocate(kMiB, a, &error, nullptr);
    check(error, "allocate");
    lastCache->recordUse(block, b);
  }
  Block* pending = lastCache->allocate(kMiB, a, &error, nullptr);
  check(error, "allocate");
  lastCache->recordUse(pending, b);
  check(orLaunchKernel(b, &endless, nullptr, 0), "endless");
  lastCache->free(pending);
}

// ---------------------------------------------------------------- stress

constexpr int kThreads = 8;
constexpr std::size_t kStreams = 4;  // of each device, shared by all threads
constexpr std::size_t kStride = 512; // bytes from one word written to the next

std::array<std::array<orStream_t, kStreams>, kDevices> streams;
std::array<DeviceCache*, kDevices> caches;

struct alignas(16) Pattern {
  void* data;
  std::size_t bytes;
  std::uint32_t value;
  std::uint32_t turns; // to take longer
};

template <typename Touch>
void eachWord(orKernelContext* context, void* args, Touch touch) {
  const Pattern& it = *static_cast<Pattern*>(args);
  for (std::uint32_t i = 0; i < it.turns; ++i) {
    std::this_thread::yield();
  }
  auto* data = static_cast<char*>(orKernelAddress(context, it.data));
  for (std::size_t at = 0; at < it.bytes; at += kStride) {
    touch(*reinterpret_cast<std::uint32_t*>(data + at), it.value);
  }
}

const orKernel kWrite{
    "write",
    [](orKernelContext* context, void* args) {
      eachWord(context, args, [](std::uint32_t& word, std::uint32_t value) {
        word = value;
      });
    },
    nullptr,
    nullptr};

const orKernel kVerify{
    "verify",
    [](orKernelContext* context, void* args) {
      eachWord(context, args, [](std::uint32_t& word, std::uint32_t value) {
        expect(
            word == value,
            "a block was handed out while another stream still used it");
      });
    },
    nullptr,
    nullptr};

struct Held {
  Block* block;
  std::size_t device;
  std::size_t bytes;
  std::uint32_t value;
};

// Where threads leave blocks for others to free.
std::mutex lostMutex;
std::vector<Held> lost;

class Worker {
 public:
  explicit Worker(unsigned seed) : random_(seed) {
    for (std::size_t device = 0; device < kDevices; ++device) {
      check(orSetDevice(static_cast<int>(device)), "orSetDevice");
      check(
          orEventCreateWithFlags(&events_[device], orEventDisableTiming),
          "orEventCreate");
    }
  }

  std::uint64_t run(std::chrono::steady_clock::time_point end) {
    while (std::chrono::steady_clock::now() < end) {
      act(pick(100));
    }
    while (!held_.empty()) {
      release();
    }
    for (orEvent_t event : events_) {
      check(orEventDestroy(event), "orEventDestroy");
    }
    return allocations_;
  }

 private:
  std::size_t pick(std::size_t below) {
    return random_() % below;
  }

  void act(std::size_t action) {
    if (held_.empty() || (action < 40 && held_.size() < 16)) {
      allocate();
    } else if (action < 60) {
      use(held_[pick(held_.size())]);
    } else if (action < 92) {
      release();
    } else if (action < 97) {
      exchange();
    } else if (DeviceCache& cache = *caches[pick(kDevices)]; action == 97) {
      sum(cache.snapshot());
    } else if (action == 98) {
      const Statistics now = cache.statistics();
      expect(
          now.allocatedBytes[kAll].current <= now.activeBytes[kAll].current &&
              now.activeBytes[kAll].current +
                      now.inactiveSplitBytes[kAll].current <=
                  now.reservedBytes[kAll].current,
          "statistics that cannot be");
    } else if (pick(8) == 0) {
      check(cache.emptyCache(), "emptyCache");
    }
  }

  void launch(const Held& held, const orKernel& kernel, orStream_t stream) {
    Pattern pattern{
        address(held.block),
        held.bytes,
        held.value,
        static_cast<std::uint32_t>(pick(8) == 0 ? pick(20) : 0)};
    check(orLaunchKernel(stream, &kernel, &pattern, sizeof(pattern)), "launch");
  }

  void allocate() {
    const std::size_t kind = pick(20);
    const std::size_t bytes =
        1 + (kind < 13   ? pick(64 * kKiB)
             : kind < 18 ? pick(1200 * kKiB)
                         : pick(kind == 18 ? 5 * kMiB : 14 * kMiB));
    const std::size_t device = pick(kDevices);
    orError error = orSuccess;
    Shortage shortage{};
    Block* block = caches[device]->allocate(
        bytes, streams[device][pick(kStreams)], &error, &shortage);
    if (error == orErrorOutOfMemory) {
      expect(shortage.requested == bytes, "a shortage of another request");
      while (held_.size() > 8) {
        release();
      }
      return;
    }
    check(error, "allocate");
    ++allocations_;
    held_.push_back(
        {block, device, bytes, static_cast<std::uint32_t>(random_())});
    launch(held_.back(), kWrite, stream(block));
  }

  // Read on another stream, after what was queued on the block's own.
  void use(const Held& held) {
    const orStream_t own = stream(held.block);
    const orStream_t other = streams[held.device][pick(kStreams)];
    check(orEventRecord(events_[held.device], own), "orEventRecord");
    check(orStreamWaitEvent(other, events_[held.device]), "orStreamWaitEvent");
    launch(held, kVerify, other);
    caches[held.device]->recordUse(held.block, other);
  }

  Held takeOut(std::vector<Held>& from) {
    std::swap(from[pick(from.size())], from.back());
    const Held held = from.back();
    from.pop_back();
    return held;
  }

  void release() {
    const Held held = takeOut(held_);
    launch(held, kVerify, stream(held.block));
    caches[held.device]->free(held.block);
  }

  void exchange() {
    const Held mine = takeOut(held_);
    const std::lock_guard lock(lostMutex);
    lost.push_back(mine);
    if (lost.size() > 8) {
      held_.push_back(takeOut(lost));
    }
  }

  std::minstd_rand random_;
  std::array<orEvent_t, kDevices> events_{};
  std::vector<Held> held_;
  std::uint64_t allocations_ = 0;
};

void randomWork(int seconds, unsigned seed) {
  std::array<std::unique_ptr<Bench>, kDevices> benches;
  for (std::size_t device = 0; device < kDevices; ++device) {
    benches[device] = std::make_unique<Bench>(static_cast<int>(device));
    caches[device] = &benches[device]->cache;
    // Narrow, so that all stages of a shortage are passed.
    caches[device]->setLimit((device == 0 ? 300 : 120) * kMiB);
    for (orStream_t& stream : streams[device]) {
      stream = newStream(static_cast<int>(device));
    }
  }
  benches[1]->settings([](Settings& s) {
    s.collectAbove = 0.8;
    s.maxSplit = 12 * kMiB;
    s.divisions.fill(8);
  });
  caches[1]->recordHistory(1000, [] { return std::make_shared<int>(0); });
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  std::atomic<std::uint64_t> allocations{0};
  std::vector<std::thread> workers;
  for (unsigned i = 0; i < kThreads; ++i) {
    workers.emplace_back([&allocations, end, seed, i] {
      allocations += Worker(seed + i).run(end);
    });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
  for (const Held& held : lost) {
    caches[held.device]->free(held.block);
  }
  long retries = 0;
  for (auto& bench : benches) {
    consistent(*bench);
    check(bench->cache.emptyCache(), "emptyCache");
    consistent(*bench);
    bench->cache.recordHistory(0, nullptr);
    retries += bench->cache.statistics().retries;
  }
  for (auto& bench : benches) {
    bench.reset(); // which checks that all is given back
  }
  std::printf(
      "allocator_stress: %ju allocations, %ld retries\n",
      std::uintmax_t{allocations},
      retries);
}

// ---------------------------------------------------------------- speed

// Of this thread's processor time, so that other programs disturb it less.
double cpuNanoseconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e9 * static_cast<double>(time.tv_sec) +
         static_cast<double>(time.tv_nsec);
}

void measure(const char* what, Bench& it, std::size_t bytes) {
  constexpr int kPairs = 100'000;
  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    orError error = orSuccess;
    const double start = cpuNanoseconds();
    for (int i = 0; i < kPairs; ++i) {
      it.cache.free(it.cache.allocate(bytes, it.a, &error, nullptr));
    }
    best = std::min(best, (cpuNanoseconds() - start) / kPairs);
  }
  std::printf("%-36s %5.1f ns\n", what, best);
}

void speed() {
  Bench it;
  measure("split and merge, 64 KiB", it, 64 * kKiB);
  measure("split and merge, 4 MiB", it, 4 * kMiB);
  Block* first = it.get(64 * kKiB, it.a); // a hole: neighbours are in use
  Block* second = it.get(64 * kKiB, it.a);
  it.cache.free(first);
  measure("same size between others, 64 KiB", it, 64 * kKiB);
  it.cache.free(second);
  check(it.cache.emptyCache(), "emptyCache");
  measure("whole segment, 16 MiB", it, 16 * kMiB);
}

} // namespace

int main(int count, char** words) {
  const std::string first = count > 1 ? words[1] : "5";
  setenv("OPENREG_MEMORY_MB", std::to_string(kCapacity / kMiB).c_str(), 1);
  if (first == "--bench") {
    speed();
    return 0;
  }
  const int seconds = std::atoi(first.c_str());
  const auto seed = static_cast<unsigned>(
      count > 2 ? std::atoi(words[2]) : static_cast<int>(getpid()));
  alarm(static_cast<unsigned>(10 * seconds + 120)); // a hang is a failure
  std::printf("allocator_stress: seed %u\n", seed);
  std::fflush(stdout);
  deviceLost();        // before the driver starts here
  std::atexit(atExit); // before the driver's: it runs after it
  for (auto* each :
       {reuse,
        recordUse,
        recordOwnUse,
        recordForeignUse,
        splitting,
        rounding,
        oversize,
        garbage,
        limits,
        retries,
        threads,
        devices,
        peaks,
        history,
        freeOnEngine,
        emptying,
        forks}) {
    each();
  }
  randomWork(seconds, seed);
  leaveBusy();
  return 0;
}
