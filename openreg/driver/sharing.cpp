// Chapter: frontend
// Device memory that several processes map: memory objects, out and in.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "openreg/driver/device.h"
#include "openreg/driver/memory.h"
#include "openreg/driver/pause.h"
#include "openreg/driver/status.h"

namespace openreg::driver {
namespace {

constexpr std::size_t kPage = Heap::kShareable;
// Nobody can change the size of an object: a mapping past its end would fault.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// The last page of an object says what the pages before it are. It comes last
// so that they keep the alignment that large pages need.
struct Label {
  char magic[16] = "openreg memory";
  int device = -1;
  std::size_t bytes = 0;
};

std::size_t wholePages(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

orError refusedBySystem(const char* what) {
  return fail(orErrorSystem, "%s: %s", what, std::strerror(errno));
}

int duplicate(int fd) {
  return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

// A new object for an allocation, or -1 and errno.
int create(int device, std::size_t bytes) {
  const int fd = memfd_create("openreg", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    return -1;
  }
  Label label;
  label.device = device;
  label.bytes = bytes;
  const auto place = static_cast<off_t>(wholePages(bytes));
  if (ftruncate(fd, place + static_cast<off_t>(kPage)) == 0 &&
      pwrite(fd, &label, sizeof(label), place) == sizeof(label) &&
      fcntl(fd, F_ADD_SEALS, kSeals) == 0) {
    return fd;
  }
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

// Pages that hold zeros need no memory: the object is born with them.
void copyPages(char* dst, const char* src, std::size_t bytes) {
  static constexpr char zeros[kPage] = {};
  for (std::size_t at = 0; at < bytes; at += kPage) {
    if (std::memcmp(src + at, zeros, kPage) != 0) {
      std::memcpy(dst + at, src + at, kPage);
    }
  }
}

// Put the object where the private memory at `place` is, with its contents.
bool replace(char* place, std::size_t bytes, int fd) {
  constexpr int access = PROT_READ | PROT_WRITE;
  void* const mapped = mmap(nullptr, bytes, access, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    return false;
  }
  madvise(mapped, bytes, MADV_HUGEPAGE);
  copyPages(static_cast<char*>(mapped), place, bytes);
  constexpr int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
  if (mremap(mapped, bytes, bytes, flags, place) == MAP_FAILED) {
    const int error = errno;
    munmap(mapped, bytes);
    errno = error;
    return false;
  }
  return true;
}

// What a descriptor from another process refers to.
orError read(int fd, Label& label) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 && errno == EBADF) {
    return fail(
        orErrorInvalidValue,
        "descriptor %d is not open; import an object before its descriptor is "
        "closed",
        fd);
  }
  struct stat status;
  const Label ours;
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd, &status) != 0 ||
      status.st_size < static_cast<off_t>(2 * kPage) ||
      pread(
          fd,
          &label,
          sizeof(label),
          status.st_size - static_cast<off_t>(kPage)) != sizeof(label) ||
      std::memcmp(label.magic, ours.magic, sizeof(ours.magic)) != 0 ||
      label.bytes < kPage ||
      wholePages(label.bytes) + kPage !=
          static_cast<std::size_t>(status.st_size)) {
    return fail(
        orErrorInvalidValue,
        "descriptor %d is not openreg memory; it must come from orMemExport",
        fd);
  }
  return orSuccess;
}

} // namespace

bool Heap::object(const void* ptr, int& fd) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (block == blocks_.end() || block->second.retired) {
    return false;
  }
  fd = block->second.object;
  return true;
}

int Heap::share(int device, const void* ptr) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (block == blocks_.end()) {
    errno = EFAULT; // freed since the caller looked
    return -1;
  }
  if (block->second.object < 0) {
    const std::size_t bytes = block->second.size;
    const int fd = create(device, bytes);
    if (fd < 0) {
      return -1;
    }
    if (!replace(windows().backing(ptr), wholePages(bytes), fd)) {
      const int error = errno;
      close(fd);
      errno = error;
      return -1;
    }
    block->second.object = fd;
  }
  return duplicate(block->second.object);
}

