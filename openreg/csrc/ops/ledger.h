// Chapter: fallback
// The ledger of what ran on the CPU, and what that cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "openreg/csrc/ops/fallback_modes.h"

namespace c10 {
class OperatorHandle;
} // namespace c10

namespace openreg {

// [fallback: entry]
// What one call moved and took.
struct HostCost {
  std::size_t toHost = 0; // bytes
  std::size_t toDevice = 0;
  int64_t nanoseconds = 0; // of the host, copies and waiting for them included
};

// One operator, by overload. Made at its first call and never freed. Guarded by
// the ledger's mutex, except for what never changes.
struct LedgerEntry {
  std::string name; // as in "aten::add.out"
  std::string_view category;
  std::size_t calls = 0;
  HostCost cost;                            // of all calls
  std::map<std::string, std::size_t> sites; // calls, by where they came from
  bool warned = false;
  FallbackRules rules; // under which `mode` was found
  FallbackMode mode = FallbackMode::Warn;
};
// [/fallback: entry]

// What a call has to do before it may run.
struct LedgerOrder {
  LedgerEntry* entry;
  FallbackMode mode;
  bool warn; // nobody has been told of this operator
  bool site; // where it is called from is wanted
};

// Look up an operator's entry and what the calling thread's rules say of it.
LedgerOrder openEntry(const c10::OperatorHandle& op);

// Say that the one warning has been given.
void setWarned(LedgerEntry* entry);

// Enter a call. An empty site is not noted.
void enterCall(
    LedgerEntry* entry, const HostCost& cost, const std::string& site);

} // namespace openreg
