// Chapter: autograd
// An operator of one's own, with all that PyTorch asks of it: silu(gate) * up,
// the activation of Llama's feed-forward layers. In one pass over the memory,
// where PyTorch's own operators take two and keep a tensor in between.
#include <ATen/Dispatch.h>
#include <ATen/TensorIterator.h>
#include <ATen/TensorOperators.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "openreg/csrc/operand.h"
#include "openreg/csrc/ops/arguments.h"
#include "openreg/csrc/ops/silu_mul_loops.h"
#include "openreg/csrc/trial.h"

namespace openreg {
namespace {

constexpr char kForward[] = "openreg::silu_mul";
constexpr char kBackward[] = "openreg::silu_mul_backward";

// [autograd: check-silu-mul]
// For all devices, and for tensors without data: what the operator demands. A
// size may be a symbol there. To ask for its number would fix it for good; to
// demand that two be equal leaves them free.
void checkPair(const at::Tensor& gate, const at::Tensor& up) {
  const c10::SymIntArrayRef left = gate.sym_sizes(), right = up.sym_sizes();
  const auto equal = [](const c10::SymInt& a, const c10::SymInt& b) {
    return a.sym_eq(b).expect_true(__FILE__, __LINE__);
  };
  TORCH_CHECK(
      std::equal(left.begin(), left.end(), right.begin(), right.end(), equal),
      "openreg::silu_mul: expected two tensors of the same sizes, but got ",
      left,
      " and ",
      right);
  TORCH_CHECK(
      gate.scalar_type() == up.scalar_type() &&
          at::isFloatingType(gate.scalar_type()),
      "openreg::silu_mul: expected two tensors of one floating-point dtype, "
      "but got ",
      gate.scalar_type(),
      " and ",
      up.scalar_type());
  TORCH_CHECK(
      gate.device() == up.device(),
      "openreg::silu_mul: expected two tensors on the same device, but got ",
      gate.device(),
      " and ",
      up.device());
}
// [/autograd: check-silu-mul]

// [autograd: silu-mul-choose]
// The loops for this processor, as torch judges it: what torch has found, or
// what the environment variable ATEN_CPU_CAPABILITY says.
//
// NB: not by an at::native::DispatchStub, as ATen's kernels. Its size and the
// arguments of its functions depend on macros (HAVE_AVX2_CPU_DEFINITION and
// others) that torch was built with and that its headers do not keep.
bool hasAvx2() {
  static const bool result = at::get_cpu_capability().starts_with("AVX");
  return result;
}

template <typename T>
SiluMulLoops loops() {
  return hasAvx2() ? siluMulLoopsWithAvx2<T>()
                   : SiluMulLoops{&siluMulForward<T>, &siluMulBackward<T>};
}
// [/autograd: silu-mul-choose]

// [autograd: silu-mul-iterate]
// On an engine. TensorIterator finds the loops for the strides at hand: it
// joins and reorders dimensions, and splits the work over threads.
void forwardLoop(
    const at::Tensor& out, const at::Tensor& gate, const at::Tensor& up) {
  auto iter = at::TensorIteratorConfig()
                  .add_output(out)
                  .add_const_input(gate)
                  .add_const_input(up)
                  .resize_outputs(false)
                  .build();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, out.scalar_type(), kForward, [&] {
        iter.for_each(loops<scalar_t>().forward);
      });
}

void backwardLoop(
    const at::Tensor& gradGate,
    const at::Tensor& gradUp,
    const at::Tensor& grad,
    const at::Tensor& gate,
    const at::Tensor& up) {
  auto iter = at::TensorIteratorConfig()
                  .add_output(gradGate)
                  .add_output(gradUp)
                  .add_const_input(grad)
                  .add_const_input(gate)
                  .add_const_input(up)
                  .resize_outputs(false)
                  .build();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, grad.scalar_type(), kBackward, [&] {
        iter.for_each(loops<scalar_t>().backward);
      });
}
// [/autograd: silu-mul-iterate]

// [autograd: silu-mul-kernels]
at::Tensor forward(const at::Tensor& gate, const at::Tensor& up) {
  const c10::DeviceGuard guard(commonDevice(kForward, gate, up));
  checkPair(gate, up);
  const at::Tensor out = at::empty_like(gate);
  launchTried<kForward>(
      signatureOf(gate, up), [y = keep(out), g = keep(gate), u = keep(up)] {
        forwardLoop(y.view(), g.view(), u.view());
      });
  return out;
}

std::tuple<at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  const c10::DeviceGuard guard(commonDevice(kBackward, grad, gate, up));
  checkPair(gate, up);
  checkPair(grad, gate);
  at::Tensor gradGate = at::empty_like(gate);
  at::Tensor gradUp = at::empty_like(up);
  launchTried<kBackward>(
      signatureOf(grad, gate, up),
      [dg = keep(gradGate),
       du = keep(gradUp),
       dy = keep(grad),
       g = keep(gate),
       u = keep(up)] {
        backwardLoop(dg.view(), du.view(), dy.view(), g.view(), u.view());
      });
  return {std::move(gradGate), std::move(gradUp)};
}
// [/autograd: silu-mul-kernels]

