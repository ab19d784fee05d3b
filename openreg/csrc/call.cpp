// Chapter: kernels
#include "openreg/csrc/call.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "openreg/csrc/launch.h"

namespace openreg {
namespace {

using torch::jit::Stack;
using Kernel = detail::KernelOf<Call>;

// What the process keeps for an operator: the queue needs its descriptor, and
// one does not come and go with a library.
struct Known {
  std::string name;
  orKernel kernel{};
  Trials trials;
};

Known& knownFor(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* const known =
      new std::unordered_map<c10::OperatorName, std::unique_ptr<Known>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Known>& found = (*known)[op.operator_name()];
  if (found == nullptr) {
    found = std::make_unique<Known>();
    found->name = toString(op.operator_name());
    found->kernel = {
        found->name.c_str(), &Kernel::run, &Kernel::move, &Kernel::destroy};
  }
  return *found;
}

Signature signatureOf(const Stack& arguments) {
  Signature signature = 1;
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      signature = mix(signature, value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        signature = mix(signature, tensor);
      }
    } else if (value.isString()) {
      signature = mix(signature, value.toStringView());
    }
  }
  return signature;
}

} // namespace

// [kernels: boxed-keep]
KeptValue keepValue(const c10::IValue& value) {
  if (value.isTensor()) {
    return Operand(value.toTensor());
  }
  if (value.isTensorList()) {
    return keep(at::TensorList(value.toTensorVector()));
  }
  if (value.isOptionalTensorList()) {
    return keep(value.toOptionalTensorList());
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) {
    return c10::IValue(c10::Device(c10::kCPU)); // the library's own word for it
  }
  return value;
}

c10::IValue giveValue(const KeptValue& kept) {
  if (const auto* operand = std::get_if<Operand>(&kept)) {
    return operand->view();
  }
  if (const auto* operands = std::get_if<std::vector<Operand>>(&kept)) {
    return give(*operands);
  }
  if (const auto* indices = std::get_if<Indices>(&kept)) {
    return give(*indices);
  }
  return std::get<c10::IValue>(kept);
}
// [/kernels: boxed-keep]

Call::Call(const c10::OperatorHandle& op, const Stack& arguments)
    : op_(op), signature_(signatureOf(arguments)) {
  arguments_.reserve(arguments.size());
  for (const c10::IValue& value : arguments) {
    arguments_.push_back(keepValue(value));
  }
}

void Call::addOutput(const c10::IValue& output) {
  outputs_.push_back(keepValue(output));
}

void Call::setAnyOut(std::size_t argument, c10::ScalarType dtype) {
  arguments_[argument] =
      c10::IValue(at::empty({0}, at::TensorOptions(c10::kCPU).dtype(dtype)));
}

// [kernels: boxed-body]
Stack Call::run() const {
  Stack stack;
  stack.reserve(arguments_.size());
  for (const KeptValue& argument : arguments_) {
    stack.push_back(giveValue(argument));
  }
  op_.callBoxed(stack);
  return stack;
}

void Call::operator()() const {
  if (answer_ != nullptr) { // the host waits, and raises what is thrown
    try {
      answer_->results = run();
    } catch (...) {
      answer_->error = std::current_exception();
    }
    return;
  }
  const Stack results = run();
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    copyResult(giveValue(outputs_[i]), results[i]);
  }
}

void copyResult(const c10::IValue& output, const c10::IValue& result) {
  if (output.isTensor() && output.toTensor().defined()) {
    settle(output.toTensor(), result.toTensor());
  } else if (output.isTensorList()) {
    const auto outs = output.toTensorVector(), each = result.toTensorVector();
    for (std::size_t i = 0; i < outs.size(); ++i) {
      settle(outs[i], each[i]);
    }
  }
}
// [/kernels: boxed-body]

void Call::tryOnHost() const {
  knownFor(op_).trials.check(signature_, [this] { run(); });
}

// [kernels: boxed-launch]
void Call::launch() && {
  const orKernel& kernel = knownFor(op_).kernel;
  check(orLaunchKernel(currentStream(), &kernel, this, sizeof(*this)));
}

Stack Call::launchAndWait() && {
  const auto answer = std::make_shared<Answer>();
  answer_ = answer;
  std::move(*this).launch();
  check(orStreamSynchronize(currentStream()));
  if (answer->error != nullptr) {
    std::rethrow_exception(answer->error);
  }
  return std::move(answer->results);
}
// [/kernels: boxed-launch]

} // namespace openreg
