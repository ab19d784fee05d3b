// Chapter: frontend
// `parameter.data = tensor`, which is what `module.to(device)` does: the tensor
// object stays, and takes over the sizes, strides and storage of another.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace openreg {
namespace {

// [frontend: set-data]
// PyTorch asks whether the two are of one C++ type, by a list of backends that
// has the CPU and CUDA in it, and no PrivateUse1. Where it gets a no, a module
// that moves is given new parameters in silence: an optimizer that was made
// before goes on changing the old ones, and layers that shared a weight no
// longer do. Tensors of this device are plain c10::TensorImpl, as the CPU's.
bool compatible(const at::Tensor& self, const at::Tensor& from) {
  const auto plain = [](const at::Tensor& tensor) {
    return (tensor.is_cpu() || tensor.is_privateuseone()) &&
           tensor.layout() == c10::kStrided;
  };
  return plain(self) && plain(from);
}
// [/frontend: set-data]

} // namespace

// [frontend: register-set-data]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &compatible);
}
// [/frontend: register-set-data]

} // namespace openreg
