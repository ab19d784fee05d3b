// silu(gate) * up once more, in a library that outlives releases of PyTorch: it
// includes the headers of the stable ABI only, and so calls C functions that
// later releases keep. The chip's own C API does the rest.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>

#include "openreg/driver/openreg.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What the kernel is launched with: addresses of the device.
struct Arguments {
  float* out;
  const float* gate;
  const float* up;
  std::int64_t count;
};

void run(orKernelContext* context, void* arguments) {
  const auto [out, gate, up, count] = *static_cast<Arguments*>(arguments);
  auto* y = static_cast<float*>(orKernelAddress(context, out));
  const auto* g = static_cast<const float*>(orKernelAddress(context, gate));
  const auto* u = static_cast<const float*>(orKernelAddress(context, up));
  for (std::int64_t i = 0; i < count; ++i) {
    y[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
  }
}

Tensor siluMul(Tensor gate, Tensor up) {
  STD_TORCH_CHECK(
      gate.device() == up.device(),
      "stable::silu_mul: expected two tensors on the same device");
  STD_TORCH_CHECK(
      gate.scalar_type() == ScalarType::Float &&
          up.scalar_type() == ScalarType::Float,
      "stable::silu_mul: expected two tensors of float32");
  STD_TORCH_CHECK(
      gate.sizes().equals(up.sizes()),
      "stable::silu_mul: expected two tensors of the same sizes");
  const auto device = gate.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  gate = torch::stable::contiguous(gate);
  up = torch::stable::contiguous(up);
  const Tensor out = torch::stable::empty_like(gate);

  static constexpr orKernel kernel{"stable::silu_mul", &run, nullptr, nullptr};
  Arguments arguments{
      out.mutable_data_ptr<float>(),
      gate.const_data_ptr<float>(),
      up.const_data_ptr<float>(),
      gate.numel()};
  const auto stream = torch::stable::accelerator::getCurrentStream(device);
  const orError error = orLaunchKernel(
      static_cast<orStream_t>(stream.nativeHandle()),
      &kernel,
      &arguments,
      sizeof(arguments));
  STD_TORCH_CHECK(error == orSuccess, orGetLastErrorMessage());
  return out;
}

} // namespace

STABLE_TORCH_LIBRARY(stable, m) {
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(stable, PrivateUse1, m) {
  m.impl("silu_mul", TORCH_BOX(&siluMul));
}
