// Chapter: devices
// A host access to device memory faults; this says so before the process dies.
#include <signal.h>
#include <unistd.h>

#include <cstring>

#include "openreg/driver/memory.h"

namespace openreg::driver {
namespace {

struct sigaction previous;

// Only functions that are safe in a signal handler: no stdio, no allocation.
class Line {
 public:
  Line& operator<<(const char* text) {
    while (*text != '\0' && used_ < sizeof(text_)) {
      text_[used_++] = *text++;
    }
    return *this;
  }

  Line& number(std::uintptr_t value, unsigned base) {
    char digits[24];
    std::size_t count = 0;
    do {
      digits[count++] = "0123456789abcdef"[value % base];
      value /= base;
    } while (value != 0);
    while (count > 0 && used_ < sizeof(text_)) {
      text_[used_++] = digits[--count];
    }
    return *this;
  }

  void send() const {
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text_, used_);
  }

 private:
  char text_[256];
  std::size_t used_ = 0;
};

// [devices: on-fault]
void onFault(int signal, siginfo_t* info, void*) {
  const int device = info->si_code > 0 ? windows().deviceOf(info->si_addr) : -1;
  if (device >= 0) {
    Line line;
    line << "openreg: host code touched openreg:";
    line.number(static_cast<unsigned>(device), 10) << " memory at 0x";
    line.number(reinterpret_cast<std::uintptr_t>(info->si_addr), 16)
        << "; copy it to the host first, for example with tensor.cpu()\n";
    line.send();
  }
  // Whoever handled this signal before gets it again, with the same address:
  // returning repeats the access under the restored handler. A signal sent
  // by hand would not repeat itself, so that one is sent on.
  sigaction(signal, &previous, nullptr);
  if (info->si_code <= 0) {
    raise(signal);
  }
}
// [/devices: on-fault]

} // namespace

void installFaultHandler() {
  struct sigaction action;
  std::memset(&action, 0, sizeof(action));
  action.sa_sigaction = onFault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous);
}

} // namespace openreg::driver
