// Random work on the driver from many threads: order, data, memory, exit.
//
//   driver_stress [SECONDS [SEED]]
//
// Ends with status 1 and a sentence when the driver breaks a promise of
// openreg.h. Meant to be built with a sanitizer: kernels share plain memory,
// so a missing order is a data race as well.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "openreg/driver/openreg.h"

namespace {

constexpr int kThreads = 8;
constexpr int kStreams = 4; // per thread, on both devices in turn
constexpr int kDevices = 2;
constexpr std::size_t kWords = 4096; // of the largest block

[[noreturn]] void broken(const std::string& what) {
  static std::mutex once; // never unlocked: the first sentence counts
  once.lock();
  std::fprintf(stderr, "driver_stress: %s\n", what.c_str());
  std::_Exit(1);
}

void check(orError error, const char* call) {
  if (error != orSuccess) {
    broken(
        std::string(call) + ": " + orGetErrorName(error) + ": " +
        orGetLastErrorMessage());
  }
}

void expect(bool holds, const char* otherwise) {
  if (!holds) {
    broken(otherwise);
  }
}

// ---------------------------------------------------------------- kernels

std::atomic<long> liveArguments{0};

template <typename Arguments>
orKernel kernel(const char* name, void (*run)(orKernelContext*, void*)) {
  return {
      name,
      run,
      [](void* dst, void* src) {
        new (dst) Arguments(*static_cast<Arguments*>(src));
        liveArguments.fetch_add(1);
      },
      [](void* args) {
        static_cast<Arguments*>(args)->~Arguments();
        liveArguments.fetch_sub(1);
      }};
}

// A stream and what ran on it.
struct Lane {
  orStream_t stream = nullptr;
  orEvent_t event = nullptr; // recorded again and again
  int device = 0;
  std::uint64_t queued = 0; // by the host
  std::uint64_t ran = 0;    // by kernels: plain, because the stream orders them
  std::atomic<std::uint64_t> seen{0}; // `ran` for other streams

  void enter(std::uint64_t sequence) {
    expect(ran == sequence, "a kernel ran out of its stream's order");
    ++ran;
    seen.store(ran, std::memory_order_relaxed);
  }
};

struct alignas(16) Step {
  Lane* lane;
  std::uint64_t sequence;
  Lane* after; // the stream waited for, which must have come this far
  std::uint64_t afterSequence;
  std::uint32_t* block;
  std::size_t words;
  std::uint32_t old;
  std::uint32_t fresh;
};

const orKernel kStep =
    kernel<Step>("step", [](orKernelContext* context, void* args) {
      const Step& it = *static_cast<Step*>(args);
      it.lane->enter(it.sequence);
      expect(
          it.after->seen.load(std::memory_order_relaxed) >= it.afterSequence,
          "a kernel ran before the event that its stream waits for");
      expect(orKernelDevice(context) == it.lane->device, "wrong device");
      auto* data =
          static_cast<std::uint32_t*>(orKernelAddress(context, it.block));
      for (std::size_t i = 0; i < it.words; ++i) {
        expect(data[i] == it.old, "a kernel found other data than was written");
        data[i] = it.fresh;
      }
    });

struct alignas(16) Count {
  std::uint64_t* next; // of the producer
  std::uint64_t sequence;
};

const orKernel kCount =
    kernel<Count>("count", [](orKernelContext*, void* args) {
      const Count& it = *static_cast<Count*>(args);
      expect(
          *it.next == it.sequence, "a producer's kernels changed their order");
      ++*it.next;
    });

const orKernel kFail =
    kernel<Count>("fail", [](orKernelContext* context, void*) {
      orKernelFail(context, "as it should");
    });

// One stream per device that all threads launch into.
struct Shared {
  orStream_t stream = nullptr;
  std::array<std::uint64_t, kThreads> next{};
};

std::array<Shared, kDevices> shared;

// ---------------------------------------------------------------- one thread

struct Block {
  std::uint32_t* data = nullptr;
  int device = 0;
  std::size_t words = 0;
  std::uint32_t value = 0; // of all words, once the work queued so far ran
  Lane* lane = nullptr;    // that used it last

