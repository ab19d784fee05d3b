// Chapter: devices
// The C functions on streams.
#include <algorithm>

#include "openreg/driver/event.h"
#include "openreg/driver/status.h"
#include "openreg/driver/stream.h"

using namespace openreg::driver;

namespace {

orStream_t handleOf(Stream* stream) {
  return reinterpret_cast<orStream_t>(stream);
}

} // namespace

orError orDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least == nullptr || greatest == nullptr) {
    return fail(
        orErrorInvalidValue, "orDeviceGetStreamPriorityRange: null result");
  }
  *least = 0;
  *greatest = 1 - kPriorities;
  return orSuccess;
}

orError orStreamCreate(orStream_t* stream) {
  return orStreamCreateWithPriority(stream, 0);
}

orError orStreamCreateWithPriority(orStream_t* stream, int priority) {
  if (stream == nullptr) {
    return fail(orErrorInvalidValue, "orStreamCreate: stream is null");
  }
  Device* device = currentDevice();
  if (device == nullptr) {
    return orPeekAtLastError();
  }
  auto* created = new Stream(*device, std::clamp(priority, 1 - kPriorities, 0));
  device->add(created);
  *stream = handleOf(created);
  return orSuccess;
}

orError orStreamDestroy(orStream_t stream) {
  if (stream == nullptr) {
    return fail(orErrorInvalidHandle, "the default stream cannot be destroyed");
  }
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  if (found == &found->device().defaultStream()) {
    return fail(orErrorInvalidHandle, "the default stream cannot be destroyed");
  }
  if (!found->destroy()) {
    return fail(
        orErrorInvalidHandle,
        "stream %llu was destroyed before",
        static_cast<unsigned long long>(found->id()));
  }
  return orSuccess;
}

orError orStreamGetDefault(orStream_t* stream) {
  if (stream == nullptr) {
    return fail(orErrorInvalidValue, "orStreamGetDefault: stream is null");
  }
  Stream* found = resolve(nullptr);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  *stream = handleOf(found);
  return orSuccess;
}

orError orStreamGetId(orStream_t stream, uint64_t* id) {
  Stream* found = id != nullptr ? resolve(stream) : nullptr;
  if (found == nullptr) {
    return id != nullptr ? orPeekAtLastError()
                         : fail(orErrorInvalidValue, "orStreamGetId: null");
  }
  *id = found->id();
  return orSuccess;
}

orError orStreamGetDevice(orStream_t stream, int* device) {
  Stream* found = device != nullptr ? resolve(stream) : nullptr;
  if (found == nullptr) {
    return device != nullptr
               ? orPeekAtLastError()
               : fail(orErrorInvalidValue, "orStreamGetDevice: null");
  }
  *device = found->device().index;
  return orSuccess;
}

orError orStreamGetPriority(orStream_t stream, int* priority) {
  Stream* found = priority != nullptr ? resolve(stream) : nullptr;
  if (found == nullptr) {
    return priority != nullptr
               ? orPeekAtLastError()
               : fail(orErrorInvalidValue, "orStreamGetPriority: null");
  }
  *priority = found->priority();
  return orSuccess;
}

orError orStreamQuery(orStream_t stream) {
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  return found->idle() ? orSuccess : orErrorNotReady;
}

orError orStreamSynchronize(orStream_t stream) {
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  if (onEngine()) {
    return fail(
        orErrorNotPermitted, "orStreamSynchronize inside a kernel would hang");
  }
  found->wait();
  return found->device().report();
}

orError orStreamWaitEvent(orStream_t stream, orEvent_t event) {
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  return waitForEvent(*found, event);
}
