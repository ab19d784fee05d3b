// Chapter: ops
// Filling tensors: what zeros, ones and full are made of.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "openreg/csrc/launch.h"

namespace openreg {
namespace {

constexpr char kFillName[] = "fill_";

// [ops: fill]
// As on the CPU, a number may fill an expanded tensor, whose elements share
// memory; a tensor may not, since that is a copy.
at::Tensor& fillScalar(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() > 0) {
    const c10::DeviceGuard guard(self.device());
    launch<kFillName>([to = deviceView(self), value] { to.fill_(value); });
  }
  return self;
}

at::Tensor& fillTensor(at::Tensor& self, const at::Tensor& value) {
  TORCH_CHECK(
      value.dim() == 0,
      "fill_ takes a tensor of no dimensions as the value, but got one of ",
      value.dim());
  at::assert_no_internal_overlap(self);
  if (value.device() != self.device()) {
    return self.fill_(value.item()); // either of the two may be the CPU's
  }
  if (self.numel() > 0) {
    const c10::DeviceGuard guard(self.device());
    launch<kFillName>(
        [to = deviceView(self), from = deviceView(value)] { to.fill_(from); });
  }
  return self;
}
// [/ops: fill]

// [ops: zero]
at::Tensor& zero(at::Tensor& self) {
  if (self.numel() == 0) {
    return self;
  }
  if (!self.is_non_overlapping_and_dense()) {
    return fillScalar(self, 0);
  }
  const c10::DeviceGuard guard(self.device());
  check(orMemsetAsync(
      self.mutable_data_ptr(), 0, self.nbytes(), currentStream()));
  return self;
}
// [/ops: zero]

} // namespace

// [ops: register-fill]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("fill_.Scalar", &fillScalar);
  m.impl("fill_.Tensor", &fillTensor);
  m.impl("zero_", &zero);
}
// [/ops: register-fill]

} // namespace openreg
