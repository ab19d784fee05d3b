// Chapter: ops
// Views: new sizes and strides over the same memory. PyTorch's own functions
// only rearrange metadata, so they serve any device.
#include <ATen/core/Tensor.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace openreg {

// [ops: views]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("is_set_to", &at::native::is_set_to);
}
// [/ops: views]

} // namespace openreg
