// Chapter: devices
// The environment variables the driver reads, once, at its first call.
#pragma once

#include <cstddef>
#include <string>

namespace openreg::driver {

inline constexpr int kMaxDevices = 16;

struct Config {
  int devices = 2;             // OPENREG_DEVICE_COUNT
  std::size_t memory = 0;      // OPENREG_MEMORY_MB, per device, in bytes here
  int computeEngines = 2;      // OPENREG_COMPUTE_ENGINES, per device
  bool launchBlocking = false; // OPENREG_LAUNCH_BLOCKING
  bool launchOrigin = false;   // OPENREG_TRACE_LAUNCHES
  bool stickyErrors = false;   // OPENREG_STICKY_ERRORS
  // Empty, or the sentence that says which variable cannot be used. Then there
  // are no devices: guessing at a value would hide the mistake.
  std::string problem;
};

const Config& config();

} // namespace openreg::driver
