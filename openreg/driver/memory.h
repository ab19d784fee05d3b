// Chapter: devices
// Device memory: two windows on the same bytes, and who owns which range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "openreg/driver/openreg.h"

namespace openreg::driver {

// [devices: windows]
// Two address windows span all devices. The first holds the device pointers
// and is never accessible, so any host access faults at once. The second, at
// a constant distance, is backed by memory, and only engines use its
// addresses. Isolation therefore costs a kernel one addition and the host
// nothing, and threads never disturb each other by changing protections.
class Windows {
 public:
  // Reserve both windows; false when the system has not the address space.
  bool reserve(int devices, std::size_t bytesPerDevice);

  std::uintptr_t begin(int device) const {
    return device_ + static_cast<std::size_t>(device) * stride_;
  }
  std::ptrdiff_t offset() const {
    return offset_;
  }
  // The device whose window holds the address, or -1.
  int deviceOf(const void* ptr) const;

  char* backing(const void* ptr) const {
    return reinterpret_cast<char*>(
        reinterpret_cast<std::uintptr_t>(ptr) +
        static_cast<std::uintptr_t>(offset_));
  }

 private:
  std::uintptr_t device_ = 0;
  std::ptrdiff_t offset_ = 0;
  std::size_t stride_ = 1;
  int devices_ = 0;
};
// [/devices: windows]

Windows& windows();

// The memory of one device: best fit over address-ordered ranges.
class Heap {
 public:
  static constexpr std::size_t kAlignment = 512;
  // [frontend: shareable]
  // An allocation of a page or more has its pages to itself, so that other
  // processes can be given these pages and see nothing else.
  static constexpr std::size_t kShareable = 4096;
  // [/frontend: shareable]

  void open(int device, std::size_t bytes);

  // An address of this heap, or null when no free range is large enough.
  void* allocate(std::size_t bytes);
  // Mark an allocation as going: false if `ptr` is not the start of a live one.
  bool retire(const void* ptr);
  // Take a retirement back: nobody will release the block.
  void restore(const void* ptr);
  // Give a retired allocation's range back.
  void release(const void* ptr);

  // The live allocation an address lies in; size 0 if there is none.
  struct Range {
    std::uintptr_t begin = 0;
    std::size_t size = 0;
  };
  Range find(const void* ptr);

  struct Usage {
    std::size_t total = 0;
    std::size_t free = 0;
    std::size_t largest = 0;
  };
  Usage usage();
  bool hasRetired();

  // [frontend: objects]
  // The memory object behind an allocation, -1 for private memory; false if
  // `ptr` is not the start of a live one.
  bool object(const void* ptr, int& fd);
  // A new descriptor of that object, which is made if need be; no engine may
  // run then. -1 and errno when the system refuses.
  int share(int device, const void* ptr);
  // Map an object over a new allocation of its size; false and errno likewise.
  bool attach(const void* ptr, int fd);
  // [/frontend: objects]

 private:
  struct Block {
    std::size_t size; // as asked for, in bytes
    bool retired;
    // [frontend: block-object]
    int object = -1; // a descriptor, of the memory object that backs it
    // [/frontend: block-object]
  };
  // [frontend: detach]
  // Back to private memory of zeros; false when the system refuses.
  bool detach(const void* ptr, Block& block);
  // [/frontend: detach]

  std::mutex mutex_;
  std::map<std::uintptr_t, Block> blocks_;
  std::map<std::uintptr_t, std::size_t> free_;
  std::size_t total_ = 0;
  std::size_t retired_ = 0;
};

// Page-locked host memory, known to the driver by address.
class HostMemory {
 public:
  void* allocate(std::size_t bytes);
  bool owns(const void* ptr); // the start of an allocation
  void release(void* ptr);
  Heap::Range find(const void* ptr);

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> blocks_;
};

HostMemory& hostMemory();

// Make a host access to device memory end the process with a sentence that
// names the address and the device; other faults go to the handler before.
void installFaultHandler();

} // namespace openreg::driver
