// Chapter: devices
// Engines are the threads that run a device's streams.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "openreg/driver/command.h"

namespace openreg::driver {

class Stream;

// One turn of a spinning loop.
void relax();

inline constexpr int kPriorities = 3; // 0, -1 and -2, the greatest

// Gives ready streams to engines, the greatest priority first. An engine is a
// thread; it starts when there is work that no idle engine could take, so a
// program that uses one stream has one compute engine running.
class Scheduler {
 public:
  Scheduler(int device, int computeEngines);

  // `stream` has a command that an engine of this kind can run.
  void ready(Stream* stream, Engine kind);
  // Whether a stream of greater priority is waiting for this kind of engine.
  bool moreUrgent(Engine kind, int priority) const {
    return pool(kind).urgent.load(std::memory_order_relaxed) > -priority;
  }

  bool busy() const {
    return running_.load() > 0;
  }
  void stop();
  // [frontend: running]
  // How many engines are not idle.
  int running() {
    const std::lock_guard lock(mutex_);
    return running_.load();
  }
  // [/frontend: running]

 private:
  struct Worker {
    std::atomic<Stream*> assigned{nullptr};
    bool idle = false; // under the scheduler's lock
    std::mutex mutex;
    std::condition_variable wake;
  };

  struct Pool {
    std::size_t limit = 0;
    std::vector<std::unique_ptr<Worker>> workers;
    std::array<std::deque<Stream*>, kPriorities> ready;
    std::atomic<int> urgent{-1}; // greatest urgency waiting, -1 for none
  };

  const Pool& pool(Engine kind) const {
    return kind == Engine::Copy ? copy_ : compute_;
  }
  void work(Engine kind, Worker& self, bool spins);
  Stream* next(Engine kind, Worker& self);
  Stream* await(Worker& self, bool spins);
  bool start(Engine kind, Pool& pool, Stream* stream);

  const int device_;
  std::mutex mutex_;
  Pool compute_;
  Pool copy_;
  std::atomic<int> running_{0};
};

} // namespace openreg::driver
