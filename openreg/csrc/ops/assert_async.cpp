// Chapter: kernels
// Assertions about values of the device, which nobody waits for.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <string>
#include <string_view>

#include "openreg/csrc/operand.h"

namespace openreg {
namespace {

constexpr char kAssert[] = "_assert_async";

// [kernels: assert-async]
// A kernel that fails where the element is zero: the error is reported by the
// next call that synchronizes, as that of any other kernel.
void assertThat(const at::Tensor& self, std::string_view message) {
  TORCH_CHECK(
      self.numel() == 1,
      "_assert_async: expected a tensor of one element, but got sizes ",
      self.sizes());
  const c10::DeviceGuard guard(self.device());
  launch<kAssert>([x = keep(self), message = std::string(message)] {
    TORCH_CHECK(x.view().is_nonzero(), message);
  });
}

void assertNonzero(const at::Tensor& self) {
  assertThat(self, "Expected Tensor with single nonzero value, but got zero");
}
// [/kernels: assert-async]

} // namespace

// [kernels: register-assert]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_assert_async", &assertNonzero);
  m.impl("_assert_async.msg", &assertThat);
}
// [/kernels: register-assert]

} // namespace openreg
