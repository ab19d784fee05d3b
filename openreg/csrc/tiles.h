// Chapter: frontend
// A private layout: matrices kept in tiles, as many chips' matrix units want
// their weights. PyTorch sees the sizes and strides of an ordinary tensor; that
// its elements lie elsewhere is known from the c10::BackendMeta it carries.
#pragma once

#include <ATen/core/Tensor.h>

namespace openreg {

inline constexpr std::int64_t kTile = 16; // rows and columns of a tile

// Whether the tensor is kept in tiles.
bool isTiled(const at::Tensor& tensor);

// Throws if it is, naming the cure: for all that follows strides.
void checkStrided(const at::Tensor& tensor);

// A copy in tiles of a device tensor (.., R, C), R and C multiples of kTile.
// No gradient flows through it. It stays on the tensor's device and is queued
// on its current stream. Throws for other sizes.
at::Tensor toTiled(const at::Tensor& matrix);

// A copy with ordinary strides; contiguous.
at::Tensor toStrided(const at::Tensor& tiled);

// Another tensor object over the same elements, in tiles if `tensor` is.
at::Tensor aliasOf(const at::Tensor& tensor);

// The memory of a tiled tensor as what it is, (.., R/kTile, C/kTile, kTile,
// kTile): to move it without touching its order.
at::Tensor memoryOf(const at::Tensor& tiled);

} // namespace openreg
