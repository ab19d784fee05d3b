// Chapter: fallback
// Kinds of operators, for rules that are about many at once.
#pragma once

#include <array>
#include <string_view>

namespace c10 {
class OperatorHandle;
} // namespace c10

namespace openreg {

// [fallback: categories]
// In the order they are tried: an operator is of the first kind that fits it.
inline constexpr std::array<std::string_view, 10> kCategories{
    "custom",    // not of the namespace aten
    "foreach",   // lists of tensors: _foreach_, _fused_, _amp_foreach_
    "backward",  // *_backward*
    "random",    // tagged as seeded, or takes a generator
    "linalg",    // linalg_*, and the older names of the same
    "dynamic",   // the result's shape depends on the values
    "reduction", // tagged so
    "pointwise", // tagged so
    "factory",   // takes no tensor
    "other",
};
// [/fallback: categories]

// The operator's kind, from its namespace, its name, the tags that PyTorch's
// native_functions.yaml gives it, and its schema. A literal from kCategories.
std::string_view categoryOf(const c10::OperatorHandle& op);

} // namespace openreg
