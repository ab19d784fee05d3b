// Chapter: ops
// Nothing of this file is left once the device has kernels of its own.
// [ops: printing until kernels]
//| // The operators Python's tensor formatter runs, sent to the CPU one by one
//| // as long as the device has no kernels for them.
//| #include <ATen/native/CPUFallback.h>
//| #include <torch/library.h>
//|
//| #include "openreg/csrc/ops/arguments.h"
//|
//| namespace openreg {
//| namespace {
//|
//| void onHost(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
//|   checkArguments(op.schema(), *stack);
//|   at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
//| }
//|
//| TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
//|   for (const char* name :
//|        {"abs.out",
//|         "bitwise_and.Tensor_out",
//|         "cat.out",
//|         "ceil.out",
//|         "div.out",
//|         "eq.Tensor_out",
//|         "gt.Scalar_out",
//|         "lt.Scalar_out",
//|         "masked_select",
//|         "max",
//|         "min",
//|         "mul.out",
//|         "ne.Scalar_out",
//|         "ne.Tensor_out"}) {
//|     m.impl(name, torch::CppFunction::makeFromBoxedFunction<&onHost>());
//|   }
//| }
//|
//| } // namespace
//| } // namespace openreg
// [/ops: printing]
