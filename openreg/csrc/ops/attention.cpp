// Chapter: kernels
// Scaled dot-product attention: fused where the library has it fused, and
// PyTorch's own composition of matrix products and softmax elsewhere.
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/trial.h"

namespace openreg {
namespace {

constexpr char kAttention[] = "scaled_dot_product_attention";
constexpr char kBackward[] = "scaled_dot_product_attention_backward";

// [kernels: attention-choice]
// The library's conditions are about sizes, types and settings, not devices. A
// mask that learns is among them: it has no gradient there.
std::int64_t choose(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool groups) {
  const auto backend =
      static_cast<at::SDPBackend>(at::native::_fused_sdp_choice_cpp(
          query, key, value, mask, dropout, causal, scale, groups));
  return static_cast<std::int64_t>(
      backend == at::SDPBackend::flash_attention ? at::SDPBackend::overrideable
                                                 : backend);
}
// [/kernels: attention-choice]

// [kernels: attention]
std::tuple<
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor,
    c10::SymInt,
    c10::SymInt,
    at::Tensor,
    at::Tensor,
    at::Tensor>
attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    bool /*debugMask*/,
    std::optional<double> scale) {
  const c10::DeviceGuard guard(
      commonDevice("scaled_dot_product_attention", query, key, value, mask));
  const at::Tensor output = at::empty_like(query);
  const auto exact =
      query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor logSumExp = at::empty(
      {query.size(0), query.size(1), query.size(2)},
      query.options().dtype(exact));
  launchTried<kAttention>(
      signatureOf(query, key, value, mask),
      [q = keep(query),
       k = keep(key),
       v = keep(value),
       m = keep(mask),
       y = keep(output),
       l = keep(logSumExp),
       dropout,
       causal,
       scale] {
        const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
            q.view(), k.view(), v.view(), dropout, causal, give(m), scale);
        y.view().copy_(out);
        l.view().copy_(lse);
      });
  return {
      output,
      logSumExp,
      at::Tensor(),
      at::Tensor(),
      query.sym_size(2),
      key.sym_size(2),
      at::Tensor(),
      at::Tensor(),
      at::Tensor()};
}
// [/kernels: attention]

// [autograd: attention-backward]
// Sizes (batch, heads, length, width), laid out so that merging the heads
// afterwards is a view.
at::Tensor headsLast(const at::Tensor& like, std::int64_t width) {
  return at::empty(
             {like.size(0), like.size(2), like.size(1), width}, like.options())
      .transpose(1, 2);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attentionBackward(
    const at::Tensor& gradOutput,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    std::array<bool, 4> /*wanted*/,
    const at::Tensor& output,
    const at::Tensor& logSumExp,
    const at::Tensor& /*cumulativeQ*/,
    const at::Tensor& /*cumulativeK*/,
    c10::SymInt /*maxQ*/,
    c10::SymInt /*maxK*/,
    double dropout,
    bool causal,
    const at::Tensor& /*seed*/,
    const at::Tensor& /*offset*/,
    std::optional<double> scale) {
  if (!gradOutput.defined()) {
    return {}; // autograd asks, and has a gradient for no output
  }
  const c10::DeviceGuard guard(commonDevice(
      "scaled_dot_product_attention_backward",
      gradOutput,
      query,
      key,
      value,
      mask,
      output));
  const at::Tensor gradQuery = headsLast(query, query.size(-1));
  const at::Tensor gradKey = headsLast(key, key.size(-1));
  const at::Tensor gradValue = headsLast(value, value.size(-1));
  launchTried<kBackward>(
      signatureOf(gradOutput, query, mask),
      [dy = keep(gradOutput),
       q = keep(query),
       k = keep(key),
       v = keep(value),
       m = keep(mask),
       y = keep(output),
       l = keep(logSumExp),
       dq = keep(gradQuery),
       dk = keep(gradKey),
       dv = keep(gradValue),
       dropout,
       causal,
       scale] {
        const at::Tensor bias = m.view();
        const auto [forQuery, forKey, forValue] =
            at::_scaled_dot_product_flash_attention_for_cpu_backward(
                dy.view(),
                q.view(),
                k.view(),
                v.view(),
                y.view(),
                l.view(),
                dropout,
                causal,
                bias.defined() ? std::optional(bias) : std::nullopt,
                scale);
        dq.view().copy_(forQuery);
        dk.view().copy_(forKey);
        dv.view().copy_(forValue);
      });
  return {gradQuery, gradKey, gradValue, at::Tensor()};
}
// [/autograd: attention-backward]

// Whether each row's mask ends in padding only. PyTorch makes a nested tensor
// then, which this device does not have; no, without looking, is always right.
bool isLeftAligned(const at::Tensor& /*input*/, const at::Tensor& /*mask*/) {
  return false;
}

} // namespace

// [kernels: register-attention]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_nested_tensor_from_mask_left_aligned", &isLeftAligned);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  // [autograd: register-attention]
  m.impl(
      "_scaled_dot_product_fused_attention_overrideable_backward",
      &attentionBackward);
  // [/autograd: register-attention]
}
// [/kernels: register-attention]

} // namespace openreg

// [kernels: attention-stub]
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &openreg::choose);
} // namespace at::native
// [/kernels: attention-stub]
