// Chapter: quantization
// Integers of 8 bits times integers of 8 bits: PyTorch's product, and a linear
// layer for tensors that were quantized.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "openreg/csrc/launch.h"
#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/ops/quantized_loops.h"
#include "openreg/csrc/ops/threads.h"

namespace openreg {
namespace {

constexpr char kProduct[] = "aten::_int_mm";
constexpr char kLinear[] = "openreg::int8_linear";

// [quantization: blocks]
// (rows, inner) times (columns, inner), both of int8 and of any strides. `store`
// is called with each block of sums: its first row and column, its sizes, and
// the sums row by row.
//
// A block's numbers fit into a core's cache, together with the sums.
constexpr std::int64_t kRows = 96, kColumns = 48, kInner = 1024;

void widenRows(
    std::int16_t* wide,
    const at::Tensor& narrow,
    std::int64_t first,
    std::int64_t rows,
    std::int64_t from,
    std::int64_t inner) {
  const auto* data = narrow.const_data_ptr<std::int8_t>();
  for (std::int64_t r = 0; r < rows; ++r) {
    widen(
        wide + r * inner,
        data + (first + r) * narrow.stride(0) + from * narrow.stride(1),
        inner,
        narrow.stride(1));
  }
}

template <typename Store>
void multiply(const at::Tensor& a, const at::Tensor& b, const Store& store) {
  const std::int64_t rows = a.size(0), columns = b.size(0), inner = a.size(1);
  if (rows == 0 || columns == 0) {
    return;
  }
  const std::int64_t down = (rows + kRows - 1) / kRows;
  const std::int64_t across = (columns + kColumns - 1) / kColumns;
  const std::int64_t work = std::min(rows, kRows) * kColumns * (inner + 1);
  const std::int64_t grain = std::max<std::int64_t>(1, (1 << 18) / work);
  shareOut(down * across, grain, [&](auto begin, auto end) {
    std::vector<std::int16_t> left(std::min(rows, kRows) * inner);
    std::vector<std::int16_t> right(kColumns * std::min(inner, kInner));
    std::vector<std::int32_t> sums;
    std::int64_t widened = -1;
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t row = block / across * kRows;
      const std::int64_t column = block % across * kColumns;
      const std::int64_t height = std::min(kRows, rows - row);
      const std::int64_t width = std::min(kColumns, columns - column);
      sums.assign(height * width, 0);
      for (std::int64_t from = 0; from < inner; from += kInner) {
        const std::int64_t length = std::min(kInner, inner - from);
        std::int16_t* const part = left.data() + height * from;
        if (row != widened) { // the next blocks have the same rows
          widenRows(part, a, row, height, from, length);
        }
        widenRows(right.data(), b, column, width, from, length);
        addProducts(part, height, right.data(), width, length, sums.data());
      }
      widened = row;
      store(row, column, height, width, sums.data());
    }
  });
}
// [/quantization: blocks]

// [quantization: int-mm]
void checkProduct(const at::Tensor& self, const at::Tensor& mat2) {
  for (const auto& [name, tensor] :
       {std::pair("self", &self), {"mat2", &mat2}}) {
    TORCH_CHECK(
        tensor->dim() == 2,
        "_int_mm: expected ",
        name,
        " to be a matrix, but got sizes ",
        tensor->sizes());
    TORCH_CHECK(
        tensor->scalar_type() == at::kChar,
        "_int_mm: expected ",
        name,
        " to have dtype torch.int8, but got ",
        tensor->dtype());
  }
  TORCH_CHECK(
      self.size(1) == mat2.size(0),
      "_int_mm: matrices of sizes ",
      self.sizes(),
      " and ",
      mat2.sizes(),
      " cannot be multiplied");
}

void launchProduct(
    const at::Tensor& out, const at::Tensor& self, const at::Tensor& mat2) {
  launch<kProduct>([c = keep(out), a = keep(self), b = keep(mat2)] {
    const at::Tensor result = c.view();
    auto* const data = result.mutable_data_ptr<std::int32_t>();
    const std::int64_t down = result.stride(0), across = result.stride(1);
    multiply(
        a.view(),
        b.view().t(),
        [&](auto row, auto column, auto rows, auto columns, const auto* sums) {
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < columns; ++c) {
              data[(row + r) * down + (column + c) * across] = *sums++;
            }
          }
        });
  });
}

at::Tensor product(const at::Tensor& self, const at::Tensor& mat2) {
  const c10::DeviceGuard guard(commonDevice(kProduct, self, mat2));
  checkProduct(self, mat2);
  at::Tensor out =
      at::empty({self.size(0), mat2.size(1)}, self.options().dtype(at::kInt));
  launchProduct(out, self, mat2);
  return out;
}

at::Tensor& productInto(
    const at::Tensor& self, const at::Tensor& mat2, at::Tensor& out) {
  const c10::DeviceGuard guard(commonDevice(kProduct, self, mat2, out));
  checkProduct(self, mat2);
  TORCH_CHECK(
      out.scalar_type() == at::kInt,
      "_int_mm: expected out to have dtype torch.int32, but got ",
      out.dtype());
  at::native::resize_output(out, {self.size(0), mat2.size(1)});
  launchProduct(out, self, mat2);
  return out;
}
// [/quantization: int-mm]

// [quantization: check-int8-linear]
// Sums of this many products of 8 bits stay within 32.
constexpr std::int64_t kLongest = (std::int64_t{1} << 17) - 1;

