// Chapter: memory
// One mutex guards a device's books. No call that may wait for the device is
// made while holding it: a kernel that ends may free the blocks it used, on its
// engine's thread, and needs the mutex for that.
#include "openreg/csrc/caching.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>
#include <unordered_map>
#include <utility>

namespace openreg::caching {
namespace {

struct Arena;

// Another stream's use of a block. The event, of that stream's device, stays
// with the object, so that a recycled one needs no new event.
struct Use {
  Arena* arena = nullptr; // of the stream that uses the block
  orEvent_t event = nullptr;
  Block* block = nullptr;
  Use* next = nullptr; // of the block; then of the stream, oldest first
};

struct Segment {
  std::uintptr_t address = 0;
  std::size_t size = 0;
  Kind kind = kLarge;
  bool oversize = false;
  std::uint64_t idleSince = 0; // a count of such moments
  Arena* arena = nullptr;
  DeviceCache* owner = nullptr;
  Block* first = nullptr;
  Context context;

  bool idle() const;
};

} // namespace

struct Block {
  enum class State : std::uint8_t { Free, Allocated, Pending };

  Segment* segment = nullptr;
  std::uintptr_t address = 0;
  std::size_t size = 0;
  std::size_t requested = 0;
  Block* previous = nullptr; // in the segment
  Block* next = nullptr;
  Block* before = nullptr; // in the bin
  Block* after = nullptr;
  Use* uses = nullptr;
  std::uint32_t pending = 0; // events that have not happened
  State state = State::Free;
  bool oversize = false;
  Context context;
};

namespace {

bool Segment::idle() const {
  return first->state == Block::State::Free && first->size == size;
}

std::size_t roundTo(std::size_t step, std::size_t bytes) {
  return (bytes + step - 1) / step * step;
}

// Free blocks by size, 16 bins for each power of two. A bit for each bin that
// has blocks finds the next one in two instructions.
class Bins {
 public:
  void insert(Block* block) {
    const std::size_t bin = binOf(block->size);
    block->before = nullptr;
    block->after = heads_[bin];
    if (block->after != nullptr) {
      block->after->before = block;
    }
    heads_[bin] = block;
    steps_[bin / kSteps] |= static_cast<std::uint16_t>(1U << bin % kSteps);
    levels_ |= std::uint64_t{1} << bin / kSteps;
  }

  void remove(Block* block) {
    if (block->after != nullptr) {
      block->after->before = block->before;
    }
    if (block->before != nullptr) {
      block->before->after = block->after;
      return;
    }
    const std::size_t bin = binOf(block->size);
    heads_[bin] = block->after;
    if (block->after == nullptr) {
      std::uint16_t& steps = steps_[bin / kSteps];
      steps &= static_cast<std::uint16_t>(~(1U << bin % kSteps));
      if (steps == 0) {
        levels_ &= ~(std::uint64_t{1} << bin / kSteps);
      }
    }
  }

  // [memory: bins]
  // A block of `least` to `most` bytes, among the first `look` of each bin.
  // Those of the bin for `least` itself may be too small; of the next one that
  // is not empty, any will do.
  Block* find(std::size_t least, std::size_t most, std::size_t look) const {
    const std::size_t last = binOf(most);
    for (std::size_t bin = notEmpty(binOf(least)); bin < kBins && bin <= last;
         bin = notEmpty(bin + 1)) {
      Block* block = heads_[bin];
      for (std::size_t i = 0; i < look && block != nullptr; ++i) {
        if (block->size >= least && block->size <= most) {
          return block;
        }
        block = block->after;
      }
    }
    return nullptr;
  }
  // [/memory: bins]

 private:
  static constexpr std::size_t kSteps = 16;
  static constexpr std::size_t kLevels = 40; // up to 4 PiB
  static constexpr std::size_t kBins = kLevels * kSteps;

  // Below 16 units a bin has one size; from there on 4 bits after the first.
  static std::size_t binOf(std::size_t bytes) {
    const std::size_t units = bytes / kAlignment;
    if (units < kSteps) {
      return units;
    }
    const auto shift = static_cast<std::size_t>(std::bit_width(units)) - 5;
    return shift * kSteps + (units >> shift);
  }

  std::size_t notEmpty(std::size_t bin) const {
    std::size_t level = bin / kSteps;
    if (level >= kLevels) {
      return kBins;
    }
    const unsigned steps = steps_[level] >> bin % kSteps;
    if (steps != 0) {
      return bin + static_cast<std::size_t>(std::countr_zero(steps));
    }
    const std::uint64_t levels = levels_ >> level >> 1;
    if (levels == 0) {
      return kBins;
    }
    level += 1 + static_cast<std::size_t>(std::countr_zero(levels));
    return level * kSteps +
           static_cast<std::size_t>(std::countr_zero(steps_[level]));
  }

