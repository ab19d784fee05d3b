// Chapter: fallback
#pragma once

#include <string>

namespace openreg {

// Enter a call that goes to the CPU in the ledger behind
// torch.openreg.fallbacks(). True if it is the operator's first.
bool countFallback(const std::string& name);

} // namespace openreg
