// Chapter: frontend
#include "openreg/driver/pause.h"

#include <condition_variable>
#include <mutex>

#include "openreg/driver/device.h"

namespace openreg::driver {
namespace {

struct State {
  std::mutex turn; // one pause at a time; taken first
  std::mutex mutex;
  std::condition_variable still;   // perhaps: look again
  std::condition_variable resumed; // for the engines
  int parked = 0;                  // under `mutex`
};

State& state() {
  static auto* const instance = new State; // engines outlive static objects
  return *instance;
}

// Engines that are not idle. One that is about to get work is counted, or
// else it sees the flag: it is counted and started under its scheduler's lock.
int running() {
  int result = 0;
  for (Device* device : startedDevices()) {
    result += device->scheduler.running();
  }
  return result;
}

} // namespace

Pause::Pause() {
  State& it = state();
  it.turn.lock();
  std::unique_lock lock(it.mutex);
  pauseAsked.store(true);
  it.still.wait(lock, [&it] { return it.parked == running(); });
}

Pause::~Pause() {
  State& it = state();
  {
    const std::lock_guard lock(it.mutex);
    pauseAsked.store(false);
    it.resumed.notify_all();
  }
  it.turn.unlock();
}

void park() {
  State& it = state();
  std::unique_lock lock(it.mutex);
  ++it.parked;
  it.still.notify_one();
  it.resumed.wait(lock, [] { return !pauseAsked.load(); });
  --it.parked;
}

void noteIdle() {
  if (pauseAsked.load()) {
    const std::lock_guard lock(state().mutex);
    state().still.notify_one();
  }
}

} // namespace openreg::driver