void checkLinear(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& scale,
    const std::optional<at::Tensor>& bias,
    at::ScalarType dtype) {
  TORCH_CHECK(
      input.scalar_type() == at::kChar && weight.scalar_type() == at::kChar,
      kLinear,
      ": expected input and weight of dtype torch.int8, but got ",
      input.dtype(),
      " and ",
      weight.dtype());
  TORCH_CHECK(
      weight.dim() == 2 && input.dim() > 0 &&
          input.sym_size(-1) == weight.sym_size(1),
      kLinear,
      ": expected input of sizes (..., in) and weight of sizes (out, in), but "
      "got ",
      input.sym_sizes(),
      " and ",
      weight.sym_sizes());
  TORCH_CHECK(
      weight.sym_size(1) <= kLongest,
      kLinear,
      ": the sums of ",
      weight.sym_size(1),
      " products may not fit into 32 bits; at most ",
      kLongest,
      " do. Split the layer along its inputs");
  const auto fits = [&](const at::Tensor& each, const char* name) {
    TORCH_CHECK(
        each.scalar_type() == at::kFloat && each.dim() == 1 &&
            each.sym_size(0) == weight.sym_size(0),
        kLinear,
        ": expected ",
        name,
        " of dtype torch.float32 and sizes (out), but got ",
        each.dtype(),
        " and ",
        each.sym_sizes());
  };
  fits(scale, "scale");
  if (bias.has_value() && bias->defined()) {
    fits(*bias, "bias");
  }
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
          dtype == at::kChar,
      kLinear,
      ": results can have dtype torch.float32, torch.bfloat16, torch.float16 "
      "or torch.int8, but not ",
      dtype);
}

at::Tensor emptyResult(
    const at::Tensor& input, const at::Tensor& weight, at::ScalarType dtype) {
  c10::SymDimVector sizes(input.sym_sizes());
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, input.options().dtype(dtype));
}
// [/quantization: check-int8-linear]

// [quantization: int8-linear]
template <typename T>
void storeRow(T* row, const float* values, std::int64_t count) {
  std::copy_n(values, count, row); // converts
}
void storeRow(std::int8_t* row, const float* values, std::int64_t count) {
  roundValues(row, values, count);
}

template <typename T>
void linearLoop(
    const at::Tensor& out,
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& scale,
    const std::optional<at::Tensor>& bias) {
  auto* const data = out.mutable_data_ptr<T>(); // contiguous: made here
  const at::Tensor scales = scale.contiguous();
  const at::Tensor shifts =
      bias.has_value() ? bias->contiguous() : at::Tensor();
  const auto* const factor = scales.const_data_ptr<float>();
  const auto* const shift =
      shifts.defined() ? shifts.const_data_ptr<float>() : nullptr;
  const std::int64_t outputs = weight.size(0);
  multiply(
      input.reshape({-1, weight.size(1)}),
      weight,
      [&](auto row, auto column, auto rows, auto columns, const auto* sums) {
        std::array<float, kColumns> values;
        for (std::int64_t r = row; r < row + rows; ++r, sums += columns) {
          scaleSums(
              values.data(),
              sums,
              factor + column,
              shift ? shift + column : nullptr,
              columns);
          storeRow(data + r * outputs + column, values.data(), columns);
        }
      });
}

// What an engine runs, and what runs for tensors of the CPU.
void runLinear(
    const at::Tensor& out,
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& scale,
    const std::optional<at::Tensor>& bias) {
  if (out.numel() == 0) {
    return;
  }
  switch (out.scalar_type()) {
    case at::kChar:
      return linearLoop<std::int8_t>(out, input, weight, scale, bias);
    case at::kHalf:
      return linearLoop<c10::Half>(out, input, weight, scale, bias);
    case at::kBFloat16:
      return linearLoop<c10::BFloat16>(out, input, weight, scale, bias);
    default:
      return linearLoop<float>(out, input, weight, scale, bias);
  }
}

at::Tensor linear(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& scale,
    const std::optional<at::Tensor>& bias,
    at::ScalarType dtype) {
  const c10::DeviceGuard guard(
      commonDevice(kLinear, input, weight, scale, bias));
  checkLinear(input, weight, scale, bias, dtype);
  at::Tensor out = emptyResult(input, weight, dtype);
  launch<kLinear>([y = keep(out),
                   x = keep(input),
                   w = keep(weight),
                   s = keep(scale),
                   b = keep(bias)] {
    runLinear(y.view(), x.view(), w.view(), s.view(), give(b));
  });
  return out;
}
// [/quantization: int8-linear]

at::Tensor linearOnCpu(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& scale,
    const std::optional<at::Tensor>& bias,
    at::ScalarType dtype) {
  checkLinear(input, weight, scale, bias, dtype);
  at::Tensor out = emptyResult(input, weight, dtype);
  runLinear(out, input, weight, scale, bias);
  return out;
}

at::Tensor linearOnMeta(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& scale,
    const std::optional<at::Tensor>& bias,
    at::ScalarType dtype) {
  checkLinear(input, weight, scale, bias, dtype);
  return emptyResult(input, weight, dtype);
}

} // namespace

// [quantization: register-int8]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_int_mm", &product);
  m.impl("_int_mm.out", &productInto);
}

TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.def(
      "int8_linear(Tensor input, Tensor weight, Tensor scale, "
      "Tensor? bias=None, *, ScalarType dtype=float) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("int8_linear", &linear);
}

TORCH_LIBRARY_IMPL(openreg, CPU, m) {
  m.impl("int8_linear", &linearOnCpu);
}

TORCH_LIBRARY_IMPL(openreg, Meta, m) {
  m.impl("int8_linear", &linearOnMeta);
}

// For the gradients of scale and bias there is no formula: backward() says so.
TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("int8_linear", torch::autograd::autogradNotImplementedFallback());
}
// [/quantization: register-int8]

} // namespace openreg