  std::uint64_t levels_ = 0;
  std::array<std::uint16_t, kLevels> steps_{};
  std::array<Block*, kBins> heads_{};
};

// Held for some tens of nanoseconds, while a sleeping lock takes twice as long
// to come and go as the work it guards.
class Lock {
 public:
  void lock() {
    for (int i = 0; flag_.test_and_set(std::memory_order_acquire); ++i) {
      if (i >= 64) {
        std::this_thread::yield(); // its holder may want this very core
      }
    }
  }
  void unlock() {
    flag_.clear(std::memory_order_release);
  }

 private:
  std::atomic_flag flag_;
};

// What belongs to one stream.
struct Arena {
  Bins& bins(Kind kind) {
    return bins_[kind - kSmall];
  }

  std::uint64_t id = 0;
  orStream_t stream = nullptr;
  int device = 0; // may be another one's for a stream that only uses blocks
  std::size_t users = 0; // segments, uses, and calls that hold on to it
  bool owns = false;     // it had segments, which may be on their way back
  Use* oldest = nullptr; // pending here, in the order of their events
  Use* newest = nullptr;
  Use* spare = nullptr;

 private:
  std::array<Bins, 2> bins_;
};

// The calling thread's current device, for a while.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    orGetDevice(&previous_);
    orSetDevice(device);
  }
  ~CurrentDevice() {
    orSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
};

[[gnu::always_inline]] inline void add(
    Counters& counters, Kind kind, std::size_t amount) {
  counters[kAll].add(static_cast<std::int64_t>(amount));
  counters[kind].add(static_cast<std::int64_t>(amount));
}

[[gnu::always_inline]] inline void subtract(
    Counters& counters, Kind kind, std::size_t amount) {
  counters[kAll].subtract(static_cast<std::int64_t>(amount));
  counters[kind].subtract(static_cast<std::int64_t>(amount));
}

template <typename Change>
void eachCounter(Statistics& it, Change change) {
  for (Counters* counters :
       {&it.allocations,
        &it.segments,
        &it.active,
        &it.inactiveSplits,
        &it.allocatedBytes,
        &it.reservedBytes,
        &it.activeBytes,
        &it.inactiveSplitBytes,
        &it.requestedBytes}) {
    std::for_each(counters->begin(), counters->end(), change);
  }
  change(it.oversizeAllocations);
  change(it.oversizeSegments);
}

} // namespace

void Counter::add(std::int64_t amount) {
  current += amount;
  if (current > peak) { // seldom, and a branch is cheaper than a store
    peak = current;
  }
  allocated += amount;
}

void Counter::subtract(std::int64_t amount) {
  current -= amount;
  freed += amount;
}

struct DeviceCache::Impl {
  class Hold;

  struct Request {
    std::size_t bytes, size;
    Kind kind;
    Arena* arena;
    const Context& context;
    orError error;
  };

  Impl(DeviceCache& cache, int index);

  Context capture() const noexcept {
    return recording.load(std::memory_order_relaxed) ? captureNow() : nullptr;
  }
  Context captureNow() const noexcept;
  Arena& arenaOf(orStream_t stream);
  std::size_t rounded(std::size_t bytes) const;
  std::size_t segmentSize(const Request& request) const;
  Block* find(const Request& request, std::size_t look);
  Block* take(Block* block, const Request& request);
  void absorbNext(Block* block);
  void complete(Block* block) noexcept;
  bool await(Use* use, Block* block) noexcept;
  void poll() noexcept;

  Block* again(Request& request);
  Block* grow(Hold& hold, Request& request, std::size_t bytes);
  Block* obtain(Hold& hold, Request& request);
  void collect(Hold& hold, const Request& request, std::size_t bytes);
  bool giveBackFor(Hold& hold, const Request& request);
  void giveBack(Hold& hold, Segment& segment, const Context& context);
  orError empty(Hold& hold, const Context& context, bool settle);
  void explain(const Request& request, Shortage* shortage);

  Block* newBlock();
  void recycle(Block* block);
  Use* newUse(Arena& arena);
  void recycle(Use* use);
  bool drop(Context& context) noexcept;
  void remember(
      Entry::Action action,
      std::uintptr_t address,
      std::size_t size,
      std::uint64_t stream,
      const Context& context) noexcept {
    if (historyLimit > 0) {
      rememberNow(action, address, size, stream, context);
    }
  }
  void rememberNow(
      Entry::Action action,
      std::uintptr_t address,
      std::size_t size,
      std::uint64_t stream,
      const Context& context) noexcept;
  std::size_t reserved() const {
    return static_cast<std::size_t>(statistics.reservedBytes[kAll].current);
  }

