// Chapter: kernels
// Leaky ReLU with a random slope: an operator that draws numbers, made of ones
// that the device has.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/leaky_relu.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "openreg/csrc/ops/arguments.h"

namespace openreg {
namespace {

// [kernels: rrelu]
// The slope is drawn for each element that is not positive. `noise` becomes
// the slopes, for the backward pass.
at::Tensor rrelu(
    const at::Tensor& self,
    at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  const c10::DeviceGuard guard(commonDevice("rrelu_with_noise", self, noise));
  TORCH_CHECK(
      self.sizes() == noise.sizes(),
      "rrelu_with_noise: noise of sizes ",
      noise.sizes(),
      " for a tensor of sizes ",
      self.sizes());
  const double low = lower.toDouble(), high = upper.toDouble();
  if (!training) {
    return at::leaky_relu(self, (low + high) / 2);
  }
  noise.uniform_(low, high, std::move(generator));
  noise.masked_fill_(self > 0, 1);
  return self * noise;
}
// [/kernels: rrelu]

at::Tensor& rreluInPlace(
    at::Tensor& self,
    at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  return self.copy_(
      rrelu(self, noise, lower, upper, training, std::move(generator)));
}

at::Tensor& rreluInto(
    const at::Tensor& self,
    at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator,
    at::Tensor& out) {
  at::native::resize_output(out, self.sizes());
  return out.copy_(
      rrelu(self, noise, lower, upper, training, std::move(generator)));
}

} // namespace

// [kernels: register-rrelu]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("rrelu_with_noise", &rrelu);
  m.impl("rrelu_with_noise_", &rreluInPlace);
  m.impl("rrelu_with_noise.out", &rreluInto);
}
// [/kernels: register-rrelu]

} // namespace openreg
