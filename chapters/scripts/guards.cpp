// Which device is current while guards are made and unmade: each function
// writes what it sees into `seen`. Needs c10 alone, no tensors.
#include <c10/core/DeviceGuard.h>

#include <exception>
#include <stdexcept>

namespace {

c10::Device device(int index) {
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

int now() {
  return c10::impl::getDeviceGuardImpl(c10::kPrivateUse1)->getDevice().index();
}

} // namespace

extern "C" void nested(int* seen) {
  *seen++ = now();
  {
    const c10::DeviceGuard outer(device(2));
    *seen++ = now();
    {
      const c10::DeviceGuard inner(device(1));
      *seen++ = now();
      const c10::DeviceGuard same(device(-1)); // no index: nothing to change
      *seen++ = now();
    }
    *seen++ = now();
  }
  *seen++ = now();
}

extern "C" void thrown(int* seen) {
  try {
    const c10::DeviceGuard outer(device(2));
    const c10::DeviceGuard inner(device(1));
    *seen++ = now();
    throw std::runtime_error("a kernel cannot be launched");
  } catch (const std::runtime_error&) {
    *seen++ = now();
  }
  try {
    const c10::DeviceGuard refused(device(7));
    *seen++ = -1; // not reached
  } catch (const std::exception&) {
    *seen++ = now();
  }
}

extern "C" void optional(int* seen) {
  c10::OptionalDeviceGuard guard; // knows no device, restores none
  *seen++ = now();
  for (int index : {2, 1}) {
    guard.reset_device(device(index));
    *seen++ = now();
  }
  *seen++ = guard.original_device()->index();
}
