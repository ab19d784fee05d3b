// Chapter: devices
// The C functions on events.
#include "openreg/driver/event.h"
#include "openreg/driver/status.h"
#include "openreg/driver/stream.h"

using namespace openreg::driver;

namespace {

std::mutex poolMutex;

std::vector<orEvent*>& pool() {
  static auto* const instance = new std::vector<orEvent*>; // never destroyed
  return *instance;
}

} // namespace

orError orEventCreate(orEvent_t* event) {
  return orEventCreateWithFlags(event, orEventDefault);
}

orError orEventCreateWithFlags(orEvent_t* event, unsigned flags) {
  if (event == nullptr ||
      (flags & ~(orEventBlockingSync | orEventDisableTiming)) != 0) {
    return fail(
        orErrorInvalidValue,
        event == nullptr ? "orEventCreate: event is null"
                         : "orEventCreate: unknown flags 0x%x",
        flags);
  }
  Device* device = currentDevice();
  if (device == nullptr) {
    return orPeekAtLastError();
  }
  orEvent* created = nullptr;
  {
    const std::lock_guard lock(poolMutex);
    if (!pool().empty()) {
      created = pool().back();
      pool().pop_back();
    }
  }
  if (created == nullptr) {
    created = new orEvent;
  }
  created->state = std::make_shared<EventState>(*device, flags);
  created->alive.store(true, std::memory_order_release);
  *event = created;
  return orSuccess;
}

orError orEventDestroy(orEvent_t event) {
  if (resolveEvent(event) == nullptr) {
    return orPeekAtLastError();
  }
  if (!event->alive.exchange(false)) {
    return fail(orErrorInvalidHandle, "the event was destroyed before");
  }
  event->state.reset();
  const std::lock_guard lock(poolMutex);
  pool().push_back(event);
  return orSuccess;
}

orError orEventRecord(orEvent_t event, orStream_t stream) {
  auto state = resolveEvent(event);
  Stream* found = state != nullptr ? resolve(stream) : nullptr;
  if (found == nullptr) {
    return orPeekAtLastError();
  }
  if (&found->device() != &state->device) {
    return fail(
        orErrorInvalidHandle,
        "an event of openreg:%d cannot be recorded on a stream of openreg:%d; "
        "make the event while that device is current",
        state->device.index,
        found->device().index);
  }
  Command command;
  command.kind = Command::Kind::Record;
  command.event = state;
  command.version = state->next();
  // Outside the lock: an engine takes the stream's lock before the event's.
  const std::uint64_t version = command.version;
  const orError error = found->enqueue(std::move(command));
  if (error != orSuccess) {
    state->complete(version, nullptr); // nobody may wait for it for ever
  }
  return error;
}

orError orEventQuery(orEvent_t event) {
  const auto state = resolveEvent(event);
  if (state == nullptr) {
    return orPeekAtLastError();
  }
  const std::lock_guard lock(state->mutex);
  return state->done(state->recorded) ? orSuccess : orErrorNotReady;
}

orError orEventSynchronize(orEvent_t event) {
  const auto state = resolveEvent(event);
  if (state == nullptr) {
    return orPeekAtLastError();
  }
  if (onEngine()) {
    return fail(
        orErrorNotPermitted, "orEventSynchronize inside a kernel would hang");
  }
  {
    std::unique_lock lock(state->mutex);
    const std::uint64_t version = state->recorded;
    for (int i = 0; i < 400 && !state->done(version) &&
                    (state->flags & orEventBlockingSync) == 0;
         ++i) {
      lock.unlock();
      lock.lock();
    }
    state->happened.wait(
        lock, [&] { return state->done(version) || shuttingDown(); });
  }
  return state->device.report();
}

orError orEventElapsedTime(
    float* milliseconds, orEvent_t start, orEvent_t end) {
  if (milliseconds == nullptr) {
    return fail(orErrorInvalidValue, "orEventElapsedTime: result is null");
  }
  std::chrono::steady_clock::time_point times[2];
  const orEvent_t events[] = {start, end};
  for (int i = 0; i < 2; ++i) {
    const auto state = resolveEvent(events[i]);
    if (state == nullptr) {
      return orPeekAtLastError();
    }
    const std::lock_guard lock(state->mutex);
    const char* which = i == 0 ? "start" : "end";
    if ((state->flags & orEventDisableTiming) != 0) {
      return fail(
          orErrorInvalidValue, "the %s event takes no time stamps", which);
    }
    if (state->recorded == 0) {
      return fail(
          orErrorInvalidValue, "the %s event was never recorded", which);
    }
    if (!state->done(state->recorded)) {
      return orErrorNotReady;
    }
    times[i] = state->time;
  }
  *milliseconds =
      std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
  return orSuccess;
}

orError orEventGetDevice(orEvent_t event, int* device) {
  const auto state = resolveEvent(event);
  if (state == nullptr) {
    return orPeekAtLastError();
  }
  if (device == nullptr) {
    return fail(orErrorInvalidValue, "orEventGetDevice: device is null");
  }
  *device = state->device.index;
  return orSuccess;
}
