# Chapter: quantization
"""Products whose results have another dtype, as torchao asks for them.

``out_dtype(aten.mm, torch.int32, a, b)`` says "multiply, and let the sums be
wide". PyTorch's own answer is ``_int_mm`` on CUDA and XPU. On other devices it
widens the matrices first, to four times their size, and multiplies those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._higher_order_ops.out_dtype import out_dtype, out_dtype_fallback


# [quantization: out-dtype]
def _multiply(
    operator: torch._ops.OpOverload, dtype: torch.dtype, *args: Any
) -> torch.Tensor:
    whole = operator is torch.ops.aten.mm.default and dtype == torch.int32
    if whole and all(matrix.dtype == torch.int8 for matrix in args):
        return torch._int_mm(*args)
    return out_dtype_fallback(operator, dtype, *args)


out_dtype.py_impl(torch._C.DispatchKey.PrivateUse1)(_multiply)
# [/quantization: out-dtype]
