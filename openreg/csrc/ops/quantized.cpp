// Chapter: quantization
// Tensors of quantized dtypes, which carry a scale: made, read, viewed, copied.
// Nothing is computed with them; that is for plain integers.
#include <ATen/core/Tensor.h>
#include <ATen/native/quantized/AffineQuantizer.h>
#include <ATen/ops/_empty_affine_quantized.h>
#include <ATen/ops/_empty_affine_quantized_native.h>
#include <ATen/ops/_make_per_tensor_quantized_tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/dequantize_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_quantized_native.h>
#include <ATen/ops/q_scale_native.h>
#include <ATen/ops/q_zero_point_native.h>
#include <ATen/ops/qscheme_native.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <ATen/ops/quantize_per_tensor_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/unsqueeze_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "openreg/csrc/launch.h"
#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"

namespace openreg {
namespace {

// [quantization: integers]
// The integers of a quantized tensor, of any device, as a tensor of their own:
// the same memory, without the scale.
at::Tensor integersOf(const at::Tensor& quantized) {
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(quantized.storage()),
      c10::DispatchKeySet(
          quantized.is_cpu() ? c10::DispatchKey::CPU
                             : c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(c10::toUnderlying(quantized.scalar_type())));
  result.unsafeGetTensorImpl()->set_sizes_and_strides(
      quantized.sizes(), quantized.strides(), quantized.storage_offset());
  return result;
}

at::Tensor intRepr(const at::Tensor& self) {
  return integersOf(self).clone();
}
// [/quantization: integers]

// [quantization: quantize]
// PyTorch's own functions check the arguments and make the tensors, on the
// current device. Each then asks a stub for the loop.
constexpr char kQuantize[] = "aten::quantize_per_tensor";
constexpr char kDequantize[] = "aten::dequantize";

void quantizeLoop(
    const at::Tensor& values,
    at::Tensor& quantized,
    double scale,
    std::int64_t zero) {
  launch<kQuantize>([y = keep(integersOf(quantized)),
                     x = keep(values),
                     scale,
                     zero,
                     dtype = quantized.scalar_type()] {
    y.view().copy_(
        integersOf(at::quantize_per_tensor(x.view(), scale, zero, dtype)));
  });
}

void dequantizeLoop(
    const at::Tensor& quantized,
    at::Tensor& values,
    double scale,
    std::int64_t zero) {
  launch<kDequantize>(
      [y = keep(values), x = keep(integersOf(quantized)), scale, zero] {
        y.view().copy_(
            at::_make_per_tensor_quantized_tensor(x.view(), scale, zero)
                .dequantize());
      });
}

template <auto Function>
struct Guarded;

template <
    typename Result,
    typename... Rest,
    Result (*Function)(const at::Tensor&, Rest...)>
struct Guarded<Function> {
  static Result call(const at::Tensor& self, Rest... rest) {
    const c10::DeviceGuard guard(self.device());
    return Function(self, std::forward<Rest>(rest)...);
  }
};

at::Tensor emptyAffine(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pinned,
    double scale,
    std::int64_t zero,
    std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::native::empty_affine_quantized(
      sizes, dtype, layout, device, pinned, scale, zero, format);
}
// [/quantization: quantize]

// [quantization: copy-quantized]
// Between quantized tensors of the device, or one of the CPU: the integers, and
// the scale with them. PyTorch has refused all else.
at::Tensor copyFrom(
    const at::Tensor& self, const at::Tensor& dst, bool nonBlocking) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      self.is_quantized() && dst.is_quantized() &&
          self.scalar_type() == dst.scalar_type() &&
          self.qscheme() == at::kPerTensorAffine &&
          dst.qscheme() == at::kPerTensorAffine,
      "copy_: openreg copies quantized tensors to tensors of the same dtype, "
      "with one scale, but got ",
      self.dtype(),
      " and ",
      dst.dtype(),
      ". Bring them by int_repr() and q_scale(), or call dequantize() first");
  at::set_quantizer_(dst, at::get_qtensorimpl(self)->quantizer());
  integersOf(dst).copy_(integersOf(self), nonBlocking);
  return dst;
}

// To the device, and from it. PyTorch's own leaves a tensor with gaps, such as
// q[::2], where it is.
at::Tensor toCopy(
    const at::Tensor& self,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> pinned,
    bool nonBlocking,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      self.qscheme() == at::kPerTensorAffine,
      "to: openreg has quantized tensors with one scale, but got ",
      toString(self.qscheme()),
      ". Bring the parts by int_repr() and q_per_channel_scales(), or call "
      "dequantize() first");
  const auto kept = format.value_or(at::MemoryFormat::Preserve);
  at::Tensor result = at::_empty_affine_quantized(
      self.sizes(),
      self.options()
          .dtype(dtype.value_or(self.scalar_type()))
          .device(device.value_or(self.device()))
          .pinned_memory(pinned),
      self.q_scale(),
      self.q_zero_point(),
      kept == at::MemoryFormat::Preserve ? self.suggest_memory_format() : kept);
  return result.copy_(self, nonBlocking);
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  return other.is_quantized() &&
         at::get_qtensorimpl(self)->quantizer()->equalTo(
             at::get_qtensorimpl(other)->quantizer()) &&
         integersOf(self).equal(integersOf(other));
}
// [/quantization: copy-quantized]

at::Tensor make(const at::Tensor& self, double scale, std::int64_t zero) {
  const at::ScalarType dtype = c10::toQIntType(self.scalar_type());
  at::Tensor result = at::new_qtensor(
      self.sizes(),
      self.options().dtype(dtype),
      at::make_per_tensor_affine_quantizer(scale, zero, dtype));
  integersOf(result).copy_(self);
  return result;
}

} // namespace

// [quantization: register-quantized]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl(
      "quantize_per_tensor", &Guarded<&at::native::quantize_per_tensor>::call);
  m.impl(
      "quantize_per_tensor.tensor_qparams",
      &Guarded<&at::native::quantize_per_tensor_tensor_qparams>::call);
  m.impl("_make_per_tensor_quantized_tensor", &Guarded<&make>::call);
}

TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, m) {
  m.impl("_empty_affine_quantized", &emptyAffine);
  m.impl("empty_quantized", &at::native::empty_quantized);
  m.impl("empty_like", &at::native::empty_like_quantized);
  m.impl("dequantize.self", &Guarded<&at::native::dequantize_quantized>::call);
  m.impl("int_repr", &intRepr);
  m.impl("q_scale", &at::native::q_scale_quant);
  m.impl("q_zero_point", &at::native::q_zero_point_quant);
  m.impl("qscheme", &at::native::qscheme_quant);
  m.impl("_copy_from", &copyFrom);
  m.impl("_to_copy", &toCopy);
  m.impl("clone", &at::native::quantized_clone);
  m.impl("equal", &equal);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_qtensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl(
      "set_.source_Storage_storage_offset",
      static_cast<at::Tensor& (*)(
          at::Tensor&,
          at::Storage,
          std::int64_t,
          at::IntArrayRef,
          at::IntArrayRef)>(&at::native::set_storage_quantized_));
  m.impl("unsqueeze", &at::native::unsqueeze_quantized);
}
// [/quantization: register-quantized]

} // namespace openreg

// [quantization: register-stubs]
namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(
    quantize_tensor_per_tensor_affine_stub, &openreg::quantizeLoop)
REGISTER_PRIVATEUSE1_DISPATCH(
    dequantize_tensor_per_tensor_affine_stub, &openreg::dequantizeLoop)

} // namespace at::native
// [/quantization: register-stubs]