  DeviceCache& owner;
  const int device;
  mutable Lock mutex; // guards all below but `recording`
  Settings settings;
  std::size_t limit = SIZE_MAX;
  std::size_t promised = 0; // bytes being asked of the driver
  Statistics statistics;
  std::unordered_map<orStream_t, std::unique_ptr<Arena>> arenas;
  Arena* latest = nullptr;
  std::vector<std::unique_ptr<Segment>> segments;
  std::vector<std::unique_ptr<std::array<Block, 64>>> slabs;
  Block* spare = nullptr;
  std::size_t pendingUses = 0;
  std::uint64_t moments = 0;

  std::atomic<bool> recording{false};
  std::shared_ptr<const std::function<Context()>> captures;
  std::vector<Entry> history; // a ring once it is full
  std::size_t historyLimit = 0;
  std::size_t historyStart = 0;
  std::vector<Context> dropped;
};

// The lock. Contexts that nobody needs any more end after it: their destructor
// is not ours, and may wait for a thread that waits for the lock.
class DeviceCache::Impl::Hold {
 public:
  explicit Hold(Impl& impl) : impl_(impl), lock_(impl.mutex) {
  }
  ~Hold() {
    if (!impl_.dropped.empty()) {
      dropped_.swap(impl_.dropped);
    }
    if (!refused.empty()) {
      unlock();
    }
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  void lock() {
    lock_.lock();
  }
  void unlock() {
    lock_.unlock();
    for (void* memory : refused) {
      orFree(memory);
    }
    refused.clear();
  }

  std::vector<void*> refused; // by a stream that is no more

 private:
  Impl& impl_;
  std::vector<Context> dropped_;
  std::unique_lock<Lock> lock_; // released first
};

namespace {

// [memory: fork]
// A child has the parent's books but none of its device. Holding every lock
// across the fork keeps the books whole and the child's locks free.
std::atomic<bool> used{false}; // a cache has asked the driver for memory
std::atomic<bool> forked{false};
std::mutex cachesMutex;
std::vector<Lock*>& cacheMutexes() {
  static auto* const instance = new std::vector<Lock*>; // stays
  return *instance;
}

void beforeFork() {
  cachesMutex.lock();
  for (Lock* mutex : cacheMutexes()) {
    mutex->lock();
  }
}

void afterForkInParent() {
  for (Lock* mutex : cacheMutexes()) {
    mutex->unlock();
  }
  cachesMutex.unlock();
}

void afterForkInChild() {
  forked.store(used.load());
  afterForkInParent();
}
// [/memory: fork]

} // namespace

DeviceCache::Impl::Impl(DeviceCache& cache, int index)
    : owner(cache), device(index) {
  static const int registered =
      pthread_atfork(beforeFork, afterForkInParent, afterForkInChild);
  static_cast<void>(registered);
  const std::lock_guard lock(cachesMutex);
  cacheMutexes().push_back(&mutex);
}

DeviceCache::DeviceCache(int device) : impl_(new Impl(*this, device)) {
}

// ---------------------------------------------------------------- history

Context DeviceCache::Impl::captureNow() const noexcept {
  try {
    std::unique_lock lock(mutex);
    const auto function = captures;
    lock.unlock(); // what it calls may wait for a thread that waits for us
    return function != nullptr && *function ? (*function)() : nullptr;
  } catch (...) {
    return nullptr; // history is not worth an allocation
  }
}

bool DeviceCache::Impl::drop(Context& context) noexcept {
  if (context == nullptr) {
    return true;
  }
  try {
    dropped.emplace_back();
    dropped.back().swap(context);
    return true;
  } catch (const std::bad_alloc&) {
    return false; // stays where it is
  }
}

void DeviceCache::Impl::rememberNow(
    Entry::Action action,
    std::uintptr_t address,
    std::size_t size,
    std::uint64_t stream,
    const Context& context) noexcept {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Entry entry{
      action,
      address,
      size,
      stream,
      std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(),
      context};
  if (history.size() == historyLimit) {
    Entry& oldest = history[historyStart];
    if (drop(oldest.context)) {
      oldest = std::move(entry);
      historyStart = (historyStart + 1) % historyLimit;
    }
    return;
  }
  try {
    history.push_back(std::move(entry));
  } catch (const std::bad_alloc&) {
    // A gap in the history; free() has nobody to tell.
  }
}

// ---------------------------------------------------------------- parts

Block* DeviceCache::Impl::newBlock() {
  if (spare == nullptr) {
    slabs.push_back(std::make_unique<std::array<Block, 64>>());
    for (Block& block : *slabs.back()) {
      recycle(&block);
    }
  }
  return std::exchange(spare, spare->after);
}

void DeviceCache::Impl::recycle(Block* block) {
  block->after = spare;
  spare = block;
}

Use* DeviceCache::Impl::newUse(Arena& arena) {
  ++arena.users;
  if (arena.spare != nullptr) {
    return std::exchange(arena.spare, arena.spare->next);
  }
  auto use = std::make_unique<Use>();
  use->arena = &arena;
  const CurrentDevice current(arena.device);
  orEventCreateWithFlags(&use->event, orEventDisableTiming);
  return use.release();
}

void DeviceCache::Impl::recycle(Use* use) {
  --use->arena->users;
  use->next = use->arena->spare;
  use->arena->spare = use;
}

Arena& DeviceCache::Impl::arenaOf(orStream_t stream) {
  if (latest != nullptr && latest->stream == stream) {
    return *latest;
  }
  auto found = arenas.find(stream);
  if (found == arenas.end()) {
    auto arena = std::make_unique<Arena>();
    arena->stream = stream;
    orStreamGetId(stream, &arena->id);
    orStreamGetDevice(stream, &arena->device);
    found = arenas.emplace(stream, std::move(arena)).first;
  }
  latest = found->second.get();
  return *latest;
}

std::size_t DeviceCache::Impl::rounded(std::size_t bytes) const {
  if (bytes > SIZE_MAX / 4) {
    return bytes; // no device has that much, and rounding must not overflow
  }
  const auto log = static_cast<std::size_t>(std::bit_width(bytes)) - 1;
  const std::size_t divisions =
      settings.divisions[std::clamp<std::size_t>(log, 20, 35) - 20];
  if (divisions > 1 && bytes > kAlignment * divisions) {
    const std::size_t step = std::bit_floor(bytes) / std::bit_floor(divisions);
    bytes = roundTo(step, bytes);
  }
  return roundTo(kAlignment, bytes);
}

std::size_t DeviceCache::Impl::segmentSize(const Request& request) const {
  const std::size_t size = request.size;
  if (request.kind == kSmall) {
    return kSmallSegment;
  }
  if (size > SIZE_MAX / 4) {
    return size;
  }
  const std::size_t segment = size < kMinLarge
                                  ? std::max(size, settings.largeSegment)
                                  : roundTo(kRoundLarge, size);
  // A segment of maxSplit would be closed to the very request it was made for.
  return size < settings.maxSplit
             ? std::min(
                   segment, (settings.maxSplit - 1) / kAlignment * kAlignment)
             : segment;
}

// ---------------------------------------------------------------- blocks

// [memory: find]
// A request below maxSplit leaves the blocks above it alone, and one above it
// takes no block that is much too large: neither would be split.
Block* DeviceCache::Impl::find(const Request& request, std::size_t look) {
  std::size_t most = SIZE_MAX;
  if (request.kind == kLarge) {
    most = request.size < settings.maxSplit
               ? settings.maxSplit - 1
               : request.size + std::min(settings.maxRounding, ~request.size);
  }
  return request.arena->bins(request.kind).find(request.size, most, look);
}
// [/memory: find]

// [memory: split]
// Take a free block out of its bin, and put back what is left of it.
Block* DeviceCache::Impl::take(Block* block, const Request& request) {
  Segment& segment = *block->segment;
  const Kind kind = segment.kind;
  const bool whole = block->size == segment.size;
  const std::size_t rest = block->size - request.size;
  const bool split = kind == kSmall
                         ? rest >= kAlignment
                         : rest > kSmallSize && block->size < settings.maxSplit;
  Block* remainder = split ? newBlock() : nullptr; // may throw, so first
  Bins& bins = segment.arena->bins(kind);
  bins.remove(block);
  if (!whole) {
    subtract(statistics.inactiveSplits, kind, 1);
    subtract(statistics.inactiveSplitBytes, kind, block->size);
  }
  if (split) {
    remainder->segment = &segment;
    remainder->address = block->address + request.size;
    remainder->size = rest;
    remainder->state = Block::State::Free;
    remainder->previous = block;
    remainder->next = block->next;
    if (block->next != nullptr) {
      block->next->previous = remainder;
    }
    block->next = remainder;
    block->size = request.size;
    bins.insert(remainder);
    add(statistics.inactiveSplits, kind, 1);
    add(statistics.inactiveSplitBytes, kind, rest);
  }
  return block;
}

// [/memory: split]

// [memory: merge]
void DeviceCache::Impl::absorbNext(Block* block) {
  Block* gone = block->next;
  block->size += gone->size;
  block->next = gone->next;
  if (block->next != nullptr) {
    block->next->previous = block;
  }
  recycle(gone);
}

// Nobody uses the block any more: join it with its free neighbours.
void DeviceCache::Impl::complete(Block* block) noexcept {
  Segment& segment = *block->segment;
  const Kind kind = segment.kind;
  subtract(statistics.active, kind, 1);
  subtract(statistics.activeBytes, kind, block->size);
  subtract(statistics.requestedBytes, kind, block->requested);
  remember(
      Entry::Action::FreeCompleted,
      block->address,
      block->size,
      segment.arena->id,
      block->context);
  drop(block->context);
  block->state = Block::State::Free;
  Bins& bins = segment.arena->bins(kind);
  const auto join = [&](Block* left, Block* neighbour) {
    bins.remove(neighbour);
    subtract(statistics.inactiveSplits, kind, 1);
    subtract(statistics.inactiveSplitBytes, kind, neighbour->size);
    absorbNext(left);
  };
  const auto isFree = [](const Block* neighbour) {
    return neighbour != nullptr && neighbour->state == Block::State::Free;
  };
  if (isFree(block->next)) {
    join(block, block->next);
  }
  if (isFree(block->previous)) {
    join(block->previous, block->previous);
    block = block->previous;
  }
  bins.insert(block);
  if (block->size == segment.size) {
    segment.idleSince = ++moments;
  } else {
    add(statistics.inactiveSplits, kind, 1);
    add(statistics.inactiveSplitBytes, kind, block->size);
  }
}
// [/memory: merge]

// [memory: allocate]
Block* DeviceCache::allocate(
    std::size_t bytes, orStream_t stream, orError* error, Shortage* shortage) {
  *error = orSuccess;
  if (forked.load(std::memory_order_relaxed)) {
    *error = orInit(); // says why not
    return nullptr;
  }
  Impl& impl = *impl_;
  const Context context = impl.capture();
  Impl::Hold hold(impl);
  const std::size_t size = impl.rounded(bytes);
  const Kind kind = size <= kSmallSize ? kSmall : kLarge;
  Impl::Request request{
      bytes, size, kind, &impl.arenaOf(stream), context, orSuccess};
  constexpr std::size_t kLook = 8; // so a long bin costs no more than a short
  Block* block = impl.find(request, kLook);
  if (block == nullptr) {
    block = impl.obtain(hold, request);
    *error = request.error;
  }
  if (block == nullptr) {
    if (*error == orErrorOutOfMemory) {
      impl.explain(request, shortage);
    }
    return nullptr;
  }
  impl.take(block, request);
  block->state = Block::State::Allocated;
  block->requested = bytes;
  if (block->context != context) {
    impl.drop(block->context);
    block->context = context;
  }
  Statistics& statistics = impl.statistics;
  add(statistics.allocations, kind, 1);
  add(statistics.active, kind, 1);
  add(statistics.allocatedBytes, kind, block->size);
  add(statistics.activeBytes, kind, block->size);
  add(statistics.requestedBytes, kind, bytes);
  block->oversize = block->size >= impl.settings.maxSplit;
  if (block->oversize) {
    statistics.oversizeAllocations.add(1);
  }
  impl.remember(
      Entry::Action::Alloc,
      block->address,
      block->size,
      request.arena->id,
      context);
  return block;
}

// [/memory: allocate]

// [memory: obtain]
// Nothing in the cache is known to fit. From here on the lock is let go now and
// then, and other threads allocate and free.
Block* DeviceCache::Impl::obtain(Hold& hold, Request& request) {
  struct Keep { // emptyCache() must not end the arena meanwhile
    explicit Keep(Arena& kept) : arena(kept) {
      ++arena.users;
    }
    ~Keep() {
      --arena.users;
    }
    Arena& arena;
  } const keep(*request.arena);

  Block* block = again(request);
  if (block != nullptr) {
    return block;
  }
  const std::size_t segment = segmentSize(request);
  collect(hold, request, segment);
  block = grow(hold, request, segment);
  if (request.error != orErrorOutOfMemory) {
    return block;
  }
  block = again(request);
  if (block == nullptr && giveBackFor(hold, request)) {
    block = grow(hold, request, segment);
  }
  if (block == nullptr && request.error == orErrorOutOfMemory) {
    ++statistics.retries;
    request.error = empty(hold, request.context, false);
    if (request.error == orSuccess) {
      block = again(request);
      block = block != nullptr ? block : grow(hold, request, segment);
      // A segment to share is a luxury: in the end the request alone will do.
      if (request.error == orErrorOutOfMemory && segment > request.size) {
        block = grow(hold, request, request.size);
      }
    }
  }
  if (block != nullptr) {
    request.error = orSuccess;
    orGetLastError(); // the driver's refusals above were overcome
  }
  return block;
}

// [/memory: obtain]

// Look once more, at all blocks, after those whose events have happened.
Block* DeviceCache::Impl::again(Request& request) {
  poll();
  return find(request, SIZE_MAX);
}

// [memory: grow]
// A new segment from the driver, as one free block.
Block* DeviceCache::Impl::grow(
    Hold& hold, Request& request, std::size_t bytes) {
  if (bytes > limit - std::min(limit, reserved() + promised)) {
    request.error = orErrorOutOfMemory;
    return nullptr;
  }
  segments.reserve(segments.size() + 1); // what may throw, before the memory
  auto segment = std::make_unique<Segment>();
  Block* block = newBlock();
  promised += bytes;
  void* memory = nullptr;
  used.store(true);
  hold.unlock(); // it may wait for frees that are queued
  {
    const CurrentDevice current(device);
    request.error = orMalloc(&memory, bytes);
  }
  hold.lock();
  promised -= bytes;
  // [/memory: grow]
  if (request.error != orSuccess) {
    recycle(block);
    return nullptr;
  }
  const bool oversize = bytes >= settings.maxSplit;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  segment->address = address;
  segment->size = bytes;
  segment->kind = request.kind;
  segment->oversize = oversize;
  segment->arena = request.arena;
  segment->owner = &owner;
  segment->first = block;
  segment->context = request.context;
  block->segment = segment.get();
  block->address = address;
  block->size = bytes;
  block->previous = nullptr;
  block->next = nullptr;
  block->state = Block::State::Free;
  segments.push_back(std::move(segment));
  ++request.arena->users;
  request.arena->owns = true;
  request.arena->bins(request.kind).insert(block);
  ++statistics.deviceAllocations;
  add(statistics.segments, request.kind, 1);
  add(statistics.reservedBytes, request.kind, bytes);
  if (oversize) {
    statistics.oversizeSegments.add(1);
  }
  remember(
      Entry::Action::SegmentAlloc,
      address,
      bytes,
      request.arena->id,
      request.context);
  return block;
}

void DeviceCache::Impl::explain(const Request& request, Shortage* shortage) {
  Shortage why{};
  why.requested = request.bytes;
  why.rounded = request.size;
  why.limit = limit;
  {
    const CurrentDevice current(device);
    orMemGetInfo(&why.deviceFree, &why.capacity);
  }
  why.allocated =
      static_cast<std::size_t>(statistics.allocatedBytes[kAll].current);
  why.reserved = reserved();
  for (const auto& segment : segments) {
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      if (block->state == Block::State::Free) {
        why.largestFree = std::max(why.largestFree, block->size);
      }
    }
  }
  ++statistics.outOfMemory;
  remember(
      Entry::Action::OutOfMemory,
      why.deviceFree,
      request.bytes,
      request.arena->id,
      request.context);
  if (shortage != nullptr) {
    *shortage = why;
  }
}

