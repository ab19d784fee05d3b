// Chapter: devices
#include "openreg/driver/event.h"

#include <algorithm>

#include "openreg/driver/status.h"
#include "openreg/driver/stream.h"

namespace openreg::driver {
namespace {

// How many failed versions an event remembers for waits still queued.
constexpr std::size_t kFailures = 16;

} // namespace

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

std::uint64_t EventState::next() {
  const std::lock_guard lock(mutex);
  pending.push_back(++recorded);
  return recorded;
}

bool EventState::done(std::uint64_t version) const {
  return std::find(pending.begin(), pending.end(), version) == pending.end();
}

std::shared_ptr<Failure> EventState::failureOf(std::uint64_t version) {
  const std::lock_guard lock(mutex);
  for (const auto& [failed, failure] : failures) {
    if (failed == version) {
      return failure;
    }
  }
  return nullptr;
}

void EventState::complete(
    std::uint64_t version, std::shared_ptr<Failure> failed) {
  std::vector<Stream*> released;
  {
    const std::lock_guard lock(mutex);
    if ((flags & orEventDisableTiming) == 0 && version == recorded) {
      time = std::chrono::steady_clock::now();
    }
    std::erase(pending, version);
    if (failed != nullptr) {
      failures.emplace_back(version, std::move(failed));
      if (failures.size() > kFailures) {
        failures.erase(failures.begin());
      }
    }
    std::erase_if(waiters, [&](const auto& waiter) {
      if (waiter.first == version) {
        released.push_back(waiter.second);
      }
      return waiter.first == version;
    });
    happened.notify_all();
  }
  for (Stream* stream : released) {
    stream->unblock();
  }
}

bool EventState::passed(std::uint64_t version, Stream* stream) {
  const std::lock_guard lock(mutex);
  if (done(version)) {
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
