// Chapter: devices
// The C functions on devices.
#include <cstdio>
#include <cstring>

#include "openreg/driver/config.h"
#include "openreg/driver/device.h"
#include "openreg/driver/status.h"

using namespace openreg::driver;

// [devices: count]
orError orGetDeviceCount(int* count) {
  if (count == nullptr) {
    return fail(orErrorInvalidValue, "orGetDeviceCount: count is null");
  }
  if (!config().problem.empty()) {
    return usable();
  }
  *count = config().devices;
  return orSuccess;
}
// [/devices: count]

orError orSetDevice(int device) {
  if (const orError error = checkIndex(device); error != orSuccess) {
    return error;
  }
  currentIndex() = device;
  return orSuccess;
}

orError orGetDevice(int* device) {
  if (device == nullptr) {
    return fail(orErrorInvalidValue, "orGetDevice: device is null");
  }
  *device = currentIndex();
  return orSuccess;
}

orError orGetDeviceProperties(orDeviceProp* properties, int device) {
  if (properties == nullptr) {
    return fail(orErrorInvalidValue, "orGetDeviceProperties: null result");
  }
  if (const orError error = checkIndex(device); error != orSuccess) {
    return error;
  }
  std::memset(properties, 0, sizeof(*properties));
  std::snprintf(
      properties->name, sizeof(properties->name), "OpenReg simulated device");
  properties->total_memory = config().memory;
  properties->compute_engines = config().computeEngines;
  properties->copy_engines = 1;
  properties->major = 1;
  return orSuccess;
}

orError orDeviceGetState(int device, int* started) {
  if (started == nullptr) {
    return fail(orErrorInvalidValue, "orDeviceGetState: started is null");
  }
  if (const orError error = checkIndex(device); error != orSuccess) {
    return error;
  }
  *started = startedDevice(device) != nullptr;
  return orSuccess;
}

orError orInit(void) {
  Device* device = currentDevice();
  return device != nullptr ? orSuccess : orPeekAtLastError();
}

orError orDeviceSynchronize(void) {
  Device* device = currentDevice();
  if (device == nullptr) {
    return orPeekAtLastError();
  }
  if (onEngine()) {
    return fail(
        orErrorNotPermitted, "orDeviceSynchronize inside a kernel would hang");
  }
  device->drain();
  return device->report();
}

orError orDeviceReset(void) {
  Device* device = currentDevice();
  if (device == nullptr) {
    return orPeekAtLastError();
  }
  if (onEngine()) {
    return fail(
        orErrorNotPermitted, "orDeviceReset inside a kernel would hang");
  }
  device->drain();
  device->forget();
  return orSuccess;
}
