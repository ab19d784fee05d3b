// Chapter: ops
// Tensors and storages that change their size, and tensors that change storage.
#include "openreg/csrc/ops/resize.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "openreg/csrc/allocator.h"
#include "openreg/csrc/device.h"
#include "openreg/csrc/stream.h"
#include "openreg/csrc/tiles.h"

namespace openreg {

// [ops: resize-storage]
void resizeStorage(c10::StorageImpl* storage, std::size_t bytes) {
  TORCH_CHECK(
      storage->resizable(),
      "cannot resize a storage that is not resizable; it may be borrowed from "
      "another library. Clone the tensor first");
  const c10::DeviceGuard guard(storage->device());
  c10::DataPtr data;
  if (bytes > 0) {
    data = c10::GetAllocator(c10::kPrivateUse1)->allocate(bytes);
    const std::size_t kept = std::min(bytes, storage->nbytes());
    check(orMemcpyAsync(
        data.get(),
        storage->data(),
        kept,
        orMemcpyDeviceToDevice,
        currentStream()));
  } else {
    data = c10::DataPtr(nullptr, storage->device());
  }
  // The old memory goes when the assignment returns. The queued copy still
  // reads it, on the current stream, which need not be the one it belongs to.
  if (bytes > 0) {
    deviceAllocator()->recordStream(
        storage->data_ptr(), currentStream(storage->device().index()));
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}
// [/ops: resize-storage]

namespace {

// [ops: grow]
// Make the storage large enough for the sizes and strides the tensor has.
void growToFit(const at::Tensor& self) {
  if (self.numel() == 0) {
    return;
  }
  const std::size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    resizeStorage(storage, needed);
  }
}
// [/ops: grow]

// [ops: resize]
const at::Tensor& resize(
    const at::Tensor& self,
    c10::IntArrayRef size,
    std::optional<c10::MemoryFormat> format) {
  checkStrided(self);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    growToFit(self);
  }
  if (format.has_value()) {
    TORCH_CHECK(
        *format != c10::MemoryFormat::Preserve,
        "resize_ cannot preserve a memory format; name the one you want");
    impl->empty_tensor_restride(*format);
    growToFit(self);
  }
  return self;
}
// [/ops: resize]

// [ops: set]
at::Tensor& setStorage(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  TORCH_CHECK(
      source.device().type() == c10::kPrivateUse1,
      "cannot put a storage of ",
      source.device(),
      " under an openreg tensor; move it to the device first");
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_backend_meta(nullptr); // said how to read the storage it had
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  growToFit(self);
  return self;
}

// `set_()` leaves an empty tensor with a storage of its own.
at::Tensor& setEmpty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Allocator* allocator = c10::GetAllocator(c10::kPrivateUse1);
  c10::Storage empty(
      c10::Storage::use_byte_size_t(),
      0,
      allocator->allocate(0),
      allocator,
      /*resizable=*/true);
  return setStorage(self, std::move(empty), 0, {0}, {});
}
// [/ops: set]

} // namespace

// [ops: register-resize]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("resize_", &resize);
  m.impl("set_", &setEmpty);
  m.impl("set_.source_Storage_storage_offset", &setStorage);
  // These two end in the one above.
  m.impl(
      "set_.source_Storage",
      static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(
          &at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}
// [/ops: register-resize]

} // namespace openreg
