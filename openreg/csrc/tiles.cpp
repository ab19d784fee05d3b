// Chapter: frontend
#include "openreg/csrc/tiles.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias_native.h>
#include <torch/csrc/autograd/utils/wrap_outputs.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "openreg/csrc/module.h"

namespace openreg {
namespace {

// [frontend: meta]
// The tiles all have one size, so there is nothing to say but that it is so.
struct Tiles final : c10::BackendMeta {
  // Shared by tensors that share sizes, strides and storage: detach(), .data.
  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }
};

void mark(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Tiles>());
}
// [/frontend: meta]

// The sizes (.., R/kTile, C/kTile, kTile, kTile) for (.., R, C).
std::vector<std::int64_t> tileSizes(c10::IntArrayRef sizes) {
  std::vector<std::int64_t> result(sizes.begin(), sizes.end());
  const std::size_t last = result.size();
  result[last - 2] /= kTile;
  result[last - 1] /= kTile;
  result.insert(result.end(), {kTile, kTile});
  return result;
}

// [frontend: payload]
constexpr char kKey[] = "openreg::tiles16x16";

using Payload = std::unordered_map<std::string, bool>;

// What torch.save writes beside the storage, which stays as it is.
void write(const at::Tensor& tensor, Payload& payload) {
  if (isTiled(tensor)) {
    payload[kKey] = true;
  }
}

// What torch.load does with it, on the device and, with map_location, on the
// CPU, where nothing reads tiles.
void read(const at::Tensor& tensor, Payload& payload) {
  if (payload.count(kKey) == 0) {
    return;
  }
  if (tensor.device().type() == c10::kPrivateUse1) {
    mark(tensor);
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor tiles = tensor.view(tileSizes(tensor.sizes()));
  const at::Tensor matrix =
      tiles.transpose(-3, -2).reshape(tensor.sizes()).contiguous();
  // A storage of its own: another tensor of the file may be read from this one.
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(matrix.storage());
}
// [/frontend: payload]

// [frontend: register-payload]
[[maybe_unused]] const bool registered = [] {
  const auto device = c10::DeviceType::PrivateUse1;
  torch::jit::TensorBackendMetaRegistry(device, &write, &read);
  // Without these a file loaded to the CPU would keep its order, in silence.
  torch::jit::GetBackendMetaAllowlist().insert(c10::DeviceType::CPU);
  auto& hooks = torch::jit::GetBackendMetaSerialization();
  if (!hooks[static_cast<std::size_t>(c10::DeviceType::CPU)].has_value()) {
    torch::jit::TensorBackendMetaRegistry(
        c10::DeviceType::CPU, [](const at::Tensor&, Payload&) {}, &read);
  }
  return true;
}();
// [/frontend: register-payload]

} // namespace

// [frontend: tiles]
bool isTiled(const at::Tensor& tensor) {
  const auto* meta = tensor.unsafeGetTensorImpl()->get_backend_meta();
  return meta != nullptr && dynamic_cast<const Tiles*>(meta) != nullptr;
}

void checkStrided(const at::Tensor& tensor) {
  TORCH_CHECK(
      !isTiled(tensor),
      "this tensor of ",
      tensor.device(),
      " is kept in tiles, where strides mean nothing; pass "
      "torch.openreg.to_strided(tensor)");
}

at::Tensor toTiled(const at::Tensor& matrix) {
  const c10::IntArrayRef sizes = matrix.sizes();
  TORCH_CHECK_VALUE(
      matrix.device().type() == c10::kPrivateUse1,
      "only a tensor of the device is kept in tiles; this one is on ",
      matrix.device());
  TORCH_CHECK_VALUE(
      sizes.size() >= 2 && sizes.end()[-2] % kTile == 0 &&
          sizes.end()[-1] % kTile == 0,
      "tiles hold ",
      kTile,
      " rows and columns; pad the last two sizes of ",
      sizes,
      " to multiples of it");
  if (isTiled(matrix)) {
    return aliasOf(matrix);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<std::int64_t> split(sizes.begin(), sizes.end() - 2);
  split.insert(
      split.end(),
      {sizes.end()[-2] / kTile, kTile, sizes.end()[-1] / kTile, kTile});
  const at::Tensor ordered = matrix.resolve_conj().resolve_neg();
  at::Tensor result = ordered.reshape(split)
                          .transpose(-3, -2)
                          .clone(c10::MemoryFormat::Contiguous)
                          .view(sizes);
  mark(result);
  return result;
}

at::Tensor memoryOf(const at::Tensor& tiled) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::native::alias(tiled).view(tileSizes(tiled.sizes()));
}

at::Tensor toStrided(const at::Tensor& tiled) {
  if (!isTiled(tiled)) {
    return tiled;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return memoryOf(tiled)
      .transpose(-3, -2)
      .clone(c10::MemoryFormat::Contiguous)
      .view(tiled.sizes());
}

at::Tensor aliasOf(const at::Tensor& tensor) {
  at::Tensor result = at::native::alias(tensor); // drops what it does not know
  if (isTiled(tensor)) {
    mark(result);
  }
  return result;
}
// [/frontend: tiles]

void bindTiles(pybind11::module_& m) {
  m.def("to_tiled", &toTiled);
  m.def("to_strided", &toStrided);
  m.def("is_tiled", &isTiled);
}

} // namespace openreg
