// Chapter: quantization
#include "openreg/csrc/ops/threads.h"

#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace openreg {

// [quantization: share-out]
// TensorIterator's loop over threads is compiled, inside of torch. The elements
// of this tensor are never touched: where they are tells which ones are meant.
void shareOut(
    std::int64_t count,
    std::int64_t grain,
    c10::function_ref<void(std::int64_t begin, std::int64_t end)> work) {
  const at::Tensor places = at::empty({count}, at::kByte);
  const auto* const first = static_cast<const char*>(places.const_data_ptr());
  auto iter = at::TensorIteratorConfig()
                  .add_output(places)
                  .resize_outputs(false)
                  .check_all_same_dtype(false)
                  .build();
  // Of two dimensions, as all its loops are; the second has length 1.
  iter.for_each(
      [&](char** data, const std::int64_t*, std::int64_t size, std::int64_t) {
        const std::int64_t begin = *data - first;
        work(begin, begin + size);
      },
      grain);
}
// [/quantization: share-out]

} // namespace openreg
