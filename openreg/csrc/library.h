// Chapter: kernels
// Operators of the vendor's library, by their schema alone.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace openreg {

// Boxed kernels, for any operator whose library function is PyTorch's CPU
// kernel. Nothing is copied to the host: they are not the fallback. They differ
// in how the host learns the outputs' sizes; `out=` arguments are resized.

// From nothing: all that is written are arguments that keep their size.
void writtenKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Every output is like the first tensor.
void likeKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The tensors are broadcast, and their types promoted.
void broadcastKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// From the operator's `Meta` kernel, which is often written in Python: right
// for every operator that has one, at 50 to 200 microseconds a call.
void inferredKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// They depend on the data, or a result is no tensor: the host waits for the
// kernel.
void dependentKernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace openreg
