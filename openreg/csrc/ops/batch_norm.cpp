// Chapter: kernels
// Batch normalization. By hand, since its sizes follow no general rule: what is
// saved for the backward pass is empty where nothing is trained, and the
// running statistics are written, which the oldest schema does not say.
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/cpu/mixed_data_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/trial.h"

namespace openreg {
namespace {

constexpr char kBatchNorm[] = "batch_norm";

using Maybe = std::optional<at::Tensor>;
using Normalized = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Outs = std::tuple<at::Tensor&, at::Tensor&, at::Tensor&>;

// All but the input.
struct Settings {
  const Maybe& weight;
  const Maybe& bias;
  const Maybe& mean; // running, as is the variance
  const Maybe& variance;
  bool training;
  double momentum;
  double epsilon;
};

void checkChannels(const at::Tensor& input, const Settings& with) {
  for (const Maybe* each :
       {&with.weight, &with.bias, &with.mean, &with.variance}) {
    TORCH_CHECK(
        !each->has_value() || !(*each)->defined() ||
            (*each)->numel() == input.size(1),
        "batch_norm: ",
        input.size(1),
        " channels, and a weight, bias or running statistic of ",
        (*each)->numel(),
        " elements");
  }
}

// [kernels: batch-norm]
// The library's `out=` form is another kernel than its functional one, and
// PyTorch 2.13's is wrong about strided inputs: whoever asks for it gets it.
void launchBatchNorm(
    const at::Tensor& input,
    const Settings& with,
    const at::Tensor& output,
    const at::Tensor& mean,
    const at::Tensor& inverse,
    bool isOut = false) {
  launchTried<kBatchNorm>(
      signatureOf(input, with.weight, with.mean),
      [x = keep(input),
       w = keep(with.weight),
       b = keep(with.bias),
       rm = keep(with.mean),
       rv = keep(with.variance),
       y = keep(output),
       m = keep(mean),
       i = keep(inverse),
       training = with.training,
       momentum = with.momentum,
       epsilon = with.epsilon,
       isOut] {
        at::Tensor out = y.view(), saveMean = m.view(), saveInverse = i.view();
        if (isOut) {
          at::native_batch_norm_out(
              out,
              saveMean,
              saveInverse,
              x.view(),
              give(w),
              give(b),
              give(rm),
              give(rv),
              training,
              momentum,
              epsilon);
          return;
        }
        const auto results = at::native_batch_norm(
            x.view(),
            give(w),
            give(b),
            give(rm),
            give(rv),
            training,
            momentum,
            epsilon);
        out.copy_(std::get<0>(results));
        saveMean.copy_(std::get<1>(results));
        saveInverse.copy_(std::get<2>(results));
      });
}

Normalized normalized(const at::Tensor& input, const Settings& with) {
  const c10::DeviceGuard guard(commonDevice(
      "batch_norm", input, with.weight, with.bias, with.mean, with.variance));
  checkChannels(input, with);
  at::Tensor output = at::empty_like(input, input.suggest_memory_format());
  const bool mixed = at::native::is_mixed_type(
      input,
      with.weight.value_or(at::Tensor()),
      with.bias.value_or(at::Tensor()),
      with.mean.value_or(at::Tensor()),
      with.variance.value_or(at::Tensor()));
  const auto saved =
      input.options().dtype(at::native::param_scalar_type(input, mixed));
  const std::int64_t channels = with.training ? input.size(1) : 0;
  at::Tensor mean = at::empty({channels}, saved);
  at::Tensor inverse = at::empty({channels}, saved); // standard deviation
  launchBatchNorm(input, with, output, mean, inverse);
  return {std::move(output), std::move(mean), std::move(inverse)};
}

Outs normalizedInto(
    const at::Tensor& input,
    const Settings& with,
    at::Tensor& output,
    at::Tensor& mean,
    at::Tensor& inverse) {
  const c10::DeviceGuard guard(commonDevice(
      "batch_norm",
      input,
      with.weight,
      with.bias,
      with.mean,
      with.variance,
      output,
      mean,
      inverse));
  checkChannels(input, with);
  at::native::resize_output(output, input.sizes());
  if (with.training) {
    at::native::resize_output(mean, {input.size(1)});
    at::native::resize_output(inverse, {input.size(1)});
  }
  launchBatchNorm(input, with, output, mean, inverse, true);
  return {output, mean, inverse};
}
// [/kernels: batch-norm]

// The schemas: the oldest, one that says that statistics are written, and one
// without them.
Normalized batchNorm(
    const at::Tensor& x,
    const Maybe& w,
    const Maybe& b,
    const Maybe& mean,
    const Maybe& variance,
    bool training,
    double momentum,
    double epsilon) {
  return normalized(x, {w, b, mean, variance, training, momentum, epsilon});
}

Normalized batchNormWithStatistics(
    const at::Tensor& x,
    const Maybe& w,
    const Maybe& b,
    at::Tensor& mean,
    at::Tensor& variance,
    bool training,
    double momentum,
    double epsilon) {
  return batchNorm(x, w, b, mean, variance, training, momentum, epsilon);
}

Normalized batchNormWithoutStatistics(
    const at::Tensor& x,
    const Maybe& w,
    const Maybe& b,
    bool training,
    double momentum,
    double epsilon) {
  return batchNorm(x, w, b, {}, {}, training, momentum, epsilon);
}

Outs batchNormOut(
    const at::Tensor& x,
    const Maybe& w,
    const Maybe& b,
    const Maybe& mean,
    const Maybe& variance,
    bool training,
    double momentum,
    double epsilon,
    at::Tensor& y,
    at::Tensor& savedMean,
    at::Tensor& savedInverse) {
  return normalizedInto(
      x,
      {w, b, mean, variance, training, momentum, epsilon},
      y,
      savedMean,
      savedInverse);
}

Outs batchNormWithStatisticsOut(
    const at::Tensor& x,
    const Maybe& w,
    const Maybe& b,
    at::Tensor& mean,
    at::Tensor& variance,
    bool training,
    double momentum,
    double epsilon,
    at::Tensor& y,
    at::Tensor& savedMean,
    at::Tensor& savedInverse) {
  return batchNormOut(
      x,
      w,
      b,
      mean,
      variance,
      training,
      momentum,
      epsilon,
      y,
      savedMean,
      savedInverse);
}

Outs batchNormWithoutStatisticsOut(
    const at::Tensor& x,
    const Maybe& w,
    const Maybe& b,
    bool training,
    double momentum,
    double epsilon,
    at::Tensor& y,
    at::Tensor& savedMean,
    at::Tensor& savedInverse) {
  return batchNormOut(
      x, w, b, {}, {}, training, momentum, epsilon, y, savedMean, savedInverse);
}

} // namespace

// [kernels: register-batch-norm]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_batch_norm", &batchNorm);
  m.impl("native_batch_norm.out", &batchNormOut);
  m.impl("_native_batch_norm_legit", &batchNormWithStatistics);
  m.impl("_native_batch_norm_legit.out", &batchNormWithStatisticsOut);
  m.impl("_native_batch_norm_legit.no_stats", &batchNormWithoutStatistics);
  m.impl(
      "_native_batch_norm_legit.no_stats_out", &batchNormWithoutStatisticsOut);
}
// [/kernels: register-batch-norm]

} // namespace openreg
