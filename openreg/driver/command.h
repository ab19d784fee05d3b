// Chapter: devices
// What a stream queues, and the memory it is queued in.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "openreg/driver/openreg.h"

namespace openreg::driver {

struct EventState;

// Which kind of engine a command needs. Control commands take no time worth
// an engine of their own and run wherever the stream happens to be.
enum class Engine : std::uint8_t { Compute, Copy, Control };

struct Command {
  enum class Kind : std::uint8_t {
    Kernel,
    HostFunction,
    Copy,
    Fill,
    Record,
    Wait,
    Free,
  };

  std::uint32_t bytes = 0; // with the payload, set by the queue
  Kind kind{};

  // Kernel: the arguments follow this struct in the queue, or lie behind
  // `outside` when they are too large for it.
  const orKernel* kernel = nullptr;
  void* outside = nullptr;
  std::unique_ptr<std::string> origin;

  // HostFunction
  void (*function)(void*) = nullptr;

  // Copy: dst, src. Fill: dst. Free: dst. HostFunction: src is its argument.
  void* dst = nullptr;
  const void* src = nullptr;
  std::size_t size = 0;
  int value = 0;

  // Record, Wait
  std::shared_ptr<EventState> event;
  std::uint64_t version = 0;

  Engine engine() const {
    switch (kind) {
      case Kind::Kernel:
      case Kind::HostFunction:
        return Engine::Compute;
      case Kind::Copy:
      case Kind::Fill:
        return Engine::Copy;
      default:
        return Engine::Control;
    }
  }

  void* arguments() {
    return outside != nullptr ? outside : this + 1;
  }
};

// A first-in first-out queue of commands of different sizes, laid end to end
// in chunks, so that a launch costs a few stores and no allocation.
//
// One thread at a time may push (the stream's producer lock sees to that) and
// one at a time may read; the two sides share no lock. The reader must know by
// other means, the stream's counters, that a command is there.
class CommandQueue {
 public:
  // The largest argument block kept inside a chunk.
  static constexpr std::size_t kInside = 2048;

  CommandQueue();
  CommandQueue(const CommandQueue&) = delete;
  CommandQueue& operator=(const CommandQueue&) = delete;

  // A new last command with room for `payload` bytes behind it. It stays at
  // its address until it is popped.
  Command& push(Command&& command, std::size_t payload = 0);

  Command& front();
  void pop();

 private:
  struct Chunk;

  // The reader's side and the writer's, on cache lines of their own.
  alignas(64) Chunk* first_;
  std::size_t read_ = 0;
  alignas(64) Chunk* last_;
  std::size_t write_ = 0;
  std::atomic<Chunk*> spare_{nullptr};
};

} // namespace openreg::driver