  std::size_t bytes() const {
    return words * sizeof(std::uint32_t);
  }
};

class Worker {
 public:
  Worker(int number, unsigned seed) : number_(number), random_(seed) {
    for (int i = 0; i < kStreams; ++i) {
      Lane& lane = lanes_[static_cast<std::size_t>(i)];
      lane.device = i % kDevices;
      check(orSetDevice(lane.device), "orSetDevice");
      check(
          orStreamCreateWithPriority(&lane.stream, -pick(3)),
          "orStreamCreateWithPriority");
      check(
          orEventCreateWithFlags(
              &lane.event, pick(2) ? orEventDefault : orEventBlockingSync),
          "orEventCreateWithFlags");
    }
    void* pinned = nullptr;
    check(orMallocHost(&pinned, kWords * 4), "orMallocHost");
    pinned_ = static_cast<std::uint32_t*>(pinned);
  }

  void run(std::chrono::steady_clock::time_point end) {
    while (std::chrono::steady_clock::now() < end) {
      act(pick(13));
    }
    while (!blocks_.empty()) {
      freeBlock();
    }
    for (Lane& lane : lanes_) {
      synchronize(lane);
      check(orEventDestroy(lane.event), "orEventDestroy");
      check(orStreamDestroy(lane.stream), "orStreamDestroy");
    }
    check(orFreeHost(pinned_), "orFreeHost");
  }

  std::uint64_t counted(int device) const {
    return counted_[static_cast<std::size_t>(device)];
  }

 private:
  int pick(int below) {
    return static_cast<int>(random_() % static_cast<unsigned>(below));
  }
  Lane& anyLane() {
    return lanes_[static_cast<std::size_t>(pick(kStreams))];
  }
  Lane& laneOn(int device) {
    return lanes_[static_cast<std::size_t>(
        device + kDevices * pick(kStreams / kDevices))];
  }
  std::size_t anyBlock() {
    return static_cast<std::size_t>(pick(static_cast<int>(blocks_.size())));
  }

  void act(int action) {
    if (blocks_.empty() || (action == 0 && blocks_.size() < 16)) {
      allocate(pick(kDevices), 1 + static_cast<std::size_t>(pick(kWords)));
    } else if (action <= 4) {
      step(blocks_[anyBlock()]);
    } else if (action == 5) {
      copyBlock(anyBlock());
    } else if (action == 6) {
      download(blocks_[anyBlock()]);
    } else if (action == 7) {
      upload(blocks_[anyBlock()]);
    } else if (action == 8) {
      freeBlock();
    } else if (action == 9) {
      share(blocks_[anyBlock()]);
    } else if (action == 10 && pick(8) == 0) {
      synchronize(anyLane());
    } else {
      count();
    }
  }

  // Let `lane` go on with a block where another stream left off.
  void order(Lane& lane, Block& block) {
    if (block.lane != &lane) {
      Lane& before = *block.lane;
      check(orEventRecord(before.event, before.stream), "orEventRecord");
      check(orStreamWaitEvent(lane.stream, before.event), "orStreamWaitEvent");
      if (pick(2) == 0) { // elsewhere, which must not move the wait
        check(
            orEventRecord(before.event, laneOn(before.device).stream),
            "orEventRecord");
      }
    }
    block.lane = &lane;
  }

  bool allocate(int device, std::size_t words) {
    check(orSetDevice(device), "orSetDevice");
    void* data = nullptr;
    const orError error = orMalloc(&data, words * 4);
    if (error == orErrorOutOfMemory) {
      return false;
    }
    check(error, "orMalloc");
    Lane& lane = laneOn(device);
    const auto byte = static_cast<unsigned>(pick(256));
    check(
        orMemsetAsync(data, static_cast<int>(byte), words * 4, lane.stream),
        "orMemsetAsync");
    blocks_.push_back(
        {static_cast<std::uint32_t*>(data),
         device,
         words,
         byte * 0x01010101U,
         &lane});
    return true;
  }

  void step(Block& block) {
    Lane& before = *block.lane;
    const std::uint64_t reached = before.queued;
    Lane& lane = laneOn(block.device);
    order(lane, block);
    Step it{
        &lane,
        lane.queued++,
        &before,
        reached,
        block.data,
        block.words,
        block.value,
        static_cast<std::uint32_t>(random_())};
    check(orLaunchKernel(lane.stream, &kStep, &it, sizeof(it)), "step");
    block.value = it.fresh;
  }

