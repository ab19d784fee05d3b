// Chapter: devices
// Launching work, and what a kernel may ask while it runs.
#include "openreg/driver/kernel.h"

#include "openreg/driver/config.h"
#include "openreg/driver/device.h"
#include "openreg/driver/status.h"
#include "openreg/driver/stream.h"

using namespace openreg::driver;

namespace {

std::atomic<void (*)(char*, std::size_t)> describeOrigin{nullptr};

std::unique_ptr<std::string> origin() {
  auto* describe = describeOrigin.load(std::memory_order_relaxed);
  if (!config().launchOrigin || describe == nullptr) {
    return nullptr;
  }
  char text[256] = "";
  describe(text, sizeof(text));
  return std::make_unique<std::string>(text);
}

orError finish(orError error, Stream& stream) {
  if (error != orSuccess || !config().launchBlocking || onEngine()) {
    return error;
  }
  stream.wait();
  return stream.device().report();
}

} // namespace

orError orLaunchKernel(
    orStream_t stream, const orKernel* kernel, void* args, size_t bytes) {
  if (kernel == nullptr || kernel->run == nullptr || kernel->name == nullptr ||
      (args == nullptr && bytes > 0)) {
    return fail(
        orErrorInvalidValue,
        "orLaunchKernel: a kernel needs a name, code, and its arguments");
  }
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  Command command;
  command.kind = Command::Kind::Kernel;
  command.kernel = kernel;
  command.origin = origin();
  return finish(found->enqueue(std::move(command), args, bytes), *found);
}

orError orLaunchHostFunc(
    orStream_t stream, void (*function)(void*), void* data) {
  if (function == nullptr) {
    return fail(orErrorInvalidValue, "orLaunchHostFunc: function is null");
  }
  Stream* found = resolve(stream);
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  Command command;
  command.kind = Command::Kind::HostFunction;
  command.function = function;
  command.src = data;
  return finish(found->enqueue(std::move(command)), *found);
}

int orKernelDevice(const orKernelContext* context) {
  return context->device;
}

void* orKernelAddress(const orKernelContext* context, const void* ptr) {
  if (windows().deviceOf(ptr) != context->device) {
    return const_cast<void*>(ptr);
  }
  return windows().backing(ptr);
}

void orKernelFail(orKernelContext* context, const char* message) {
  if (context->failure.empty()) { // the first reason is the one that counts
    context->failure = message != nullptr ? message : "no reason given";
  }
}

orError orGetBackingOffset(ptrdiff_t* offset) {
  if (offset == nullptr) {
    return fail(orErrorInvalidValue, "orGetBackingOffset: offset is null");
  }
  if (currentDevice() == nullptr) {
    return orPeekAtLastError();
  }
  *offset = windows().offset();
  return orSuccess;
}

orError orSetLaunchOrigin(void (*describe)(char* text, size_t size)) {
  describeOrigin.store(describe);
  return orSuccess;
}
