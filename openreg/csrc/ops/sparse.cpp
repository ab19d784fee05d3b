// Chapter: kernels
// Sparse tensors in coordinate form (COO): what PyTorch writes anew for each
// device. Everything else about them is made of their indices and values, and
// structured.py registers PyTorch's own functions for it.
#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_to_sparse_native.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/copy_sparse_to_sparse.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "openreg/csrc/ops/arguments.h"

// [kernels: declare-stub]
// Not in the headers that come with torch, but in its library.
namespace at::native {
DECLARE_DISPATCH(Tensor (*)(const Tensor&, IntArrayRef), flatten_indices_stub)
} // namespace at::native
// [/kernels: declare-stub]

namespace openreg {
namespace {

// [kernels: flatten-indices]
// (dimensions, nnz) to (nnz): where the elements lie in the flat dense tensor.
at::Tensor flatten(const at::Tensor& indices, c10::IntArrayRef sizes) {
  const c10::DeviceGuard guard(indices.device());
  at::Tensor flat = at::zeros({indices.size(1)}, indices.options());
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    flat.mul_(sizes[i]).add_(indices.select(0, static_cast<std::int64_t>(i)));
  }
  return flat;
}
// [/kernels: flatten-indices]

// Where the elements of a sparse tensor lie in the flat dense one, (nnz).
at::Tensor places(const at::Tensor& sparse) {
  return at::sparse::flatten_indices(sparse._indices(), sparse.sizes());
}

// A dense tensor with the dimensions that `sparse` indexes made one.
at::Tensor flattened(const at::Tensor& dense, const at::Tensor& sparse) {
  std::vector<std::int64_t> sizes = sparse.sizes().vec();
  const auto end = sizes.begin() + sparse.sparse_dim();
  const std::int64_t rows = c10::multiply_integers(sizes.begin(), end);
  sizes.erase(sizes.begin(), end);
  sizes.insert(sizes.begin(), rows);
  return dense.reshape(sizes);
}

void checkSameSizes(
    const char* name, const at::Tensor& left, const at::Tensor& right) {
  TORCH_CHECK(
      left.sizes() == right.sizes(),
      name,
      ": expected sizes of self and other to match, but ",
      left.sizes(),
      " != ",
      right.sizes());
}

// [kernels: coalesce]
// Each place once. How many there are depends on the indices: the host waits.
at::Tensor coalesce(const at::Tensor& self) {
  if (self._nnz() < 2) {
    return self.clone()._coalesced_(true);
  }
  const c10::DeviceGuard guard(self.device());
  const auto [once, inverse] = at::_unique(places(self), true, true);
  std::vector<std::int64_t> sizes = self._values().sizes().vec();
  sizes[0] = once.size(0);
  const at::Tensor values = at::zeros(sizes, self._values().options());
  values.index_add_(0, inverse, self._values());
  const at::Tensor indices =
      at::empty({self.sparse_dim(), once.size(0)}, self._indices().options());
  indices.index_copy_(1, inverse, self._indices()); // equal where they meet
  return at::_sparse_coo_tensor_unsafe(
             indices, values, self.sizes(), self.options())
      ._coalesced_(true);
}
// [/kernels: coalesce]

void addToDense(
    const at::Tensor& self,
    const at::Tensor& other,
    const at::Scalar& alpha,
    const at::Tensor& out) {
  checkSameSizes("add", self, other);
  at::Tensor sum =
      self.to(out.scalar_type(), false, /*copy=*/true).contiguous();
  flattened(sum, other)
      .index_add_(
          0, places(other), other._values().to(out.scalar_type()), alpha);
  out.resize_(self.sizes()).copy_(sum);
}

at::Tensor& add(
    const at::Tensor& self,
    const at::Tensor& other,
    const at::Scalar& alpha,
    at::Tensor& out) {
  const c10::DeviceGuard guard(commonDevice("add", self, other, out));
  if (!self.is_sparse()) {
    addToDense(self, other, alpha, out);
    return out;
  }
  TORCH_CHECK(
      other.is_sparse(),
      "add(sparse, dense) is not supported. Use add(dense, sparse) instead.");
  checkSameSizes("add", self, other);
  const at::ScalarType type = out.scalar_type();
  at::Tensor sum = at::_sparse_coo_tensor_unsafe(
      at::cat({self._indices(), other._indices()}, 1),
      at::cat({self._values().to(type), other._values().to(type) * alpha}),
      self.sizes(),
      out.options());
  if (self.is_coalesced() && other.is_coalesced()) {
    sum = coalesce(sum);
  }
  return at::copy_sparse_to_sparse_(out, sum);
}

// The places that both have, of coalesced tensors.
at::Tensor productOf(
    const at::Tensor& self, const at::Tensor& other, c10::ScalarType type) {
  const at::Tensor ours = places(self), theirs = places(other);
  if (theirs.numel() == 0) {
    return at::_sparse_coo_tensor_unsafe(
        self._indices().narrow(1, 0, 0),
        self._values().narrow(0, 0, 0).to(type),
        self.sizes());
  }
  const at::Tensor found =
      at::searchsorted(theirs, ours).clamp_max(theirs.numel() - 1);
  const at::Tensor both = theirs.index({found}).eq(ours);
  return at::_sparse_coo_tensor_unsafe(
      self._indices().index({at::indexing::Slice(), both}),
      self._values().index({both}).to(type) *
          other._values().index({found.index({both})}).to(type),
      self.sizes());
}

at::Tensor& multiply(
    const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
  const c10::DeviceGuard guard(commonDevice("mul", self, other, out));
  const at::ScalarType type = out.scalar_type();
  const bool left = self.is_sparse();
  const at::Tensor& sparse = left ? self : other;
  const at::Tensor& factor = left ? other : self;
  at::Tensor result;
  if (factor.is_sparse()) {
    checkSameSizes("mul", self, other);
    result = productOf(self.coalesce(), other.coalesce(), type);
  } else {
    if (factor.dim() != 0) {
      checkSameSizes("mul", self, other);
    }
    const at::Tensor values = factor.dim() == 0
                                  ? factor
                                  : flattened(factor.contiguous(), sparse)
                                        .index_select(0, places(sparse));
    result = at::_sparse_coo_tensor_unsafe(
        sparse._indices(),
        (sparse._values() * values).to(type),
        sparse.sizes());
  }
  if (sparse.is_coalesced() || factor.is_sparse()) {
    result._coalesced_(true);
  }
  return at::copy_sparse_to_sparse_(out, result);
}

// [kernels: sparse-product]
// beta self + alpha (sparse @ dense), as sums over the sparse matrix's elements.
at::Tensor addProduct(
    const at::Tensor& self,
    const at::Tensor& sparse,
    const at::Tensor& dense,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  const c10::DeviceGuard guard(commonDevice("addmm", self, sparse, dense));
  TORCH_CHECK(
      sparse.is_sparse() && !dense.is_sparse() && !self.is_sparse(),
      "addmm: expected a dense matrix plus the product of a sparse and a dense "
      "one");
  TORCH_CHECK(
      sparse.sparse_dim() == 2 && sparse.dense_dim() == 0 && dense.dim() == 2 &&
          sparse.size(1) == dense.size(0),
      "addmm: matrices of sizes ",
      sparse.sizes(),
      " and ",
      dense.sizes(),
      " cannot be multiplied");
  const std::vector<std::int64_t> sizes{sparse.size(0), dense.size(1)};
  at::Tensor sum = at::zeros(sizes, dense.options());
  if (beta.toComplexDouble() != 0.0) { // zero times NaN is no number either
    sum.add_(self.expand(sizes), beta);
  }
  const at::Tensor indices = sparse._indices();
  const at::Tensor terms = sparse._values().unsqueeze(1) *
                           dense.index_select(0, indices.select(0, 1));
  return sum.index_add_(0, indices.select(0, 0), terms, alpha);
}
// [/kernels: sparse-product]

at::Tensor& addProductInto(
    const at::Tensor& self,
    const at::Tensor& sparse,
    const at::Tensor& dense,
    const at::Scalar& beta,
    const at::Scalar& alpha,
    at::Tensor& out) {
  const at::Tensor sum = addProduct(self, sparse, dense, beta, alpha);
  return const_cast<at::Tensor&>(out.resize_(sum.sizes())).copy_(sum);
}

at::Tensor& addProductInPlace(
    at::Tensor& self,
    const at::Tensor& sparse,
    const at::Tensor& dense,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  return self.copy_(addProduct(self, sparse, dense, beta, alpha));
}

at::Tensor toSparse(const at::Tensor& self, std::int64_t sparseDim) {
  const c10::DeviceGuard guard(self.device());
  return at::native::dense_to_sparse(self, sparseDim);
}

at::Tensor toLayout(
    const at::Tensor& self,
    std::optional<c10::Layout> layout,
    c10::OptionalArrayRef<std::int64_t> blockSize,
    std::optional<std::int64_t> denseDim) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(c10::kSparse) == c10::kSparse,
      "to_sparse: openreg has sparse tensors in the layout torch.sparse_coo "
      "only, not ",
      *layout);
  const c10::DeviceGuard guard(self.device());
  return at::native::dense_to_sparse(self, layout, blockSize, denseDim);
}

} // namespace

// [kernels: register-sparse]
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_coalesce", &coalesce);
  m.impl("add.out", &add);
  m.impl("mul.out", &multiply);
  m.impl("addmm", &addProduct);
  m.impl("addmm.out", &addProductInto);
  m.impl("addmm_", &addProductInPlace);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_to_sparse", &toLayout);
  m.impl("_to_sparse.sparse_dim", &toSparse);
}
// [/kernels: register-sparse]

} // namespace openreg

// [kernels: flatten-stub]
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(flatten_indices_stub, &openreg::flatten)
} // namespace at::native
// [/kernels: flatten-stub]
