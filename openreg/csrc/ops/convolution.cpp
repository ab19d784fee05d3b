// Chapter: kernels
// Convolutions: all of them, since PyTorch reduces them to one operator.
//
// `aten::convolution` checks its arguments, and ends for this device in the
// pair of operators that are there to be overridden. The library chooses its
// algorithm by itself, on the engine.
#include <ATen/core/Tensor.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <vector>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/trial.h"

namespace openreg {
namespace {

constexpr char kConvolution[] = "convolution";
constexpr char kBackward[] = "convolution_backward";

// [kernels: convolution-format]
// The layout of the result depends on the algorithm that the library will
// choose, so it is asked: about views, of which it looks at no element.
c10::MemoryFormat formatOf(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef outputPadding,
    std::int64_t groups) {
  if (input.dim() < 4) {
    return c10::MemoryFormat::Contiguous;
  }
  const auto x = keep(input), w = keep(weight);
  const auto b = keep(bias);
  const at::native::ConvBackend backend = at::native::select_conv_backend(
      x.view(),
      w.view(),
      give(b),
      c10::fromIntArrayRefSlow(stride),
      c10::fromIntArrayRefSlow(padding),
      c10::fromIntArrayRefSlow(dilation),
      transposed,
      c10::fromIntArrayRefSlow(outputPadding),
      groups,
      std::nullopt);
  return at::native::_determine_backend_memory_format(
      x.view(), w.view(), backend);
}
// [/kernels: convolution-format]

// [kernels: convolution]
at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef outputPadding,
    std::int64_t groups) {
  const c10::DeviceGuard guard(
      commonDevice("convolution", input, weight, bias));
  const std::vector<std::int64_t> sizes =
      transposed
          ? at::native::conv_input_size(
                input.sizes(),
                weight.sizes(),
                padding,
                outputPadding,
                stride,
                dilation,
                groups)
          : at::native::conv_output_size(
                input.sizes(), weight.sizes(), padding, stride, dilation);
  const c10::MemoryFormat format = formatOf(
      input,
      weight,
      bias,
      stride,
      padding,
      dilation,
      transposed,
      outputPadding,
      groups);
  const at::Tensor output = at::empty(sizes, input.options(), format);
  launchTried<kConvolution>(
      signatureOf(input, weight, bias),
      [x = keep(input),
       w = keep(weight),
       b = keep(bias),
       y = keep(output),
       stride = stride.vec(),
       padding = padding.vec(),
       dilation = dilation.vec(),
       outputPadding = outputPadding.vec(),
       transposed,
       groups] {
        y.view().copy_(
            at::convolution(
                x.view(),
                w.view(),
                give(b),
                stride,
                padding,
                dilation,
                transposed,
                outputPadding,
                groups));
      });
  return output;
}
// [/kernels: convolution]

// [autograd: convolution-backward]
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolutionBackward(
    const at::Tensor& gradOutput,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::IntArrayRef stride,
    c10::IntArrayRef padding,
    c10::IntArrayRef dilation,
    bool transposed,
    c10::IntArrayRef outputPadding,
    std::int64_t groups,
    std::array<bool, 3> wanted) {
  const c10::DeviceGuard guard(
      commonDevice("convolution_backward", gradOutput, input, weight));
  const std::int64_t channels =
      transposed ? weight.size(1) * groups : weight.size(0);
  const c10::MemoryFormat format = formatOf(
      input,
      weight,
      std::nullopt,
      stride,
      padding,
      dilation,
      transposed,
      outputPadding,
      groups);
  std::array<at::Tensor, 3> gradients;
  if (wanted[0]) {
    gradients[0] = at::empty_like(input, format);
  }
  if (wanted[1]) {
    gradients[1] = at::empty_like(weight, format);
  }
  if (wanted[2]) {
    gradients[2] = at::empty({channels}, gradOutput.options());
  }
  launchTried<kBackward>(
      signatureOf(gradOutput, input, weight),
      [dy = keep(gradOutput),
       x = keep(input),
       w = keep(weight),
       results = keep(at::TensorList(gradients)),
       stride = stride.vec(),
       padding = padding.vec(),
       dilation = dilation.vec(),
       outputPadding = outputPadding.vec(),
       channels,
       transposed,
       groups,
       wanted] {
        const auto [dx, dw, db] = at::convolution_backward(
            dy.view(),
            x.view(),
            w.view(),
            c10::IntArrayRef(channels),
            stride,
            padding,
            dilation,
            transposed,
            outputPadding,
            groups,
            wanted);
        const std::array<at::Tensor, 3> found{dx, dw, db};
        for (std::size_t i = 0; i < found.size(); ++i) {
          if (wanted[i]) {
            results[i].view().copy_(found[i]);
          }
        }
      });
  return {gradients[0], gradients[1], gradients[2]};
}
// [/autograd: convolution-backward]

} // namespace

// [kernels: register-convolution]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", &convolution);
  // [autograd: register-convolution]
  m.impl("convolution_backward_overrideable", &convolutionBackward);
  // [/autograd: register-convolution]
}
// [/kernels: register-convolution]

} // namespace openreg
