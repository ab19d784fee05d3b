// Chapter: hooks
// What PyTorch's device-neutral C++ code asks an accelerator.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "openreg/csrc/device.h"
// [generators: include]
#include "openreg/csrc/generator.h"
// [/generators: include]
#include "openreg/csrc/pinned.h"
// [ops: include-resize]
#include "openreg/csrc/ops/resize.h"
// [/ops: include-resize]

namespace openreg {
namespace {

// [hooks: probes]
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  // Must neither throw nor start the device: a process asks, then forks.
  bool isAvailable() const override {
    return deviceCount() > 0;
  }

  c10::DeviceIndex deviceCount() const override {
    return openreg::deviceCount();
  }
  // [/hooks: probes]

  // [hooks: start]
  void init() const override {
    check(orInit());
  }

  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    int started = 0;
    return orDeviceGetState(index, &started) == orSuccess && started != 0;
  }
  // [/hooks: start]

  // [hooks: current]
  void setCurrentDevice(c10::DeviceIndex index) const override {
    setDevice(index);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return currentDevice();
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return openreg::exchangeDevice(index);
  }

  // Like exchangeDevice, but an index that is not there changes nothing.
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index >= 0 && index < openreg::deviceCount()
               ? openreg::exchangeDevice(index)
               : currentDevice();
  }
  // [/hooks: current]

  // [hooks: pointers]
  // True for page-locked memory. PyTorch asks about any host pointer, also
  // before the device has started, so no answer may start it.
  bool isPinnedPtr(const void* data) const override {
    orPointerAttributes attributes;
    return orPointerGetAttributes(&attributes, data) == orSuccess &&
           attributes.type == orMemoryHost;
  }

  at::Device getDeviceFromPtr(void* data) const override {
    orPointerAttributes attributes;
    check(orPointerGetAttributes(&attributes, data));
    TORCH_CHECK(
        attributes.type == orMemoryDevice,
        "the pointer is not openreg memory, so no openreg device owns it");
    return {
        c10::kPrivateUse1, static_cast<c10::DeviceIndex>(attributes.device)};
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return pinnedAllocator();
  }
  // [/hooks: pointers]

  // [generators: hooks]
  const at::Generator& getDefaultGenerator(
      c10::DeviceIndex index) const override {
    return defaultGenerator(index);
  }

  // What torch.Generator("openreg:1") makes.
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    const c10::DeviceIndex device = index < 0 ? currentDevice() : index;
    TORCH_CHECK(
        device < openreg::deviceCount(),
        "there is no openreg:",
        static_cast<int>(device),
        " to make a generator for; ",
        static_cast<int>(openreg::deviceCount()),
        " devices are present");
    return at::make_generator<Generator>(device);
  }
  // [/generators: hooks]

  // [ops: resize-hook]
  void resizePrivateUse1Bytes(
      const c10::Storage& storage, size_t bytes) const override {
    resizeStorage(storage.unsafeGetStorageImpl(), bytes);
  }
  // [/ops: resize-hook]
};

// [hooks: register]
// PyTorch keeps the pointer for the life of the process and asks it from
// threads that outlive static destructors, so the object is never destroyed.
[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
// [/hooks: register]

} // namespace
} // namespace openreg