  // To a new block on either device, by either device's stream.
  void copyBlock(std::size_t source) {
    if (!allocate(pick(kDevices), blocks_[source].words)) {
      return;
    }
    Block& from = blocks_[source];
    Block& to = blocks_.back();
    Lane& lane = anyLane();
    order(lane, to);
    order(lane, from);
    check(
        orMemcpyAsync(
            to.data,
            from.data,
            to.bytes(),
            orMemcpyDeviceToDevice,
            lane.stream),
        "orMemcpyAsync");
    to.value = from.value;
  }

  void download(Block& block) {
    Lane& lane = *block.lane;
    check(
        orMemcpyAsync(
            pinned_, block.data, block.bytes(), orMemcpyDefault, lane.stream),
        "orMemcpyAsync");
    check(orEventRecord(lane.event, lane.stream), "orEventRecord");
    check(orEventSynchronize(lane.event), "orEventSynchronize");
    const bool same =
        std::all_of(pinned_, pinned_ + block.words, [&](std::uint32_t word) {
          return word == block.value;
        });
    expect(same, "the host read other data than was written");
  }

  void upload(Block& block) {
    block.value = static_cast<std::uint32_t>(random_());
    const std::vector<std::uint32_t> words(block.words, block.value);
    check( // pageable: the vector may go when the call returns
        orMemcpyAsync(
            block.data,
            words.data(),
            block.bytes(),
            orMemcpyHostToDevice,
            block.lane->stream),
        "orMemcpyAsync");
  }

  // Map the block a second time, and go on with either of the two places.
  void share(Block& block) {
    int object = -1;
    std::size_t offset = 0;
    const orError error = orMemExport(&object, &offset, block.data);
    if (block.bytes() < 4096) {
      expect(error == orErrorInvalidValue, "a part of a page was exported");
      return;
    }
    check(error, "orMemExport");
    expect(offset == 0, "a block does not lie at the start of its object");
    check(orSetDevice(block.device), "orSetDevice");
    void* data = nullptr;
    std::size_t bytes = 0;
    const orError imported = orMemImport(&data, &bytes, object);
    close(object);
    if (imported == orErrorOutOfMemory) {
      return;
    }
    check(imported, "orMemImport");
    expect(bytes == block.bytes(), "an object has another size");
    Lane& lane = laneOn(block.device);
    order(lane, block);
    Block old = block;
    block.data = static_cast<std::uint32_t*>(data);
    if (pick(2) == 0) {
      download(block);
      std::swap(block.data, old.data);
    }
    check(orFreeAsync(old.data, lane.stream), "orFreeAsync");
  }

  void freeBlock() {
    const std::size_t index = anyBlock();
    Block block = blocks_[index];
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(index));
    if (pick(4) == 0) {
      synchronize(*block.lane); // orFree() looks at the block's device only
      check(orFree(block.data), "orFree");
      return;
    }
    Lane& lane = laneOn(block.device);
    order(lane, block);
    check(orFreeAsync(block.data, lane.stream), "orFreeAsync");
  }

  void synchronize(Lane& lane) {
    check(orStreamSynchronize(lane.stream), "orStreamSynchronize");
    check(orStreamQuery(lane.stream), "orStreamQuery");
    expect(lane.ran == lane.queued, "a synchronized stream has work left");
  }

  void count() {
    const auto device = static_cast<std::size_t>(pick(kDevices));
    Count it{
        &shared[device].next[static_cast<std::size_t>(number_)],
        counted_[device]++};
    check(
        orLaunchKernel(shared[device].stream, &kCount, &it, sizeof(it)),
        "count");
  }

  const int number_;
  std::minstd_rand random_;
  std::array<Lane, kStreams> lanes_;
  std::array<std::uint64_t, kDevices> counted_{};
  std::vector<Block> blocks_;
  std::uint32_t* pinned_ = nullptr;
};

// ---------------------------------------------------------------- phases

std::size_t freeMemory(int device) {
  std::size_t free = 0;
  std::size_t total = 0;
  check(orSetDevice(device), "orSetDevice");
  check(orDeviceSynchronize(), "orDeviceSynchronize");
  check(orMemGetInfo(&free, &total), "orMemGetInfo");
  return free;
}