// [memory: free]
void DeviceCache::free(Block* block) noexcept {
  if (forked.load(std::memory_order_relaxed)) {
    return; // the parent's memory
  }
  Impl& impl = *impl_;
  const Context context = impl.capture();
  Impl::Hold hold(impl);
  const Segment& segment = *block->segment;
  const Kind kind = segment.kind;
  subtract(impl.statistics.allocations, kind, 1);
  subtract(impl.statistics.allocatedBytes, kind, block->size);
  if (block->oversize) {
    impl.statistics.oversizeAllocations.subtract(1);
  }
  impl.remember(
      Entry::Action::FreeRequested,
      block->address,
      block->size,
      segment.arena->id,
      context);
  block->state = Block::State::Pending;
  while (block->uses != nullptr) {
    Use* use = std::exchange(block->uses, block->uses->next);
    if (!impl.await(use, block)) {
      impl.recycle(use);
    }
  }
  if (block->pending == 0) {
    impl.complete(block);
  }
}
// [/memory: free]

// [memory: pending]
void DeviceCache::recordUse(Block* block, orStream_t stream) {
  if (stream == block->segment->arena->stream ||
      forked.load(std::memory_order_relaxed)) {
    return; // its own stream's work is in order anyway
  }
  Impl::Hold hold(*impl_);
  for (const Use* use = block->uses; use != nullptr; use = use->next) {
    if (use->arena->stream == stream) {
      return;
    }
  }
  Use* use = impl_->newUse(impl_->arenaOf(stream));
  use->next = std::exchange(block->uses, use);
}

