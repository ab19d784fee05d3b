// Chapter: kernels
// Batch normalization. By hand, since its sizes follow no general rule: what is
// saved for the backward pass is empty where nothing is trained, and the
// running statistics are written, which the oldest schema does not say.
#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/mixed_data_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/trial.h"

namespace openreg {
namespace {

constexpr char kBatchNorm[] = "batch_norm";

using Maybe = std::optional<at::Tensor>;
using Normalized = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void checkChannels(const at::Tensor& input, const Maybe& each) {
  if (!each.has_value() || !each->defined()) {
    return;
  }
  TORCH_CHECK(
      each->numel() == input.size(1),
      "batch_norm: ",
      input.size(1),
      " channels, and a weight, bias or running statistic of ",
      each->numel(),
      " elements");
}

// [kernels: batch-norm]
Normalized batchNorm(
    const at::Tensor& input,
    const Maybe& weight,
    const Maybe& bias,
    const Maybe& runningMean,
    const Maybe& runningVariance,
    bool training,
    double momentum,
    double epsilon) {
  const c10::DeviceGuard guard(commonDevice(
      "batch_norm", input, weight, bias, runningMean, runningVariance));
  for (const Maybe* each : {&weight, &bias, &runningMean, &runningVariance}) {
    checkChannels(input, *each);
  }
  at::Tensor output = at::empty_like(input, input.suggest_memory_format());
  const bool mixed = at::native::is_mixed_type(
      input,
      weight.value_or(at::Tensor()),
      bias.value_or(at::Tensor()),
      runningMean.value_or(at::Tensor()),
      runningVariance.value_or(at::Tensor()));
  const auto saved =
      input.options().dtype(at::native::param_scalar_type(input, mixed));
  const std::int64_t channels = training ? input.size(1) : 0;
  at::Tensor mean = at::empty({channels}, saved);
  at::Tensor inverse = at::empty({channels}, saved); // standard deviation
  launchTried<kBatchNorm>(
      signatureOf(input, weight, runningMean),
      [x = keep(input),
       w = keep(weight),
       b = keep(bias),
       rm = keep(runningMean),
       rv = keep(runningVariance),
       y = keep(output),
       m = keep(mean),
       i = keep(inverse),
       training,
       momentum,
       epsilon] {
        const auto [out, saveMean, saveInverse] = at::native_batch_norm(
            x.view(),
            give(w),
            give(b),
            give(rm),
            give(rv),
            training,
            momentum,
            epsilon);
        y.view().copy_(out);
        m.view().copy_(saveMean);
        i.view().copy_(saveInverse);
      });
  return {std::move(output), std::move(mean), std::move(inverse)};
}
// [/kernels: batch-norm]

Normalized batchNormWithStatistics(
    const at::Tensor& input,
    const Maybe& weight,
    const Maybe& bias,
    at::Tensor& runningMean,
    at::Tensor& runningVariance,
    bool training,
    double momentum,
    double epsilon) {
  return batchNorm(
      input,
      weight,
      bias,
      runningMean,
      runningVariance,
      training,
      momentum,
      epsilon);
}

Normalized batchNormWithoutStatistics(
    const at::Tensor& input,
    const Maybe& weight,
    const Maybe& bias,
    bool training,
    double momentum,
    double epsilon) {
  return batchNorm(input, weight, bias, {}, {}, training, momentum, epsilon);
}

} // namespace

// [kernels: register-batch-norm]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_batch_norm", &batchNorm);
  m.impl("_native_batch_norm_legit", &batchNormWithStatistics);
  m.impl("_native_batch_norm_legit.no_stats", &batchNormWithoutStatistics);
}
// [/kernels: register-batch-norm]

} // namespace openreg
