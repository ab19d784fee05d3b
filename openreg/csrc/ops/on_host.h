// Chapter: fallback
// One call of an operator's CPU kernel on tensors of the device.
#pragma once

#include <ATen/core/stack.h>

#include "openreg/csrc/ops/ledger.h"

namespace c10 {
class OperatorHandle;
} // namespace c10

namespace openreg {

// [fallback: on-host]
// Copy the arguments to the host, run the operator's CPU kernel there, copy
// the results and what it has written back. `cost` counts the bytes, also when
// it throws; nothing of the device is written before the kernel has succeeded.
//
// What at::native::cpu_fallback does, and beyond it: a tensor given twice is
// copied once, so the kernel sees that the two are the same and refuses or
// allows it as on the CPU; an `out=` of PyTorch's own operators is written
// only, so it is not copied there; the results go to the device of the first
// tensor that is on one, where the other looks at the first tensor, which may
// be a CPU number; a resized `out=` gets the strides it got on the CPU; what
// the kernel writes though its schema does not say so is written back, too.
void runOnHost(
    const c10::OperatorHandle& op, torch::jit::Stack* stack, HostCost* cost);
// [/fallback: on-host]

} // namespace openreg
