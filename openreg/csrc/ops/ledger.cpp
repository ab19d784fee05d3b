// Chapter: fallback
#include "openreg/csrc/ops/ledger.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "openreg/csrc/module.h"
#include "openreg/csrc/ops/category.h"
#include "openreg/csrc/ops/foreach_fallback.h"

namespace py = pybind11;

namespace openreg {
namespace {

struct Ledger {
  std::mutex mutex;
  // By name, as a library may be taken away and its place be given to another.
  std::unordered_map<c10::OperatorName, LedgerEntry> entries;
  bool allSites = false;
};

Ledger& ledger() {
  static Ledger* const instance = new Ledger;
  return *instance;
}

py::dict asDict(const LedgerEntry& entry) {
  py::dict result;
  result["operator"] = entry.name;
  result["category"] = entry.category;
  result["calls"] = entry.calls;
  result["bytes_to_host"] = entry.cost.toHost;
  result["bytes_to_device"] = entry.cost.toDevice;
  result["seconds"] = static_cast<double>(entry.cost.nanoseconds) / 1e9;
  result["sites"] = entry.sites;
  return result;
}

py::list records() {
  std::vector<LedgerEntry> found; // Python objects are not made under the lock
  {
    const std::lock_guard lock(ledger().mutex);
    for (const auto& [key, entry] : ledger().entries) {
      if (entry.calls > 0) {
        found.push_back(entry);
      }
    }
  }
  py::list result;
  for (const LedgerEntry& entry : found) {
    result.append(asDict(entry));
  }
  return result;
}

void reset() {
  const std::lock_guard lock(ledger().mutex);
  for (auto& [key, entry] : ledger().entries) {
    entry.calls = 0; // the entries stay: a running call may hold one
    entry.cost = {};
    entry.sites.clear();
    entry.warned = false;
  }
}

c10::OperatorHandle operatorOf(const std::string& name) {
  const std::size_t dot = name.find('.');
  std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  if (overload == "default") {
    overload.clear();
  }
  const auto op =
      c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
  TORCH_CHECK_VALUE(
      op.has_value(), "there is no operator '", name, "', with this overload");
  return *op;
}

std::string modeOf(const std::string& name) {
  const c10::OperatorHandle op = operatorOf(name);
  const std::string known = toString(op.operator_name());
  return toString(decide(currentFallbackRules(), known, categoryOf(op)));
}

} // namespace

// [fallback: open-entry]
LedgerOrder openEntry(const c10::OperatorHandle& op) {
  const FallbackRules rules = currentFallbackRules();
  const std::lock_guard lock(ledger().mutex);
  LedgerEntry& entry = ledger().entries[op.operator_name()];
  if (entry.name.empty()) {
    entry.name = toString(op.operator_name());
    entry.category = categoryOf(op);
  }
  if (entry.rules != rules) { // at first too: the process always has some
    entry.mode = decide(rules, entry.name, entry.category);
    entry.rules = rules;
  }
  return {
      &entry,
      entry.mode,
      entry.mode == FallbackMode::Warn && !entry.warned,
      ledger().allSites || entry.sites.empty()};
}
// [/fallback: open-entry]

void setWarned(LedgerEntry* entry) {
  const std::lock_guard lock(ledger().mutex);
  entry->warned = true;
}

void enterCall(
    LedgerEntry* entry, const HostCost& cost, const std::string& site) {
  const std::lock_guard lock(ledger().mutex);
  ++entry->calls;
  entry->cost.toHost += cost.toHost;
  entry->cost.toDevice += cost.toDevice;
  entry->cost.nanoseconds += cost.nanoseconds;
  if (!site.empty()) {
    ++entry->sites[site];
  }
}

void bindFallback(py::module_& m) {
  m.def("fallback_records", &records);
  m.def("fallback_reset", &reset);
  m.def("fallback_mode", &modeOf);
  m.def("fallback_category", [](const std::string& name) {
    return categoryOf(operatorOf(name));
  });
  m.def("fallback_set_mode", &setFallbackRules);
  // A pointer as a number: entries and scopes live as long as the process.
  m.def("fallback_push_mode", [](const std::string& rules) {
    return reinterpret_cast<std::uintptr_t>(pushFallbackRules(rules));
  });
  m.def("fallback_restore_mode", [](std::uintptr_t outer) {
    restoreFallbackRules(reinterpret_cast<const FallbackScope*>(outer));
  });
  m.def("fallback_record_sites", [](bool all) {
    const std::lock_guard lock(ledger().mutex);
    return std::exchange(ledger().allSites, all);
  });
  m.def("fallback_categories", [] {
    return std::vector<std::string>(kCategories.begin(), kCategories.end());
  });
  m.def("fallback_foreach", &foreachFallbacks);
  registerForeachFallbacks();
}

} // namespace openreg
