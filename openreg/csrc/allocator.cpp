// Chapter: memory
// Where a tensor's bytes come from: each allocation straight from the driver.
#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <mutex>

#include "openreg/csrc/device.h"

namespace openreg {
namespace {

using Stats = c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kMaxDevices = 16;
constexpr size_t kAggregate =
    static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

// The figures of every device. Never destroyed: tensors outlive statics.
struct Books {
  std::mutex mutex;
  std::array<Stats, kMaxDevices> devices;
  bool used = false;
};

Books& books() {
  static Books* const instance = new Books;
  return *instance;
}

// What the storage keeps to give its memory back.
struct Block {
  void* data;
  size_t bytes;
  c10::DeviceIndex device;
};

void count(const Block& block, bool allocated) {
  const std::lock_guard lock(books().mutex);
  books().used = true;
  Stats& stats = books().devices[static_cast<size_t>(block.device)];
  const auto change = [allocated](auto& stat, size_t amount) {
    allocated ? stat[kAggregate].increase(amount)
              : stat[kAggregate].decrease(amount);
  };
  change(stats.allocation, 1);
  change(stats.allocated_bytes, block.bytes);
  change(stats.reserved_bytes, block.bytes); // nothing is kept back
  change(stats.active_bytes, block.bytes);
  change(stats.requested_bytes, block.bytes);
}

// Queued work may still use the memory, so the driver frees it in stream
// order. Nothing here throws: a deleter has nobody to tell.
void release(void* context) {
  auto* block = static_cast<Block*>(context);
  int previous = 0;
  orGetDevice(&previous);
  orSetDevice(block->device);
  orFreeAsync(block->data, nullptr);
  orSetDevice(previous);
  count(*block, false);
  delete block;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex index = currentDevice();
    void* data = nullptr;
    check(orMalloc(&data, bytes));
    const c10::Device device(c10::kPrivateUse1, index);
    if (data == nullptr) {
      return {nullptr, device};
    }
    auto* block = new Block{data, bytes, index};
    count(*block, true);
    return {data, block, &release, device};
  }

  // Bytes of one device, whoever's the current one is.
  void copy_data(void* dst, const void* src, size_t bytes) const override {
    check(orMemcpy(dst, src, bytes, orMemcpyDeviceToDevice));
  }

  bool initialized() override {
    const std::lock_guard lock(books().mutex);
    return books().used;
  }

  // Nothing is cached, so there is nothing to give back or to keep busy.
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {
  }

  Stats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(books().mutex);
    return of(device);
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t free = 0;
    size_t total = 0;
    const c10::DeviceIndex previous = exchangeDevice(device);
    const orError error = orMemGetInfo(&free, &total);
    setDevice(previous);
    check(error);
    return {free, total};
  }

 private:
  static Stats& of(c10::DeviceIndex device) {
    TORCH_CHECK(
        device >= 0 && device < deviceCount(),
        "there is no openreg:",
        static_cast<int>(device),
        " to ask for memory statistics; ",
        static_cast<int>(deviceCount()),
        " devices are present");
    return books().devices[static_cast<size_t>(device)];
  }

  template <typename Change>
  static void each(c10::DeviceIndex device, Change change) {
    const std::lock_guard lock(books().mutex);
    Stats& stats = of(device);
    for (auto* stat :
         {&stats.allocation,
          &stats.allocated_bytes,
          &stats.reserved_bytes,
          &stats.active_bytes,
          &stats.requested_bytes}) {
      change((*stat)[kAggregate]);
    }
  }
};

Allocator& allocator() {
  static Allocator* const instance = new Allocator;
  return *instance;
}

REGISTER_ALLOCATOR(c10::kPrivateUse1, &allocator());

} // namespace
} // namespace openreg
