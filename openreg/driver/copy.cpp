// Chapter: devices
// Copies and fills: checked against the allocations, then queued.
#include <cstring>

#include "openreg/driver/device.h"
#include "openreg/driver/memory.h"
#include "openreg/driver/status.h"
#include "openreg/driver/stream.h"

namespace openreg::driver {
namespace {

// One end of a copy: where it is, and where an engine finds it.
struct End {
  orMemoryType type = orMemoryUnregistered;
  Device* device = nullptr;
  void* address = nullptr;
};

// Look up `bytes` at `ptr`; orSuccess, or why the range cannot be used.
orError look(const char* what, const void* ptr, std::size_t bytes, End& end) {
  end.address = const_cast<void*>(ptr);
  const int index = windows().deviceOf(ptr);
  Heap::Range range;
  if (index >= 0) {
    end.type = orMemoryDevice;
    end.device = startedDevice(index);
    range = end.device != nullptr ? end.device->heap.find(ptr) : range;
    if (range.begin == 0) {
      return fail(
          orErrorInvalidPointer,
          "%s %p lies in openreg:%d but in no live allocation",
          what,
          ptr,
          index);
    }
    end.address = windows().backing(ptr);
  } else if (range = hostMemory().find(ptr); range.begin != 0) {
    end.type = orMemoryHost;
  } else {
    return orSuccess; // pageable memory has no bounds to check
  }
  const std::size_t offset =
      reinterpret_cast<std::uintptr_t>(ptr) - range.begin;
  if (bytes <= range.size - offset) {
    return orSuccess;
  }
  return fail(
      orErrorOutOfBounds,
      "%zu bytes at offset %zu leave the %s's allocation of %zu bytes",
      bytes,
      offset,
      what,
      range.size);
}

orError checkKind(orMemcpyKind kind, const End& dst, const End& src) {
  const bool toDevice = dst.type == orMemoryDevice;
  const bool fromDevice = src.type == orMemoryDevice;
  const int actual = (fromDevice ? 2 : 0) + (toDevice ? 1 : 0);
  if (kind == orMemcpyDefault || kind == actual) {
    return orSuccess;
  }
  return fail(
      orErrorInvalidValue,
      "the copy goes from %s to %s memory, not in the direction asked for; "
      "orMemcpyDefault finds the direction by itself",
      fromDevice ? "device" : "host",
      toDevice ? "device" : "host");
}

// Queue a copy; `pageable` tells whether an end is pageable host memory.
orError copy(
    void* dst,
    const void* src,
    std::size_t bytes,
    orMemcpyKind kind,
    Stream& stream,
    bool& pageable) {
  End to;
  End from;
  if (bytes == 0) {
    return orSuccess; // wherever the pointers point
  }
  if (dst == nullptr || src == nullptr) {
    return fail(orErrorInvalidValue, "orMemcpy: a null pointer");
  }
  if (const orError error = look("destination", dst, bytes, to);
      error != orSuccess) {
    return error;
  }
  if (const orError error = look("source", src, bytes, from);
      error != orSuccess) {
    return error;
  }
  if (const orError error = checkKind(kind, to, from); error != orSuccess) {
    return error;
  }
  pageable =
      to.type == orMemoryUnregistered || from.type == orMemoryUnregistered;
  Command command;
  command.kind = Command::Kind::Copy;
  command.dst = to.address;
  command.src = from.address;
  command.size = bytes;
  return stream.enqueue(std::move(command));
}

orError finish(Stream& stream) {
  stream.wait();
  return stream.device().report();
}

} // namespace
} // namespace openreg::driver

using namespace openreg::driver;

orError orMemcpy(void* dst, const void* src, size_t bytes, orMemcpyKind kind) {
  Stream* stream = resolve(nullptr);
  if (stream == nullptr) {
    return orPeekAtLastError();
  }
  if (onEngine()) {
    return fail(orErrorNotPermitted, "orMemcpy inside a kernel would hang");
  }
  bool pageable = false;
  const orError error = copy(dst, src, bytes, kind, *stream, pageable);
  return error == orSuccess ? finish(*stream) : error;
}

orError orMemcpyAsync(
    void* dst,
    const void* src,
    size_t bytes,
    orMemcpyKind kind,
    orStream_t stream) {
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  bool pageable = false;
  const orError error = copy(dst, src, bytes, kind, *found, pageable);
  return error == orSuccess && pageable && !onEngine() ? finish(*found) : error;
}

orError orMemsetAsync(void* ptr, int value, size_t bytes, orStream_t stream) {
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  if (bytes == 0) {
    return orSuccess; // wherever the pointer points
  }
  End end;
  if (const orError error = look("destination", ptr, bytes, end);
      error != orSuccess) {
    return error;
  }
  if (end.type != orMemoryDevice) {
    return fail(
        orErrorInvalidPointer, "orMemsetAsync: %p is not device memory", ptr);
  }
  Command command;
  command.kind = Command::Kind::Fill;
  command.dst = end.address;
  command.value = value;
  command.size = bytes;
  return found->enqueue(std::move(command));
}
