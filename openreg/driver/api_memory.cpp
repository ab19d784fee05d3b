// Chapter: devices
// The C functions on memory, copies aside.
#include "openreg/driver/device.h"
#include "openreg/driver/memory.h"
#include "openreg/driver/status.h"
#include "openreg/driver/stream.h"

using namespace openreg::driver;

orError orMalloc(void** ptr, size_t bytes) {
  if (ptr == nullptr) {
    return fail(orErrorInvalidValue, "orMalloc: ptr is null");
  }
  Device* device = currentDevice();
  if (device == nullptr) {
    return orPeekAtLastError();
  }
  if (bytes == 0) {
    *ptr = nullptr;
    return orSuccess;
  }
  void* result = device->heap.allocate(bytes);
  if (result == nullptr && !onEngine() && device->heap.hasRetired()) {
    device->drain(); // frees that are queued may make room
    result = device->heap.allocate(bytes);
  }
  if (result == nullptr) {
    const Heap::Usage usage = device->heap.usage();
    return fail(
        orErrorOutOfMemory,
        "openreg:%d is out of memory: %zu bytes asked for, %zu of %zu bytes "
        "free, the largest free range has %zu; free something, or raise "
        "OPENREG_MEMORY_MB",
        device->index,
        bytes,
        usage.free,
        usage.total,
        usage.largest);
  }
  *ptr = result;
  return orSuccess;
}

namespace {

// The device whose live allocation starts at `ptr`, now marked as going.
Device* retire(void* ptr) {
  const int index = windows().deviceOf(ptr);
  Device* device = startedDevice(index);
  if (device != nullptr && device->heap.retire(ptr)) {
    return device;
  }
  fail(
      orErrorInvalidPointer,
      "%p is not the start of a live device allocation; was it freed before?",
      ptr);
  return nullptr;
}

} // namespace

orError orFree(void* ptr) {
  if (const orError error = usable(); error != orSuccess || ptr == nullptr) {
    return error;
  }
  if (onEngine()) {
    return fail(
        orErrorNotPermitted,
        "orFree inside a kernel would hang; use orFreeAsync");
  }
  Device* device = retire(ptr);
  if (device == nullptr) {
    return orErrorInvalidPointer;
  }
  device->drain();
  device->heap.release(ptr);
  return orSuccess;
}

orError orFreeAsync(void* ptr, orStream_t stream) {
  if (const orError error = usable(); error != orSuccess || ptr == nullptr) {
    return error;
  }
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  if (windows().deviceOf(ptr) != found->device().index) {
    return fail(
        orErrorInvalidPointer,
        "%p is not memory of the stream's device, openreg:%d",
        ptr,
        found->device().index);
  }
  if (retire(ptr) == nullptr) {
    return orErrorInvalidPointer;
  }
  Command command;
  command.kind = Command::Kind::Free;
  command.dst = ptr;
  const orError error = found->enqueue(std::move(command));
  if (error != orSuccess) {
    found->device().heap.restore(ptr); // refused, so still the caller's
  }
  return error;
}

orError orMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  if (free_bytes == nullptr || total_bytes == nullptr) {
    return fail(orErrorInvalidValue, "orMemGetInfo: null result");
  }
  Device* device = currentDevice();
  if (device == nullptr) {
    return orPeekAtLastError();
  }
  const Heap::Usage usage = device->heap.usage();
  *free_bytes = usage.free;
  *total_bytes = usage.total;
  return orSuccess;
}

orError orMallocHost(void** ptr, size_t bytes) {
  if (ptr == nullptr) {
    return fail(orErrorInvalidValue, "orMallocHost: ptr is null");
  }
  if (currentDevice() == nullptr) {
    return orPeekAtLastError();
  }
  if (bytes == 0) {
    *ptr = nullptr;
    return orSuccess;
  }
  void* result = hostMemory().allocate(bytes);
  if (result == nullptr) {
    return fail(
        orErrorSystem, "the system has no %zu bytes of host memory", bytes);
  }
  *ptr = result;
  return orSuccess;
}

orError orFreeHost(void* ptr) {
  if (const orError error = usable(); error != orSuccess || ptr == nullptr) {
    return error;
  }
  if (!hostMemory().owns(ptr)) {
    return fail(
        orErrorInvalidPointer,
        "%p is not the start of page-locked memory; was it freed before?",
        ptr);
  }
  if (!onEngine()) {
    for (Device* device : startedDevices()) {
      device->drain();
    }
  }
  hostMemory().release(ptr);
  return orSuccess;
}

orError orPointerGetAttributes(
    orPointerAttributes* attributes, const void* ptr) {
  if (attributes == nullptr) {
    return fail(orErrorInvalidValue, "orPointerGetAttributes: null result");
  }
  orPointerAttributes result{orMemoryUnregistered, -1, nullptr, 0};
  Heap::Range range;
  const int index = windows().deviceOf(ptr);
  if (Device* device = startedDevice(index)) {
    result.type = orMemoryDevice;
    result.device = index;
    range = device->heap.find(ptr);
  } else if (range = hostMemory().find(ptr); range.begin != 0) {
    result.type = orMemoryHost;
  }
  result.base = reinterpret_cast<void*>(range.begin);
  result.size = range.size;
  *attributes = result;
  return orSuccess;
}
