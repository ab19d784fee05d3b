// Chapter: kernels
// Operators of the vendor's library, by their schema alone.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace openreg {

// Boxed kernels, for any operator whose library function is PyTorch's CPU
// kernel. Nothing is copied to the host: they are not the fallback. They differ
// in how the host learns the form of the results, their sizes and dtypes.

// From nothing: all that is written are arguments that keep their size.
void writtenKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// From the operator's `Meta` kernel, which checks the arguments too. It is
// asked once for each form of the arguments: see inference.h. `out=` arguments
// are resized. If it refuses the call, the host waits for the library's answer.
void inferredKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// From the first call with arguments of this form, which waits for the device:
// for operators without a `Meta` kernel, or with one that errs about strides.
void learnedKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// From the `Meta` kernel if no argument is channels-last or of half precision,
// otherwise from the first call: for operators whose `Meta` kernel errs about the
// strides of such layouts, or about what half precision is kept in.
void arrangedKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// They depend on the data, or a result is no tensor: the host waits for the
// kernel at every call.
void dependentKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace openreg