void randomWork(int seconds, unsigned seed) {
  std::array<std::size_t, kDevices> before{};
  for (int device = 0; device < kDevices; ++device) {
    const auto index = static_cast<std::size_t>(device);
    before[index] = freeMemory(device);
    check(orStreamCreate(&shared[index].stream), "orStreamCreate");
  }
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    workers.push_back(
        std::make_unique<Worker>(i, seed + static_cast<unsigned>(i)));
  }
  for (auto& worker : workers) {
    threads.emplace_back([&worker, end] { worker->run(end); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::uint64_t launches = 0;
  for (int device = 0; device < kDevices; ++device) {
    const auto index = static_cast<std::size_t>(device);
    expect(freeMemory(device) == before[index], "device memory was lost");
    for (std::size_t i = 0; i < kThreads; ++i) {
      launches += shared[index].next[i];
      expect(
          shared[index].next[i] == workers[i]->counted(device),
          "launches from several threads were lost");
    }
  }
  expect(liveArguments.load() == 0, "kernel arguments were not destroyed");
  std::printf("driver_stress: %ju shared launches\n", std::uintmax_t{launches});
}

// Threads that fail on streams of one device, and synchronize.
void failures() {
  constexpr int kRounds = 200;
  std::atomic<int> reports{0};
  std::uint64_t ran[kStreams] = {};
  std::vector<std::thread> threads;
  std::vector<orStream_t> streams(kStreams);
  for (std::size_t i = 0; i < kStreams; ++i) {
    threads.emplace_back([&, i] {
      check(orStreamCreate(&streams[i]), "orStreamCreate");
      Count it{&ran[i], 0};
      for (int round = 0; round < kRounds; ++round) {
        check(orLaunchKernel(streams[i], &kFail, &it, sizeof(it)), "fail");
        check(orLaunchKernel(streams[i], &kFail, &it, sizeof(it)), "fail");
        const orError error = orStreamSynchronize(streams[i]);
        expect(
            error == orSuccess || error == orErrorKernelFailed,
            "a failure was reported as something else");
        reports += error == orErrorKernelFailed;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  reports += orDeviceSynchronize() == orErrorKernelFailed;
  check(orDeviceSynchronize(), "orDeviceSynchronize, after the report");
  expect(reports > 0, "no failure was reported");
  for (std::size_t i = 0; i < kStreams; ++i) {
    Count it{&ran[i], 0};
    check(orLaunchKernel(streams[i], &kCount, &it, sizeof(it)), "count");
    check(orStreamSynchronize(streams[i]), "orStreamSynchronize");
    expect(ran[i] == 1, "a stream runs nothing any more after a failure");
  }
  expect(liveArguments.load() == 0, "kernel arguments were not destroyed");
}

// The process ends while threads launch and a kernel never does.
void leaveBusy() {
  static std::array<Count, kThreads> counts;
  static std::array<std::uint64_t, kThreads> next;
  static const orKernel endless{
      "endless",
      [](orKernelContext*, void*) {
        while (true) {
          pause();
        }
      },
      nullptr,
      nullptr};
  check(orSetDevice(1), "orSetDevice");
  check(orLaunchKernel(nullptr, &endless, nullptr, 0), "endless");
  for (std::size_t i = 0; i < kThreads; ++i) {
    orStream_t stream = nullptr;
    check(orSetDevice(i % kDevices), "orSetDevice");
    check(orStreamCreate(&stream), "orStreamCreate");
    counts[i].next = &next[i];
    std::thread([i, stream] {
      Count& it = counts[i];
      while (orLaunchKernel(stream, &kCount, &it, sizeof(it)) == orSuccess) {
        ++it.sequence;
        if (it.sequence % 1000 == 0) {
          orStreamSynchronize(stream);
        }
      }
      expect(
          orGetLastError() == orErrorShutdown,
          "a launch during the exit failed for another reason");
    }).detach();
  }
}

} // namespace

int main(int count, char** words) {
  const int seconds = count > 1 ? std::atoi(words[1]) : 5;
  const auto seed = static_cast<unsigned>(
      count > 2 ? std::atoi(words[2]) : static_cast<int>(getpid()));
  alarm(static_cast<unsigned>(10 * seconds + 120)); // a hang is a failure
  std::printf("driver_stress: seed %u\n", seed);
  std::fflush(stdout);
  randomWork(seconds, seed);
  check(orSetDevice(0), "orSetDevice");
  failures();
  leaveBusy();
  return 0;
}
