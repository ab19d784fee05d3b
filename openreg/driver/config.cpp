// Chapter: devices
#include "openreg/driver/config.h"

#include <cerrno>
#include <cstdlib>

namespace openreg::driver {
namespace {

class Reader {
 public:
  long number(const char* name, long fallback, long least, long most) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == '\0') {
      return fallback;
    }
    char* end = nullptr;
    errno = 0;
    const long value = std::strtol(text, &end, 10);
    if (*end == '\0' && errno == 0 && value >= least && value <= most) {
      return value;
    }
    if (problem.empty()) {
      problem = std::string(name) + "='" + text + "' is not a whole number " +
                "from " + std::to_string(least) + " to " +
                std::to_string(most) + "; unset it or correct it";
    }
    return fallback;
  }

  bool flag(const char* name) {
    return number(name, 0, 0, 1) == 1;
  }

  std::string problem;
};

Config read() {
  Reader reader;
  Config result;
  result.devices = static_cast<int>(
      reader.number("OPENREG_DEVICE_COUNT", 2, 0, kMaxDevices));
  const long megabytes =
      reader.number("OPENREG_MEMORY_MB", 4096, 1, 1024 * 1024);
  result.memory = static_cast<std::size_t>(megabytes) << 20;
  result.computeEngines =
      static_cast<int>(reader.number("OPENREG_COMPUTE_ENGINES", 2, 1, 16));
  result.launchBlocking = reader.flag("OPENREG_LAUNCH_BLOCKING");
  result.launchOrigin = reader.flag("OPENREG_TRACE_LAUNCHES");
  result.stickyErrors = reader.flag("OPENREG_STICKY_ERRORS");
  result.problem = reader.problem;
  if (!result.problem.empty()) {
    result.devices = 0;
  }
  return result;
}

} // namespace

const Config& config() {
  static const Config* const instance = new Config(read()); // never destroyed
  return *instance;
}

} // namespace openreg::driver