// Let the block wait for what is queued on the stream that used it. False when
// the driver refuses: the process exits or the device is lost, and no more work
// will run there.
bool DeviceCache::Impl::await(Use* use, Block* block) noexcept {
  Arena& arena = *use->arena;
  try {
    if (orEventRecord(use->event, arena.stream) != orSuccess) {
      orGetLastError();
      return false;
    }
  } catch (const std::bad_alloc&) {
    return false;
  }
  use->block = block;
  use->next = nullptr;
  (arena.oldest == nullptr ? arena.oldest : arena.newest->next) = use;
  arena.newest = use;
  ++block->pending;
  ++pendingUses;
  return true;
}

// Free the blocks whose events have happened. A stream's events happen in
// order, so the first that has not ends the search.
void DeviceCache::Impl::poll() noexcept {
  if (pendingUses == 0) {
    return;
  }
  for (const auto& [id, arena] : arenas) {
    while (arena->oldest != nullptr &&
           orEventQuery(arena->oldest->event) != orErrorNotReady) {
      Use* use = std::exchange(arena->oldest, arena->oldest->next);
      --pendingUses;
      if (--use->block->pending == 0) {
        complete(use->block);
      }
      recycle(use);
    }
  }
}
// [/memory: pending]

// [memory: give-back]
// Work that is queued on the segment's own stream may still use it, so the
// driver frees it in the order of that stream: nothing waits here, and orMalloc
// waits by itself if it needs the memory. Other streams' uses have ended.
void DeviceCache::Impl::giveBack(
    Hold& hold, Segment& segment, const Context& context) {
  Arena& arena = *segment.arena;
  void* memory = reinterpret_cast<void*>(segment.address);
  hold.refused.reserve(hold.refused.size() + 1);
  if (orFreeAsync(memory, arena.stream) != orSuccess) {
    hold.refused.push_back(memory); // the stream was destroyed: wait, unlocked
  }
  // [/memory: give-back]
  remember(
      Entry::Action::SegmentFree,
      segment.address,
      segment.size,
      arena.id,
      context);
  drop(segment.context);
  arena.bins(segment.kind).remove(segment.first);
  recycle(segment.first);
  --arena.users;
  ++statistics.deviceFrees;
  subtract(statistics.segments, segment.kind, 1);
  subtract(statistics.reservedBytes, segment.kind, segment.size);
  if (segment.oversize) {
    statistics.oversizeSegments.subtract(1);
  }
  segments.erase(
      std::find_if(segments.begin(), segments.end(), [&](const auto& each) {
        return each.get() == &segment;
      }));
}

