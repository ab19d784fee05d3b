// Chapter: devices
// A stream: commands in order, run by whichever engine of the device is free.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "openreg/driver/command.h"
#include "openreg/driver/device.h"
#include "openreg/driver/openreg.h"

namespace openreg::driver {

// Guards a few stores. A sleeping lock would cost a system call whenever two
// host threads meet, which is more than the launch itself.
class SpinLock {
 public:
  void lock();
  void unlock() {
    flag_.clear(std::memory_order_release);
  }

 private:
  std::atomic_flag flag_;
};

// The C API's orStream_t points to one of these. Streams are never freed: a
// destroyed one only refuses new work, so a stale handle gives an error
// instead of undefined behaviour. A stream is a few hundred bytes.
class Stream {
 public:
  Stream(Device& device, int priority);

  Device& device() const {
    return device_;
  }
  std::uint64_t id() const {
    return id_;
  }
  int priority() const {
    return priority_;
  }

  // Append a command; for a kernel also its arguments. orErrorInvalidHandle
  // once the stream was destroyed.
  orError enqueue(
      Command&& command, void* args = nullptr, std::size_t bytes = 0);

  bool idle() const {
    return done_.load(std::memory_order_acquire) ==
           queued_.load(std::memory_order_acquire);
  }
  // Wait for all that is queued now, or for the process to exit.
  void wait();

  // How many commands were ever queued.
  std::uint64_t queued() const {
    return queued_.load();
  }

  bool destroy(); // false if it was destroyed before

  // An engine of kind `kind` runs commands until the stream is empty, waits
  // for an event, needs another kind of engine, or must give way.
  void run(Engine kind);
  // An event this stream waits for has happened.
  void unblock();

  // A failure was reported: what is still queued here because of it will not
  // run. Returns how many commands that is.
  unsigned skipQueued(const std::shared_ptr<Failure>& failure);

 private:
  // Who is responsible for the stream now. Only an engine that holds it in
  // Running reads the queue.
  enum class State { Idle, Ready, Running, Blocked };
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  bool handOver(Engine kind);
  bool goIdle();
  void execute(Command& command, std::uint64_t sequence);
  void executeKernel(Command& command);
  bool mustSkip(std::uint64_t sequence);
  void adopt(const std::shared_ptr<Failure>& failure);
  std::shared_ptr<Failure> failureAt(std::uint64_t sequence);

  Device& device_;
  const std::uint64_t id_;
  const int priority_;

  // Producers, one after the other.
  SpinLock producers_;
  bool destroyed_ = false; // under producers_
  CommandQueue queue_;

  // How many commands were ever queued, and how many are done; "work" is the
  // kernels and copies among them, which a failure drops: records, waits and
  // frees take place all the same. What a producer writes, what the engine
  // writes and what both read are on cache lines of their own: a line that
  // both write travels between two cores with each launch.
  alignas(64) std::atomic<std::uint64_t> queued_{0};
  std::atomic<std::uint64_t> queuedWork_{0};
  alignas(64) std::atomic<std::uint64_t> done_{0};
  std::atomic<std::uint64_t> startedWork_{0};
  std::uint64_t known_ = 0; // queued_ as the engine last read it
  alignas(64) std::atomic<State> state_{State::Idle};

  // The earliest count of done commands a host thread sleeps for; waking one
  // for every command would cost more than the command.
  std::atomic<std::uint64_t> wakeAt_{kNever};
  std::mutex mutex_; // for `drained_` and the two below
  std::condition_variable drained_;
  std::shared_ptr<Failure> failure_;  // since when nothing here runs
  std::uint64_t skipUntil_ = 0;       // commands up to this one do not run
  std::shared_ptr<Failure> reported_; // because of which
  std::atomic<bool> mayFail_{false};  // false: the two above need no look
};

// The stream behind a handle, null meaning the current device's default one.
// Null, after fail(), when there is none to use.
Stream* resolve(orStream_t handle);

} // namespace openreg::driver
