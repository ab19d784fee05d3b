// Chapter: kernels
#include "openreg/csrc/library.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/sync_debug.h"

namespace openreg {
namespace {

using torch::jit::Stack;

// ------------------------------------------------------------ arguments

// [kernels: boxed-keep]
// An argument as the queue holds it.
using KeptValue =
    std::variant<c10::IValue, Operand, std::vector<Operand>, Indices>;

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

// [kernels: boxed-meta]
// The same tensor without data, for a question about shapes.
at::Tensor metaOf(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) {
    return tensor; // a number
  }
  at::Tensor result = at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

c10::IValue metaOf(const c10::IValue& value) {
  if (value.isTensor()) {
    return metaOf(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      result.push_back(metaOf(tensor));
    }
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> result;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      result.push_back(
          each.has_value() ? std::optional(metaOf(*each)) : std::nullopt);
    }
    return result;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) {
    return c10::Device(c10::kMeta);
  }
  return value;
}
// [/kernels: boxed-meta]

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

bool isWritten(const c10::AliasInfo* alias) {
  return alias != nullptr && alias->isWrite();
}

// -------------------------------------------------------------- launches

// [kernels: boxed-body]
// The library's call, on an engine.
struct Call {
  c10::OperatorHandle op;
  std::vector<KeptValue> arguments;
  std::vector<KeptValue> outputs; // the operator's fresh results go here
  std::shared_ptr<Stack> results; // or here

  void operator()() const {
    Stack stack;
    for (const KeptValue& argument : arguments) {
      stack.push_back(giveValue(argument));
    }
    op.callBoxed(stack);
    if (results != nullptr) {
      *results = std::move(stack);
      return;
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      fill(giveValue(outputs[i]), stack[i]);
    }
  }

  static void fill(const c10::IValue& output, const c10::IValue& result) {
    if (output.isTensor() && output.toTensor().defined()) {
      output.toTensor().copy_(result.toTensor());
    } else if (output.isTensorList()) {
      const auto outs = output.toTensorVector(), each = result.toTensorVector();
      for (std::size_t i = 0; i < outs.size(); ++i) {
        outs[i].copy_(each[i]);
      }
    }
  }
};

void launchCall(Call call) {
  // The descriptor must live as long as the queue does.
  static std::mutex mutex;
  static auto* const kernels =
      new std::unordered_map<c10::OperatorName, orKernel>;
  using Kernel = detail::KernelOf<Call>;
  const orKernel* kernel = nullptr;
  {
    const std::lock_guard lock(mutex);
    auto [place, fresh] = kernels->try_emplace(call.op.operator_name());
    if (fresh) {
      const auto* name = new std::string(toString(place->first));
      place->second = {
          name->c_str(), &Kernel::run, &Kernel::move, &Kernel::destroy};
    }
    kernel = &place->second;
  }
  check(orLaunchKernel(currentStream(), kernel, &call, sizeof(call)));
}
// [/kernels: boxed-body]

Call callOf(const c10::OperatorHandle& op, const Stack& arguments) {
  Call call{op, {}, {}, nullptr};
  call.arguments.reserve(arguments.size());
  for (const c10::IValue& value : arguments) {
    call.arguments.push_back(keepValue(value));
  }
  return call;
}

// [kernels: boxed-allocate]
at::Tensor allocateLike(const at::Tensor& shape, c10::Device device) {
  return shape.defined() ? at::empty_strided(
                               shape.sizes(),
                               shape.strides(),
                               shape.options().device(device))
                         : at::Tensor();
}

c10::IValue allocateLike(const c10::IValue& shape, c10::Device device) {
  if (shape.isTensor()) {
    return allocateLike(shape.toTensor(), device);
  }
  if (shape.isTensorList()) {
    c10::List<at::Tensor> result;
    for (const at::Tensor& each : shape.toTensorVector()) {
      result.push_back(allocateLike(each, device));
    }
    return result;
  }
  return shape;
}
// [/kernels: boxed-allocate]

// What the schema calls the arguments that are written, in order.
std::vector<std::size_t> writtenArguments(const c10::FunctionSchema& schema) {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    if (isWritten(schema.arguments()[i].alias_info())) {
      result.push_back(i);
    }
  }
  return result;
}

} // namespace

namespace {

// [kernels: boxed-rules]
// What an operator has to do with one of its arguments or results.
struct Request {
  const c10::OperatorHandle& op;
  const Stack& arguments;
  c10::Device device;

  // Its tensors, without those that are only written.
  std::vector<at::Tensor> read() const {
    std::vector<at::Tensor> result;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& each = op.schema().arguments()[i];
      const c10::IValue& value = arguments[i];
      if (each.is_out() || !value.isTensor() || !value.toTensor().defined()) {
        continue;
      }
      result.push_back(value.toTensor());
    }
    return result;
  }
};

