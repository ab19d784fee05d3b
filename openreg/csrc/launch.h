// Chapter: ops
// The one way work gets onto the device.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <new>
#include <type_traits>
#include <utility>

#include "openreg/csrc/device.h"
#include "openreg/csrc/stream.h"

namespace openreg {

// Bytes from an address of the device to where kernels find it; constant.
std::ptrdiff_t backingOffset();

// [ops: view]
// The tensor's elements as a running kernel sees them: a CPU tensor over the
// backing memory. Made on the host, to be read and written by a kernel only.
//
// It does not keep the memory alive. Nothing needs to: a freed block is handed
// out again on its own stream only, behind the kernels that were launched
// before. For a tensor that another stream owns, the user calls record_stream.
at::Tensor deviceView(const at::Tensor& tensor);
// [/ops: view]

namespace detail {

// [ops: kernel]
// A kernel descriptor for a C++ callable, which the queue moves, runs and
// destroys in place. An exception becomes the kernel's failure: it must not
// leave an engine's thread.
template <typename Body>
struct KernelOf {
  static void run(orKernelContext* context, void* args) {
    // The operator was dispatched, and autograd recorded, on the host.
    const at::AutoDispatchBelowADInplaceOrView below;
    try {
      (*static_cast<Body*>(args))();
    } catch (const c10::Error& error) {
      orKernelFail(context, error.what_without_backtrace());
    } catch (const std::exception& error) {
      orKernelFail(context, error.what());
    }
  }

  static void move(void* dst, void* src) {
    new (dst) Body(std::move(*static_cast<Body*>(src)));
  }

  static void destroy(void* args) {
    static_cast<Body*>(args)->~Body();
  }
};
// [/ops: kernel]

} // namespace detail

// [ops: launch]
// Queue `body`, which is moved from, on the current stream of the current
// device and return. The name is what an error message will call it.
template <const char* kName, typename Body>
void launch(Body&& body) {
  static_assert(!std::is_lvalue_reference_v<Body>, "the queue takes it along");
  using Kernel = detail::KernelOf<Body>;
  static_assert(alignof(Body) <= 16, "the queue aligns arguments to 16");
  static constexpr orKernel kernel{
      kName, &Kernel::run, &Kernel::move, &Kernel::destroy};
  check(orLaunchKernel(currentStream(), &kernel, &body, sizeof(Body)));
}
// [/ops: launch]

} // namespace openreg