// Before `bytes` more pass the threshold, give back what was idle longest.
void DeviceCache::Impl::collect(
    Hold& hold, const Request& request, std::size_t bytes) {
  if (settings.collectAbove <= 0) {
    return;
  }
  std::size_t free = 0;
  std::size_t capacity = 0;
  {
    const CurrentDevice current(device);
    orMemGetInfo(&free, &capacity);
  }
  const auto threshold = static_cast<std::size_t>(
      settings.collectAbove * static_cast<double>(std::min(limit, capacity)));
  while (reserved() + promised + bytes > threshold) {
    Segment* oldest = nullptr;
    for (const auto& segment : segments) {
      if (segment->idle() &&
          (oldest == nullptr || segment->idleSince < oldest->idleSince)) {
        oldest = segment.get();
      }
    }
    if (oldest == nullptr) {
      return;
    }
    giveBack(hold, *oldest, request.context);
  }
}

// Give back the smallest idle segment, of any stream, that makes room enough.
bool DeviceCache::Impl::giveBackFor(Hold& hold, const Request& request) {
  const std::size_t wanted = segmentSize(request);
  Segment* best = nullptr;
  for (const auto& segment : segments) {
    if (segment->idle() && segment->size >= wanted &&
        (best == nullptr || segment->size < best->size)) {
      best = segment.get();
    }
  }
  if (best == nullptr) {
    return false;
  }
  giveBack(hold, *best, request.context);
  return true;
}

