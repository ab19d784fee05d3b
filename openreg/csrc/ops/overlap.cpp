// Chapter: ops
#include "openreg/csrc/ops/overlap.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>

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

} // namespace

void checkOverlap(
    const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const std::size_t count = schema.arguments().size();
  const auto arguments = torch::jit::last(stack, count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      continue;
    }
    for (const at::Tensor& written : tensorsOf(arguments[i])) {
      at::assert_no_internal_overlap(written);
      for (std::size_t k = 0; k < count; ++k) {
        for (const at::Tensor& read : tensorsOf(arguments[k])) {
          if (k != i && written.defined() && read.defined()) {
            at::assert_no_partial_overlap(written, read);
          }
        }
      }
    }
  }
}

} // namespace openreg
