// Chapter: quantization
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace openreg {

// [quantization: threads]
// Shares out [0, count) to the threads of torch, `grain` at least to each, as
// at::parallel_for does where it is compiled with OpenMP. Compiled without, that
// is a plain loop: it lives in a header. OpenMP's own runtime library, linked
// here, would be a second one beside torch's, with threads of its own.
void shareOut(
    std::int64_t count,
    std::int64_t grain,
    c10::function_ref<void(std::int64_t begin, std::int64_t end)> work);
// [/quantization: threads]

} // namespace openreg
