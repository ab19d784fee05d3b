# Chapter: fallback
"""What to do about an operator that runs on the CPU."""

import torch

from openreg import _C


# [fallback: remedy]
def remedy(operator: str) -> str:
    """What could be done so that an operator does not run on the CPU.

    Args:
        operator: with its overload, as in ``"aten::add.out"``.

    >>> import torch
    >>> torch.openreg.fallback.remedy("aten::tril_indices")
    'make it on the CPU once, and keep the copy on the device'
    """
    if siblings := _with_kernels(operator):
        return (
            f"call {' or '.join(siblings)}, which has a kernel, or register "
            f"{operator} through it"
        )
    if not operator.startswith("aten::"):
        return f'write a kernel: torch.library.impl("{operator}", "openreg")'
    if _C.fallback_category(operator) == "factory":
        return "make it on the CPU once, and keep the copy on the device"
    if operator in _C.fallback_foreach():
        return (
            "register a kernel for the elements' operator, which PyTorch "
            "composes this one of"
        )
    if _decomposes(operator):
        return (
            "register PyTorch's own decomposition of it, from "
            f'torch._decomp: torch.library.impl("{operator}", "openreg")'
        )
    return (
        f'write a kernel: torch.library.impl("{operator}", "openreg") or '
        "TORCH_LIBRARY_IMPL(aten, PrivateUse1, m); or do this part of the "
        "program on the CPU, so that its tensors are copied once"
    )


def _stem(operator: str) -> str:
    """Of a function, its in-place and its out= form: the same."""
    name = operator.partition(".")[0]
    return name.removesuffix("_") if not name.endswith("__") else name


def _with_kernels(operator: str) -> list[str]:
    """The operator's other overloads and forms that the device has."""
    name, stem = operator.partition(".")[0], _stem(operator)
    others = torch._C._dispatch_get_registrations_for_dispatch_key(
        "PrivateUse1"
    )
    foreach = set(_C.fallback_foreach())
    return sorted(
        other
        for other in others
        if other.partition(".")[0] in (name, stem, f"{stem}_")
        and other != operator
        and other not in foreach
    )[:3]


def _decomposes(operator: str) -> bool:
    from torch._decomp import decomposition_table

    return any(
        isinstance(known, torch._ops.OpOverload)
        and known._schema.name == operator.partition(".")[0]
        and known._schema.overload_name == operator.partition(".")[2]
        for known in decomposition_table
    )


# [/fallback: remedy]
