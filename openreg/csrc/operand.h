// Chapter: kernels
// The arguments of a kernel on their way from the host to the device.
//
// An operator returns before its kernel runs, and its caller goes on: resizes
// the tensor, gives it another storage, changes a scalar on the CPU. So a
// launch takes a copy of all that describes its arguments, and none of it is
// shared with the host: `keep(argument)` is what the queue holds, and
// `give(kept)` what the kernel is called with.
#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/OptionalRef.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "openreg/csrc/launch.h"

namespace openreg {

// [kernels: operand]
// What a kernel has to know of a tensor: 128 bytes, no reference counts.
class Operand {
 public:
  // Undefined, a tensor of any openreg device, or a CPU tensor of no
  // dimensions, whose value is taken along. Throws for anything else, and for
  // a tensor kept in tiles.
  explicit Operand(const at::Tensor& tensor);

  // The tensor over the device's memory: on an engine's thread only, while the
  // operand stays where it is. In a trial, zeros that stand for it.
  at::Tensor view() const;

  // Whether a view still has the strides that it was given.
  bool isLaidOutAs(const at::Tensor& view) const;

 private:
  at::Tensor sample() const;

  enum class Kind : std::uint8_t { Undefined, Device, Value };

  struct Storage {
    const char* begin = nullptr; // as kernels see it
    std::size_t bytes = 0;
  };
  union {
    Storage storage_{};                      // Device
    alignas(16) std::array<char, 16> value_; // Value: the element
  };
  std::int64_t offset_ = 0; // Device: elements from the storage's begin
  c10::impl::SizesAndStrides shape_;
  caffe2::TypeMeta dtype_;
  Kind kind_ = Kind::Undefined;
  bool conj_ = false;
  bool neg_ = false;
  bool number_ = false; // a Python number, which is weak in type promotion
};
// [/kernels: operand]

// A list with gaps, as x[:, i] makes it.
struct Indices {
  std::vector<std::optional<Operand>> operands;
};

// [kernels: keep]
// Everything that is a value of its own stays as it is.
template <typename T>
T keep(const T& argument) {
  static_assert(!std::is_pointer_v<T> && !std::is_reference_v<T>);
  return argument;
}
inline Operand keep(const at::Tensor& tensor) {
  return Operand(tensor);
}
std::optional<Operand> keep(const at::OptionalTensorRef& tensor);
std::optional<Operand> keep(const std::optional<at::Tensor>& tensor);
std::vector<Operand> keep(const at::ITensorListRef& tensors);
std::vector<Operand> keep(at::TensorList tensors);
Indices keep(const c10::List<std::optional<at::Tensor>>& tensors);
Indices keep(const at::IOptTensorListRef& tensors);
std::optional<at::Scalar> keep(const at::OptionalScalarRef& scalar);
std::string keep(std::string_view text);
std::optional<std::string> keep(const std::optional<std::string_view>& text);
template <typename T>
std::vector<T> keep(const c10::ArrayRef<T>& values) {
  return values.vec();
}
template <typename T>
std::optional<std::vector<T>> keep(const c10::OptionalArrayRef<T>& values) {
  return values.has_value() ? std::optional(values->vec()) : std::nullopt;
}
template <typename T>
std::optional<std::vector<T>> keep(
    const std::optional<c10::ArrayRef<T>>& values) {
  return values.has_value() ? std::optional(values->vec()) : std::nullopt;
}
// What is kept of an argument of type T.
template <typename T>
using Kept = decltype(keep(std::declval<T>()));
// [/kernels: keep]

// [kernels: give]
template <typename T>
const T& give(const T& kept) {
  return kept;
}
// Puts a library's result where the host expects it. The library may have
// written there already; in another layout, if it has chosen one by itself.
void settle(const at::Tensor& output, const at::Tensor& result);

// A view serves for what a kernel reads and, as a reference, for its result,
// which is settled when the call is over.
class View {
 public:
  explicit View(const Operand& kept) : kept_(kept), tensor_(kept.view()) {
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() noexcept(false) {
    if (!kept_.isLaidOutAs(tensor_)) [[unlikely]] {
      settle(kept_.view(), tensor_);
    }
  }

  operator at::Tensor&() {
    return tensor_;
  }

 private:
  const Operand& kept_;
  at::Tensor tensor_;
};
inline View give(const Operand& kept) {
  return View(kept);
}
inline std::optional<at::Tensor> give(const std::optional<Operand>& kept) {
  return kept.has_value() ? std::optional(kept->view()) : std::nullopt;
}
std::vector<at::Tensor> give(const std::vector<Operand>& kept);
c10::List<std::optional<at::Tensor>> give(const Indices& kept);
template <typename T>
c10::OptionalArrayRef<T> give(const std::optional<std::vector<T>>& kept) {
  return kept.has_value() ? c10::OptionalArrayRef<T>(c10::ArrayRef<T>(*kept))
                          : std::nullopt;
}
inline std::optional<std::string_view> give(
    const std::optional<std::string>& kept) {
  return kept;
}
// [/kernels: give]

} // namespace openreg
