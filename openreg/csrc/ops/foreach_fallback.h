// Chapter: fallback
#pragma once

#include <string>
#include <vector>

namespace openreg {

// [fallback: foreach-header]
// Send operators on lists to the CPU as wholes, where that is better.
//
// PyTorch composes each `_foreach_` operator of its elements' operator. If the
// device has a kernel for that one, nothing has to be done. If not, each
// element would go to the CPU by itself: these get the fallback by name.
// To be called once, when all kernels of the library are registered.
void registerForeachFallbacks();

// Their names, as in "aten::_foreach_lgamma.out".
const std::vector<std::string>& foreachFallbacks();
// [/fallback: foreach-header]

} // namespace openreg
