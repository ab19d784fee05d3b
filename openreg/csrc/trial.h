// Chapter: kernels
// Refusing at once what the library has no code for.
//
// That `sort` does not know complex numbers is known to the kernel alone, and
// it runs on an engine, later: its error would reach a line that has nothing
// to do with it. So the first call of an operator with a combination of dtypes
// tries the kernel on the host, on zeros, and on one element in place of large
// tensors. That the kernel is "not implemented for" something, or wants other
// dtypes than these, is raised there and then. Every other error of a trial is
// dropped, for it may be about what was made up.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <c10/core/OptionalRef.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <unordered_set>

#include "openreg/csrc/launch.h"

namespace openreg {

// [kernels: trial]
// While one lives, the operands on this thread give small tensors of the host,
// and dispatch is that of an engine's thread.
class Trial {
 public:
  Trial();
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;
  ~Trial();

  static bool isRunning();
  // There is a tensor without elements. Kernels return early for those, so the
  // trial proves nothing.
  static void setInconclusive();

  // Runs the kernel. False if that proved nothing; throws
  // c10::NotImplementedError, and what errors there are about dtypes.
  static bool passes(c10::function_ref<void()> kernel);
};
// [/kernels: trial]

// [kernels: signature]
// The dtypes of a kernel's arguments, and what else chooses its code.
using Signature = std::uint64_t;

inline Signature mix(Signature signature, Signature word) {
  return signature * 0x9e3779b97f4a7c15u + word + 1;
}
inline Signature mix(Signature signature, const at::Tensor& tensor) {
  return mix(
      signature,
      tensor.defined() ? static_cast<Signature>(tensor.scalar_type()) + 1 : 0);
}
inline Signature mix(
    Signature signature, const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? mix(signature, *tensor) : mix(signature, 0);
}
inline Signature mix(Signature signature, at::OptionalTensorRef tensor) {
  return tensor.has_value() ? mix(signature, *tensor) : mix(signature, 0);
}
Signature mix(Signature signature, const at::ITensorListRef& tensors);
Signature mix(Signature signature, const at::IOptTensorListRef& tensors);
Signature mix(Signature signature, std::string_view text);
Signature mix(Signature signature, std::optional<std::string_view> text);

// Numbers, lists of them and the like do not choose.
template <typename T>
concept Choosing = requires(const T& argument) {
  requires !std::is_arithmetic_v<T>;
  mix(Signature(), argument);
};

template <typename... Arguments>
Signature signatureOf(const Arguments&... arguments) {
  Signature signature = 1;
  const auto add = [&](const auto& argument) {
    if constexpr (Choosing<std::decay_t<decltype(argument)>>) {
      signature = mix(signature, argument);
    }
  };
  (add(arguments), ...);
  return signature;
}
// [/kernels: signature]

// [kernels: trials]
// The signatures that a kernel has passed its trial for.
class Trials {
 public:
  template <typename Kernel>
  void check(Signature signature, Kernel&& kernel) {
    for (const std::atomic<Signature>& each : recent_) {
      if (each.load(std::memory_order_relaxed) == signature) {
        return;
      }
    }
    run(signature, kernel);
  }

 private:
  void run(Signature signature, c10::function_ref<void()> kernel);

  std::array<std::atomic<Signature>, 6> recent_{};
  std::mutex mutex_;
  std::unordered_set<Signature> passed_;
  std::size_t next_ = 0;
};
// [/kernels: trials]

// [kernels: launch-tried]
// launch(), after a trial where the signature is new.
template <const char* kName, typename Body>
void launchTried(Signature signature, Body&& body) {
  static Trials* const trials = new Trials; // used until the process ends
  trials->check(signature, body);
  launch<kName>(std::forward<Body>(body));
}
// [/kernels: launch-tried]

} // namespace openreg
