// Chapter: devices
#include "openreg/driver/event.h"

#include <algorithm>

#include "openreg/driver/status.h"
#include "openreg/driver/stream.h"

namespace openreg::driver {
std::shared_ptr<EventState> resolveEvent(orEvent_t event) {
  if (usable() != orSuccess) {
    return nullptr;
  }
  if (event == nullptr || !event->alive.load(std::memory_order_acquire)) {
    fail(orErrorInvalidHandle, "the event was destroyed, or is null");
    return nullptr;
  }
  return event->state;
}

void EventState::complete(
    std::uint64_t version, std::shared_ptr<Failure> failed) {
  std::vector<Stream*> released;
  {
    const std::lock_guard lock(mutex);
    if ((flags & orEventDisableTiming) == 0) {
      time = std::chrono::steady_clock::now();
    }
    completed = std::max(completed, version);
    failure = std::move(failed);
    const auto still = std::partition(
        waiters.begin(), waiters.end(), [this](const auto& waiter) {
          return waiter.first > completed;
        });
    for (auto waiter = still; waiter != waiters.end(); ++waiter) {
      released.push_back(waiter->second);
    }
    waiters.erase(still, waiters.end());
    happened.notify_all();
  }
  for (Stream* stream : released) {
    stream->unblock();
  }
}

bool EventState::passed(std::uint64_t version, Stream* stream) {
  const std::lock_guard lock(mutex);
  if (completed >= version) {
    return true;
  }
  waiters.emplace_back(version, stream);
  return false;
}

orError waitForEvent(Stream& stream, orEvent_t event) {
  auto state = resolveEvent(event);
  if (state == nullptr) {
    return orPeekAtLastError();
  }
  Command command;
  command.kind = Command::Kind::Wait;
  {
    const std::lock_guard lock(state->mutex);
    command.version = state->recorded;
    if (command.version == 0) {
      return orSuccess;
    }
  }
  command.event = std::move(state);
  return stream.enqueue(std::move(command));
}

} // namespace openreg::driver
