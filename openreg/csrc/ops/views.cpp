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

#include "openreg/csrc/tiles.h"

namespace openreg {

namespace {

// [ops: strided]
// `Kernel`, for tensors whose elements lie where their strides say.
template <auto Kernel>
struct Strided;

template <
    typename Result,
    typename... Rest,
    Result (*Kernel)(const at::Tensor&, Rest...)>
struct Strided<Kernel> {
  static Result call(const at::Tensor& self, Rest... rest) {
    checkStrided(self);
    return Kernel(self, std::forward<Rest>(rest)...);
  }
};
// [/ops: strided]

} // namespace

// [ops: views]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("view", &Strided<&at::native::view>::call);
  m.impl("as_strided", &Strided<&at::native::as_strided_tensorimpl>::call);
  m.impl("_reshape_alias", &Strided<&at::native::_reshape_alias>::call);
  m.impl("unfold", &Strided<&at::native::unfold>::call);
  m.impl("view_as_real", &Strided<&at::native::view_as_real>::call);
  m.impl("view_as_complex", &Strided<&at::native::view_as_complex>::call);
  // These two change nothing but the tensor object.
  m.impl("alias", &aliasOf);
  m.impl("detach", &aliasOf);
  m.impl("is_set_to", &at::native::is_set_to);
}
// [/ops: views]

} // namespace openreg
