// Chapter: devices
#include "openreg/csrc/device.h"

#include <c10/util/Exception.h>

#include <string>

namespace openreg {

// [devices: raise]
void raise(orError error, const std::source_location& where) {
  const c10::SourceLocation location{
      where.function_name(), where.file_name(), where.line()};
  std::string message = orGetLastErrorMessage();
  switch (error) {
    case orErrorOutOfMemory:
      throw c10::OutOfMemoryError(location, std::move(message));
    case orErrorKernelFailed:
    case orErrorDeviceLost:
      throw c10::AcceleratorError(location, error, std::move(message));
    default:
      throw c10::Error(location, std::move(message));
  }
}
// [/devices: raise]

// [devices: current]
c10::DeviceIndex deviceCount() noexcept {
  int count = 0;
  return orGetDeviceCount(&count) == orSuccess
             ? static_cast<c10::DeviceIndex>(count)
             : c10::DeviceIndex{0};
}

c10::DeviceIndex currentDevice() {
  int device = 0;
  check(orGetDevice(&device));
  return static_cast<c10::DeviceIndex>(device);
}

void setDevice(c10::DeviceIndex index) {
  check(orSetDevice(index));
}

c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) {
  const c10::DeviceIndex previous = currentDevice();
  if (previous != index) {
    setDevice(index);
  }
  return previous;
}
// [/devices: current]

} // namespace openreg
