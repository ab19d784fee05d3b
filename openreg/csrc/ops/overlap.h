// Chapter: ops
#pragma once

#include <ATen/core/stack.h>

namespace c10 {
struct FunctionSchema;
} // namespace c10

namespace openreg {

// Refuse a call whose written tensors overlap themselves, or in part another
// argument. On the CPU the arguments are copies that share nothing, so what
// overlaps on the device has to be refused before, as the CPU's kernels would.
void checkOverlap(
    const c10::FunctionSchema& schema, const torch::jit::Stack& stack);

} // namespace openreg
