// Chapter: kernels
// Like the CPU's, `relu` is `clamp_min`, which has a kernel.
#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_min.h>
#include <torch/library.h>

namespace openreg {
namespace {

// [kernels: relu]
void checkNumbers(const at::Tensor& self) {
  TORCH_CHECK(
      self.scalar_type() != at::kBool, "Boolean inputs not supported for relu");
}

at::Tensor relu(const at::Tensor& self) {
  checkNumbers(self);
  return at::clamp_min(self, 0);
}

at::Tensor& reluInPlace(at::Tensor& self) {
  checkNumbers(self);
  return at::clamp_min_(self, 0);
}
// [/kernels: relu]

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("relu", &relu);
  m.impl("relu_", &reluInPlace);
}

} // namespace openreg
