// Chapter: ops
// Making tensors: the two operators every factory ends in.
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "openreg/csrc/device.h"

namespace openreg {
namespace {

// [ops: check-options]
// The device to allocate on. An operator registered outside PyTorch gets no
// device guard from the dispatcher, so every factory sets the device itself.
c10::Device checkOptions(
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(c10::kStrided) == c10::kStrided,
      "openreg tensors are strided; there is no ",
      *layout,
      " layout on this device. Make the tensor on the CPU");
  TORCH_CHECK(
      !pinned.value_or(false),
      "only CPU tensors can be pinned; leave pin_memory out for openreg");
  const c10::Device wanted = device.value_or(c10::Device(c10::kPrivateUse1));
  return wanted.has_index() ? wanted
                            : c10::Device(c10::kPrivateUse1, currentDevice());
}
// [/ops: check-options]

// [ops: empty]
at::Tensor emptyMemoryFormat(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(checkOptions(layout, device, pinned));
  return at::detail::empty_generic(
      size,
      c10::GetAllocator(c10::kPrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}
// [/ops: empty]

// [ops: empty-strided]
at::Tensor emptyStrided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned) {
  const c10::DeviceGuard guard(checkOptions(layout, device, pinned));
  return at::detail::empty_strided_generic(
      size,
      stride,
      c10::GetAllocator(c10::kPrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}
// [/ops: empty-strided]

} // namespace

// [ops: register-empty]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &emptyMemoryFormat);
  m.impl("empty_strided", &emptyStrided);
}
// [/ops: register-empty]

} // namespace openreg
