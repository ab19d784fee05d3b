// Chapter: kernels
#include "openreg/csrc/library.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "openreg/csrc/call.h"
#include "openreg/csrc/inference.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/sync_debug.h"

namespace openreg {
namespace {

using torch::jit::Stack;

// [kernels: boxed-device]
// The device that the operator works on.
c10::Device deviceOf(const Stack& arguments) {
  for (const c10::IValue& value : arguments) {
    if (value.isTensor() && value.toTensor().is_privateuseone()) {
      return value.toTensor().device();
    }
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.is_privateuseone()) {
          return tensor.device();
        }
      }
    }
    if (value.isDevice() && value.toDevice().has_index()) {
      return value.toDevice();
    }
  }
  return {c10::kPrivateUse1, currentDevice()};
}
// [/kernels: boxed-device]

// One call of a boxed kernel: its arguments, off the dispatcher's stack.
struct Request {
  Request(const c10::OperatorHandle& op, const Stack& stack)
      : op(op),
        schema(op.schema()),
        arguments(
            stack.end() -
                static_cast<std::ptrdiff_t>(schema.arguments().size()),
            stack.end()),
        guard(deviceOf(arguments)) {
    checkArguments(schema, stack);
  }

  c10::Device device() const {
    return guard.current_device();
  }

  // The argument that the operator writes and returns as this result, if any.
  const c10::IValue* written(std::size_t result) const {
    const c10::AliasInfo* const alias = schema.returns()[result].alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      return nullptr;
    }
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* const each = schema.arguments()[i].alias_info();
      if (each != nullptr && each->isWrite() &&
          each->beforeSets() == alias->beforeSets()) {
        return &arguments[i];
      }
    }
    TORCH_INTERNAL_ASSERT(false, op.operator_name(), " returns no argument");
  }

  bool isOut(std::size_t result) const {
    return written(result) != nullptr &&
           schema
               .arguments()[static_cast<std::size_t>(
                   written(result) - arguments.data())]
               .is_out();
  }

  void answer(Stack* stack, Stack results) const {
    torch::jit::drop(*stack, arguments.size());
    for (c10::IValue& result : results) {
      stack->push_back(std::move(result));
    }
  }

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  const Stack arguments;
  const c10::DeviceGuard guard;
};

// [kernels: boxed-allocate]
at::Tensor allocateLike(const at::Tensor& form, c10::Device device) {
  return form.defined()
             ? at::empty_strided(
                   form.sizes(), form.strides(), form.options().device(device))
             : at::Tensor();
}

c10::IValue allocateLike(const c10::IValue& form, c10::Device device) {
  if (form.isTensor()) {
    return allocateLike(form.toTensor(), device);
  }
  if (form.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& each : form.toTensorVector()) {
      result.push_back(allocateLike(each, device));
    }
    return result;
  }
  return form;
}
// [/kernels: boxed-allocate]

// [kernels: boxed-fit]
// Makes room in an `out=` argument. One that is an input too keeps its size,
// and one that was empty is laid out as the operator likes.
void fit(
    const Request& request, const at::Tensor& out, const at::Tensor& form) {
  const bool isInput =
      std::ranges::count_if(request.arguments, [&](const c10::IValue& each) {
        return each.isTensor() && each.toTensor().is_same(out);
      }) > 1;
  TORCH_CHECK(
      !isInput || out.sizes() == form.sizes(),
      "output with shape ",
      out.sizes(),
      " doesn't match the broadcast shape ",
      form.sizes());
  const bool isEmpty = out.numel() == 0;
  if (at::native::resize_output(out, form.sizes()) && isEmpty &&
      form.is_non_overlapping_and_dense()) {
    out.as_strided_(form.sizes(), form.strides());
  }
}
// [/kernels: boxed-fit]

// [kernels: boxed-queue]
// The call, when the form of its results is known.
Stack queue(const Request& request, const Form& form, bool isNew) {
  Stack results;
  for (std::size_t i = 0; i < form->size(); ++i) {
    if (const c10::IValue* const written = request.written(i)) {
      if (request.isOut(i)) {
        fit(request, written->toTensor(), (*form)[i].toTensor());
      }
      results.push_back(*written);
    } else {
      results.push_back(allocateLike((*form)[i], request.device()));
    }
  }
  Call call(request.op, request.arguments); // after the resizing
  for (std::size_t i = 0; i < results.size(); ++i) {
    call.addOutput(results[i]);
  }
  if (isNew) {
    call.tryOnHost();
  }
  std::move(call).launch();
  return results;
}
// [/kernels: boxed-queue]

