// Chapter: ops
// Copies: within a device, between two, and to and from the host.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "openreg/csrc/launch.h"

namespace openreg {
namespace {

constexpr char kCopyName[] = "copy";

bool sameBits(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.is_conj() == b.is_conj() &&
         a.is_neg() == b.is_neg();
}

// [ops: plain]
// Whether one run of bytes holds the elements of both, in the same order.
bool plain(const at::Tensor& dst, const at::Tensor& src) {
  return sameBits(dst, src) && dst.strides() == src.strides() &&
         dst.is_non_overlapping_and_dense();
}

void copyBytes(const at::Tensor& dst, const at::Tensor& src) {
  check(orMemcpyAsync(
      dst.mutable_data_ptr(),
      src.const_data_ptr(),
      dst.nbytes(),
      orMemcpyDefault,
      nullptr));
}
// [/ops: plain]

// [ops: within]
// Between two tensors of the current device. Anything but plain bytes needs a
// kernel: it converts types, follows strides, resolves conjugation.
void copyWithin(const at::Tensor& dst, const at::Tensor& src) {
  if (plain(dst, src)) {
    copyBytes(dst, src);
    return;
  }
  launch<kCopyName>(
      [to = deviceView(dst), from = deviceView(src)] { to.copy_(from); });
}
// [/ops: within]

// The default streams of two devices, one after the other.
class StreamOrder {
 public:
  // What is queued on `later` from now on runs after what `earlier` has queued.
  static void after(c10::Device later, c10::Device earlier) {
    orEvent_t event = nullptr;
    {
      const c10::DeviceGuard guard(earlier);
      check(orEventCreateWithFlags(&event, orEventDisableTiming));
      check(orEventRecord(event, nullptr));
    }
    const c10::DeviceGuard guard(later);
    const orError waited = orStreamWaitEvent(nullptr, event);
    orEventDestroy(event);
    check(waited);
  }
};

// [ops: between]
// Between two devices, on the source's stream: the source is packed there, and
// the destination's stream waits for the bytes.
void copyBetween(const at::Tensor& dst, const at::Tensor& src) {
  StreamOrder::after(src.device(), dst.device()); // dst may still be in use
  const c10::DeviceGuard guard(src.device());
  if (plain(dst, src)) {
    copyBytes(dst, src);
    StreamOrder::after(dst.device(), src.device());
    return;
  }
  const at::Tensor packed =
      at::empty(src.sizes(), src.options().dtype(dst.dtype()));
  copyWithin(packed, src);
  const at::Tensor arrived = at::empty(dst.sizes(), dst.options());
  StreamOrder::after(src.device(), dst.device());
  copyBytes(arrived, packed);
  StreamOrder::after(dst.device(), src.device());
  const c10::DeviceGuard there(dst.device());
  copyWithin(dst, arrived);
}
// [/ops: between]

// [ops: to-host]
// The device packs, the copy engine moves one run of bytes, and the host
// spreads them, if that is needed at all.
void copyToHost(const at::Tensor& dst, const at::Tensor& src, bool async) {
  const c10::DeviceGuard guard(src.device());
  if (plain(dst, src)) {
    copyBytes(dst, src);
    if (async && dst.is_pinned()) {
      return; // the caller synchronizes before it reads
    }
    check(orStreamSynchronize(nullptr));
    return;
  }
  at::Tensor packed = src;
  if (!src.is_contiguous() || !sameBits(dst, src)) {
    packed = at::empty(src.sizes(), src.options().dtype(dst.dtype()));
    copyWithin(packed, src);
  }
  const at::Tensor arrived =
      at::empty(dst.sizes(), packed.options().device(c10::kCPU));
  copyBytes(arrived, packed); // pageable, so this waits
  dst.copy_(arrived);
}
// [/ops: to-host]

// [ops: to-device]
void copyToDevice(const at::Tensor& dst, const at::Tensor& src, bool async) {
  const c10::DeviceGuard guard(dst.device());
  if (plain(dst, src)) {
    copyBytes(dst, src);
    if (!src.is_pinned()) {
      return; // pageable memory: the driver has waited
    }
    if (async) {
      // The bytes are read later. Holding the source until then is our part.
      launch<kCopyName>([source = src.storage()] {});
    } else {
      check(orStreamSynchronize(nullptr));
    }
    return;
  }
  const at::Tensor packed =
      src.is_contiguous() && !src.is_conj() && !src.is_neg()
          ? src
          : at::empty(src.sizes(), src.options().pinned_memory(false))
                .copy_(src);
  const at::Tensor arrived =
      at::empty(dst.sizes(), dst.options().dtype(src.dtype()));
  copyToDevice(arrived, packed, async);
  copyWithin(dst, arrived);
}
// [/ops: to-device]

// [ops: copy-from]
at::Tensor copyFrom(
    const at::Tensor& self, const at::Tensor& dst, bool nonBlocking) {
  TORCH_CHECK(
      self.sizes() == dst.sizes(),
      "cannot copy a tensor of shape ",
      self.sizes(),
      " into one of shape ",
      dst.sizes(),
      "; expand it first");
  if (dst.is_same(self) || dst.numel() == 0) {
    return dst;
  }
  // The CPU refuses these before it writes; a queued kernel would be too late.
  at::assert_no_internal_overlap(dst);
  if (dst.device() == self.device()) {
    at::assert_no_partial_overlap(dst, self);
    const c10::DeviceGuard guard(dst.device());
    copyWithin(dst, self);
  } else if (self.is_cpu()) {
    copyToDevice(dst, self, nonBlocking);
  } else if (dst.is_cpu()) {
    copyToHost(dst, self, nonBlocking);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(
        self.device().type() == dst.device().type(),
        "cannot copy from ",
        self.device(),
        " to ",
        dst.device(),
        "; go through the CPU");
    copyBetween(dst, self);
  }
  return dst;
}
// [/ops: copy-from]

// [ops: copy-from-and-resize]
// The CPU fallback's way back for `out=` arguments of the wrong size.
at::Tensor copyFromAndResize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copyFrom(self, dst, /*nonBlocking=*/false);
}
// [/ops: copy-from-and-resize]

// [ops: item]
// Reads one element, and so waits for all work before it on the stream.
at::Scalar localScalarDense(const at::Tensor& self) {
  const at::Tensor host =
      at::empty({}, self.options().device(c10::kCPU).pinned_memory(false));
  const c10::DeviceGuard guard(self.device());
  check(orMemcpyAsync(
      host.mutable_data_ptr(),
      self.const_data_ptr(),
      self.itemsize(),
      orMemcpyDeviceToHost,
      nullptr));
  return host.item();
}
// [/ops: item]

} // namespace

// [ops: register-copy]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copyFrom);
  m.impl("_copy_from_and_resize", &copyFromAndResize);
  m.impl("_local_scalar_dense", &localScalarDense);
}
// [/ops: register-copy]

// [ops: lazy-bits]
// `_copy_from` reads conjugation and negation itself. Without these lines the
// fallback of the two keys resolves them first, by a clone, which is a copy,
// which resolves them first, until the stack is full.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
// [/ops: lazy-bits]

} // namespace openreg
