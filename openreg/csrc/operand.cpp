// Chapter: kernels
#include "openreg/csrc/operand.h"

#include <ATen/ops/zeros.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstring>

#include "openreg/csrc/tiles.h"
#include "openreg/csrc/trial.h"

namespace openreg {

// [kernels: take]
Operand::Operand(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return;
  }
  checkStrided(tensor);
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  dtype_ = impl->dtype();
  conj_ = tensor.is_conj();
  neg_ = tensor.is_neg();
  shape_.set_sizes(impl->sizes());
  shape_.set_strides(impl->strides());
  if (impl->device_type() == c10::DeviceType::PrivateUse1) {
    const c10::Storage& storage = impl->storage();
    kind_ = Kind::Device;
    storage_.bytes = storage.nbytes();
    offset_ = impl->storage_offset();
    if (const void* const data = storage.data()) {
      storage_.begin = static_cast<const char*>(data) + backingOffset();
    }
    return;
  }
  TORCH_CHECK(
      tensor.is_cpu() && tensor.dim() == 0,
      "Expected all tensors to be on the same device, but found at least two "
      "devices, openreg and ",
      tensor.device(),
      "! A kernel takes only a CPU tensor of no dimensions along");
  kind_ = Kind::Value;
  number_ = impl->is_wrapped_number();
  value_ = {};
  std::memcpy(value_.data(), tensor.const_data_ptr(), dtype_.itemsize());
}
// [/kernels: take]

// [kernels: view]
at::Tensor Operand::view() const {
  if (kind_ == Kind::Undefined) {
    return {};
  }
  if (kind_ == Kind::Device && Trial::isRunning()) [[unlikely]] {
    return sample();
  }
  // A storage of its own: that two tensors share one is something that library
  // functions ask about, and decide by.
  const bool onDevice = kind_ == Kind::Device;
  const void* const data = onDevice ? storage_.begin : value_.data();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      onDevice ? storage_.bytes : dtype_.itemsize(),
      c10::DataPtr(const_cast<void*>(data), c10::kCPU));
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype_);
  c10::TensorImpl* const impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(
      shape_.sizes_arrayref(), shape_.strides_arrayref(), offset_);
  if (number_) {
    impl->set_wrapped_number(true);
  }
  // Conjugation and negation are lazy: bits that say how to read the elements.
  if (conj_) {
    result._set_conj(true);
  }
  if (neg_) {
    result._set_neg(true);
  }
  // The host has made room for the result. A kernel that wants another size is
  // wrong, and must not put its result elsewhere.
  impl->set_allow_tensor_metadata_change(false);
  return result;
}
// [/kernels: view]

// [kernels: settle]
bool Operand::isLaidOutAs(const at::Tensor& view) const {
  return kind_ == Kind::Undefined ||
         shape_.strides_arrayref() == view.strides();
}

void settle(const at::Tensor& output, const at::Tensor& result) {
  if (output.const_data_ptr() != result.const_data_ptr()) {
    output.copy_(result);
  } else if (output.strides() != result.strides()) {
    output.copy_(result.clone());
  }
}
// [/kernels: settle]

// [kernels: sample]
at::Tensor Operand::sample() const {
  // Of its own size, so that pools and convolutions go through; if that is
  // more than a trial is worth, of one element.
  constexpr std::int64_t kWorth = 1 << 14;
  std::vector<std::int64_t> sizes = shape_.sizes_arrayref().vec();
  if (c10::multiply_integers(sizes) > kWorth) {
    std::fill(sizes.begin(), sizes.end(), 1);
  }
  at::Tensor result =
      at::zeros(sizes, at::TensorOptions(c10::kCPU).dtype(dtype_));
  if (result.numel() == 0) {
    Trial::setInconclusive();
  }
  result._set_conj(conj_);
  result._set_neg(neg_);
  result.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(false);
  return result;
}
// [/kernels: sample]

std::optional<Operand> keep(const at::OptionalTensorRef& tensor) {
  return tensor.has_value() ? std::optional<Operand>(*tensor) : std::nullopt;
}

std::optional<Operand> keep(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? std::optional<Operand>(*tensor) : std::nullopt;
}

std::vector<Operand> keep(const at::ITensorListRef& tensors) {
  std::vector<Operand> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    result.emplace_back(tensor);
  }
  return result;
}

std::vector<Operand> keep(at::TensorList tensors) {
  return keep(at::ITensorListRef(tensors));
}

// Indices may be the CPU's, on every device. A copy is taken along, whose
// memory the order of the stream keeps.
template <typename MaybeTensor>
std::optional<Operand> keepIndex(const MaybeTensor& tensor) {
  if (!tensor.has_value() || !tensor->defined() || !tensor->is_cpu() ||
      tensor->dim() == 0) {
    return keep(tensor);
  }
  return Operand(tensor->to(c10::Device(c10::kPrivateUse1, currentDevice())));
}

Indices keep(const c10::List<std::optional<at::Tensor>>& tensors) {
  Indices result;
  for (const std::optional<at::Tensor>& tensor : tensors) {
    result.operands.push_back(keepIndex(tensor));
  }
  return result;
}

Indices keep(const at::IOptTensorListRef& tensors) {
  Indices result;
  for (const at::OptionalTensorRef& tensor : tensors) {
    result.operands.push_back(keepIndex(tensor));
  }
  return result;
}

std::optional<at::Scalar> keep(const at::OptionalScalarRef& scalar) {
  return scalar.has_value() ? std::optional(scalar.get()) : std::nullopt;
}

std::string keep(std::string_view text) {
  return std::string(text);
}

std::optional<std::string> keep(const std::optional<std::string_view>& text) {
  return text.has_value() ? std::optional<std::string>(*text) : std::nullopt;
}

std::vector<at::Tensor> give(const std::vector<Operand>& kept) {
  std::vector<at::Tensor> result;
  result.reserve(kept.size());
  for (const Operand& operand : kept) {
    result.push_back(operand.view());
  }
  return result;
}

c10::List<std::optional<at::Tensor>> give(const Indices& kept) {
  c10::List<std::optional<at::Tensor>> result;
  for (const std::optional<Operand>& operand : kept.operands) {
    result.push_back(give(operand));
  }
  return result;
}

} // namespace openreg
