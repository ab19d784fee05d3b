// Chapter: guards
// What c10::DeviceGuard and its kin call: one object for the whole process.
#include <c10/core/impl/DeviceGuardImplInterface.h>
// [streams: include-trace]
#include <c10/core/impl/GPUTrace.h>
// [/streams: include-trace]

// [memory: include]
#include "openreg/csrc/allocator.h"
// [/memory: include]
#include "openreg/csrc/device.h"
// [streams: include]
#include "openreg/csrc/stream.h"
// [/streams: include]
// [frontend: include-sync-debug]
#include "openreg/csrc/sync_debug.h"
// [/frontend: include-sync-debug]

namespace openreg {
namespace {

// [guards: device]
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kPrivateUse1;

  c10::DeviceType type() const override {
    return static_type;
  }

  // A device without an index means the current one, which stays.
  c10::Device exchangeDevice(c10::Device device) const override {
    return make(
        device.has_index() ? openreg::exchangeDevice(device.index())
                           : currentDevice());
  }

  c10::Device getDevice() const override {
    return make(currentDevice());
  }

  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      openreg::setDevice(device.index());
    }
  }
  // [/guards: device]

  // [guards: no-throw]
  // A guard's destructor restores the device with this one, perhaps while an
  // exception is on its way: a second one would end the process.
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      orSetDevice(device.index());
    }
  }

  // The autograd engine makes one queue per device from this number, once. It
  // must not throw, and must not change.
  c10::DeviceIndex deviceCount() const noexcept override {
    return openreg::deviceCount();
  }
  // [/guards: no-throw]

  // [guards: default-stream until streams]
  //| // Every device has its default stream, whose id is 0, and nothing else yet.
  //| c10::Stream getStream(c10::Device device) const override {
  //|   return c10::Stream(c10::Stream::DEFAULT, resolve(device));
  //| }
  //|
  //| c10::Stream getDefaultStream(c10::Device device) const override {
  //|   return getStream(device);
  //| }
  //|
  //| c10::Stream exchangeStream(c10::Stream stream) const override {
  //|   return getStream(stream.device());
  //| }
  // [/guards: default-stream]

  // [streams: get]
  c10::Stream getStream(c10::Device device) const override {
    return currentStream(resolve(device).index());
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, resolve(device));
  }

  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return newStream(resolve(device).index(), priority);
  }

  c10::Stream getStreamFromGlobalPool(
      c10::Device device, bool urgent) const override {
    return newStream(resolve(device).index(), urgent ? -1 : 0);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return openreg::exchangeStream(stream);
  }

  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return toHandle(stream);
  }
  // [/streams: get]

  // [streams: wait]
  bool queryStream(const c10::Stream& stream) const override {
    return answer(orStreamQuery(toHandle(stream)));
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    // [frontend: note-stream-wait]
    noteWait("a stream's synchronize()");
    // [/frontend: note-stream-wait]
    trace([&](const auto& python) {
      python->trace_gpu_stream_synchronization(static_type, address(stream));
    });
    check(orStreamSynchronize(toHandle(stream)));
  }
  // [/streams: wait]

  // [streams: record]
  // The event is made at its first record, on the device of that stream, and
  // stays there. BACKEND_DEFAULT is how PyTorch asks for time stamps.
  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex index,
      const c10::EventFlag flag) const override {
    TORCH_CHECK(
        index == -1 || index == stream.device_index(),
        "the event belongs to openreg:",
        static_cast<int>(index),
        " and cannot be recorded on a stream of ",
        stream.device(),
        "; make another event for it");
    const c10::Device previous = exchangeDevice(stream.device());
    orError error = orSuccess;
    if (*event == nullptr) {
      orEvent_t made = nullptr;
      error = orEventCreateWithFlags(
          &made,
          flag == c10::EventFlag::BACKEND_DEFAULT ? orEventDefault
                                                  : orEventDisableTiming);
      *event = made;
      trace([&](const auto& python) {
        python->trace_gpu_event_creation(static_type, address(made));
      });
    }
    if (error == orSuccess) {
      error = orEventRecord(toEvent(*event), toHandle(stream));
    }
    orSetDevice(previous.index()); // keeps the message of `error`
    check(error);
    trace([&](const auto& python) {
      python->trace_gpu_event_record(
          static_type, address(*event), address(stream));
    });
  }
  // [/streams: record]

  // [streams: block]
  // The stream waits, not the caller; event and stream may belong to different
  // devices.
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return; // never recorded: nothing to wait for
    }
    check(orStreamWaitEvent(toHandle(stream), toEvent(event)));
    trace([&](const auto& python) {
      python->trace_gpu_event_wait(
          static_type, address(event), address(stream));
    });
  }
  // [/streams: block]

  // [streams: event]
  bool queryEvent(void* event) const override {
    return event == nullptr || answer(orEventQuery(toEvent(event)));
  }

  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    trace([&](const auto& python) {
      python->trace_gpu_event_synchronization(static_type, address(event));
    });
    check(orEventSynchronize(toEvent(event)));
  }

  // Milliseconds by the device's clock.
  double elapsedTime(
      void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(
        start != nullptr && end != nullptr,
        "elapsed_time() needs two events that were recorded");
    float milliseconds = 0;
    check(orEventElapsedTime(&milliseconds, toEvent(start), toEvent(end)));
    return milliseconds;
  }

  // Events die while other exceptions fly, and while the process exits.
  void destroyEvent(
      void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) {
      trace([&](const auto& python) {
        python->trace_gpu_event_deletion(static_type, address(event));
      });
      orEventDestroy(toEvent(event));
    }
  }
  // [/streams: event]

  // [memory: record-data-ptr]
  void recordDataPtrOnStream(
      const c10::DataPtr& data, const c10::Stream& stream) const override {
    deviceAllocator()->recordStream(data, stream);
  }
  // [/memory: record-data-ptr]

  // [guards: synchronize-device]
  // The index counts, not the current device. Without one it is the current.
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const c10::DeviceIndex previous = exchangeDevice(make(index)).index();
    const orError error = orDeviceSynchronize();
    orSetDevice(previous); // keeps the message of `error`
    check(error);
    // [streams: trace-device]
    trace([](const auto& python) {
      python->trace_gpu_device_synchronization(static_type);
    });
    // [/streams: trace-device]
  }
  // [/guards: synchronize-device]

  // [guards: capability]
  // The kernels are the CPU's, and so are the types they can compute with.
  c10::DeviceCapability getDeviceCapability(c10::Device device) const override {
    resolve(device);
    return {};
  }
  // [/guards: capability]

 private:
  static c10::Device make(c10::DeviceIndex index) {
    return {static_type, index};
  }

  // [guards: resolve]
  // The device that is meant; throws if there is no such device.
  static c10::Device resolve(c10::Device device) {
    if (!device.has_index()) {
      return make(currentDevice());
    }
    int started = 0;
    check(orDeviceGetState(device.index(), &started)); // checks the index
    return device;
  }
  // [/guards: resolve]

  // [streams: helpers]
  static orEvent_t toEvent(void* event) {
    return static_cast<orEvent_t>(event);
  }

  // Done, or not yet; anything else is an error.
  static bool answer(orError error) {
    if (error == orErrorNotReady) {
      return false;
    }
    check(error);
    return true;
  }
  // [/streams: helpers]

  // [streams: trace]
  // PyTorch's way to watch an accelerator from Python: it looks the callbacks
  // up in `torch.openreg._gpu_trace`. Costs one load while nobody watches.
  template <typename Tell>
  static void trace(Tell tell) {
    if (const auto* python = c10::impl::GPUTrace::get_trace()) [[unlikely]] {
      tell(*python);
    }
  }

  static std::uintptr_t address(const void* event) {
    return reinterpret_cast<std::uintptr_t>(event);
  }

  static std::uintptr_t address(const c10::Stream& stream) {
    return address(static_cast<const void*>(toHandle(stream)));
  }
  // [/streams: trace]
};

// [guards: register]
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
// [/guards: register]

} // namespace
} // namespace openreg
