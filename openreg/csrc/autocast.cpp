// Chapter: amp
// What torch.autocast does to each operator with tensors of the device.
//
// The operators and their policies are PyTorch's own lists, in the header: what
// is safe in half precision is a property of the operator's arithmetic and not
// of a device. A wrapper casts the arguments and calls the operator again with
// the Autocast key excluded, above autograd, so that casts have gradients.
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace openreg {
namespace {

// The header's lists name them so.
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

// [amp: refuse]
at::Tensor refuseBinaryCrossEntropy(
    const at::Tensor& input,
    const at::Tensor& target,
    const std::optional<at::Tensor>& weight,
    std::int64_t reduction) {
  TORCH_CHECK(
      false,
      "binary_cross_entropy and BCELoss are unsafe under autocast: the "
      "gradient of log(p) overflows in half precision. Leave the sigmoid out "
      "and use binary_cross_entropy_with_logits or BCEWithLogitsLoss, or cast "
      "to float inside of torch.autocast(\"openreg\", enabled=False)");
}
// [/amp: refuse]

// [amp: call-silu-mul]
// The operator of the chapter autograd, by way of the dispatcher.
Tensor callSiluMul(const Tensor& gate, const Tensor& up) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("openreg::silu_mul", "")
                             .typed<Tensor(const Tensor&, const Tensor&)>();
  return op.call(gate, up);
}
// [/amp: call-silu-mul]

} // namespace

// [amp: fallthrough]
// All other operators: what stands behind the key in the dispatcher's order.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
// [/amp: fallthrough]

// [amp: policies]
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define APPEND_DTYPE(...) \
  KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(APPEND_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
  m.impl("binary_cross_entropy", &refuseBinaryCrossEntropy);
}
// [/amp: policies]

// [amp: register-silu-mul]
TORCH_LIBRARY_IMPL(openreg, AutocastPrivateUse1, m) {
  m.impl(
      "silu_mul",
      &at::autocast::WrapFunction<
          at::autocast::CastPolicy::promote,
          at::kPrivateUse1,
          decltype(callSiluMul),
          decltype(callSiluMul),
          &callSiluMul>::type::call);
}
// [/amp: register-silu-mul]

} // namespace openreg
