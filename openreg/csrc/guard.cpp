// Chapter: guards
// What c10::DeviceGuard and its kin call: one object for the whole process.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "openreg/csrc/device.h"

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

  // [guards: default-stream]
  // Every device has its default stream, whose id is 0, and nothing else yet.
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, resolve(device));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  // [/guards: default-stream]

  // [guards: synchronize-device]
  // The index counts, not the current device. Without one it is the current.
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const c10::DeviceIndex previous = exchangeDevice(make(index)).index();
    const orError error = orDeviceSynchronize();
    orSetDevice(previous); // keeps the message of `error`
    check(error);
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
};

// [guards: register]
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
// [/guards: register]

} // namespace
} // namespace openreg
