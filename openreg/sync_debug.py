# Chapter: frontend
"""Finding the operators that make the host wait for a device.

A training step is fast while the host runs ahead. One ``item()`` ends that.
"""

from __future__ import annotations

from openreg import _C

_MODES = {"default": 0, "warn": 1, "error": 2}


# [frontend: sync-debug-mode]
def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Say what happens where an operator waits for a device.

    It is for the whole process. What counts is a copy that waits (``.cpu()``,
    ``.item()``, a copy from memory that is not page-locked, and so every
    operator that falls back to the CPU) and a stream's ``synchronize()``.

    Args:
        debug_mode: ``"default"`` or 0 for nothing, ``"warn"`` or 1 for a
            warning, ``"error"`` or 2 for a RuntimeError instead of the wait.

    Raises:
        ValueError: it is none of these.

    >>> import torch
    >>> torch.openreg.set_sync_debug_mode("error")
    >>> torch.openreg.Stream().synchronize()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    RuntimeError: openreg waits for the device: a stream's synchronize()...
    >>> torch.openreg.set_sync_debug_mode("default")
    """
    if isinstance(debug_mode, str):
        if debug_mode not in _MODES:
            raise ValueError(
                f"expected 'default', 'warn' or 'error', got {debug_mode!r}"
            )
        debug_mode = _MODES[debug_mode]
    _C.set_sync_debug_mode(debug_mode)


def get_sync_debug_mode() -> int:
    """What :func:`set_sync_debug_mode` has set: 0, 1 or 2.

    >>> import torch
    >>> torch.openreg.get_sync_debug_mode()
    0
    """
    return _C.get_sync_debug_mode()


# [/frontend: sync-debug-mode]
