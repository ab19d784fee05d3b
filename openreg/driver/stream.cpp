// Chapter: devices
#include "openreg/driver/stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <shared_mutex>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <utility>

#include "openreg/driver/config.h"
#include "openreg/driver/event.h"
#include "openreg/driver/kernel.h"
// [frontend: include-pause]
#include "openreg/driver/pause.h"
// [/frontend: include-pause]
#include "openreg/driver/status.h"

namespace openreg::driver {
namespace {

std::atomic<std::uint64_t> nextId{1};

// A waiting host thread spins this often before it sleeps: a short kernel is
// over sooner than the thread would be awake again.
constexpr int kSpins = 500; // some 10 to 20 microseconds
// An engine whose stream ran empty stays with it for about as long.
constexpr int kLinger = 200;

// Every stream there is. They are never freed, so one that was known once is
// known for ever, and each thread remembers the last few that it has used.
class Registry {
 public:
  void add(const Stream* stream) {
    const std::unique_lock lock(mutex_);
    streams_.insert(stream);
  }

  bool knows(const Stream* stream) {
    thread_local std::array<const Stream*, 16> seen{};
    const auto bits = reinterpret_cast<std::uintptr_t>(stream) / sizeof(Stream);
    const Stream*& place = seen[bits % seen.size()];
    if (place != stream) {
      const std::shared_lock lock(mutex_);
      if (!streams_.contains(stream)) {
        return false;
      }
      place = stream;
    }
    return true;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_set<const Stream*> streams_;
};

Registry& registry() {
  static auto* const instance = new Registry; // never destroyed
  return *instance;
}

} // namespace

Stream::Stream(Device& device, int priority)
    : device_(device),
      id_(nextId.fetch_add(1, std::memory_order_relaxed)),
      priority_(priority) {
  registry().add(this);
}

void SpinLock::lock() {
  for (int i = 0; flag_.test_and_set(std::memory_order_acquire); ++i) {
    if (i < 64) {
      relax();
    } else {
      std::this_thread::yield(); // its holder may want this very core
    }
  }
}

orError Stream::enqueue(Command&& command, void* args, std::size_t bytes) {
  if (shuttingDown()) {
    return fail(
        orErrorShutdown,
        "the process is exiting; openreg:%d takes no more work",
        device_.index);
  }
  if (device_.lost() && command.kind != Command::Kind::Free) {
    return device_.refuseLost();
  }
  const bool outside = bytes > CommandQueue::kInside;
  if (outside) {
    command.outside = ::operator new(bytes, std::align_val_t{16});
  }
  std::unique_lock lock(producers_);
  if (destroyed_) {
    lock.unlock();
    ::operator delete(command.outside, std::align_val_t{16});
    return fail(
        orErrorInvalidHandle,
        "stream %llu of openreg:%d was destroyed",
        static_cast<unsigned long long>(id_),
        device_.index);
  }
  const Engine kind = command.engine();
  Command& placed = queue_.push(std::move(command), outside ? 0 : bytes);
  if (bytes > 0) {
    if (placed.kernel->move != nullptr) {
      placed.kernel->move(placed.arguments(), args);
    } else {
      std::memcpy(placed.arguments(), args, bytes);
    }
  }
  // Sequentially consistent, as the engine's half in goIdle(): either we see
  // that it went idle, or it sees this command.
  if (kind != Engine::Control) {
    queuedWork_.fetch_add(1, std::memory_order_relaxed);
  }
  queued_.fetch_add(1);
  lock.unlock();
  State idle = State::Idle;
  if (state_.load() != State::Idle ||
      !state_.compare_exchange_strong(idle, State::Ready)) {
    return orSuccess; // an engine has this stream already, or will get it
  }
  try {
    device_.scheduler.ready(this, kind);
  } catch (const std::system_error& error) {
    return fail(
        orErrorSystem, "cannot start an engine thread: %s", error.what());
  }
  return orSuccess;
}

void Stream::wait() {
  const std::uint64_t target = queued_.load(std::memory_order_acquire);
  for (int i = 0; i < kSpins; ++i) {
    if (done_.load(std::memory_order_acquire) >= target) {
      return;
    }
    relax();
  }
  std::unique_lock lock(mutex_);
  while (true) {
    // Announced first, then looked: the engine does it the other way round,
    // so one of the two sees the other.
    if (wakeAt_.load() > target) {
      wakeAt_.store(target);
    }
    if (done_.load() >= target || shuttingDown()) {
      return;
    }
    drained_.wait(lock);
  }
}

bool Stream::destroy() {
  const std::lock_guard lock(producers_);
  return !std::exchange(destroyed_, true);
}

// True if the stream is empty and now Idle. The engine stays a moment before
// it lets go: the next launch of a busy host is about to come.
bool Stream::goIdle() {
  const std::uint64_t done = done_.load(std::memory_order_relaxed);
  for (int i = 0; i < kLinger; ++i) {
    relax();
    relax();
    known_ = queued_.load(std::memory_order_acquire);
    if (known_ != done) {
      return false;
    }
    if (device_.scheduler.moreUrgent(Engine::Compute, 1)) {
      break; // another stream is waiting for an engine
    }
  }
  state_.store(State::Idle);
  // From here on another engine may hold the stream, so nothing that only its
  // holder uses is touched unless this one gets it back.
  State idle = State::Idle;
  return queued_.load() == done ||
         !state_.compare_exchange_strong(idle, State::Running);
}

// Let go of the stream when this engine is not the one for what comes next.
// False if the engine should go on with the front command.
bool Stream::handOver(Engine kind) {
  if (shuttingDown()) {
    return true; // stays Running: nobody takes it up again
  }
  // Read the producer's counter only when what it last said is done: each
  // look takes the cache line away from a host thread that is launching.
  // A loop, because what made goIdle() take the stream back may have been run
  // by another engine in between.
  while (known_ == done_.load(std::memory_order_relaxed)) {
    known_ = queued_.load(std::memory_order_acquire);
    if (known_ == done_.load(std::memory_order_relaxed) && goIdle()) {
      return true;
    }
  }
  Command& command = queue_.front();
  if (command.kind == Command::Kind::Wait) {
    state_.store(State::Blocked); // before anybody can unblock it
    if (!command.event->passed(command.version, this)) {
      return true;
    }
    state_.store(State::Running);
  }
  const Engine wanted =
      command.engine() == Engine::Control ? kind : command.engine();
  if (wanted == kind && !device_.scheduler.moreUrgent(kind, priority_)) {
    return false;
  }
  state_.store(State::Ready);
  device_.scheduler.ready(this, wanted);
  return true;
}

void Stream::run(Engine kind) {
  state_.store(State::Running);
  while (!handOver(kind)) {
    // [frontend: park]
    if (pauseAsked.load()) [[unlikely]] {
      park();
      continue; // the process may be exiting by now
    }
    // [/frontend: park]
    const std::uint64_t sequence = done_.load(std::memory_order_relaxed) + 1;
    execute(queue_.front(), sequence);
    queue_.pop();
    done_.store(sequence);
    if (wakeAt_.load() <= sequence) {
      const std::lock_guard lock(mutex_);
      wakeAt_.store(kNever); // those who wait for more announce it again
      drained_.notify_all();
    }
  }
}

void Stream::unblock() {
  State blocked = State::Blocked;
  if (state_.compare_exchange_strong(blocked, State::Ready)) {
    device_.scheduler.ready(this, Engine::Compute);
  }
}

// Whether the next kernel or copy is dropped. Only the engine that holds the
// stream makes it fail, so a stream that has not failed needs no lock.
bool Stream::mustSkip(std::uint64_t sequence) {
  if (!mayFail_.load(std::memory_order_relaxed)) {
    startedWork_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  const std::lock_guard lock(mutex_);
  startedWork_.fetch_add(1, std::memory_order_relaxed);
  if (sequence <= skipUntil_) {
    return true; // counted when the failure was reported
  }
  if (failure_ != nullptr) {
    failure_->skipped.fetch_add(1);
    return true;
  }
  mayFail_.store(false, std::memory_order_relaxed);
  return false;
}

// Work behind a failure would compute with what the failed kernel left. One
// that was reported meanwhile drops what was queued here at that time.
void Stream::adopt(const std::shared_ptr<Failure>& failure) {
  const std::lock_guard failureLock(failure->mutex);
  const std::lock_guard lock(mutex_);
  mayFail_.store(true, std::memory_order_relaxed);
  if (failure->reported) {
    skipUntil_ = std::max(skipUntil_, failure->horizon[this]);
    reported_ = failure;
  } else if (failure_ == nullptr) {
    failure_ = failure;
    failure->streams.push_back(this);
  }
}

unsigned Stream::skipQueued(const std::shared_ptr<Failure>& failure) {
  const std::lock_guard lock(mutex_);
  if (failure_ != failure) {
    return 0;
  }
  reported_ = std::move(failure_);
  failure_ = nullptr;
  skipUntil_ = queued_.load();
  return static_cast<unsigned>(queuedWork_.load() - startedWork_.load());
}

// The failure because of which the command does not count, or null.
std::shared_ptr<Failure> Stream::failureAt(std::uint64_t sequence) {
  if (!mayFail_.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  return sequence <= skipUntil_ ? reported_ : failure_;
}

void Stream::execute(Command& command, std::uint64_t sequence) {
  using Kind = Command::Kind;
  switch (command.kind) {
    case Kind::Record:
      command.event->complete(command.version, failureAt(sequence));
      return;
    case Kind::Wait:
      if (const auto failure = command.event->failureOf(command.version)) {
        adopt(failure);
      }
      return;
    case Kind::Free:
      device_.heap.release(command.dst);
      return;
    default:
      break;
  }
  const bool skip = mustSkip(sequence);
  if (command.kind == Kind::Kernel) {
    if (!skip) {
      executeKernel(command);
    }
    if (command.kernel->destroy != nullptr) {
      command.kernel->destroy(command.arguments());
    }
    ::operator delete(command.outside, std::align_val_t{16});
  } else if (skip) {
    return;
  } else if (command.kind == Kind::HostFunction) {
    command.function(const_cast<void*>(command.src));
  } else if (command.kind == Kind::Copy) {
    std::memcpy(command.dst, command.src, command.size);
  } else {
    std::memset(command.dst, command.value, command.size);
  }
}

void Stream::executeKernel(Command& command) {
  orKernelContext context{device_.index, windows().offset(), {}};
  command.kernel->run(&context, command.arguments());
  if (context.failure.empty()) {
    return;
  }
  auto failure = std::make_shared<Failure>();
  failure->sentence = "kernel '" + std::string(command.kernel->name) +
                      "' failed on openreg:" + std::to_string(device_.index) +
                      ", stream " + std::to_string(id_) + ": " +
                      context.failure;
  if (command.origin != nullptr) {
    failure->sentence += " (launched at " + *command.origin + ")";
  }
  adopt(failure);
  device_.record(std::move(failure));
}

Stream* resolve(orStream_t handle) {
  if (handle != nullptr) {
    if (usable() != orSuccess) {
      return nullptr;
    }
    auto* stream = reinterpret_cast<Stream*>(handle);
    if (!registry().knows(stream)) {
      fail(
          orErrorInvalidHandle,
          "%p is not a stream of this process; a stream comes from "
          "orStreamCreate",
          static_cast<void*>(handle));
      return nullptr;
    }
    return stream;
  }
  Device* device = currentDevice();
  return device != nullptr ? &device->defaultStream() : nullptr;
}

} // namespace openreg::driver
