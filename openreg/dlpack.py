# Chapter: frontend
"""DLPack, whose Python half in PyTorch asks for "privateuse1" by that name.

The C++ half has had this device since ``kDLExtDev``; the two methods that
``torch.from_dlpack`` calls compare ``tensor.device.type`` with the name that
every backend replaces (torch 2.13 to 2.15). So they are completed here, for
tensors of this device only.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any

import torch
from torch.overrides import has_torch_function_unary
from torch.utils.dlpack import DLDeviceType

from openreg.streams import ExternalStream, current_stream, default_stream
from openreg.tiles import is_tiled


def _wait(tensor: torch.Tensor, stream: Any) -> None:
    """Make the consumer's `stream` wait for the work queued on ours.

    `stream` is as in ``torch.cuda``: -1 asks for no order; None and 1 are the
    default stream; anything else is a native handle.
    """
    if stream is not None and type(stream) is not int:
        raise TypeError("stream must be ``int`` or ``none``")
    if stream == -1:
        return
    if stream == 0:
        raise BufferError(
            "stream 0 says nothing in DLPack; pass 1 for the default stream, "
            "a native handle, or -1 for no order"
        )
    ours = current_stream(tensor.device)
    if stream is None or stream == 1:
        theirs = default_stream(tensor.device)
    else:
        theirs = ExternalStream(stream, tensor.device)
    if theirs != ours:
        theirs.wait_stream(ours)


def _install() -> None:
    export, where = torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__

    @functools.wraps(export)
    def __dlpack__(  # noqa: N807
        self: torch.Tensor, *, stream: Any = -1, **options: Any
    ) -> object:
        # A subclass that takes over dispatches first, and may come back.
        if not has_torch_function_unary(self) and self.device.type == "openreg":
            if is_tiled(self):
                raise BufferError(
                    "Can't export tensors kept in tiles, use "
                    "torch.openreg.to_strided(tensor)"
                )
            _wait(self, stream)
            stream = -1
        return export(self, stream=stream, **options)

    @functools.wraps(where)
    def __dlpack_device__(  # noqa: N807
        self: torch.Tensor,
    ) -> tuple[IntEnum, int]:
        if has_torch_function_unary(self):
            return where(self)  # which hands it on
        if self.device.type == "openreg":
            return DLDeviceType.kDLExtDev, self.device.index
        return where(self)

    torch.Tensor.__dlpack__ = __dlpack__
    torch.Tensor.__dlpack_device__ = __dlpack_device__
