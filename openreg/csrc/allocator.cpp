// Chapter: memory
#include "openreg/csrc/allocator.h"

#include <Python.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdio>
#include <string>

#include "openreg/csrc/device.h"
// [frontend: include-sharing]
#include "openreg/csrc/sharing.h"
// [/frontend: include-sharing]
#include "openreg/csrc/stream.h"

namespace openreg {
namespace {

using caching::Block;
using caching::DeviceCache;
using Stats = c10::CachingDeviceAllocator::DeviceStats;
using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;

constexpr std::size_t kMaxDevices = 16;

// [memory: apply-settings]
// PYTORCH_ALLOC_CONF, as PyTorch has parsed it.
caching::Settings configured() {
  caching::Settings settings;
  settings.largeSegment = Config::large_segment_size();
  settings.maxSplit = Config::max_split_size();
  settings.maxRounding = Config::max_non_split_rounding_size();
  settings.collectAbove = Config::garbage_collection_threshold();
  const auto& divisions = Config::roundup_power2_divisions();
  for (std::size_t i = 0; i < settings.divisions.size(); ++i) {
    settings.divisions[i] = i < divisions.size() ? divisions[i] : 0;
  }
  if (Config::use_expandable_segments()) {
    TORCH_WARN_ONCE(
        "PYTORCH_ALLOC_CONF asks for expandable_segments, which openreg has "
        "not: its driver maps no memory piece by piece. The rest is in effect");
  }
  return settings;
}
// [/memory: apply-settings]

// [memory: caches]
// Never destroyed: tensors outlive static destructors.
std::array<DeviceCache*, kMaxDevices>& caches() {
  static auto* const instance = [] {
    auto* const made = new std::array<DeviceCache*, kMaxDevices>;
    const caching::Settings settings = configured();
    for (std::size_t index = 0; index < kMaxDevices; ++index) {
      (*made)[index] = new DeviceCache(static_cast<int>(index));
      (*made)[index]->setSettings(settings);
    }
    return made;
  }();
  return *instance;
}

// Settings may change while the program runs. There is one place for a hook,
// which another backend may have taken: ours calls it first.
[[maybe_unused]] const bool registered = [] {
  Config::registerDeviceConfigParserHook(
      [previous = Config::getConfigParserHook()](const std::string& text) {
        if (previous) {
          previous(text);
        }
        const caching::Settings settings = configured();
        for (DeviceCache* cache : caches()) {
          cache->setSettings(settings);
        }
      },
      {});
  return true;
}();
// [/memory: caches]

std::string sized(std::size_t bytes) {
  std::array<char, 32> text;
  const double amount = static_cast<double>(bytes);
  const char* const unit = bytes >= 1 << 30   ? "GiB"
                           : bytes >= 1 << 20 ? "MiB"
                                              : "KiB";
  const double divisor = bytes >= 1 << 30   ? 1 << 30
                         : bytes >= 1 << 20 ? 1 << 20
                                            : 1 << 10;
  std::snprintf(text.data(), text.size(), "%.2f %s", amount / divisor, unit);
  return text.data();
}

// [memory: shortage]
[[noreturn]] void refuse(
    c10::Device device, const caching::Shortage& shortage) {
  std::string limit;
  if (shortage.limit != SIZE_MAX) {
    limit = " This process may use " + sized(shortage.limit) +
            " (set_per_process_memory_fraction).";
  }
  const std::size_t idle = shortage.reserved - shortage.allocated;
  std::string advice =
      "Use a smaller batch, or free tensors that are still "
      "referenced; torch.openreg.memory_summary() says more.";
  if (idle >= shortage.rounded) {
    advice =
        "What is cached would do, in one piece: it is fragmented. Free "
        "tensors in the order of their allocation, or set "
        "PYTORCH_ALLOC_CONF=max_split_size_mb:N.";
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      device,
      " is out of memory: tried to allocate ",
      sized(shortage.requested),
      ". The device has ",
      sized(shortage.capacity),
      ", of which ",
      sized(shortage.deviceFree),
      " are free.",
      limit,
      " PyTorch holds ",
      sized(shortage.reserved),
      ": ",
      sized(shortage.allocated),
      " in tensors and ",
      sized(idle),
      " cached, the largest free block of ",
      sized(shortage.largestFree),
      ". ",
      advice);
}
// [/memory: shortage]

// [memory: report]
// What torch.profiler (profile_memory=True) and the stream sanitizer are told.
void report(const Block* block, bool allocated) {
  if (c10::memoryProfilingEnabled()) [[unlikely]] {
    int device = 0;
    orStreamGetDevice(stream(block), &device);
    const auto bytes = static_cast<std::int64_t>(size(block));
    const caching::Statistics now = owner(block).statistics();
    c10::reportMemoryUsageToProfiler(
        address(block),
        allocated ? bytes : -bytes,
        static_cast<std::size_t>(now.allocatedBytes[caching::kAll].current),
        static_cast<std::size_t>(now.reservedBytes[caching::kAll].current),
        {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)});
  }
  if (const auto* python = c10::impl::GPUTrace::get_trace()) [[unlikely]] {
    const auto where = reinterpret_cast<std::uintptr_t>(address(block));
    if (allocated) {
      (*python)->trace_gpu_memory_allocation(c10::kPrivateUse1, where);
    } else {
      (*python)->trace_gpu_memory_deallocation(c10::kPrivateUse1, where);
    }
  }
}
// [/memory: report]

// [memory: release]
// The storage's deleter. Nothing here throws: it has nobody to tell.
void release(void* context) {
  auto* const block = static_cast<Block*>(context);
  if (block == nullptr) {
    return;
  }
  report(block, false);
  owner(block).free(block);
}
// [/memory: release]

// [memory: unlocked]
// Lets go of Python's lock where this thread holds it, as it does in
// torch.UntypedStorage(): when memory is short, the cache waits for streams,
// and what they run may need the lock.
class Unlocked {
 public:
  Unlocked()
      : held_(
            Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread()
                                                     : nullptr) {
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    if (held_ != nullptr) {
      PyEval_RestoreThread(held_);
    }
  }

