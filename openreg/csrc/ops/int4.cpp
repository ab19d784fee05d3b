// Chapter: quantization
// A linear layer whose weights have 4 bits, with a scale and a zero for each
// group of them. The products are those of floating-point numbers.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "openreg/csrc/launch.h"
#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/ops/quantized_loops.h"
#include "openreg/csrc/ops/threads.h"

namespace openreg {
namespace {

constexpr char kLinear[] = "openreg::int4_linear";

// [quantization: check-int4-linear]
void checkLinear(
    const at::Tensor& input,
    const at::Tensor& packed,
    const at::Tensor& scale,
    const at::Tensor& zero,
    const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(
      at::isFloatingType(input.scalar_type()) &&
          input.scalar_type() != at::kDouble,
      kLinear,
      ": expected input of dtype torch.float32, torch.bfloat16 or "
      "torch.float16, but got ",
      input.dtype());
  TORCH_CHECK(
      packed.scalar_type() == at::kByte && packed.dim() == 2 &&
          input.dim() > 0 && input.sym_size(-1) == packed.sym_size(1) * 2,
      kLinear,
      ": expected input of sizes (..., in) and packed of dtype torch.uint8 and "
      "sizes (out, in / 2), but got ",
      input.sym_sizes(),
      " and ",
      packed.dtype(),
      " of ",
      packed.sym_sizes());
  TORCH_CHECK(
      scale.scalar_type() == at::kFloat && scale.dim() == 2 &&
          scale.sym_size(0) == packed.sym_size(0) && scale.sym_size(1) > 0 &&
          packed.sym_size(1) * 2 % scale.sym_size(1) == 0,
      kLinear,
      ": expected scale of dtype torch.float32 and sizes (out, groups), with "
      "as many inputs in each group, but got ",
      scale.dtype(),
      " of ",
      scale.sym_sizes(),
      " for packed of ",
      packed.sym_sizes());
  TORCH_CHECK(
      zero.scalar_type() == at::kFloat &&
          zero.sym_sizes().equals(scale.sym_sizes()),
      kLinear,
      ": expected zero of the dtype and sizes of scale, but got ",
      zero.dtype(),
      " of ",
      zero.sym_sizes());
  if (bias.has_value() && bias->defined()) {
    TORCH_CHECK(
        bias->scalar_type() == input.scalar_type() && bias->dim() == 1 &&
            bias->sym_size(0) == packed.sym_size(0),
        kLinear,
        ": expected bias of dtype ",
        input.dtype(),
        " and sizes (out), but got ",
        bias->dtype(),
        " of ",
        bias->sym_sizes());
  }
}
// [/quantization: check-int4-linear]

at::Tensor emptyResult(const at::Tensor& input, const at::Tensor& packed) {
  c10::SymDimVector sizes(input.sym_sizes());
  sizes.back() = packed.sym_size(0);
  return at::empty_symint(sizes, input.options());
}

// [quantization: int4-linear]
// The weights of a block of outputs are unpacked into a core's cache, and the
// library multiplies them there. In memory they never have more than 4 bits.
constexpr std::int64_t kBlock = 1 << 16; // numbers
constexpr std::int64_t kOutputs = 32;

void runLinear(
    const at::Tensor& out,
    const at::Tensor& input,
    const at::Tensor& packed,
    const at::Tensor& scale,
    const at::Tensor& zero,
    const std::optional<at::Tensor>& bias) {
  if (out.numel() == 0) {
    return;
  }
  const std::int64_t outputs = packed.size(0), pairs = packed.size(1);
  const std::int64_t inputs = 2 * pairs, groups = scale.size(1);
  const at::Tensor x = input.reshape({-1, inputs}).to(at::kFloat);
  const at::Tensor y = at::empty({x.size(0), outputs}, x.options());
  const at::Tensor bytes = packed.contiguous();
  const at::Tensor scales = scale.contiguous(), zeros = zero.contiguous();
  const std::int64_t length = std::clamp<std::int64_t>(
      kBlock / std::max<std::int64_t>(inputs, 1), 1, kOutputs);
  const std::int64_t blocks = (outputs + length - 1) / length;
  shareOut(blocks, 1, [&](auto begin, auto end) {
    const at::Tensor buffer = at::empty({length, inputs}, x.options());
    for (std::int64_t first = begin * length;
         first < std::min(end * length, outputs);
         first += length) {
      const std::int64_t count = std::min(length, outputs - first);
      for (std::int64_t row = first; row < first + count; ++row) {
        unpack(
            buffer.mutable_data_ptr<float>() + (row - first) * inputs,
            bytes.const_data_ptr<std::uint8_t>() + row * pairs,
            pairs,
            groups,
            scales.const_data_ptr<float>() + row * groups,
            zeros.const_data_ptr<float>() + row * groups);
      }
      at::Tensor part = y.narrow(1, first, count);
      at::mm_out(part, x, buffer.narrow(0, 0, count).t());
    }
  });
  if (bias.has_value() && bias->defined()) {
    y.add_(*bias);
  }
  out.view({-1, outputs}).copy_(y);
}

at::Tensor linear(
    const at::Tensor& input,
    const at::Tensor& packed,
    const at::Tensor& scale,
    const at::Tensor& zero,
    const std::optional<at::Tensor>& bias) {
  const c10::DeviceGuard guard(
      commonDevice(kLinear, input, packed, scale, zero, bias));
  checkLinear(input, packed, scale, zero, bias);
  at::Tensor out = emptyResult(input, packed);
  launch<kLinear>([y = keep(out),
                   x = keep(input),
                   w = keep(packed),
                   s = keep(scale),
                   z = keep(zero),
                   b = keep(bias)] {
    runLinear(y.view(), x.view(), w.view(), s.view(), z.view(), give(b));
  });
  return out;
}
// [/quantization: int4-linear]

at::Tensor linearOnCpu(
    const at::Tensor& input,
    const at::Tensor& packed,
    const at::Tensor& scale,
    const at::Tensor& zero,
    const std::optional<at::Tensor>& bias) {
  checkLinear(input, packed, scale, zero, bias);
  at::Tensor out = emptyResult(input, packed);
  const at::AutoDispatchBelowADInplaceOrView below;
  runLinear(out, input, packed, scale, zero, bias);
  return out;
}

at::Tensor linearOnMeta(
    const at::Tensor& input,
    const at::Tensor& packed,
    const at::Tensor& scale,
    const at::Tensor& zero,
    const std::optional<at::Tensor>& bias) {
  checkLinear(input, packed, scale, zero, bias);
  return emptyResult(input, packed);
}

} // namespace

// [quantization: register-int4]
TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.def(
      "int4_linear(Tensor input, Tensor packed, Tensor scale, Tensor zero, "
      "Tensor? bias=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("int4_linear", &linear);
}

TORCH_LIBRARY_IMPL(openreg, CPU, m) {
  m.impl("int4_linear", &linearOnCpu);
}

TORCH_LIBRARY_IMPL(openreg, Meta, m) {
  m.impl("int4_linear", &linearOnMeta);
}

// The weights are fixed; that the input has no gradient here must be said.
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("int4_linear", torch::autograd::autogradNotImplementedFallback());
}
// [/quantization: register-int4]

} // namespace openreg
