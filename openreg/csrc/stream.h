// Chapter: streams
// The chip's streams, spoken of in PyTorch's terms.
#pragma once

#include <c10/core/Stream.h>

#include "openreg/driver/openreg.h"

namespace openreg {

// [streams: handle]
// A c10::Stream is a device and a number, copied freely. The number here is
// the driver's handle, and 0 for the device's default stream; so a stream that
// another library made is a c10::Stream too, without registration.
c10::Stream toStream(orStream_t handle, c10::DeviceIndex device);

// The driver's handle, never null. Starts the device; throws if it has no such
// stream.
orStream_t toHandle(const c10::Stream& stream);
// [/streams: handle]

// [streams: current]
// The calling thread's current stream of its current device, as a launch takes
// it: null, the driver's own word for the default stream, unless another one
// was set. The one question asked for every kernel, so it costs a few loads.
orStream_t currentStream();

// The same as a handle that is never null, for code that keeps it.
orStream_t currentHandle();

// The calling thread's current stream of a device. Starts nothing.
c10::Stream currentStream(c10::DeviceIndex device);

// Make a stream current for its device and return the one before. The current
// device stays.
c10::Stream exchangeStream(const c10::Stream& stream);
// [/streams: current]

// [streams: note-use]
// Tell PyTorch that the device is in use, if it does not know yet.
void noteUse();
// [/streams: note-use]

// [streams: new]
// A stream of the device's pool for this priority, in turn; priorities out of
// range are clamped. Greater numbers are less urgent, as in the driver.
c10::Stream newStream(c10::DeviceIndex device, int priority);
// [/streams: new]

} // namespace openreg