 private:
  PyThreadState* held_;
};
// [/memory: unlocked]

// [memory: allocate]
struct Allocator final : c10::DeviceAllocator {
  // On the current device, for use on its current stream.
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(c10::kPrivateUse1, currentDevice());
    if (bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    orError error = orSuccess;
    caching::Shortage shortage{};
    const orStream_t stream = currentHandle();
    Block* block = nullptr;
    {
      const Unlocked unlocked;
      block = caches()[static_cast<std::size_t>(device.index())]->allocate(
          bytes, stream, &error, &shortage);
      // [frontend: collect-when-short]
      // Other processes may have let go of what they were sent.
      if (block == nullptr && collectShared() > 0) [[unlikely]] {
        block = caches()[static_cast<std::size_t>(device.index())]->allocate(
            bytes, stream, &error, &shortage);
      }
      // [/frontend: collect-when-short]
    }
    if (block == nullptr) [[unlikely]] {
      if (error == orErrorOutOfMemory) {
        refuse(device, shortage);
      }
      check(error);
    }
    report(block, true);
    return {address(block), block, &release, device};
  }
  // [/memory: allocate]

  // [memory: record-stream]
  // Memory that came from elsewhere, such as a tensor over a foreign buffer, is
  // not ours to keep.
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    // [frontend: record-imported]
    if (recordImportedUse(data, stream)) {
      return;
    }
    // [/frontend: record-imported]
    if (data.get_deleter() == &release && data.get_context() != nullptr) {
      auto* const block = static_cast<Block*>(data.get_context());
      owner(block).recordUse(block, toHandle(stream));
    }
  }
  // [/memory: record-stream]

  // Bytes of one device, in the order of the current stream.
  void copy_data(void* dst, const void* src, std::size_t bytes) const override {
    check(orMemcpyAsync(
        dst, src, bytes, orMemcpyDeviceToDevice, currentStream()));
  }

  // Whether there is anything to ask about. PyTorch asks this first, and its
  // other questions only then: none of them may start a device.
  bool initialized() override {
    for (int device = 0; device < deviceCount(); ++device) {
      int started = 0;
      if (orDeviceGetState(device, &started) == orSuccess && started != 0) {
        return true;
      }
    }
    return false;
  }

  void emptyCache(c10::MempoolId_t pool) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        pool == c10::MempoolId_t(0, 0), "openreg has no private memory pools");
    const Unlocked unlocked;
    for (DeviceCache* cache : caches()) {
      check(cache->emptyCache());
    }
  }

  // [memory: stats]
  Stats getDeviceStats(c10::DeviceIndex device) override {
    const caching::Statistics now = cacheOf(device).statistics();
    Stats stats;
    copy(now.allocations, stats.allocation);
    copy(now.segments, stats.segment);
    copy(now.active, stats.active);
    copy(now.inactiveSplits, stats.inactive_split);
    copy(now.allocatedBytes, stats.allocated_bytes);
    copy(now.reservedBytes, stats.reserved_bytes);
    copy(now.activeBytes, stats.active_bytes);
    copy(now.inactiveSplitBytes, stats.inactive_split_bytes);
    copy(now.requestedBytes, stats.requested_bytes);
    copy(now.oversizeAllocations, stats.oversize_allocations);
    copy(now.oversizeSegments, stats.oversize_segments);
    stats.num_alloc_retries = now.retries;
    stats.num_ooms = now.outOfMemory;
    stats.num_sync_all_streams = now.waitsForAll;
    stats.num_device_alloc = now.deviceAllocations;
    stats.num_device_free = now.deviceFrees;
    stats.max_split_size = static_cast<std::int64_t>(Config::max_split_size());
    return stats;
  }
  // [/memory: stats]

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    cacheOf(device).resetAccumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    cacheOf(device).resetPeaks();
  }

  std::pair<std::size_t, std::size_t> getMemoryInfo(
      c10::DeviceIndex device) override {
    std::size_t free = 0;
    std::size_t total = 0;
    const c10::DeviceIndex previous = exchangeDevice(device);
    const orError error = orMemGetInfo(&free, &total);
    orSetDevice(previous); // keeps the message of `error`
    check(error);
    return {free, total};
  }

 private:
  static void copy(
      const caching::Counter& from, c10::CachingAllocator::Stat& to) {
    to.current = from.current;
    to.peak = from.peak;
    to.allocated = from.allocated;
    to.freed = from.freed;
  }

  static void copy(
      const caching::Counters& from, c10::CachingAllocator::StatArray& to) {
    for (std::size_t kind = 0; kind < from.size(); ++kind) {
      copy(from[kind], to[kind]);
    }
  }
};

} // namespace

DeviceCache& cacheOf(c10::DeviceIndex device) {
  TORCH_CHECK(
      device >= 0 && device < deviceCount(),
      "there is no openreg:",
      static_cast<int>(device),
      " to ask about its memory; ",
      static_cast<int>(deviceCount()),
      " devices are present");
  return *caches()[static_cast<std::size_t>(device)];
}

// [memory: register]
c10::DeviceAllocator* deviceAllocator() {
  static auto* const instance = new Allocator;
  return instance;
}

namespace {
REGISTER_ALLOCATOR(c10::kPrivateUse1, deviceAllocator());
} // namespace
// [/memory: register]

} // namespace openreg
