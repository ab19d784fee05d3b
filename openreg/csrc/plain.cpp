// Chapter: kernels
#include "openreg/csrc/plain.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>

#include "openreg/csrc/device.h"

namespace openreg {

// [kernels: is-plain]
bool isPlain(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.device_type() == c10::kPrivateUse1 && impl.is_contiguous() &&
         impl.device().index() == currentDevice();
}

at::Tensor newResult(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(
      sizes,
      c10::GetAllocator(c10::kPrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype,
      std::nullopt);
}
// [/kernels: is-plain]

} // namespace openreg
