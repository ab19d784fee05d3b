// Chapter: devices
#include "openreg/driver/engine.h"

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <thread>

#include "openreg/driver/device.h"
// [frontend: include-pause-engine]
#include "openreg/driver/pause.h"
// [/frontend: include-pause-engine]
#include "openreg/driver/stream.h"

namespace openreg::driver {
namespace {

thread_local bool insideEngine = false;

// How long the first engine looks for new work before it sleeps. Waking a
// sleeping thread costs tens of microseconds, as much as many launches, so a
// busy host should find it awake; a machine with few cores wants it asleep.
constexpr int kSpins = 2000; // about 50 microseconds

// Signals belong to the program's own threads: Python expects its handlers
// there, and an engine must not be interrupted inside a kernel.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

} // namespace

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

bool onEngine() {
  return insideEngine;
}

Scheduler::Scheduler(int device, int computeEngines) : device_(device) {
  compute_.limit = static_cast<std::size_t>(computeEngines);
  copy_.limit = 1;
}

void Scheduler::ready(Stream* stream, Engine kind) {
  const std::lock_guard lock(mutex_);
  if (shuttingDown()) {
    return;
  }
  if (kind == Engine::Control) {
    kind = Engine::Compute; // or a new engine would be of no kind
  }
  Pool& pool = kind == Engine::Copy ? copy_ : compute_;
  // The lowest idle engine: the one that ran last keeps its caches, and its
  // pool of OpenMP threads, and the others sleep on.
  for (auto& worker : pool.workers) {
    if (worker->idle) {
      worker->idle = false;
      running_.fetch_add(1);
      worker->assigned.store(stream, std::memory_order_release);
      const std::lock_guard wakeLock(worker->mutex);
      worker->wake.notify_one();
      return;
    }
  }
  if (pool.workers.size() < pool.limit && start(kind, pool, stream)) {
    return;
  }
  const int urgency = -stream->priority();
  pool.ready[static_cast<std::size_t>(urgency)].push_back(stream);
  if (urgency > pool.urgent.load(std::memory_order_relaxed)) {
    pool.urgent.store(urgency, std::memory_order_relaxed);
  }
}

bool Scheduler::start(Engine kind, Pool& pool, Stream* stream) {
  auto worker = std::make_unique<Worker>();
  worker->assigned.store(stream, std::memory_order_release);
  Worker& self = *worker;
  const bool first = pool.workers.empty();
  const SignalsBlocked blocked; // inherited by the new thread
  try {
    std::thread thread([this, kind, &self, first] { work(kind, self, first); });
    const std::string name = "or" + std::to_string(device_) +
                             (kind == Engine::Copy ? "-copy" : "-compute") +
                             std::to_string(pool.workers.size());
    pthread_setname_np(thread.native_handle(), name.c_str());
    thread.detach();
  } catch (const std::system_error&) {
    if (first) {
      throw; // nobody would ever run this
    }
    return false; // the engines there are will do
  }
  running_.fetch_add(1);
  pool.workers.push_back(std::move(worker));
  return true;
}

void Scheduler::work(Engine kind, Worker& self, bool spins) {
  insideEngine = true;
  Stream* stream = await(self, spins);
  while (true) {
    stream->run(kind);
    stream = next(kind, self);
    if (stream == nullptr) {
      // [frontend: note-idle]
      noteIdle();
      // [/frontend: note-idle]
      stream = await(self, spins);
    }
  }
}

// The most urgent ready stream, or null, and then this engine is idle.
Stream* Scheduler::next(Engine kind, Worker& self) {
  const std::lock_guard lock(mutex_);
  Pool& pool = kind == Engine::Copy ? copy_ : compute_;
  Stream* found = nullptr;
  int urgent = -1;
  for (int urgency = kPriorities - 1; urgency >= 0 && urgent < 0; --urgency) {
    auto& waiting = pool.ready[static_cast<std::size_t>(urgency)];
    if (found == nullptr && !waiting.empty() && !shuttingDown()) {
      found = waiting.front();
      waiting.pop_front();
    }
    if (!waiting.empty()) {
      urgent = urgency;
    }
  }
  pool.urgent.store(urgent, std::memory_order_relaxed);
  if (found == nullptr) {
    self.idle = true;
    running_.fetch_sub(1);
  }
  return found;
}

Stream* Scheduler::await(Worker& self, bool spins) {
  for (int i = 0; spins && i < kSpins; ++i) {
    if (self.assigned.load(std::memory_order_acquire) != nullptr) {
      return self.assigned.exchange(nullptr, std::memory_order_acq_rel);
    }
    relax();
  }
  std::unique_lock lock(self.mutex);
  self.wake.wait(lock, [&] { return self.assigned.load() != nullptr; });
  return self.assigned.exchange(nullptr, std::memory_order_acq_rel);
}

// At exit: nothing to hand out any more; running engines stop by themselves.
void Scheduler::stop() {
  const std::lock_guard lock(mutex_);
  for (Pool* pool : {&compute_, &copy_}) {
    for (auto& waiting : pool->ready) {
      waiting.clear();
    }
    pool->urgent.store(-1, std::memory_order_relaxed);
  }
}

} // namespace openreg::driver
