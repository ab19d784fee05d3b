// Chapter: fallback
// Operators without a kernel run on the CPU: counted, and never in silence.
#include <ATen/native/CPUFallback.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "openreg/csrc/module.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/ops/fallback.h"

namespace openreg {
namespace {

enum class Mode { Silent, Warn, Error };

// OPENREG_FALLBACK: off says nothing, warn (the default) says it once for each
// operator, error refuses.
Mode readMode() {
  const char* text = std::getenv("OPENREG_FALLBACK");
  const std::string mode = text != nullptr && *text != '\0' ? text : "warn";
  if (mode == "off") {
    return Mode::Silent;
  }
  TORCH_CHECK(
      mode == "warn" || mode == "error",
      "OPENREG_FALLBACK='",
      mode,
      "' is not one of off, warn, error; unset it or correct it");
  return mode == "error" ? Mode::Error : Mode::Warn;
}

Mode mode() {
  static const Mode value = readMode();
  return value;
}

struct Ledger {
  std::mutex mutex;
  std::map<std::string, std::size_t> calls; // by operator and overload
};

Ledger& ledger() {
  static Ledger* const instance = new Ledger;
  return *instance;
}

void note(const std::string& name) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      mode() != Mode::Error,
      name,
      " has no kernel for openreg, and OPENREG_FALLBACK=error forbids running "
      "it on the CPU");
  const bool first = countFallback(name);
  if (first && mode() == Mode::Warn) {
    TORCH_WARN(
        name,
        " has no kernel for openreg and runs on the CPU: its tensors are "
        "copied there and back. torch.openreg.fallbacks() counts the calls; "
        "OPENREG_FALLBACK=off|warn|error sets what happens");
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = toString(op.operator_name());
  checkArguments(op.schema(), *stack);
  note(name);
  try {
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  } catch (const c10::NotImplementedError& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        name,
        " has no kernel for openreg, and the CPU cannot stand in: ",
        error.what_without_backtrace());
  }
}

} // namespace

bool countFallback(const std::string& name) {
  const std::lock_guard lock(ledger().mutex);
  return ledger().calls[name]++ == 0;
}

void bindFallback(pybind11::module_& m) {
  m.def("fallbacks", [] {
    const std::lock_guard lock(ledger().mutex);
    return ledger().calls;
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace openreg
