// Chapter: quantization
// What takes the time with integers of 8 and 4 bits: the loops alone, plain C++.
#pragma once

#include <cstdint>

namespace openreg {

// [quantization: products-api]
// Widens `count` numbers. Twice the memory, and the loop below needs it:
// processors multiply pairs of 16 bits, and add them up in 32.
void widen(
    std::int16_t* wide,
    const std::int8_t* narrow,
    std::int64_t count,
    std::int64_t stride);

// sums[r][c] += the dot product of row r of `a` and row c of `b`. All rows are
// `inner` numbers long and lie behind each other; those of `sums` are `columns`
// long. Exact, as long as the sums fit in 32 bits.
void addProducts(
    const std::int16_t* a,
    std::int64_t rows,
    const std::int16_t* b,
    std::int64_t columns,
    std::int64_t inner,
    std::int32_t* sums);
// [/quantization: products-api]

// [quantization: scale-api]
// values = sums * scales + shifts; no shifts where that is null.
void scaleSums(
    float* values,
    const std::int32_t* sums,
    const float* scales,
    const float* shifts,
    std::int64_t count);

// To the nearest of -127 ... 127, and to the even one of two.
void roundValues(std::int8_t* rounded, const float* values, std::int64_t count);
// [/quantization: scale-api]

// [quantization: unpack-api]
// A row of numbers of 4 bits, two in each of `pairs` bytes, becomes (number -
// zero) * scale, with a scale and a zero for each of `groups` parts. The lower
// bits hold the row's first half and the upper ones its second: so vectors are
// read and written whole.
void unpack(
    float* values,
    const std::uint8_t* packed,
    std::int64_t pairs,
    std::int64_t groups,
    const float* scales,
    const float* zeros);
// [/quantization: unpack-api]

} // namespace openreg
