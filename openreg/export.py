# Chapter: export
"""Programs that leave the device.

An exported program names the operators that ran. Some of them belong to this
device: attention goes to an operator that only devices of this kind have, and
``openreg::silu_mul`` is the package's own. What is here says them in operators
that every device, and ONNX, has.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten


# [export: attention]
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """Attention in products and a softmax, with the results of the fused one.

    Args:
        query: of shape (batch, heads, length, width); the others alike.

    Raises:
        NotImplementedError: with dropout. PyTorch takes other operators then.
    """
    if dropout_p:
        raise NotImplementedError(
            "the fused attention has no decomposition with dropout: the "
            "numbers would be another device's. Export after model.eval()"
        )
    # Grouped queries: a head of keys serves several of queries.
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        ones = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=key.device
        )
        scores = scores.masked_fill(ones.tril().logical_not(), -math.inf)
    if attn_bias is not None:
        scores = scores + attn_bias
    none = query.new_empty(0)
    return (
        scores.softmax(-1) @ value,
        scores.logsumexp(-1),
        *(none, none, query.shape[-2], key.shape[-2]),
        *(none, none, none),
    )


# [/export: attention]


# [export: decompositions]
def decompositions() -> dict[torch._ops.OperatorBase, Callable]:
    """The table for ``ExportedProgram.run_decompositions``.

    PyTorch's own, and the operators that only this device has.

    >>> from torch.export import export
    >>> program = export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    >>> table = torch.openreg.export.decompositions()
    >>> program = program.run_decompositions(table)
    """
    fused = aten._scaled_dot_product_fused_attention_overrideable.default
    return {
        **torch.export.default_decompositions(),
        fused: _attention,
        torch.ops.openreg.silu_mul.default: _silu_mul,
    }


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


# [/export: decompositions]


# [export: to]
def to(
    program: torch.export.ExportedProgram, device: torch.device | str
) -> torch.export.ExportedProgram:
    """The program for another device: parameters, constants and operators.

    Raises:
        NotImplementedError: see `decompositions`.
    """
    from torch.export.passes import move_to_device_pass

    moved = program.run_decompositions(decompositions())
    # The pass changes what it gets, and these are the caller's program's too.
    moved._state_dict = dict(moved.state_dict)
    moved._constants = dict(moved.constants)
    return move_to_device_pass(moved, device)


# [/export: to]
