// Chapter: frontend
#include "openreg/csrc/sync_debug.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <atomic>

#include "openreg/csrc/module.h"

namespace openreg {
namespace {

// As torch.cuda numbers them.
enum Mode : int { Silent = 0, Warn = 1, Error = 2 };

std::atomic<int> mode{Silent};

} // namespace

// [frontend: note-wait]
void noteWait(const char* what) {
  switch (mode.load(std::memory_order_relaxed)) {
    case Silent:
      return;
    case Warn:
      TORCH_WARN("openreg waits for the device: ", what);
      return;
    default:
      TORCH_CHECK(
          false,
          "openreg waits for the device: ",
          what,
          ". torch.openreg.set_sync_debug_mode('error') forbids it; "
          "'default' allows it again");
  }
}
// [/frontend: note-wait]

void bindSyncDebug(pybind11::module_& m) {
  m.def("set_sync_debug_mode", [](int wanted) {
    TORCH_CHECK_VALUE(
        wanted >= Silent && wanted <= Error,
        "the mode must be 0 ('default'), 1 ('warn') or 2 ('error'), not ",
        wanted);
    mode.store(wanted, std::memory_order_relaxed);
  });
  m.def("get_sync_debug_mode", [] { return mode.load(); });
}

} // namespace openreg
