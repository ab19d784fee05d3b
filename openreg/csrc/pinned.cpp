// Chapter: hooks
#include "openreg/csrc/pinned.h"

#include <cstring>

#include "openreg/csrc/device.h"

namespace openreg {
namespace {

// [hooks: pinned]
void release(void* data) {
  orFreeHost(data); // waits for copies that still use the block
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    check(orMallocHost(&data, bytes));
    return {data, data, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* dst, const void* src, size_t bytes) const override {
    std::memcpy(dst, src, bytes);
  }
};
// [/hooks: pinned]

} // namespace

c10::Allocator* pinnedAllocator() {
  static PinnedAllocator* const instance = new PinnedAllocator;
  return instance;
}

} // namespace openreg
