// Chapter: devices
// How a driver function reports a failure.
#pragma once

#include "openreg/driver/openreg.h"

namespace openreg::driver {

// Keep `code` and the formatted sentence as the calling thread's last error
// and return `code`, so that a failing function ends in `return fail(...)`.
[[gnu::format(printf, 2, 3)]] orError fail(
    orError code, const char* format, ...);

} // namespace openreg::driver
