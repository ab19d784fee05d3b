// Chapter: kernels
// What the results of an operator look like, asked once.
//
// An operator's `Meta` kernel tells the form of its results, and is often
// written in Python: 50 to 200 microseconds. It is a function of the call's
// description alone, and a program makes the same few calls again and again.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace openreg {

// [kernels: description]
// All that the form of a call's results can depend on: the operator, its
// tensors' sizes, strides and dtypes, and every other argument's value.
class Description {
 public:
  // Nothing for an argument that has no such description, as a generator.
  static std::optional<Description> of(
      const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

  std::size_t hash() const;
  bool operator==(const Description& other) const = default;

 private:
  bool add(const c10::IValue& value);
  void add(const at::Tensor& tensor);
  void add(std::int64_t word);

  std::vector<std::int64_t> words_;
};
// [/kernels: description]

// The results as tensors without data, on the device `meta`; other values as
// they are.
using Form = std::shared_ptr<const torch::jit::Stack>;

// The form that was remembered for the call, or null.
Form recall(const Description& description);
void remember(Description description, Form form);

// The same tensors without data: for questions about shapes.
c10::IValue metaOf(const c10::IValue& value);

} // namespace openreg
