// Chapter: devices
#include "openreg/driver/command.h"

#include <new>
#include <utility>

namespace openreg::driver {

struct CommandQueue::Chunk {
  static constexpr std::size_t kBytes = 32 * 1024;

  Chunk* next = nullptr;
  // Where the last command ends, once the writer has gone on to `next`. Atomic
  // only because the reader may look while the writer decides to go on; which
  // value it then sees makes no difference.
  std::atomic<std::size_t> end{kBytes + 1};
  alignas(16) std::byte data[kBytes];
};

static_assert(sizeof(Command) % 16 == 0, "arguments follow at 16 bytes");

CommandQueue::CommandQueue() : first_(new Chunk), last_(first_) {
}

Command& CommandQueue::push(Command&& command, std::size_t payload) {
  const std::size_t bytes = (sizeof(Command) + payload + 15) / 16 * 16;
  if (write_ + bytes > Chunk::kBytes) {
    Chunk* chunk = spare_.exchange(nullptr, std::memory_order_acquire);
    if (chunk == nullptr) {
      chunk = new Chunk;
    }
    chunk->next = nullptr;
    chunk->end.store(Chunk::kBytes + 1, std::memory_order_relaxed);
    last_->next = chunk;
    last_->end.store(write_, std::memory_order_relaxed);
    last_ = chunk;
    write_ = 0;
  }
  auto* placed = new (last_->data + write_) Command(std::move(command));
  placed->bytes = static_cast<std::uint32_t>(bytes);
  write_ += bytes;
  // The engine has read here last, a chunk ago: ask for the cache lines of the
  // next command before it is there to wait for them.
  constexpr std::size_t kLine = 64;
  for (std::size_t ahead = 0; ahead < bytes; ahead += kLine) {
    __builtin_prefetch(last_->data + write_ + ahead, 1);
  }
  return *placed;
}

Command& CommandQueue::front() {
  if (read_ == first_->end.load(std::memory_order_relaxed)) {
    Chunk* drained = std::exchange(first_, first_->next);
    read_ = 0;
    delete spare_.exchange(drained, std::memory_order_acq_rel);
  }
  return *std::launder(reinterpret_cast<Command*>(first_->data + read_));
}

void CommandQueue::pop() {
  Command& command = front();
  read_ += command.bytes;
  command.~Command();
}

} // namespace openreg::driver
