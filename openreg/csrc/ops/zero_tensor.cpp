// Chapter: autograd
// Tangents of zero, which forward-mode differentiation asks for by their own
// operator: PyTorch's devices give a tensor without memory there, and the
// kernels of `dot` and `vdot` have to look out for it. Zeros in memory are
// right for every kernel.
#include <ATen/ops/zeros_native.h>
#include <torch/library.h>

namespace openreg {

// [autograd: register-zero-tensor]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_efficientzerotensor", &at::native::zeros_symint);
}
// [/autograd: register-zero-tensor]

} // namespace openreg