bool Heap::attach(const void* ptr, int fd) {
  const std::lock_guard lock(mutex_);
  Block& block = blocks_.at(reinterpret_cast<std::uintptr_t>(ptr));
  const std::size_t bytes = wholePages(block.size);
  const int kept = duplicate(fd);
  if (kept < 0) {
    return false;
  }
  constexpr int access = PROT_READ | PROT_WRITE;
  constexpr int flags = MAP_SHARED | MAP_FIXED;
  char* const place = windows().backing(ptr);
  if (mmap(place, bytes, access, flags, kept, 0) == MAP_FAILED) {
    const int error = errno;
    close(kept);
    errno = error;
    return false;
  }
  madvise(place, bytes, MADV_HUGEPAGE);
  block.object = kept;
  return true;
}

bool Heap::detach(const void* ptr, Block& block) {
  constexpr int access = PROT_READ | PROT_WRITE;
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const std::size_t bytes = wholePages(block.size);
  char* const place = windows().backing(ptr);
  if (mmap(place, bytes, access, flags, -1, 0) == MAP_FAILED) {
    return false;
  }
  madvise(place, bytes, MADV_HUGEPAGE);
  close(block.object);
  block.object = -1;
  return true;
}

} // namespace openreg::driver

using namespace openreg::driver;

orError orMemExport(int* fd, size_t* offset, const void* ptr) {
  if (fd == nullptr || offset == nullptr) {
    return fail(orErrorInvalidValue, "orMemExport: null result");
  }
  if (const orError error = usable(); error != orSuccess) {
    return error;
  }
  if (onEngine()) {
    return fail(
        orErrorNotPermitted,
        "orMemExport inside a kernel or a host function would hang");
  }
  Device* device = startedDevice(windows().deviceOf(ptr));
  const Heap::Range range =
      device != nullptr ? device->heap.find(ptr) : Heap::Range{};
  if (range.begin == 0) {
    return fail(
        orErrorInvalidPointer,
        "%p lies in no live device allocation of this process",
        ptr);
  }
  if (range.size < Heap::kShareable) {
    return fail(
        orErrorInvalidValue,
        "the allocation of %zu bytes at %p shares its page with others; only "
        "one of %zu bytes or more can be exported",
        range.size,
        ptr,
        Heap::kShareable);
  }
  const void* const begin = reinterpret_cast<const void*>(range.begin);
  int known = -1;
  int result = -1;
  if (device->heap.object(begin, known) && known >= 0) {
    result = device->heap.share(device->index, begin);
  } else {
    const Pause pause;
    result = device->heap.share(device->index, begin);
  }
  if (result < 0) {
    return refusedBySystem("cannot put device memory on a memory object");
  }
  *fd = result;
  *offset = reinterpret_cast<std::uintptr_t>(ptr) - range.begin;
  return orSuccess;
}

orError orMemImport(void** ptr, size_t* bytes, int fd) {
  if (ptr == nullptr || bytes == nullptr) {
    return fail(orErrorInvalidValue, "orMemImport: null result");
  }
  Device* device = currentDevice();
  if (device == nullptr) {
    return orPeekAtLastError();
  }
  Label label;
  if (const orError error = read(fd, label); error != orSuccess) {
    return error;
  }
  if (label.device != device->index) {
    return fail(
        orErrorInvalidDevice,
        "descriptor %d is memory of openreg:%d, and openreg:%d is current; "
        "make the memory's device current first",
        fd,
        label.device,
        device->index);
  }
  void* result = nullptr;
  if (const orError error = orMalloc(&result, label.bytes);
      error != orSuccess) {
    return error;
  }
  if (!device->heap.attach(result, fd)) {
    const orError error = refusedBySystem("cannot map imported device memory");
    device->heap.retire(result);
    device->heap.release(result);
    return error;
  }
  *ptr = result;
  *bytes = label.bytes;
  return orSuccess;
}