// Wait for every pending event and give back all idle segments; `settle`: and
// wait until the driver has them.
orError DeviceCache::Impl::empty(
    Hold& hold, const Context& context, bool settle) {
  std::vector<Arena*> kept;
  std::vector<orEvent_t> events;
  kept.reserve(arenas.size());
  for (const auto& [id, arena] : arenas) {
    ++arena->users;
    kept.push_back(arena.get());
  }
  for (const Arena* arena : kept) {
    if (arena->oldest != nullptr) {
      events.push_back(arena->newest->event);
    }
  }
  orError result = orSuccess;
  const auto check = [&result](orError error) {
    result = result == orSuccess ? error : result;
  };
  // [memory: empty]
  ++statistics.waitsForAll;
  if (!events.empty()) {
    hold.unlock();
    for (orEvent_t event : events) {
      check(orEventSynchronize(event));
    }
    hold.lock();
  }
  poll();
  for (std::size_t i = segments.size(); i-- > 0;) {
    if (segments[i]->idle()) {
      giveBack(hold, *segments[i], context);
    }
  }
  // [/memory: empty]
  if (settle) { // also for what went before, when memory was short
    std::vector<orStream_t> streams;
    for (const Arena* arena : kept) {
      if (arena->owns) {
        streams.push_back(arena->stream);
      }
    }
    hold.unlock();
    for (orStream_t stream : streams) {
      check(orStreamSynchronize(stream));
    }
    hold.lock();
  }
  for (Arena* arena : kept) {
    if (--arena->users > 0 || (arena->owns && !settle)) {
      continue;
    }
    while (arena->spare != nullptr) {
      Use* use = std::exchange(arena->spare, arena->spare->next);
      orEventDestroy(use->event);
      delete use;
    }
    arenas.erase(arena->stream);
  }
  latest = nullptr;
  return result;
}

