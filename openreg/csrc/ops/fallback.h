// Chapter: fallback
// Operators without a kernel run on the CPU: counted, and never in silence.
#pragma once

#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
} // namespace c10

namespace openreg {

// [fallback: fallback]
// The boxed kernel of every operator that has no other on this device. It can
// also be registered for one operator by name, in the place of a kernel that
// PyTorch composes of others.
//
// Refused, and nothing is written: what the rules of torch.openreg.fallback
// forbid; a view, which would share no memory with its base; tensors of two
// devices; layouts that this device does not have; a generator of this device,
// as the CPU's kernels draw from their own; what the CPU has no kernel for.
// A kernel of the device that fails does not come here.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// [/fallback: fallback]

} // namespace openreg
