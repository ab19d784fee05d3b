// Chapter: ops
#include "openreg/csrc/ops/arguments.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>

#include <optional>
#include <string>
#include <vector>

namespace openreg {
namespace {

// The tensors of one argument: itself, or what its list holds.
std::vector<at::Tensor> tensorsOf(const c10::IValue& value) {
  if (value.isTensor()) {
    return {value.toTensor()};
  }
  return value.isTensorList() ? value.toTensorVector()
                              : std::vector<at::Tensor>{};
}

// The operators that take indices from any device.
bool takesIndices(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return name == "aten::index" || name == "aten::_unsafe_index" ||
         name.starts_with("aten::index_put") ||
         name.starts_with("aten::_unsafe_index_put") ||
         name == "aten::_index_put_impl_";
}

void checkDevices(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  if (takesIndices(schema)) {
    return;
  }
  std::optional<c10::Device> first;
  for (const c10::IValue& argument : arguments) {
    for (const at::Tensor& tensor : tensorsOf(argument)) {
      if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) {
        continue;
      }
      TORCH_CHECK(
          tensor.device() == first.value_or(tensor.device()),
          "Expected all tensors to be on the same device, but found at least "
          "two devices, ",
          *first,
          " and ",
          tensor.device(),
          "! (when checking the arguments of ",
          schema.name(),
          ")");
      first = tensor.device();
    }
  }
}

void checkOverlap(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      continue;
    }
    for (const at::Tensor& written : tensorsOf(arguments[i])) {
      at::assert_no_internal_overlap(written);
      for (std::size_t k = 0; k < arguments.size(); ++k) {
        for (const at::Tensor& read : tensorsOf(arguments[k])) {
          if (k != i && written.defined() && read.defined()) {
            at::assert_no_partial_overlap(written, read);
          }
        }
      }
    }
  }
}

} // namespace

void checkArguments(
    const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  checkDevices(schema, arguments);
  checkOverlap(schema, arguments);
}

} // namespace openreg
