// Chapter: ops
#include "openreg/csrc/launch.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include "openreg/csrc/tiles.h"

namespace openreg {

std::ptrdiff_t backingOffset() {
  static const std::ptrdiff_t offset = [] {
    std::ptrdiff_t result = 0;
    check(orGetBackingOffset(&result));
    return result;
  }();
  return offset;
}

// [ops: device-view]
at::Tensor deviceView(const at::Tensor& tensor) {
  checkStrided(tensor);
  const c10::Storage& storage = tensor.storage();
  char* data = static_cast<char*>(storage.data_ptr().get());
  c10::Storage backing(
      c10::Storage::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(
          data == nullptr ? nullptr : data + backingOffset(), c10::kCPU));
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(backing),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  // Conjugation and negation are lazy: bits that say how to read the elements.
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}
// [/ops: device-view]

} // namespace openreg
