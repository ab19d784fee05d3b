// Chapter: devices
#include "openreg/driver/status.h"

#include <cstdarg>
#include <cstdio>

namespace openreg::driver {
namespace {

struct LastError {
  orError code = orSuccess;
  char message[1024] = "no error";
};

thread_local LastError last;

struct Entry {
  const char* name;
  const char* sentence;
};

Entry describe(orError error) {
  switch (error) {
    case orSuccess:
      return {"orSuccess", "no error"};
    case orErrorInvalidValue:
      return {"orErrorInvalidValue", "an argument is out of range or null"};
    case orErrorOutOfMemory:
      return {"orErrorOutOfMemory", "the device is out of memory"};
    case orErrorInvalidDevice:
      return {"orErrorInvalidDevice", "there is no device with this index"};
    case orErrorInvalidHandle:
      return {"orErrorInvalidHandle", "the stream or event does not exist"};
    case orErrorInvalidPointer:
      return {"orErrorInvalidPointer", "the pointer is not a live allocation"};
    case orErrorOutOfBounds:
      return {"orErrorOutOfBounds", "the range leaves its allocation"};
    case orErrorNotReady:
      return {"orErrorNotReady", "work is still pending"};
    case orErrorInvalidConfiguration:
      return {"orErrorInvalidConfiguration", "an environment variable is bad"};
    case orErrorKernelFailed:
      return {"orErrorKernelFailed", "a kernel failed on the device"};
    case orErrorDeviceLost:
      return {"orErrorDeviceLost", "the device is lost until it is reset"};
    case orErrorForked:
      return {"orErrorForked", "the driver cannot be used after a fork"};
    case orErrorShutdown:
      return {"orErrorShutdown", "the process is exiting"};
    case orErrorSystem:
      return {"orErrorSystem", "the operating system refused a resource"};
    case orErrorNotPermitted:
      return {"orErrorNotPermitted", "not allowed from inside the device"};
  }
  return {"unknown", "not an openreg error code"};
}

} // namespace

orError fail(orError code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last.message, sizeof(last.message), format, arguments);
  va_end(arguments);
  last.code = code;
  return code;
}

} // namespace openreg::driver

using namespace openreg::driver;

const char* orGetErrorName(orError error) {
  return describe(error).name;
}

const char* orGetErrorString(orError error) {
  return describe(error).sentence;
}

orError orGetLastError(void) {
  const orError code = last.code;
  last.code = orSuccess;
  return code;
}

orError orPeekAtLastError(void) {
  return last.code;
}

const char* orGetLastErrorMessage(void) {
  return last.message;
}
