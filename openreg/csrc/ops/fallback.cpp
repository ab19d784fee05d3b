// Chapter: fallback
#include "openreg/csrc/ops/fallback.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/ops/ledger.h"
#include "openreg/csrc/ops/on_host.h"

namespace openreg {
namespace {

// [fallback: refuse]
bool isView(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::inplace_view)) {
    return true; // changes its argument's sizes, strides or storage
  }
  const auto& results = op.schema().returns();
  return std::any_of(
      results.begin(), results.end(), [](const c10::Argument& result) {
        return result.alias_info() != nullptr &&
               !result.alias_info()->isWrite();
      });
}

void refuseOperator(const c10::OperatorHandle& op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !isView(op),
      op.operator_name(),
      " has no kernel for openreg, and a view never falls back to the CPU: "
      "its result would not share memory with its argument. Register a kernel "
      "for it");
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
      op.operator_name(),
      " has no kernel for openreg, and none for the CPU that could stand in. "
      "Register a kernel for it");
}

void refuseGenerator(
    const c10::OperatorHandle& op, const at::Generator& generator) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      generator.device().is_cpu(),
      op.operator_name(),
      " has no kernel for openreg, and on the CPU a generator of ",
      generator.device(),
      " draws nothing. Pass a CPU generator, or none");
}

void refuseArguments(
    const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = values[i];
    if (value.isTensor()) {
      const auto* alias = arguments[i].alias_info();
      TORCH_CHECK(
          alias == nullptr || !alias->isWrite() || !value.toTensor().is_cpu(),
          "Expected all tensors to be on the same device, but ",
          op.operator_name(),
          " of openreg tensors cannot write into ",
          arguments[i].name(),
          ", which is on the CPU");
    } else if (value.isGenerator()) {
      refuseGenerator(op, value.toGenerator());
    }
  }
  checkArguments(op.schema(), stack);
}
// [/fallback: refuse]

// [fallback: call-site]
// The line of the user's program that called, and the warning for it. The
// warning raises where the user has made errors of warnings.
std::string askPython(const LedgerOrder& order) {
  if (Py_IsInitialized() == 0) {
    return "a program without Python";
  }
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object site =
      pybind11::module_::import("openreg.fallback")
          .attr("_called")(order.entry->name, order.warn);
  return site.cast<std::string>();
}
// [/fallback: call-site]

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

// Enters the call however it ends: its time is gone either way.
class Entering final {
 public:
  Entering(LedgerEntry* entry, std::string site)
      : entry_(entry), site_(std::move(site)), start_(now()) {
  }
  Entering(const Entering&) = delete;
  Entering& operator=(const Entering&) = delete;
  ~Entering() {
    cost.nanoseconds = now() - start_;
    enterCall(entry_, cost, site_);
  }

  HostCost cost;

 private:
  LedgerEntry* entry_;
  std::string site_;
  int64_t start_;
};

// [fallback: refuse-layout]
// For layouts that the device does not have, and what it cannot do with sparse
// ones: PyTorch's own message lists all backends and dispatch keys there are.
void refuseLayout(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      op.operator_name(),
      ": openreg cannot do this with sparse or quantized tensors, and has no "
      "compressed or nested ones. Do this on the CPU, and bring the strided "
      "result to the device");
}
// [/fallback: refuse-layout]

} // namespace

// [fallback: boxed]
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuseOperator(op);
  refuseArguments(op, *stack);
  const LedgerOrder order = openEntry(op);
  TORCH_CHECK_NOT_IMPLEMENTED(
      order.mode != FallbackMode::Error,
      order.entry->name,
      " (",
      order.entry->category,
      ") has no kernel for openreg, and the mode 'error' of "
      "torch.openreg.fallback forbids running it on the CPU. Allow it with "
      "torch.openreg.fallback.mode(\"",
      order.entry->name,
      "=warn\") or in OPENREG_FALLBACK");
  std::string site;
  if (order.warn || order.site) {
    site = askPython(order);
    site = order.site ? site : "";
  }
  if (order.warn) {
    setWarned(order.entry);
  }
  Entering call(order.entry, std::move(site));
  try {
    runOnHost(op, stack, &call.cost);
  } catch (const c10::NotImplementedError& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        order.entry->name,
        " has no kernel for openreg, and the CPU cannot stand in: ",
        error.what_without_backtrace());
  }
}
// [/fallback: boxed]

// [fallback: register]
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuseLayout>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuseLayout>());
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuseLayout>());
}

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuseLayout>());
}
// [/fallback: register]

} // namespace openreg
