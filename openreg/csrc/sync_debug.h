// Chapter: frontend
// Finding the places where a program waits for the device.
#pragma once

namespace openreg {

// [frontend: sync-debug]
// Says, as set_sync_debug_mode() asked, that the calling thread is about to
// wait: nothing, a warning, or an exception. To be called before the wait, and
// before anything is changed. `what` completes "openreg waits for the device:".
//
// As in torch.cuda, it is for waits that an operator brings along. Nobody
// needs to be told of torch.openreg.synchronize() or an event's synchronize().
void noteWait(const char* what);
// [/frontend: sync-debug]

} // namespace openreg
