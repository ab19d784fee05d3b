# Chapter: frontend
"""Calls that wait until the device has started.

Importing a module must start no device. What such a module has to do on the
device is kept here, and done when the device starts.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from openreg import _C

# Appending and taking are atomic. A lock could be held by another thread at
# the moment of a fork, and the child would wait for it for ever.
_queued: deque[tuple[Callable[[], Any], list[str]]] = deque()


# [frontend: lazy-call]
def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
    """Call now if a device has started, else when PyTorch starts one.

    Further arguments, which ``torch.cuda`` has for the order of seeds, change
    nothing here: a seed may be set before the device has started.

    >>> import torch
    >>> torch.openreg.init()
    >>> torch.openreg._lazy_call(lambda: print("the device has started"))
    the device has started
    """
    if _C.is_initialized():
        callable()
        return
    _queued.append((callable, traceback.format_stack()[:-1]))
    if _C.is_initialized():  # by another thread, meanwhile
        _run_queued()


def _run_queued() -> None:
    """Make the calls that have waited, in their order.

    Raises:
        RuntimeError: one failed; the message says who had asked for it.
    """
    while True:
        try:
            callable, asked = _queued.popleft()
        except IndexError:
            return
        try:
            callable()
        except Exception as error:
            raise RuntimeError(
                f"a call that waited for the device to start failed: {error}\n"
                f"It was asked for here:\n{''.join(asked)}"
            ) from error


# [/frontend: lazy-call]
