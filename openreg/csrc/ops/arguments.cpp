// Chapter: ops
#include "openreg/csrc/ops/arguments.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace openreg {
namespace {

// The tensors of one argument: itself, or what its list holds.
std::vector<at::Tensor> tensorsOf(const c10::IValue& value) {
  if (value.isTensor()) {
    return {value.toTensor()};
  }
  if (value.isTensorList()) {
    return value.toTensorVector();
  }
  std::vector<at::Tensor> result;
  if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      if (each.has_value() && each->defined()) {
        result.push_back(*each);
      }
    }
  }
  return result;
}

// The operators that take indices from any device.
bool takesIndices(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return name == "aten::index" || name == "aten::_unsafe_index" ||
         name.starts_with("aten::index_put") ||
         name.starts_with("aten::_unsafe_index_put") ||
         name == "aten::_index_put_impl_";
}

// The operators that read an input while they write: it may not be their
// output, not even as a whole.
bool needsDistinct(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return name == "aten::take" || name == "aten::put_" ||
         name == "aten::index_select" || name == "aten::masked_select" ||
         name == "aten::nonzero";
}

// Notes the tensor's device, if it has a say.
void addDevice(
    std::optional<c10::Device>& first,
    const at::Tensor& tensor,
    std::string_view op) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) {
    return;
  }
  TORCH_CHECK(
      tensor.device() == first.value_or(tensor.device()),
      "Expected all tensors to be on the same device, but found at least two "
      "devices, ",
      *first,
      " and ",
      tensor.device(),
      "! (when checking the arguments of ",
      op,
      ")");
  first = tensor.device();
}

// [ops: check-arguments]
void checkDevices(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  if (takesIndices(schema)) {
    return;
  }
  std::optional<c10::Device> first;
  for (const c10::IValue& argument : arguments) {
    for (const at::Tensor& tensor : tensorsOf(argument)) {
      addDevice(first, tensor, schema.name());
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
          if (k == i || !written.defined() || !read.defined()) {
            continue;
          }
          if (needsDistinct(schema)) {
            at::assert_no_overlap(written, read);
          } else {
            at::assert_no_partial_overlap(written, read);
          }
        }
      }
    }
  }
}
// [/ops: check-arguments]

} // namespace

// [kernels: common-device]
c10::Device commonDevice(
    std::string_view op, c10::ArrayRef<const at::Tensor*> tensors) {
  std::optional<c10::Device> device;
  for (const at::Tensor* const tensor : tensors) {
    if (tensor != nullptr) {
      addDevice(device, *tensor, op);
    }
  }
  return device.value_or(c10::Device(c10::kCPU));
}
// [/kernels: common-device]

void checkArguments(
    const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto arguments = torch::jit::last(stack, schema.arguments().size());
  checkDevices(schema, arguments);
  checkOverlap(schema, arguments);
}

} // namespace openreg
