# Chapter: frontend
"""The number formats the devices compute with.

A device's kernels are those of the host's CPU, and so are its formats.
"""

from __future__ import annotations

import torch

from openreg.devices import is_available


# [frontend: formats]
def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether the devices compute with ``torch.bfloat16``.

    Args:
        including_emulation: also where the engine has no instructions for it,
            and kernels compute with ``torch.float32`` in between.

    >>> torch.openreg.is_bf16_supported()
    True
    """
    return is_available() and (
        including_emulation or torch.cpu._is_avx512_bf16_supported()
    )


def is_tf32_supported() -> bool:
    """Whether matrix products can round to TensorFloat-32: they cannot.

    >>> torch.openreg.is_tf32_supported()
    False
    """
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The formats that ``torch.autocast("openreg")`` can be asked for.

    ``torch.autocast`` demands this function, and with it
    ``torch.utils.checkpoint``, which puts the state of autocast back.

    >>> torch.openreg.get_amp_supported_dtype()
    [torch.bfloat16, torch.float16]
    """
    return [torch.bfloat16, torch.float16]


# [/frontend: formats]
