// Chapter: streams
#include "openreg/csrc/stream.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "openreg/csrc/device.h"
#include "openreg/csrc/module.h"

namespace openreg {
namespace {

constexpr std::size_t kMaxDevices = 16; // as the driver has at most

// [streams: thread-local]
// Null stands for the default stream, so a new thread starts with that.
[[gnu::tls_model("initial-exec")]] // no function call to find it
thread_local std::array<orStream_t, kMaxDevices> current{};
// [/streams: thread-local]

c10::Device deviceOf(c10::DeviceIndex index) {
  return {c10::kPrivateUse1, index};
}

// [streams: pool]
// Nobody tells when the last copy of a c10::Stream is gone, so a stream can
// never be destroyed. A pool bounds how many there are: the 33rd request gets
// the first stream again.
struct Pool {
  static constexpr std::size_t kSize = 32;
  std::mutex mutex;
  std::vector<orStream_t> streams;
  std::size_t next = 0;

  orStream_t take(int priority) {
    const std::lock_guard lock(mutex);
    if (streams.size() < kSize) {
      orStream_t made = nullptr;
      check(orStreamCreateWithPriority(&made, priority));
      streams.push_back(made);
      return made;
    }
    next = (next + 1) % kSize;
    return streams[(next + kSize - 1) % kSize];
  }
};

constexpr std::size_t kUrgencies = 8; // more than any chip's range has

// Never destroyed: streams are used until the process is gone.
Pool& pool(c10::DeviceIndex device, int urgency) {
  static auto* const pools =
      new std::array<std::array<Pool, kUrgencies>, kMaxDevices>;
  return (*pools)[static_cast<std::size_t>(device)].at(
      static_cast<std::size_t>(urgency));
}
// [/streams: pool]

// Asked once for each device: it stays the same.
orStream_t defaultHandle(c10::DeviceIndex device) {
  static std::array<std::atomic<orStream_t>, kMaxDevices> known{};
  auto& place = known.at(static_cast<std::size_t>(device));
  orStream_t handle = place.load(std::memory_order_relaxed);
  if (handle == nullptr) {
    const c10::DeviceGuard guard(deviceOf(device));
    check(orStreamGetDefault(&handle));
    place.store(handle, std::memory_order_relaxed);
  }
  return handle;
}

} // namespace

// [streams: convert]
c10::Stream toStream(orStream_t handle, c10::DeviceIndex device) {
  int owner = 0;
  check(orStreamGetDevice(handle, &owner));
  TORCH_CHECK(
      owner == device,
      "the stream belongs to openreg:",
      owner,
      ", not to openreg:",
      static_cast<int>(device));
  if (handle == defaultHandle(device)) {
    return c10::Stream(c10::Stream::DEFAULT, deviceOf(device));
  }
  return c10::Stream(
      c10::Stream::UNSAFE,
      deviceOf(device),
      reinterpret_cast<c10::StreamId>(handle));
}

orStream_t toHandle(const c10::Stream& stream) {
  TORCH_CHECK(
      stream.device_type() == c10::kPrivateUse1 && stream.device_index() >= 0,
      "expected a stream of an openreg device, got one of ",
      stream.device());
  if (stream.id() == 0) {
    return defaultHandle(stream.device_index());
  }
  const auto handle = reinterpret_cast<orStream_t>(stream.id());
  int owner = 0;
  check(orStreamGetDevice(handle, &owner));
  TORCH_CHECK(
      owner == stream.device_index(),
      "the stream belongs to openreg:",
      owner,
      ", not to ",
      stream.device());
  return handle;
}
// [/streams: convert]

// [streams: get-current]
orStream_t currentStream() {
  return current[static_cast<std::size_t>(currentDevice())];
}

orStream_t currentHandle() {
  const c10::DeviceIndex device = currentDevice();
  orStream_t handle = current[static_cast<std::size_t>(device)];
  return handle != nullptr ? handle : defaultHandle(device);
}

c10::Stream currentStream(c10::DeviceIndex device) {
  int started = 0;
  check(orDeviceGetState(device, &started)); // checks the index
  orStream_t handle = current[static_cast<std::size_t>(device)];
  return c10::Stream(
      c10::Stream::UNSAFE,
      deviceOf(device),
      reinterpret_cast<c10::StreamId>(handle));
}

c10::Stream exchangeStream(const c10::Stream& stream) {
  const c10::Stream previous = currentStream(stream.device_index());
  if (stream.id() != 0) {
    toHandle(stream); // throws if it is none
  }
  current[static_cast<std::size_t>(stream.device_index())] =
      reinterpret_cast<orStream_t>(stream.id());
  return previous;
}
// [/streams: get-current]

// [streams: started]
// Whoever makes work uses the device, and PyTorch has to know: it does not wait
// for a device that it takes for unused.
void noteUse() {
  static std::atomic<bool> noted{false};
  if (!noted.load(std::memory_order_relaxed)) {
    const pybind11::gil_scoped_acquire lock;
    torch::utils::device_lazy_init(c10::kPrivateUse1);
    noted.store(true, std::memory_order_relaxed);
  }
}
// [/streams: started]

// [streams: take]
c10::Stream newStream(c10::DeviceIndex device, int priority) {
  noteUse();
  const c10::DeviceGuard guard(deviceOf(device));
  int least = 0;
  int greatest = 0;
  check(orDeviceGetStreamPriorityRange(&least, &greatest));
  priority = std::clamp(priority, greatest, least);
  const orStream_t handle = pool(device, least - priority).take(priority);
  if (const auto* trace = c10::impl::GPUTrace::get_trace()) [[unlikely]] {
    (*trace)->trace_gpu_stream_creation(
        c10::kPrivateUse1, reinterpret_cast<uintptr_t>(handle));
  }
  return toStream(handle, device);
}
// [/streams: take]

namespace {

// [streams: sleep]
// A kernel that only takes time, without a core of the host's for it.
void sleepFor(orKernelContext*, void* nanoseconds) {
  std::this_thread::sleep_for(
      std::chrono::nanoseconds(*static_cast<std::int64_t*>(nanoseconds)));
}

void sleep(std::int64_t nanoseconds) {
  noteUse();
  static constexpr orKernel kernel{"sleep", &sleepFor, nullptr, nullptr};
  alignas(16) std::int64_t argument = nanoseconds;
  check(orLaunchKernel(currentStream(), &kernel, &argument, sizeof(argument)));
}
// [/streams: sleep]

} // namespace

// [streams: bind]
void bindStreams(pybind11::module_& m) {
  namespace py = pybind11;
  m.attr("device_type") = static_cast<int>(c10::kPrivateUse1);
  m.def("note_use", &noteUse);
  m.def("sleep", &sleep, py::call_guard<py::gil_scoped_release>());
  m.def("stream_from_handle", [](std::uintptr_t handle) {
    int device = 0;
    check(orStreamGetDevice(reinterpret_cast<orStream_t>(handle), &device));
    const c10::Stream stream = toStream(
        reinterpret_cast<orStream_t>(handle),
        static_cast<c10::DeviceIndex>(device));
    return std::make_tuple(stream.id(), device);
  });
  m.def("stream_handle", [](c10::StreamId id, int device) {
    const c10::Device of = deviceOf(static_cast<c10::DeviceIndex>(device));
    return reinterpret_cast<std::uintptr_t>(
        toHandle(c10::Stream(c10::Stream::UNSAFE, of, id)));
  });
  m.def("stream_priority", [](c10::StreamId id, int device) {
    const c10::Device of = deviceOf(static_cast<c10::DeviceIndex>(device));
    int priority = 0;
    check(orStreamGetPriority(
        toHandle(c10::Stream(c10::Stream::UNSAFE, of, id)), &priority));
    return priority;
  });
  m.def("stream_priority_range", [] {
    int least = 0;
    int greatest = 0;
    check(orDeviceGetStreamPriorityRange(&least, &greatest));
    return std::make_tuple(least, greatest);
  });
}
// [/streams: bind]

} // namespace openreg