orError DeviceCache::emptyCache() {
  if (forked.load(std::memory_order_relaxed)) {
    return orErrorForked;
  }
  const Context context = impl_->capture();
  Impl::Hold hold(*impl_);
  return impl_->empty(hold, context, true);
}

// ---------------------------------------------------------------- settings

void DeviceCache::setLimit(std::size_t bytes) {
  const std::lock_guard lock(impl_->mutex);
  impl_->limit = bytes;
}

std::size_t DeviceCache::limit() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->limit;
}

void DeviceCache::setSettings(const Settings& settings) {
  const std::lock_guard lock(impl_->mutex);
  impl_->settings = settings;
}

Statistics DeviceCache::statistics() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->statistics;
}

void DeviceCache::resetPeaks() {
  const std::lock_guard lock(impl_->mutex);
  eachCounter(impl_->statistics, [](Counter& it) { it.peak = it.current; });
}

void DeviceCache::resetAccumulated() {
  const std::lock_guard lock(impl_->mutex);
  Statistics& it = impl_->statistics;
  eachCounter(
      it, [](Counter& counter) { counter.allocated = counter.freed = 0; });
  it.retries = it.outOfMemory = it.waitsForAll = 0;
  it.deviceAllocations = it.deviceFrees = 0;
}

void DeviceCache::recordHistory(
    std::size_t entries, std::function<Context()> capture) {
  auto captures =
      std::make_shared<const std::function<Context()>>(std::move(capture));
  std::vector<Entry> history; // the old one ends after the lock
  const std::lock_guard lock(impl_->mutex);
  impl_->captures.swap(captures);
  impl_->history.swap(history);
  impl_->historyStart = 0;
  impl_->historyLimit = entries;
  impl_->recording.store(entries > 0, std::memory_order_relaxed);
}

// [memory: snapshot]
Snapshot DeviceCache::snapshot() {
  const Context context = impl_->capture();
  Snapshot result;
  Impl::Hold hold(*impl_);
  impl_->remember(Entry::Action::Snapshot, 0, 0, 0, context);
  for (const auto& segment : impl_->segments) {
    SegmentInfo info{
        segment->address,
        segment->size,
        segment->arena->id,
        segment->kind == kSmall,
        segment->context,
        {}};
    for (Block* block = segment->first; block != nullptr; block = block->next) {
      const bool active = block->state != Block::State::Free;
      info.blocks.push_back(
          {block->address,
           block->size,
           active ? block->requested : 0,
           block->state == Block::State::Allocated,
           active,
           active ? block->context : nullptr});
    }
    result.segments.push_back(std::move(info));
  }
  std::sort(
      result.segments.begin(),
      result.segments.end(),
      [](const SegmentInfo& left, const SegmentInfo& right) {
        return left.address < right.address;
      });
  result.history = impl_->history;
  std::rotate(
      result.history.begin(),
      result.history.begin() + static_cast<std::ptrdiff_t>(impl_->historyStart),
      result.history.end());
  return result;
}
// [/memory: snapshot]

void* address(const Block* block) {
  return reinterpret_cast<void*>(block->address);
}

std::size_t size(const Block* block) {
  return block->size;
}

orStream_t stream(const Block* block) {
  return block->segment->arena->stream;
}

DeviceCache& owner(const Block* block) {
  return *block->segment->owner;
}

} // namespace openreg::caching
