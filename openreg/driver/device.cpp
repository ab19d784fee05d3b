// Chapter: devices
#include "openreg/driver/device.h"

#include <pthread.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "openreg/driver/config.h"
#include "openreg/driver/status.h"
#include "openreg/driver/stream.h"

namespace openreg::driver {
namespace {

// Everything here is constant-initialised and never destroyed: autograd's and
// OpenMP's threads outlive static destructors, and a driver torn down under
// them aborts the process.
std::mutex startMutex;
std::array<std::atomic<Device*>, kMaxDevices> devices{};
bool driverStarted = false; // guarded by startMutex
std::atomic<bool> forked{false};
std::atomic<bool> exiting{false};
// Read by nearly every call. In a library that is opened at run time a
// thread-local variable costs a function call, unless it takes one of the few
// places that the loader keeps free for such small ones.
[[gnu::tls_model("initial-exec")]] thread_local int current = 0;

// [devices: fork]
// Engines are threads, and fork copies only the calling thread: a child would
// queue work that nobody runs. So the child is told, at its first call.
void afterForkInChild() {
  forked.store(true);
}
// [/devices: fork]

// Let running commands end, so that none of them runs while the libraries it
// calls are being destroyed. A kernel that never ends must not hang the exit.
void atExit() {
  if (forked.load()) {
    return; // the engines are threads of the parent
  }
  exiting.store(true);
  const auto patience =
      std::chrono::steady_clock::now() + std::chrono::seconds(1);
  for (Device* device : startedDevices()) {
    device->scheduler.stop();
    while (device->scheduler.busy() &&
           std::chrono::steady_clock::now() < patience) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

// [devices: start]
bool startDriver() { // under startMutex
  if (driverStarted) {
    return true;
  }
  if (!windows().reserve(config().devices, config().memory)) {
    fail(
        orErrorSystem,
        "cannot reserve address space for %d devices of %zu MiB; lower "
        "OPENREG_MEMORY_MB or OPENREG_DEVICE_COUNT",
        config().devices,
        config().memory >> 20);
    return false;
  }
  installFaultHandler();
  pthread_atfork(nullptr, nullptr, afterForkInChild);
  std::atexit(atExit);
  driverStarted = true;
  return true;
}

Device* start(int index) {
  const std::lock_guard lock(startMutex);
  auto& slot = devices[static_cast<std::size_t>(index)];
  if (Device* device = slot.load()) {
    return device;
  }
  if (!startDriver()) {
    return nullptr;
  }
  auto* device = new Device(index, config().memory, config().computeEngines);
  slot.store(device);
  return device;
}
// [/devices: start]

} // namespace

Device::Device(int deviceIndex, std::size_t memory, int computeEngines)
    : index(deviceIndex),
      scheduler(deviceIndex, computeEngines),
      default_(new Stream(*this, 0)) {
  heap.open(deviceIndex, memory);
  add(default_);
}

void Device::add(Stream* stream) {
  const std::lock_guard lock(mutex_);
  streams_.push_back(stream);
}

std::vector<Stream*> Device::streams() {
  const std::lock_guard lock(mutex_);
  return streams_;
}

void Device::drain() {
  for (Stream* stream : streams()) {
    stream->wait();
  }
}

void Device::record(std::shared_ptr<Failure> failure) {
  if (config().stickyErrors) {
    lost_.store(true);
  }
  const std::lock_guard lock(mutex_);
  failures_.push_back(std::move(failure));
  pending_.store(failures_.size());
}

orError Device::report() {
  if (pending_.load() == 0) {
    return refuseLost();
  }
  std::vector<std::shared_ptr<Failure>> failures;
  {
    const std::lock_guard lock(mutex_);
    failures.swap(failures_);
    pending_.store(0);
  }
  if (failures.empty()) { // another thread was faster
    return refuseLost();
  }
  std::string more;
  for (const auto& failure : failures) {
    const std::lock_guard lock(failure->mutex);
    failure->reported = true;
    for (Device* device : startedDevices()) {
      for (Stream* stream : device->streams()) {
        failure->horizon.emplace(stream, stream->queued());
      }
    }
    for (Stream* stream : failure->streams) {
      failure->skipped += stream->skipQueued(failure);
    }
  }
  const unsigned skipped = failures.front()->skipped.load();
  if (skipped > 0) {
    more += "; " + std::to_string(skipped) +
            (skipped == 1 ? " command" : " commands") +
            " queued behind it did not run";
  }
  if (failures.size() > 1) {
    more +=
        "; " + std::to_string(failures.size() - 1) +
        " more failed meanwhile, the first of them: " + failures[1]->sentence;
  }
  return fail(
      lost() ? orErrorDeviceLost : orErrorKernelFailed,
      "%s%s%s",
      failures.front()->sentence.c_str(),
      more.c_str(),
      lost() ? "; the device is lost until orDeviceReset" : "");
}

orError Device::refuseLost() const {
  if (!lost()) {
    return orSuccess;
  }
  return fail(
      orErrorDeviceLost,
      "openreg:%d is lost to an earlier kernel failure; reset it with "
      "orDeviceReset, or run without OPENREG_STICKY_ERRORS",
      index);
}

void Device::forget() {
  lost_.store(false);
  report();
}

orError checkIndex(int device) {
  if (const orError error = usable(); error != orSuccess) {
    return error;
  }
  if (device >= 0 && device < config().devices) {
    return orSuccess;
  }
  if (config().devices == 0) {
    return fail(orErrorInvalidDevice, "there is no openreg device");
  }
  return fail(
      orErrorInvalidDevice,
      "there is no openreg:%d; %d %s, with indices 0 to %d",
      device,
      config().devices,
      config().devices == 1 ? "device is present" : "devices are present",
      config().devices - 1);
}

int& currentIndex() {
  return current;
}

// [devices: usable]
orError usable() {
  if (forked.load(std::memory_order_relaxed)) {
    return fail(
        orErrorForked,
        "openreg was started before this process was forked, and a fork has "
        "none of its engines; start the child with the 'spawn' method, or "
        "fork before the first use of the device");
  }
  if (!config().problem.empty()) {
    return fail(orErrorInvalidConfiguration, "%s", config().problem.c_str());
  }
  return orSuccess;
}
// [/devices: usable]

bool shuttingDown() {
  return exiting.load(std::memory_order_relaxed);
}

Device* startedDevice(int index) {
  return index >= 0 && index < kMaxDevices
             ? devices[static_cast<std::size_t>(index)].load()
             : nullptr;
}

std::vector<Device*> startedDevices() {
  std::vector<Device*> result;
  for (auto& slot : devices) {
    if (Device* device = slot.load()) {
      result.push_back(device);
    }
  }
  return result;
}

Device* currentDevice() {
  if (checkIndex(current) != orSuccess) {
    return nullptr;
  }
  Device* device = startedDevice(current);
  return device != nullptr ? device : start(current);
}

} // namespace openreg::driver
