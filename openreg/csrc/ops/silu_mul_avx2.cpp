// Chapter: autograd
#include "openreg/csrc/ops/silu_mul_loops.h"

namespace openreg {

template <typename T>
SiluMulLoops siluMulLoopsWithAvx2() {
  return {&siluMulForward<T>, &siluMulBackward<T>};
}

template SiluMulLoops siluMulLoopsWithAvx2<float>();
template SiluMulLoops siluMulLoopsWithAvx2<double>();
template SiluMulLoops siluMulLoopsWithAvx2<at::Half>();
template SiluMulLoops siluMulLoopsWithAvx2<at::BFloat16>();

} // namespace openreg
