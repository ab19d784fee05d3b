# Chapter: frontend
"""A private layout: weights kept in tiles of 16 by 16 elements.

Chips keep matrices in the order in which their matrix units read them. PyTorch
goes on seeing sizes and strides; the tensor carries a note that its elements
lie elsewhere, which copies, ``torch.save`` and ``torch.load`` respect and all
else refuses.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import has_torch_function_unary

from openreg import _C


def to_tiled(matrix: torch.Tensor) -> torch.Tensor:
    """Return a copy of `matrix` that is kept in tiles of 16 by 16 elements.

    Args:
        matrix: a tensor of this device, of shape ``(..., R, C)`` with R and C
            multiples of 16, of any dtype. One in tiles already is returned as
            another tensor over the same memory.

    Returns:
        A tensor of the same shape, dtype and device that equals `matrix`. It
        can be copied, saved, loaded and made a parameter. ``clone`` and
        ``deepcopy`` keep the tiles; ``to``, which may change dtype or device,
        gives a strided copy. Views and kernels refuse it. No gradient flows
        from it to `matrix`.

    Raises:
        ValueError: the sizes do not fit, or the tensor is not on the device.
    """
    return _C.to_tiled(matrix)


def to_strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of `tensor` with ordinary strides.

    A tensor that is not in tiles is returned as it is.
    """
    return _C.to_strided(tensor)


def is_tiled(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` are kept in tiles.

    >>> is_tiled(torch.ones(16, 16))
    False
    """
    return _C.is_tiled(tensor)


def _install() -> None:
    # PyTorch's own copies the storage and puts the strides on top.
    plain = torch.Tensor.__deepcopy__

    @functools.wraps(plain)
    def __deepcopy__(  # noqa: N807
        self: torch.Tensor, memo: dict[int, Any]
    ) -> torch.Tensor:
        if (
            has_torch_function_unary(self)
            or self.device.type != "openreg"
            or not is_tiled(self)
            or id(self) in memo
        ):
            return plain(self, memo)
        result = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = result
        return result

    torch.Tensor.__deepcopy__ = __deepcopy__
