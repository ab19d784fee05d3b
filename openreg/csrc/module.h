// Chapter: devices
// What the other files add to the Python module `_C`.
#pragma once

#include <pybind11/pybind11.h>

namespace openreg {

// [fallback: declare]
void bindFallback(pybind11::module_& m);
// [/fallback: declare]

} // namespace openreg