// [kernels: boxed-wait]
// The call, when its results must be seen.
Stack waitFor(const Request& request) {
  Call call(request.op, request.arguments);
  for (std::size_t i = 0; i < request.arguments.size(); ++i) {
    if (request.schema.arguments()[i].is_out()) {
      // How large it must be is not known yet.
      call.setAnyOut(i, request.arguments[i].toTensor().scalar_type());
    }
  }
  Stack results = std::move(call).launchAndWait();
  for (std::size_t i = 0; i < results.size(); ++i) {
    const c10::IValue* const written = request.written(i);
    if (written != nullptr && !request.isOut(i)) {
      results[i] = *written;
      continue;
    }
    const c10::IValue found = results[i];
    if (written != nullptr) {
      fit(request, written->toTensor(), found.toTensor());
    }
    results[i] =
        written != nullptr ? *written : allocateLike(found, request.device());
    if (!found.isTensor() && !found.isTensorList()) {
      continue;
    }
    static constexpr char kName[] = "copy of a result";
    launch<kName>([output = keepValue(results[i]), found] {
      copyResult(giveValue(output), found);
    });
  }
  return results;
}
// [/kernels: boxed-wait]

// [kernels: ask-meta]
// The results of the operator's `Meta` kernel, and nothing if it refuses the
// call. Some of them are written in Python and take less than the library, or
// say it in other words: the library decides.
Form askMeta(const Request& request) {
  auto asked = std::make_shared<Stack>();
  for (const c10::IValue& value : request.arguments) {
    asked->push_back(metaOf(value));
  }
  try {
    request.op.callBoxed(*asked);
  } catch (const std::exception&) {
    return nullptr;
  }
  return asked;
}
// [/kernels: ask-meta]

// Whether no tensor is channels-last or of half precision.
bool isOrdinary(const Stack& arguments) {
  return std::ranges::all_of(arguments, [](const c10::IValue& each) {
    if (!each.isTensor() || !each.toTensor().defined()) {
      return true;
    }
    const at::Tensor& tensor = each.toTensor();
    return tensor.suggest_memory_format() == at::MemoryFormat::Contiguous &&
           !c10::isReducedFloatingType(tensor.scalar_type());
  });
}

} // namespace

// [kernels: written]
void writtenKernel(const c10::OperatorHandle& op, Stack* stack) {
  const Request request(op, *stack);
  Stack results;
  for (std::size_t i = 0; i < request.schema.returns().size(); ++i) {
    results.push_back(*request.written(i));
  }
  Call call(op, request.arguments);
  call.tryOnHost();
  std::move(call).launch();
  request.answer(stack, std::move(results));
}
// [/kernels: written]

// [kernels: inferred]
void inferredKernel(const c10::OperatorHandle& op, Stack* stack) {
  const Request request(op, *stack);
  std::optional<Description> description =
      Description::of(op, request.arguments);
  Form form = description.has_value() ? recall(*description) : nullptr;
  const bool isNew = form == nullptr;
  if (isNew) {
    form = askMeta(request);
    if (form == nullptr) {
      request.answer(stack, waitFor(request)); // which may refuse it too
      noteWait("a call that the operator's meta kernel refuses");
      return;
    }
  }
  request.answer(stack, queue(request, form, isNew));
  if (isNew && description.has_value()) { // nothing has refused the call
    remember(std::move(*description), std::move(form));
  }
}
// [/kernels: inferred]

// [kernels: learned]
void learnedKernel(const c10::OperatorHandle& op, Stack* stack) {
  const Request request(op, *stack);
  std::optional<Description> description =
      Description::of(op, request.arguments);
  if (const Form form =
          description.has_value() ? recall(*description) : nullptr) {
    request.answer(stack, queue(request, form, false));
    return;
  }
  noteWait("the first call of an operator with arguments of this form");
  Stack results = waitFor(request);
  if (description.has_value()) {
    auto form = std::make_shared<Stack>();
    for (const c10::IValue& result : results) {
      form->push_back(metaOf(result));
    }
    remember(std::move(*description), std::move(form));
  }
  request.answer(stack, std::move(results));
}
// [/kernels: learned]

// [kernels: arranged]
void arrangedKernel(const c10::OperatorHandle& op, Stack* stack) {
  const auto arguments =
      torch::jit::last(*stack, op.schema().arguments().size());
  const bool ordinary = isOrdinary(arguments.vec());
  (ordinary ? inferredKernel : learnedKernel)(op, stack);
}
// [/kernels: arranged]

// [kernels: dependent]
void dependentKernel(const c10::OperatorHandle& op, Stack* stack) {
  const Request request(op, *stack);
  noteWait("an operator whose result's size depends on the data");
  request.answer(stack, waitFor(request));
}
// [/kernels: dependent]

} // namespace openreg
