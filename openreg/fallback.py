# Chapter: fallback
"""What ran on the CPU because the device has no kernel for it."""

from openreg import _C


def fallbacks() -> dict[str, int]:
    """Calls that went to the CPU, by operator and overload.

    >>> import torch
    >>> x = torch.ones(2, device="openreg")
    >>> before = torch.openreg.fallback_count()
    >>> y = x.clone()
    >>> torch.openreg.fallback_count() - before
    0
    """
    return _C.fallbacks()


def fallback_count() -> int:
    """How many calls went to the CPU so far, in all."""
    return sum(_C.fallbacks().values())
