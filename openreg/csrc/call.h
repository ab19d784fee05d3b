// Chapter: kernels
// A call of the library for an operator that only its schema describes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <variant>
#include <vector>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/trial.h"

namespace openreg {

// [kernels: kept-value]
// An argument as the queue holds it.
using KeptValue =
    std::variant<c10::IValue, Operand, std::vector<Operand>, Indices>;

KeptValue keepValue(const c10::IValue& value);
c10::IValue giveValue(const KeptValue& kept);
// [/kernels: kept-value]

// What a call leaves for a host that waits for it.
struct Answer {
  torch::jit::Stack results;
  std::exception_ptr error;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

  // Where the library's next result belongs: a fresh tensor or an argument.
  void addOutput(const c10::IValue& output);

  // Lets the library make this `out=` argument, in the size that it wants.
  void setAnyOut(std::size_t argument, c10::ScalarType dtype);

  // Tries the call on the host if the dtypes of its arguments are new to the
  // operator: see trial.h.
  void tryOnHost() const;

  // Queues it on the current stream.
  void launch() &&;

  // Queues it, waits, and returns the library's results, which the host owns.
  // The library's error is raised as the CPU would raise it.
  torch::jit::Stack launchAndWait() &&;

  void operator()() const; // on an engine

 private:
  torch::jit::Stack run() const;

  c10::OperatorHandle op_;
  Signature signature_ = 1;
  std::vector<KeptValue> arguments_;
  std::vector<KeptValue> outputs_;
  std::shared_ptr<Answer> answer_;
};

// Settles a result of the library, a tensor or a list of them.
void copyResult(const c10::IValue& output, const c10::IValue& result);

} // namespace openreg
