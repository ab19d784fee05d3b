// Chapter: devices
// The devices of this process: lazy start, the fork rule, exit.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "openreg/driver/engine.h"
#include "openreg/driver/memory.h"
#include "openreg/driver/openreg.h"

namespace openreg::driver {

class Stream;

// A kernel that failed, from then until a synchronizing call has said so.
struct Failure {
  std::string sentence;             // who failed, where, why
  std::atomic<unsigned> skipped{0}; // commands dropped because of it
  std::mutex mutex;                 // guards the rest; taken before a stream's
  std::vector<Stream*> streams;     // those that skip because of it
  bool reported = false;
  // How many commands each stream had queued when it was reported. What then
  // lay behind the failure is dropped; what came later was sent knowingly.
  std::map<const Stream*, std::uint64_t> horizon;
};

class Device {
 public:
  Device(int index, std::size_t memory, int computeEngines);

  const int index;
  Heap heap;
  Scheduler scheduler;

  Stream& defaultStream() {
    return *default_;
  }
  void add(Stream* stream);
  std::vector<Stream*> streams();

  // Wait until all that is queued now is done.
  void drain();

  // Keep a failure for the next synchronizing call.
  void record(std::shared_ptr<Failure> failure);
  // The end of every synchronizing call: the failure, once, or success.
  orError report();
  bool lost() const {
    return lost_.load(std::memory_order_relaxed);
  }
  orError refuseLost() const;
  void forget();

 private:
  std::mutex mutex_;
  std::vector<Stream*> streams_;
  std::vector<std::shared_ptr<Failure>> failures_;
  std::atomic<std::size_t> pending_{0}; // failures not reported yet
  std::atomic<bool> lost_{false};
  Stream* default_;
};

// The calling thread's current device, started if need be; null after fail().
Device* currentDevice();
// A device that has started, or null.
Device* startedDevice(int index);
// Every device that has started.
std::vector<Device*> startedDevices();

// orSuccess, or why this process may not use the driver: a fork of a process
// that had started it, or an environment variable that cannot be used.
orError usable();
// orSuccess, or the sentence that there is no such device.
orError checkIndex(int device);

// The calling thread's current device index, started or not.
int& currentIndex();

// Set while the process exits: engines stop, waits end, launches are refused.
bool shuttingDown();

// True on an engine's thread, where waiting for the device would never end.
bool onEngine();

} // namespace openreg::driver
