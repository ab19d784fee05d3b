// Chapter: ops
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string_view>

namespace c10 {
struct FunctionSchema;
} // namespace c10

namespace openreg {

// Refuse, before an operator is sent to the CPU, what the CPU could not notice:
// there all arguments are on one device, and copies that share nothing.
//
// - Tensors of two devices; a CPU tensor without dimensions counts as a number,
//   and indices may be the CPU's, as everywhere in PyTorch.
// - A written tensor that overlaps itself, or in part another argument.
void checkArguments(
    const c10::FunctionSchema& schema, const torch::jit::Stack& stack);

// The device of these tensors, for a kernel's guard; undefined ones and numbers
// on the CPU have no say. Throws where there are two devices, and names them
// and the operator.
c10::Device commonDevice(
    std::string_view op, c10::ArrayRef<const at::Tensor*> tensors);

inline const at::Tensor* pointerTo(const at::Tensor& tensor) {
  return &tensor;
}
inline const at::Tensor* pointerTo(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? &*tensor : nullptr;
}

template <typename... Tensors>
c10::Device commonDevice(std::string_view op, const Tensors&... tensors) {
  return commonDevice(op, {pointerTo(tensors)...});
}

} // namespace openreg
