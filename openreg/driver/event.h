// Chapter: devices
// Events: versions of a point in a stream.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "openreg/driver/device.h"

namespace openreg::driver {
struct EventState;
class Stream;
} // namespace openreg::driver

// The C API's handle. Destroyed handles are kept for reuse, so a stale one is
// recognised instead of being undefined behaviour, until it is made anew.
struct orEvent {
  std::atomic<bool> alive{false};
  std::shared_ptr<openreg::driver::EventState> state;
};

namespace openreg::driver {

// What queued records and waits share with the handle, so that destroying the
// handle leaves them valid.
struct EventState {
  EventState(Device& owner, unsigned creationFlags)
      : device(owner), flags(creationFlags) {
  }

  Device& device;
  const unsigned flags;

  std::mutex mutex;
  std::condition_variable happened;
  std::uint64_t recorded = 0; // versions queued so far
  // Versions that have not happened yet. Two streams may record one event, so
  // a later version can happen before an earlier one.
  std::vector<std::uint64_t> pending;
  std::chrono::steady_clock::time_point time; // of the last record
  // Versions recorded behind a failure.
  std::vector<std::pair<std::uint64_t, std::shared_ptr<Failure>>> failures;
  std::vector<std::pair<std::uint64_t, Stream*>> waiters;

  // A new version, to be queued as a record.
  std::uint64_t next();
  // Whether the version has happened. Under the lock.
  bool done(std::uint64_t version) const;
  // What failed before the version was recorded, or null.
  std::shared_ptr<Failure> failureOf(std::uint64_t version);
  // The stream has reached a record.
  void complete(std::uint64_t version, std::shared_ptr<Failure> failed);
  // True if the version has happened; else `stream` will be unblocked then.
  bool passed(std::uint64_t version, Stream* stream);
};

// The state behind a handle; null, after fail(), for a stale one.
std::shared_ptr<EventState> resolveEvent(orEvent_t event);

// Queue a wait on `stream` for the event's latest record.
orError waitForEvent(Stream& stream, orEvent_t event);

} // namespace openreg::driver