// [autograd: silu-mul-cpu]
// The same loops serve tensors of the CPU, and the program runs anywhere.
at::Tensor forwardOnCpu(const at::Tensor& gate, const at::Tensor& up) {
  checkPair(gate, up);
  at::Tensor out = at::empty_like(gate);
  forwardLoop(out, gate, up);
  return out;
}

std::tuple<at::Tensor, at::Tensor> backwardOnCpu(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  checkPair(gate, up);
  checkPair(grad, gate);
  at::Tensor gradGate = at::empty_like(gate);
  at::Tensor gradUp = at::empty_like(up);
  backwardLoop(gradGate, gradUp, grad, gate, up);
  return {std::move(gradGate), std::move(gradUp)};
}
// [/autograd: silu-mul-cpu]

// [autograd: silu-mul-meta]
// The form of the results without data: what torch.compile and torch.export
// ask for.
at::Tensor forwardOnMeta(const at::Tensor& gate, const at::Tensor& up) {
  checkPair(gate, up);
  return at::empty_like(gate);
}

std::tuple<at::Tensor, at::Tensor> backwardOnMeta(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  checkPair(gate, up);
  checkPair(grad, gate);
  return {at::empty_like(gate), at::empty_like(up)};
}
// [/autograd: silu-mul-meta]

// [autograd: silu-mul-composed]
// What the operators mean, in operators that PyTorch knows all about: how to
// differentiate them once more or forwards, and how to vectorize them.
at::Tensor composed(const at::Tensor& gate, const at::Tensor& up) {
  checkPair(gate, up);
  return at::silu(gate) * up;
}

std::tuple<at::Tensor, at::Tensor> composedBackward(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  checkPair(gate, up);
  checkPair(grad, gate);
  const at::Tensor sigmoid = at::sigmoid(gate);
  const at::Tensor slope = sigmoid * (1 + gate * (1 - sigmoid));
  return {grad * up * slope, grad * gate * sigmoid};
}
// [/autograd: silu-mul-composed]

// [autograd: silu-mul-choice]
// Inside torch.func.grad, vmap and their kin, which have no hold on a
// torch::autograd::Function, and for tensors with tangents (forward mode).
template <typename... Tensors>
bool isTransformed(const Tensors&... tensors) {
  return c10::impl::tls_is_dispatch_key_included(
             c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
         (tensors._fw_grad(/*level=*/0).defined() || ...);
}

template <typename... Tensors>
bool isRecording(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.requires_grad() || ...);
}
// [/autograd: silu-mul-choice]

// [autograd: silu-mul-call]
// By way of the dispatcher, which looks for the next kernel.
at::Tensor call(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("openreg::silu_mul", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(gate, up);
}

std::tuple<at::Tensor, at::Tensor> callBackward(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("openreg::silu_mul_backward", "")
          .typed<std::tuple<at::Tensor, at::Tensor>(
              const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
  return op.call(grad, gate, up);
}
// [/autograd: silu-mul-call]

// [autograd: silu-mul-autograd]
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SiluMul : torch::autograd::Function<SiluMul> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    const at::AutoDispatchBelowADInplaceOrView below; // now the kernel
    return call(gate, up);
  }

  static variable_list backward(
      AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    auto [gradGate, gradUp] = callBackward(grads[0], saved[0], saved[1]);
    return {std::move(gradGate), std::move(gradUp)};
  }
};

at::Tensor recorded(const at::Tensor& gate, const at::Tensor& up) {
  if (isTransformed(gate, up)) {
    return composed(gate, up);
  }
  if (isRecording(gate, up)) {
    return SiluMul::apply(gate, up);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call(gate, up);
}

// The gradient of a gradient is rare, and needs no kernel of its own.
std::tuple<at::Tensor, at::Tensor> recordedBackward(
    const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  if (isTransformed(grad, gate, up) || isRecording(grad, gate, up)) {
    return composedBackward(grad, gate, up);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return callBackward(grad, gate, up);
}
// [/autograd: silu-mul-autograd]

} // namespace

// [autograd: register-silu-mul]
TORCH_LIBRARY_FRAGMENT(openreg, m) {
  m.def(
      "silu_mul(Tensor gate, Tensor up) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "silu_mul_backward(Tensor grad, Tensor gate, Tensor up)"
      " -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(openreg, PrivateUse1, m) {
  m.impl("silu_mul", &forward);
  m.impl("silu_mul_backward", &backward);
}

TORCH_LIBRARY_IMPL(openreg, CPU, m) {
  m.impl("silu_mul", &forwardOnCpu);
  m.impl("silu_mul_backward", &backwardOnCpu);
}

TORCH_LIBRARY_IMPL(openreg, Meta, m) {
  m.impl("silu_mul", &forwardOnMeta);
  m.impl("silu_mul_backward", &backwardOnMeta);
}

TORCH_LIBRARY_IMPL(openreg, Autograd, m) {
  m.impl("silu_mul", &recorded);
  m.impl("silu_mul_backward", &recordedBackward);
}

TORCH_LIBRARY_IMPL(openreg, FuncTorchBatched, m) {
  m.impl("silu_mul", &composed);
  m.impl("silu_mul_backward", &composedBackward);
}
// [/autograd: register-silu-mul]

} // namespace openreg
