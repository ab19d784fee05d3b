// Chapter: ops
#pragma once

#include <ATen/core/stack.h>

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

} // namespace openreg
