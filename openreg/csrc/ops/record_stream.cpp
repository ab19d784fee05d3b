// Chapter: ops
// Tensors that another stream uses, too.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "openreg/csrc/allocator.h"

namespace openreg {
namespace {

// [ops: record-stream]
// Out of scope does not mean out of use: what `stream` has queued may still
// read the tensor when its last reference goes. After this call its memory is
// not handed out again before that work is done.
void recordStream(at::Tensor& self, c10::Stream stream) {
  deviceAllocator()->recordStream(self.storage().data_ptr(), stream);
}
// [/ops: record-stream]

} // namespace

// [ops: register-record-stream]
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("record_stream", &recordStream);
}
// [/ops: register-record-stream]

} // namespace openreg
