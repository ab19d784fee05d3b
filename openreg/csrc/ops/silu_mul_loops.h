// Chapter: autograd
// The loops of silu_mul over addresses, in at::vec: the vectors of ATen's own
// kernels.
//
// They are compiled twice, for any processor and for those with AVX2. All that
// is made of at::vec is in a namespace of that name. Tensors stay outside: of
// an inline function that both sides use, such as a tensor's destructor, the
// linker would keep one copy for the whole library, and it might be the one
// that not every processor can run.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>

namespace openreg {

// [autograd: silu-mul-loops]
// What TensorIterator calls for rows of elements. For each operand, outputs
// first: its address, then the bytes from an element to the next one, and then
// those from a row to the next one.
using Loop = void (*)(
    char** data,
    const std::int64_t* strides,
    std::int64_t columns,
    std::int64_t rows);

struct SiluMulLoops {
  Loop forward;  // out; gate, up
  Loop backward; // gradGate, gradUp; grad, gate, up
};

// For float, double, half and bfloat16.
template <typename T>
SiluMulLoops siluMulLoopsWithAvx2();
// [/autograd: silu-mul-loops]

inline namespace CPU_CAPABILITY {

// [autograd: silu-mul-block]
// The elements of a row that go through the loop together: one vector of type
// T, and of the wider type that half precision is computed in, two.
template <typename T, int kOperands>
class Blocks {
 public:
  using Exact = at::opmath_type<T>;
  static constexpr int kParts = sizeof(Exact) / sizeof(T);
  using Vector = at::vec::VectorizedN<Exact, kParts>;

  Blocks(
      char** data,
      const std::int64_t* strides,
      std::int64_t columns,
      std::int64_t rows)
      : data_(data), strides_(strides), columns_(columns), rows_(rows) {
  }

  bool next() {
    column_ += size_;
    if (column_ == columns_) {
      column_ = 0;
      ++row_;
    }
    size_ = std::min<std::int64_t>(Stored::size(), columns_ - column_);
    return row_ < rows_;
  }

  Vector read(int operand) const {
    const char* const from = address(operand);
    const std::int64_t stride = strides_[operand];
    if (stride == sizeof(T)) {
      return widen(Stored::loadu(from, size_));
    }
    T elements[Stored::size()] = {};
    for (std::int64_t i = 0; i < size_; ++i) {
      elements[i] = *reinterpret_cast<const T*>(from + i * stride);
    }
    return widen(Stored::loadu(elements));
  }

  void write(int operand, const Vector& value) const {
    char* const to = address(operand);
    const std::int64_t stride = strides_[operand];
    const Stored rounded = at::vec::convert<T, 1, Exact, kParts>(value);
    if (stride == sizeof(T)) {
      rounded.store(to, static_cast<int>(size_));
      return;
    }
    T elements[Stored::size()];
    rounded.store(elements);
    for (std::int64_t i = 0; i < size_; ++i) {
      *reinterpret_cast<T*>(to + i * stride) = elements[i];
    }
  }

 private:
  using Stored = at::vec::Vectorized<T>;

  static Vector widen(const Stored& stored) {
    return at::vec::VecConvert<Exact, kParts, T, 1>::apply(stored);
  }

  char* address(int operand) const {
    return data_[operand] + column_ * strides_[operand] +
           row_ * strides_[kOperands + operand];
  }

  char** const data_;
  const std::int64_t* const strides_;
  const std::int64_t columns_, rows_;
  std::int64_t column_ = 0, row_ = 0, size_ = 0;
};
// [/autograd: silu-mul-block]

// [autograd: silu-mul-loop]
template <typename T>
void siluMulForward(
    char** data,
    const std::int64_t* strides,
    std::int64_t columns,
    std::int64_t rows) {
  Blocks<T, 3> block(data, strides, columns, rows);
  using Vector = typename decltype(block)::Vector;
  const Vector one(1);
  while (block.next()) {
    const Vector x = block.read(1), up = block.read(2);
    block.write(0, x / (one + x.neg().exp()) * up);
  }
}
// [/autograd: silu-mul-loop]

// [autograd: silu-mul-backward-loop]
template <typename T>
void siluMulBackward(
    char** data,
    const std::int64_t* strides,
    std::int64_t columns,
    std::int64_t rows) {
  Blocks<T, 5> block(data, strides, columns, rows);
  using Vector = typename decltype(block)::Vector;
  const Vector one(1);
  while (block.next()) {
    const Vector dy = block.read(2), x = block.read(3), up = block.read(4);
    const Vector sigmoid = one / (one + x.neg().exp());
    const Vector slope = sigmoid * (one + x * (one - sigmoid));
    block.write(0, dy * up * slope);
    block.write(1, dy * x * sigmoid);
  }
}
// [/autograd: silu-mul-backward-loop]

} // namespace CPU_CAPABILITY
} // namespace openreg
