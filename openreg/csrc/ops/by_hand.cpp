// Chapter: kernels
// Three operators of this backend's own, by hand from PyTorch's dispatcher down
// to the loop: what every other operator here does, with nothing in between.
#include <ATen/Dispatch.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <new>
#include <utility>

#include "openreg/csrc/launch.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/ops/raw.h"
#include "openreg/csrc/tiles.h"

namespace openreg {
namespace {

// [kernels: raw-launch]
// Queues a kernel of raw.h. The queue copies the arguments, and moves and
// destroys them by these functions, as they own memory of the host.
template <typename Kernel>
void launchRaw(const char* name, Kernel arguments) {
  static const orKernel kernel{
      name,
      &Kernel::run,
      [](void* dst, void* src) {
        new (dst) Kernel(std::move(*static_cast<Kernel*>(src)));
      },
      [](void* args) { static_cast<Kernel*>(args)->~Kernel(); }};
  check(
      orLaunchKernel(currentStream(), &kernel, &arguments, sizeof(arguments)));
}

template <typename T>
raw::Array<T> arrayOf(const at::Tensor& tensor) {
  checkStrided(tensor);
  return {
      static_cast<T*>(tensor.mutable_data_ptr()), // an address of the device
      tensor.strides().vec()};
}

template <typename T>
raw::Array<const T> constArrayOf(const at::Tensor& tensor) {
  checkStrided(tensor);
  return {
      static_cast<const T*>(tensor.const_data_ptr()), tensor.strides().vec()};
}
// [/kernels: raw-launch]

void checkSameType(
    const char* name, const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK(
      left.scalar_type() == right.scalar_type(),
      name,
      ": expected two tensors of one dtype, but got ",
      left.scalar_type(),
      " and ",
      right.scalar_type());
}

// [kernels: axpy]
// a x + y. Sizes are broadcast.
at::Tensor axpy(const at::Tensor& x, const at::Tensor& y, double a) {
  const c10::DeviceGuard guard(commonDevice("openreg::axpy", x, y));
  checkSameType("openreg::axpy", x, y);
  const std::vector<std::int64_t> sizes = at::infer_size(x.sizes(), y.sizes());
  at::Tensor z = at::empty(sizes, x.options());
  if (z.numel() == 0) {
    return z;
  }
  // A loop needs a dimension to go over.
  const std::vector<std::int64_t> loop =
      sizes.empty() ? std::vector<std::int64_t>{1} : sizes;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "openreg::axpy", [&] {
    static constexpr const char* kName = "openreg::axpy";
    launchRaw(
        kName,
        raw::Axpy<scalar_t>{
            loop,
            constArrayOf<scalar_t>(x.expand(loop)),
            constArrayOf<scalar_t>(y.expand(loop)),
            arrayOf<scalar_t>(z.view(loop)),
            static_cast<scalar_t>(a)});
  });
  return z;
}
// [/kernels: axpy]

// [kernels: row-sum]
// (rows, columns) to (rows): the sums over the last dimension.
at::Tensor rowSum(const at::Tensor& x) {
  TORCH_CHECK(
      x.dim() == 2,
      "openreg::row_sum: expected a matrix, but got sizes ",
      x.sizes());
  const c10::DeviceGuard guard(x.device());
  at::Tensor sums = at::empty({x.size(0)}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "openreg::row_sum", [&] {
    static constexpr const char* kName = "openreg::row_sum";
    launchRaw(
        kName,
        raw::RowSum<scalar_t>{
            x.size(0),
            x.size(1),
            constArrayOf<scalar_t>(x),
            arrayOf<scalar_t>(sums)});
  });
  return sums;
}
// [/kernels: row-sum]

// [kernels: product]
// (rows, inner) times (inner, columns) to (rows, columns).
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(
      a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0),
      "openreg::product: matrices of sizes ",
      a.sizes(),
      " and ",
      b.sizes(),
      " cannot be multiplied");
  const c10::DeviceGuard guard(commonDevice("openreg::product", a, b));
  checkSameType("openreg::product", a, b);
  at::Tensor c = at::empty({a.size(0), b.size(1)}, a.options());
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "openreg::product", [&] {
    static constexpr const char* kName = "openreg::product";
    launchRaw(
        kName,
        raw::Product<scalar_t>{
            a.size(0),
            b.size(1),
            a.size(1),
            constArrayOf<scalar_t>(a),
            constArrayOf<scalar_t>(b),
            arrayOf<scalar_t>(c)});
  });
  return c;
}
// [/kernels: product]

} // namespace

// [kernels: register-by-hand]
TORCH_LIBRARY(openreg, m) {
  m.def("axpy(Tensor x, Tensor y, float a) -> Tensor");
  m.def("row_sum(Tensor x) -> Tensor");
  m.def("product(Tensor a, Tensor b) -> Tensor");
}

TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("axpy", &axpy);
  m.impl("row_sum", &rowSum);
  m.impl("product", &product);
}
// [/kernels: register-by-hand]

} // namespace openreg