// Makes a fresh result, or resizes what will be written.
template <typename Fresh, typename Resize>
Stack resultsOf(const Request& request, Fresh fresh, Resize resize) {
  const c10::FunctionSchema& schema = request.op.schema();
  const std::vector<std::size_t> written = writtenArguments(schema);
  Stack results;
  for (std::size_t i = 0, next = 0; i < schema.returns().size(); ++i) {
    if (isWritten(schema.returns()[i].alias_info())) {
      const std::size_t argument = written.at(next++);
      if (schema.arguments()[argument].is_out()) {
        resize(request.arguments[argument].toTensor(), i);
      }
      results.push_back(request.arguments[argument]);
    } else {
      results.push_back(fresh(i));
    }
  }
  return results;
}

Stack writtenRule(const Request& request) {
  const auto none = [&](std::size_t) -> c10::IValue {
    TORCH_INTERNAL_ASSERT(false, request.op.operator_name(), " has results");
  };
  return resultsOf(request, none, [](const at::Tensor&, std::size_t) {});
}

Stack likeRule(const Request& request) {
  const at::Tensor first = request.read().at(0);
  return resultsOf(
      request,
      [&](std::size_t) { return at::empty_like(first); },
      [&](const at::Tensor& out, std::size_t) {
        at::native::resize_output(out, first.sizes());
      });
}

Stack broadcastRule(const Request& request) {
  std::vector<at::Tensor> tensors = request.read();
  std::vector<std::int64_t> sizes = tensors.at(0).sizes().vec();
  for (const at::Tensor& tensor : tensors) {
    sizes = at::infer_size(sizes, tensor.sizes());
  }
  if (request.op.schema().arguments()[0].name() == "condition") {
    tensors.erase(tensors.begin()); // it chooses, and has no say in the type
  }
  return resultsOf(
      request,
      [&](std::size_t) {
        return at::empty(
            sizes,
            tensors[0]
                .options()
                .device(request.device)
                .dtype(at::native::result_type(tensors)));
      },
      [&](const at::Tensor& out, std::size_t) {
        at::native::resize_output(out, sizes);
      });
}

Stack inferredRule(const Request& request) {
  Stack shapes;
  for (const c10::IValue& value : request.arguments) {
    shapes.push_back(metaOf(value));
  }
  request.op.callBoxed(shapes);
  return resultsOf(
      request,
      [&](std::size_t i) { return allocateLike(shapes[i], request.device); },
      [&](const at::Tensor& out, std::size_t i) {
        at::native::resize_output(out, shapes[i].toTensor().sizes());
      });
}
// [/kernels: boxed-rules]

// [kernels: boxed-launch]
void launchBoxed(
    const c10::OperatorHandle& op,
    Stack* stack,
    Stack (*rule)(const Request&)) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  checkArguments(schema, *stack);
  const Stack arguments(
      stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const c10::DeviceGuard guard(deviceOf(arguments));
  const Stack results = rule({op, arguments, guard.current_device()});
  Call call = callOf(op, arguments); // after the resizing
  for (std::size_t i = 0; i < results.size(); ++i) {
    const bool given = isWritten(schema.returns()[i].alias_info());
    call.outputs.push_back(given ? c10::IValue() : keepValue(results[i]));
  }
  launchCall(std::move(call));
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}
// [/kernels: boxed-launch]

} // namespace

void writtenKernel(const c10::OperatorHandle& op, Stack* stack) {
  launchBoxed(op, stack, &writtenRule);
}

void likeKernel(const c10::OperatorHandle& op, Stack* stack) {
  launchBoxed(op, stack, &likeRule);
}

void broadcastKernel(const c10::OperatorHandle& op, Stack* stack) {
  launchBoxed(op, stack, &broadcastRule);
}

void inferredKernel(const c10::OperatorHandle& op, Stack* stack) {
  launchBoxed(op, stack, &inferredRule);
}

// [kernels: dependent]
void dependentKernel(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  checkArguments(schema, *stack);
  const Stack arguments(stack->end() - count, stack->end());
  const c10::DeviceGuard guard(deviceOf(arguments));
  noteWait("an operator whose result's size depends on the data");
  Call call = callOf(op, arguments);
  const auto found = std::make_shared<Stack>();
  call.results = found;
  launchCall(std::move(call));
  check(orStreamSynchronize(currentStream()));
  torch::jit::drop(*stack, count);
  const std::vector<std::size_t> written = writtenArguments(schema);
  for (std::size_t i = 0, next = 0; i < found->size(); ++i) {
    c10::IValue& result = (*found)[i];
    if (isWritten(schema.returns()[i].alias_info())) {
      stack->push_back(arguments[written.at(next++)]);
      continue;
    }
    stack->push_back(allocateLike(result, guard.current_device()));
    static constexpr char kName[] = "copy of a result";
    launch<kName>([output = keepValue(stack->back()), result] {
      Call::fill(giveValue(output), result);
    });
  }
}
// [/kernels: dependent]

} // namespace openreg
