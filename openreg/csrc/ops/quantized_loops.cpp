// Chapter: quantization
// Compiled with -O3, and without regard for floating-point exceptions: then the
// compiler makes vector code of the loops, and no instruction has to be written
// here by name.
#include "openreg/csrc/ops/quantized_loops.h"

#include <algorithm>

// [quantization: clones]
// Two copies of a function, of which the loader takes the one for the processor
// that it finds. Elsewhere the smallest processor can do what is needed.
#if defined(__x86_64__)
#define OPENREG_FOR_EACH_PROCESSOR \
  __attribute__((target_clones("avx2", "default")))
#else
#define OPENREG_FOR_EACH_PROCESSOR
#endif
// [/quantization: clones]

namespace openreg {
namespace {

// [quantization: tile]
// A tile of sums stays in registers while the rows run past it: 9 products for
// 6 numbers that are read. A single sum would read 2 for each product.
constexpr std::int64_t kTile = 3;

template <int kRows, int kColumns>
[[gnu::always_inline]] inline void addTile(
    const std::int16_t* a,
    const std::int16_t* b,
    std::int64_t inner,
    std::int32_t* sums,
    std::int64_t stride) {
  std::int32_t tile[kRows][kColumns] = {};
  for (std::int64_t i = 0; i < inner; ++i) {
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        tile[r][c] += std::int32_t{a[r * inner + i]} * b[c * inner + i];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      sums[r * stride + c] += tile[r][c];
    }
  }
}
// [/quantization: tile]

// What is left at the edges has a size of its own.
template <int kRows>
[[gnu::always_inline]] inline void addRows(
    const std::int16_t* a,
    const std::int16_t* b,
    std::int64_t columns,
    std::int64_t inner,
    std::int32_t* sums,
    std::int64_t stride) {
  switch (columns) {
    case 1:
      return addTile<kRows, 1>(a, b, inner, sums, stride);
    case 2:
      return addTile<kRows, 2>(a, b, inner, sums, stride);
    default:
      return addTile<kRows, 3>(a, b, inner, sums, stride);
  }
}

} // namespace

// [quantization: products]
OPENREG_FOR_EACH_PROCESSOR
void addProducts(
    const std::int16_t* a,
    std::int64_t rows,
    const std::int16_t* b,
    std::int64_t columns,
    std::int64_t inner,
    std::int32_t* sums) {
  for (std::int64_t r = 0; r < rows; r += kTile) {
    for (std::int64_t c = 0; c < columns; c += kTile) {
      const std::int64_t width = std::min(kTile, columns - c);
      const std::int16_t *left = a + r * inner, *right = b + c * inner;
      std::int32_t* tile = sums + r * columns + c;
      switch (rows - r) {
        case 1:
          addRows<1>(left, right, width, inner, tile, columns);
          break;
        case 2:
          addRows<2>(left, right, width, inner, tile, columns);
          break;
        default:
          addRows<3>(left, right, width, inner, tile, columns);
      }
    }
  }
}
// [/quantization: products]

OPENREG_FOR_EACH_PROCESSOR
void widen(
    std::int16_t* wide,
    const std::int8_t* narrow,
    std::int64_t count,
    std::int64_t stride) {
  if (stride == 1) {
    for (std::int64_t i = 0; i < count; ++i) {
      wide[i] = narrow[i];
    }
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    wide[i] = narrow[i * stride];
  }
}

// [quantization: scale]
OPENREG_FOR_EACH_PROCESSOR
void scaleSums(
    float* values,
    const std::int32_t* sums,
    const float* scales,
    const float* shifts,
    std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(sums[i]) * scales[i];
  }
  for (std::int64_t i = 0; shifts && i < count; ++i) {
    values[i] += shifts[i];
  }
}

// A float of this size has no bits left for fractions: the sum is rounded, as
// all sums are, to even. There is a function for that, which is a call for each.
OPENREG_FOR_EACH_PROCESSOR
void roundValues(
    std::int8_t* rounded, const float* values, std::int64_t count) {
  constexpr float kNoFractions = 3 << 22;
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = std::max(-127.0f, std::min(127.0f, values[i]));
    rounded[i] = static_cast<std::int8_t>(
        static_cast<std::int32_t>(value + kNoFractions - kNoFractions));
  }
}
// [/quantization: scale]

// [quantization: unpack]
// Three loops, each of one kind of step, which is what a compiler makes vector
// code of. A row fits the nearest cache, and is read from there.
OPENREG_FOR_EACH_PROCESSOR
void unpack(
    float* values,
    const std::uint8_t* packed,
    std::int64_t pairs,
    std::int64_t groups,
    const float* scales,
    const float* zeros) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    values[i] = static_cast<float>(packed[i] & 15);
  }
  for (std::int64_t i = 0; i < pairs; ++i) {
    values[pairs + i] = static_cast<float>(packed[i] >> 4);
  }
  const std::int64_t length = 2 * pairs / groups;
  for (std::int64_t g = 0; g < groups; ++g, values += length) {
    const float scale = scales[g], zero = zeros[g];
    for (std::int64_t i = 0; i < length; ++i) {
      values[i] = (values[i] - zero) * scale;
    }
  }
}
// [/quantization: unpack]

} // namespace openreg
