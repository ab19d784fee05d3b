// Chapter: kernels
// The short way of elementwise calls that have nothing to work out.
//
// A fifth of the caller's time in `x + y` of one element is its meta function:
// broadcasting, type promotion, overlap and layout are settled anew at each
// call. Where all inputs are contiguous, of one size and on the current device,
// the result is contiguous and of that size, and its dtype follows from theirs.
// So the meta function is asked for each combination of dtypes once.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <optional>

#include "openreg/csrc/trial.h"

namespace openreg {

// [kernels: plain]
// Whether this is such a call. What it does not recognize goes the long way.
bool isPlain(const at::Tensor& first);

template <typename... Rest>
bool isPlain(const at::Tensor& first, const Rest&... rest) {
  const auto alike = [&first](const auto& argument) {
    if constexpr (
        std::is_same_v<std::decay_t<decltype(argument)>, at::Tensor>) {
      return isPlain(argument) && argument.sizes() == first.sizes();
    }
    return true; // a number
  };
  return isPlain(first) && (alike(rest) && ...);
}

// A contiguous tensor on the current device.
at::Tensor newResult(at::IntArrayRef sizes, at::ScalarType dtype);

// The dtypes of an operator's results, by those of its arguments.
class ResultTypes {
 public:
  // All arguments' dtypes, the numbers' too.
  template <typename... Arguments>
  static Signature of(const Arguments&... arguments) {
    Signature signature = 1;
    const auto add = [&signature](const auto& argument) {
      if constexpr (requires { argument.scalar_type(); }) {
        signature = mix(signature, argument);
      } else {
        signature = mix(signature, static_cast<Signature>(argument.type()));
      }
    };
    (add(arguments), ...);
    return mix(signature, 0) & ~kDtype;
  }

  std::optional<at::ScalarType> find(Signature signature) const {
    for (const std::atomic<Signature>& each : known_) {
      const Signature found = each.load(std::memory_order_relaxed);
      if ((found & ~kDtype) == signature) {
        return static_cast<at::ScalarType>(found & kDtype);
      }
    }
    return std::nullopt;
  }

  void add(Signature signature, at::ScalarType dtype) {
    const unsigned place = next_.fetch_add(1, std::memory_order_relaxed);
    known_[place % known_.size()].store(
        signature | static_cast<Signature>(dtype), std::memory_order_relaxed);
  }

 private:
  static constexpr Signature kDtype = 0xff; // the bits that hold the result's

  std::array<std::atomic<Signature>, 6> known_{}; // 0 is no signature
  std::atomic<unsigned> next_{0};
};
// [/kernels: plain]

} // namespace openreg
