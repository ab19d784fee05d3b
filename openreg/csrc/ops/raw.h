// Chapter: kernels
// Kernels as a vendor writes them: addresses, sizes and strides, no tensors.
//
// This is code for the device. It is compiled here by the host's compiler, and
// on a chip by its own. Addresses are device addresses; what they point at is
// found with orKernelAddress(), and belongs to the kernel while it runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "openreg/driver/openreg.h"

namespace openreg::raw {

// [kernels: raw-array]
// Elements of type T somewhere on the device. Strides in elements; a stride of
// zero reads one element again and again, which is how sizes are broadcast.
template <typename T>
struct Array {
  T* address = nullptr;
  std::vector<std::int64_t> strides;
};
// [/kernels: raw-array]

// [kernels: raw-elementwise]
// z = a x + y over the same sizes, of at least one dimension.
template <typename T>
struct Axpy {
  std::vector<std::int64_t> sizes;
  Array<const T> x, y;
  Array<T> z;
  T a;

  static void run(orKernelContext* context, void* args) {
    const Axpy& self = *static_cast<Axpy*>(args);
    self.rows(
        static_cast<const T*>(orKernelAddress(context, self.x.address)),
        static_cast<const T*>(orKernelAddress(context, self.y.address)),
        static_cast<T*>(orKernelAddress(context, self.z.address)),
        0);
  }

 private:
  // The last dimension is a loop; each dimension before it, a recursion.
  void rows(const T* from, const T* plus, T* to, std::size_t dim) const {
    const std::int64_t size = sizes[dim];
    const std::int64_t dx = x.strides[dim], dy = y.strides[dim],
                       dz = z.strides[dim];
    if (dim + 1 < sizes.size()) {
      for (std::int64_t i = 0; i < size; ++i) {
        rows(from + i * dx, plus + i * dy, to + i * dz, dim + 1);
      }
    } else if (dx == 1 && dy == 1 && dz == 1) {
      for (std::int64_t i = 0; i < size; ++i) { // what compilers vectorize
        to[i] = a * from[i] + plus[i];
      }
    } else {
      for (std::int64_t i = 0; i < size; ++i) {
        to[i * dz] = a * from[i * dx] + plus[i * dy];
      }
    }
  }
};
// [/kernels: raw-elementwise]

// [kernels: raw-reduction]
// One sum for each of `rows` rows of `columns` elements.
template <typename T>
struct RowSum {
  std::int64_t rows, columns;
  Array<const T> in; // strides of the rows and of the columns
  Array<T> out;      // one stride

  static void run(orKernelContext* context, void* args) {
    const RowSum& self = *static_cast<RowSum*>(args);
    const auto* in =
        static_cast<const T*>(orKernelAddress(context, self.in.address));
    auto* out = static_cast<T*>(orKernelAddress(context, self.out.address));
    for (std::int64_t row = 0; row < self.rows; ++row) {
      out[row * self.out.strides[0]] =
          sum(in + row * self.in.strides[0], self.columns, self.in.strides[1]);
    }
  }

 private:
  // By halves: the rounding error grows with the logarithm of the count, and
  // eight sums at a time keep the adders busy.
  static T sum(const T* in, std::int64_t count, std::int64_t stride) {
    if (count > 256) {
      const std::int64_t half = count / 16 * 8;
      return sum(in, half, stride) +
             sum(in + half * stride, count - half, stride);
    }
    std::array<T, 8> lanes{};
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      for (std::int64_t lane = 0; lane < 8; ++lane) {
        lanes[lane] += in[(i + lane) * stride];
      }
    }
    for (; i < count; ++i) {
      lanes[i % 8] += in[i * stride];
    }
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
           ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  }
};
// [/kernels: raw-reduction]

// [kernels: raw-product]
// C = A B, with A of `rows` by `inner` and B of `inner` by `columns`.
template <typename T>
struct Product {
  std::int64_t rows, columns, inner;
  Array<const T> a, b;
  Array<T> c;

  // A block of B that the nearest cache keeps, and a strip of C's rows.
  static constexpr std::int64_t kInner = 256, kColumns = 64, kRows = 4;

  static void run(orKernelContext* context, void* args) {
    const Product& self = *static_cast<Product*>(args);
    const auto* a =
        static_cast<const T*>(orKernelAddress(context, self.a.address));
    const auto* b =
        static_cast<const T*>(orKernelAddress(context, self.b.address));
    auto* c = static_cast<T*>(orKernelAddress(context, self.c.address));
    std::vector<T> block(kInner * kColumns);
    for (std::int64_t j = 0; j < self.columns; j += kColumns) {
      for (std::int64_t k = 0; k < self.inner || k == 0; k += kInner) {
        self.pack(b, k, j, block.data());
        for (std::int64_t i = 0; i < self.rows; i += kRows) {
          self.strip(a, block.data(), c, i, j, k);
        }
      }
    }
  }

 private:
  // B's block, whatever its strides are, into consecutive memory, with zeros
  // where B has ended.
  void pack(const T* from, std::int64_t k, std::int64_t j, T* to) const {
    for (std::int64_t row = 0; row < kInner; ++row) {
      for (std::int64_t column = 0; column < kColumns; ++column) {
        const bool inside = k + row < inner && j + column < columns;
        to[row * kColumns + column] =
            inside
                ? from[(k + row) * b.strides[0] + (j + column) * b.strides[1]]
                : T(0);
      }
    }
  }

  void strip(
      const T* left,
      const T* block,
      T* to,
      std::int64_t i,
      std::int64_t j,
      std::int64_t k) const {
    const std::int64_t height = rows - i < kRows ? rows - i : kRows;
    const std::int64_t depth = inner - k < kInner ? inner - k : kInner;
    const std::int64_t width = columns - j < kColumns ? columns - j : kColumns;
    std::array<std::array<T, kColumns>, kRows> sums{};
    for (std::int64_t step = 0; step < depth; ++step) {
      for (std::int64_t row = 0; row < height; ++row) {
        const T value =
            left[(i + row) * a.strides[0] + (k + step) * a.strides[1]];
        for (std::int64_t column = 0; column < kColumns; ++column) {
          sums[row][column] += value * block[step * kColumns + column];
        }
      }
    }
    for (std::int64_t row = 0; row < height; ++row) {
      for (std::int64_t column = 0; column < width; ++column) {
        T& element = to[(i + row) * c.strides[0] + (j + column) * c.strides[1]];
        element = k == 0 ? sums[row][column] : element + sums[row][column];
      }
    }
  }
};
// [/kernels: raw-product]

} // namespace openreg::raw
