// Chapter: fallback
#include "openreg/csrc/ops/on_host.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace openreg {
namespace {

bool writes(const c10::Argument& argument) {
  const c10::AliasInfo* alias = argument.alias_info();
  return alias != nullptr && alias->isWrite();
}

uint32_t versionOf(const at::Tensor& tensor) {
  const auto& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0; // inference: none
}

class HostCall final {
 public:
  HostCall(
      const c10::OperatorHandle& op, torch::jit::Stack* stack, HostCost* cost)
      : schema_(op.schema()), stack_(stack), cost_(cost) {
  }

  void bringArguments();
  void returnResults();
  void writeBack();

 private:
  struct Carried {
    at::Tensor device;
    at::Tensor host;
    uint32_t version;             // of the host's, before the call
    const c10::Argument* written; // as this one, if the schema says so
    bool unmarked;                // written, and the schema does not say so
  };

  at::Tensor toHost(const at::Tensor& tensor, const c10::Argument& argument);
  at::Tensor toDevice(const at::Tensor& tensor, const c10::Argument& result);
  bool writesUnmarked(const c10::Argument& argument) const;

  template <typename Change>
  static c10::IValue eachTensor(const c10::IValue& value, Change change);

  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  HostCost* cost_;
  std::optional<c10::Device> target_; // of the results
  std::vector<Carried> carried_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> known_; // both sides
};

// [fallback: each-tensor]
// The value with each tensor in it changed, as one, in a list or in a list of
// optional ones.
template <typename Change>
c10::IValue HostCall::eachTensor(const c10::IValue& value, Change change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? change(value.toTensor()) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(
          tensor.has_value() && tensor->defined() ? change(*tensor) : tensor);
    }
    return list;
  }
  return value;
}
// [/fallback: each-tensor]

// [fallback: written]
// The operators of PyTorch whose schemas do not mark what they write, through
// pointers. Others, written with operators, raise the version of the copy.
bool HostCall::writesUnmarked(const c10::Argument& argument) const {
  const std::string& name = schema_.name();
  return argument.name().starts_with("running_") &&
         (name == "aten::native_batch_norm" ||
          name == "aten::batch_norm_update_stats");
}
// [/fallback: written]

// [fallback: to-host]
at::Tensor HostCall::toHost(
    const at::Tensor& tensor, const c10::Argument& argument) {
  if (tensor.is_cpu()) {
    return tensor; // a number, or indices
  }
  if (!target_.has_value()) {
    target_ = tensor.device();
  }
  const auto [found, added] =
      known_.try_emplace(tensor.unsafeGetTensorImpl(), carried_.size());
  if (!added) { // an argument given twice, maybe as input and as out=
    Carried& before = carried_[found->second];
    if (writes(argument)) {
      before.written = &argument;
    }
    before.unmarked |= writesUnmarked(argument);
    return before.host;
  }
  at::Tensor host;
  // A custom operator may read what is called out=; PyTorch's own do not.
  if (argument.is_out() && schema_.name().starts_with("aten::")) {
    host = at::empty_like(tensor, tensor.options().device(c10::kCPU));
  } else {
    host = tensor.to(c10::kCPU);
    cost_->toHost += tensor.nbytes();
  }
  known_.emplace(host.unsafeGetTensorImpl(), carried_.size());
  carried_.push_back(
      {tensor,
       host,
       versionOf(host),
       writes(argument) ? &argument : nullptr,
       writesUnmarked(argument)});
  return host;
}
// [/fallback: to-host]

// [fallback: bring-arguments]
void HostCall::bringArguments() {
  const auto& arguments = schema_.arguments();
  const std::size_t first = stack_->size() - arguments.size();
  std::optional<c10::Device> asked;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack_)[first + i];
    if (value.isDevice()) {
      asked = value.toDevice();
      value = c10::Device(c10::kCPU);
      continue;
    }
    value = eachTensor(value, [&](const at::Tensor& tensor) {
      return toHost(tensor, arguments[i]);
    });
  }
  target_ = asked.has_value() ? asked : target_;
}
// [/fallback: bring-arguments]

// [fallback: to-device]
// The tensor of the device that a result belongs to: the argument itself where
// the operator returns what it has written, a new one otherwise.
at::Tensor HostCall::toDevice(
    const at::Tensor& tensor, const c10::Argument& result) {
  const auto found = known_.find(tensor.unsafeGetTensorImpl());
  if (found != known_.end()) {
    return carried_[found->second].device;
  }
  if (writes(result)) { // the kernel has made another tensor of it
    for (const Carried& each : carried_) {
      if (each.written != nullptr &&
          *each.written->alias_info() == *result.alias_info()) {
        return each.device;
      }
    }
  }
  if (!target_.has_value() || target_->is_cpu()) {
    return tensor;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided && !tensor.is_quantized(),
      "its result is ",
      tensor.is_quantized() ? "quantized" : "sparse",
      ", and only dense tensors are brought back. Call it on the CPU, with "
      ".cpu()");
  cost_->toDevice += tensor.nbytes();
  return tensor.to(*target_);
}
// [/fallback: to-device]

void HostCall::returnResults() {
  const auto& results = schema_.returns();
  const std::size_t first = stack_->size() - results.size();
  for (std::size_t i = 0; i < results.size(); ++i) {
    c10::IValue& value = (*stack_)[first + i];
    value = eachTensor(value, [&](const at::Tensor& tensor) {
      return toDevice(tensor, results[i]);
    });
  }
}

// [fallback: write-back]
void HostCall::writeBack() {
  for (const Carried& each : carried_) {
    if (each.written == nullptr) {
      if (!each.unmarked && versionOf(each.host) == each.version) {
        continue;
      }
      if (!each.device.is_inference()) { // or autograd believes the schema
        each.device.unsafeGetTensorImpl()->bump_version();
      }
    }
    if (each.device.sizes() != each.host.sizes()) { // an out= of another size
      each.device.resize_(each.host.sizes());
      if (each.host.is_non_overlapping_and_dense()) {
        each.device.unsafeGetTensorImpl()->set_sizes_and_strides(
            each.host.sizes(), each.host.strides());
      }
    }
    at::_copy_from(each.host, each.device);
    cost_->toDevice += each.host.nbytes();
  }
}
// [/fallback: write-back]

} // namespace

// [fallback: run-on-host]
void runOnHost(
    const c10::OperatorHandle& op, torch::jit::Stack* stack, HostCost* cost) {
  HostCall call(op, stack, cost);
  call.bringArguments();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.returnResults();
  call.writeBack();
}
// [/fallback: run-on-host]

} // namespace openreg
