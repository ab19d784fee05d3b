// Chapter: hooks
#include "openreg/csrc/pinned.h"

#include <cstring>
// [memory: include-pinned]
#include <utility>
// [/memory: include-pinned]

#include "openreg/csrc/device.h"
// [memory: include-stream]
#include "openreg/csrc/stream.h"
// [/memory: include-stream]

namespace openreg {
namespace {

// [hooks: pinned until memory]
//| void release(void* data) {
//|   orFreeHost(data); // waits for copies that still use the block
//| }
//|
//| struct PinnedAllocator final : c10::Allocator {
//|   c10::DataPtr allocate(size_t bytes) override {
//|     void* data = nullptr;
//|     check(orMallocHost(&data, bytes));
//|     return {data, data, &release, c10::Device(c10::kCPU)};
//|   }
//|
//|   c10::DeleterFnPtr raw_deleter() const override {
//|     return &release;
//|   }
//|
//|   void copy_data(void* dst, const void* src, size_t bytes) const override {
//|     std::memcpy(dst, src, bytes);
//|   }
//| };
// [/hooks: pinned]

// [memory: pinned-event]
// A point in a stream behind which a block is free again.
class Event {
 public:
  explicit Event(const c10::Stream& stream) {
    const c10::DeviceIndex previous = exchangeDevice(stream.device_index());
    orError error = orEventCreateWithFlags(&event_, orEventDisableTiming);
    if (error == orSuccess) {
      error = orEventRecord(event_, toHandle(stream));
    }
    orSetDevice(previous); // keeps the message of `error`
    if (error != orSuccess) {
      // The device is lost, or the process exits: nothing uses the block.
      reset();
    }
  }

  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {
  }
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event() {
    reset();
  }

  bool happened() const {
    return event_ == nullptr || orEventQuery(event_) != orErrorNotReady;
  }

 private:
  void reset() {
    if (event_ != nullptr) {
      orEventDestroy(std::exchange(event_, nullptr));
    }
  }

  orEvent_t event_ = nullptr;
};
// [/memory: pinned-event]

// [memory: pinned-cache]
// PyTorch's own cache of page-locked memory; what is ours is how to get a
// block, and how to know that the streams which used it are done with it.
struct PinnedCache final : at::CachingHostAllocatorImpl<c10::Stream, Event> {
 private:
  void allocate_host_memory(size_t bytes, void** data) override {
    check(orMallocHost(data, bytes));
  }

  void free_block(at::HostBlock<c10::Stream>* block) override {
    check(orFreeHost(block->ptr_));
  }

  void record_stream(
      std::optional<std::vector<Event>>& events, c10::Stream stream) override {
    events->emplace_back(stream);
  }

  bool query_event(Event& event) override {
    return event.happened();
  }

  c10::Stream get_current_stream() const override {
    return currentStream(currentDevice());
  }

  bool stream_is_capturing(c10::Stream stream) const override {
    return stream.is_capturing();
  }
};

void release(void* block);

struct PinnedAllocator final
    : at::CachingHostAllocatorInterface<PinnedCache, &release> {
  // In a fork, blocks of the parent's cache are plain memory.
  c10::DataPtr allocate(size_t bytes) override {
    int started = 0;
    if (orDeviceGetState(0, &started) == orErrorForked) {
      raise(orErrorForked, std::source_location::current());
    }
    return CachingHostAllocatorInterface::allocate(bytes);
  }
};
// [/memory: pinned-cache]

} // namespace

// [hooks: pinned-instance until memory]
//| c10::Allocator* pinnedAllocator() {
//|   static PinnedAllocator* const instance = new PinnedAllocator;
//|   return instance;
//| }
// [/hooks: pinned-instance]

// [memory: pinned-register]
at::HostAllocator* pinnedAllocator() {
  static auto* const instance = new PinnedAllocator; // never destroyed
  return instance;
}

namespace {

void release(void* block) {
  static_cast<PinnedAllocator*>(pinnedAllocator())->free(block);
}

REGISTER_HOST_ALLOCATOR(c10::kPrivateUse1, pinnedAllocator());

} // namespace
// [/memory: pinned-register]

} // namespace openreg
