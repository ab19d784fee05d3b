// Chapter: kernels
// OPENREG_TRACE_LAUNCHES=1: a kernel that fails tells who launched it. Python's
// stack is walked for each launch, so nobody pays who has not asked.
#include <pybind11/pybind11.h>

#include <cstdio>
#include <string>

#include "openreg/driver/openreg.h"

namespace openreg {
namespace {

// [kernels: describe-launch]
std::string usersLine() {
  if (Py_IsInitialized() == 0) {
    return "a program without Python";
  }
  const pybind11::gil_scoped_acquire gil; // an operator has let go of it
  // The caller may be on its way out with an exception: it must stay.
  const pybind11::error_scope pending;
  try {
    return pybind11::module_::import("openreg.launch_site")
        .attr("described")()
        .cast<std::string>();
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Called by the driver on the launching thread.
void describe(char* text, std::size_t size) {
  std::snprintf(text, size, "%s", usersLine().c_str());
}

[[maybe_unused]] const orError installed = orSetLaunchOrigin(&describe);
// [/kernels: describe-launch]

} // namespace
} // namespace openreg
