// Chapter: frontend
// All engines stand still while memory changes what backs it.
#pragma once

#include <atomic>

namespace openreg::driver {

// While one of these lives, no command runs on any device: the constructor
// waits for those that run now, as a synchronizing call would, and what is
// queued goes on afterwards. Any number of threads may ask, and take turns.
// Never on an engine, which would wait for itself.
class Pause {
 public:
  Pause();
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
};

// The engines' half. Between two commands an engine looks at the flag, which
// costs a load of what hardly ever changes, and parks when it is set.
inline std::atomic<bool> pauseAsked{false};
void park();
// An engine that has become idle need not be waited for.
void noteIdle();

} // namespace openreg::driver
