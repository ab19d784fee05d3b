// What a launch costs the host, in nanoseconds of the launching thread's own
// processor time, while the engines run what was queued.
//
//   launch PRODUCERS SHARED
//
// PRODUCERS host threads launch an empty kernel, on one stream if SHARED is 1,
// else each on a stream of its own; the median of the rounds is printed. With
// HELD=1 in the environment the streams are held, so that no engine works.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <thread>
#include <vector>

#include "openreg/driver/openreg.h"

namespace {

constexpr int kLaunches = 20000;
constexpr int kRounds = 21;

void nothing(orKernelContext*, void*) {
}

const orKernel kernel{"nothing", &nothing, nullptr, nullptr};

void hold(void* released) {
  while (!static_cast<std::atomic<bool>*>(released)->load()) {
    std::this_thread::yield();
  }
}

long ownTime() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000L + time.tv_nsec;
}

void must(orError error) {
  if (error != orSuccess) {
    std::fprintf(stderr, "%s\n", orGetLastErrorMessage());
    std::exit(1);
  }
}

} // namespace

int main(int count, char** words) {
  const int producers = count > 1 ? std::atoi(words[1]) : 1;
  const bool shared = count > 2 && std::atoi(words[2]) != 0;
  const bool held = std::getenv("HELD") != nullptr;
  std::vector<orStream_t> streams(static_cast<std::size_t>(producers));
  for (orStream_t& stream : streams) {
    must(orStreamCreate(&stream));
  }
  std::atomic<bool> released{false};
  std::vector<double> nanoseconds;
  std::barrier start(producers);
  std::atomic<long> total{0};
  const auto produce = [&](int index) {
    const auto mine = static_cast<std::size_t>(shared ? 0 : index);
    start.arrive_and_wait();
    const long begin = ownTime();
    alignas(16) char argument[16] = {};
    for (int i = 0; i < kLaunches; ++i) {
      must(orLaunchKernel(streams[mine], &kernel, argument, sizeof(argument)));
    }
    total += ownTime() - begin;
  };
  for (int round = 0; round < kRounds; ++round) {
    released = false;
    if (held) {
      must(orLaunchHostFunc(streams[0], &hold, &released));
    }
    total = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < producers; ++i) {
      threads.emplace_back(produce, i);
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    released = true;
    must(orDeviceSynchronize());
    nanoseconds.push_back(
        static_cast<double>(total) / (producers * double{kLaunches}));
  }
  std::sort(nanoseconds.begin(), nanoseconds.end());
  std::printf("%.1f\n", nanoseconds[nanoseconds.size() / 2]);
  return 0;
}
