// Chapter: ops
// Copies: within a device, between two, and to and from the host.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "openreg/csrc/launch.h"
#include "openreg/csrc/pinned.h"
#include "openreg/csrc/sync_debug.h"
#include "openreg/csrc/tiles.h"

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
  if (!sameBits(dst, src)) {
    return false;
  }
  // Contiguous tensors may still differ in the stride of a dimension of 1.
  return dst.is_contiguous() ? src.is_contiguous()
                             : dst.strides() == src.strides() &&
                                   dst.is_non_overlapping_and_dense();
}

void copyBytes(const at::Tensor& dst, const at::Tensor& src) {
  check(orMemcpyAsync(
      dst.mutable_data_ptr(),
      src.const_data_ptr(),
      dst.nbytes(),
      orMemcpyDefault,
      currentStream()));
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

// [ops: order]
// What is queued on `later` from now on runs after what `earlier` has queued:
// an event is recorded on the one device's stream, the other's waits for it.
void runAfter(c10::Device later, c10::Device earlier) {
  c10::DeviceGuard guard(earlier);
  orEvent_t event = nullptr;
  check(orEventCreateWithFlags(&event, orEventDisableTiming));
  check(orEventRecord(event, currentStream()));
  guard.set_index(later.index());
  const orError waited = orStreamWaitEvent(currentStream(), event);
  orEventDestroy(event); // what is queued already still takes place
  check(waited);
}
// [/ops: order]

// [ops: between]
// Between two devices, on the source's stream: the source is packed there, and
// the destination's stream waits for the bytes.
void copyBetween(const at::Tensor& dst, const at::Tensor& src) {
  runAfter(src.device(), dst.device()); // dst may still be in use
  const c10::DeviceGuard guard(src.device());
  if (plain(dst, src)) {
    copyBytes(dst, src);
    runAfter(dst.device(), src.device());
    return;
  }
  const at::Tensor packed =
      at::empty(src.sizes(), src.options().dtype(dst.dtype()));
  copyWithin(packed, src);
  const at::Tensor arrived = at::empty(dst.sizes(), dst.options());
  runAfter(src.device(), dst.device());
  copyBytes(arrived, packed);
  runAfter(dst.device(), src.device());
  const c10::DeviceGuard there(dst.device());
  copyWithin(dst, arrived);
}
// [/ops: between]

// [ops: keep]
// The bytes of a page-locked tensor are read or written later. Its block must
// not be handed out again before; what is not from our cache is held instead.
void keep(const at::Tensor& pinned) {
  const c10::DataPtr& data = pinned.storage().data_ptr();
  if (!pinnedAllocator()->record_event(
          data.get(), data.get_context(), currentStream(currentDevice()))) {
    launch<kCopyName>([storage = pinned.storage()] {});
  }
}
// [/ops: keep]

// [ops: to-host]
// The device packs, the copy engine moves one run of bytes, and the host
// spreads them, if that is needed at all.
void copyToHost(const at::Tensor& dst, const at::Tensor& src, bool async) {
  const c10::DeviceGuard guard(src.device());
  if (plain(dst, src)) {
    const bool later = async && dst.is_pinned();
    if (!later) {
      noteWait("copying to the host");
    }
    copyBytes(dst, src);
    if (later) {
      keep(dst); // the caller synchronizes before it reads
      return;
    }
    check(orStreamSynchronize(currentStream()));
    return;
  }
  noteWait("copying to the host");
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
    const bool pinned = src.is_pinned();
    if (!async || !pinned) {
      noteWait("copying pageable or blocking from the host");
    }
    copyBytes(dst, src);
    if (!pinned) {
      return; // pageable memory: the driver has waited
    }
    if (async) {
      keep(src);
    } else {
      check(orStreamSynchronize(currentStream()));
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

// [ops: source-for]
// The elements to copy, one for each element of `dst`: `copy_` broadcasts, and
// leaves that to us. The warning of complex to real belongs to the caller's
// thread too; on an engine nobody could catch it.
at::Tensor sourceFor(const at::Tensor& dst, const at::Tensor& src) {
  at::Tensor result = src;
  if (src.is_complex() && !dst.is_complex() && dst.dtype() != at::kBool) {
    TORCH_WARN_ONCE(
        "Casting complex values to real discards the imaginary part");
    result = at::real(src);
  }
  return dst.sizes() == src.sizes() ? result : result.expand(dst.sizes());
}
// [/ops: source-for]

// [ops: copy-from]
at::Tensor copyFrom(
    const at::Tensor& self, const at::Tensor& dst, bool nonBlocking) {
  const at::Tensor src = sourceFor(dst, toStrided(self));
  if (isTiled(dst)) {
    const at::Tensor there = src.to(dst.options(), nonBlocking);
    copyFrom(memoryOf(toTiled(there)), memoryOf(dst), nonBlocking);
    return dst;
  }
  if (dst.is_same(src) || dst.numel() == 0) {
    return dst;
  }
  // The CPU refuses these before it writes; a queued kernel would be too late.
  at::assert_no_internal_overlap(dst);
  if (dst.device() == src.device()) {
    at::assert_no_partial_overlap(dst, src);
    const c10::DeviceGuard guard(dst.device());
    copyWithin(dst, src);
  } else if (src.is_cpu()) {
    copyToDevice(dst, src, nonBlocking);
  } else if (dst.is_cpu()) {
    copyToHost(dst, src, nonBlocking);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(
        src.device().type() == dst.device().type(),
        "cannot copy from ",
        src.device(),
        " to ",
        dst.device(),
        "; go through the CPU");
    copyBetween(dst, src);
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

// [ops: clone]
at::Tensor clone(
    const at::Tensor& self, std::optional<c10::MemoryFormat> format) {
  if (!isTiled(self) || format.value_or(c10::MemoryFormat::Preserve) !=
                            c10::MemoryFormat::Preserve) {
    return at::native::clone(self, format);
  }
  const c10::DeviceGuard guard(self.device());
  return toTiled(toStrided(self));
}
// [/ops: clone]

// [ops: item]
// Reads one element, and so waits for all work before it on the stream.
at::Scalar localScalarDense(const at::Tensor& self) {
  noteWait("reading one element, as item() does");
  const at::Tensor host =
      at::empty({}, self.options().device(c10::kCPU).pinned_memory(false));
  const c10::DeviceGuard guard(self.device());
  check(orMemcpyAsync(
      host.mutable_data_ptr(),
      self.const_data_ptr(),
      self.itemsize(),
      orMemcpyDeviceToHost,
      currentStream()));
  return host.item();
}
// [/ops: item]

} // namespace

// [ops: register-copy]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copyFrom);
  m.impl("_copy_from_and_resize", &copyFromAndResize);
  m.impl("clone", &clone);
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
