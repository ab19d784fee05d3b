# Chapter: frontend
"""What ``torch.nn.DataParallel`` is made of, for this device.

``torch.nn.parallel`` knows no device by name, and ends in seven functions of
``torch._C`` that only a build for CUDA has, and that only know CUDA. Here they
are for openreg, in terms of copies. A CPU tensor goes to the accelerator of
the process, as in ``torch.nn.parallel.comm``.

One process for each device (``DistributedDataParallel``) is faster: here the
devices share one Python interpreter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch


def _there(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a copy of `tensor` on device `index`; -1 is the CPU."""
    device = torch.device("cpu" if index < 0 else f"openreg:{index}")
    return tensor.to(device, non_blocking=index >= 0, copy=True)


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list:
    return [
        tensor if tensor.get_device() == index else _there(tensor, index)
        for index in devices
    ]


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list:
    # Coalescing saves launches where many small copies wait for each other.
    # These do not: each is queued on the stream of its source.
    return [
        [_broadcast(tensor, [index])[0] for tensor in tensors]
        for index in devices
    ]


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list:
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    else:
        chunks = tensor.split(list(chunk_sizes), dim)
    parts = []
    for chunk, index, stream in zip(
        chunks, devices, streams or [None] * len(devices), strict=False
    ):
        with stream or contextlib.nullcontext():
            # A copy from another device waits by itself for what made it.
            parts.append(_there(chunk.contiguous(), index))
    return parts


def _gather(
    tensors: Sequence[torch.Tensor], dim: int, destination: int | None
) -> torch.Tensor:
    if destination is None:
        destination = torch.accelerator.current_device_index()
    return torch.cat([_there(tensor, destination) for tensor in tensors], dim)


def _broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list:
    return [part.copy_(tensor, non_blocking=True) for part in out]


def _scatter_out(
    tensor: torch.Tensor,
    out: Sequence[torch.Tensor],
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list:
    sizes = [part.size(dim) for part in out]
    for part, chunk in zip(out, tensor.split(sizes, dim), strict=True):
        part.copy_(chunk, non_blocking=True)
    return list(out)


def _gather_out(
    tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int
) -> torch.Tensor:
    sizes = [tensor.size(dim) for tensor in tensors]
    for part, tensor in zip(out.split(sizes, dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=True)
    return out


def _first(value: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def _offer(ours: Callable, others: Callable | None) -> Callable:
    """Return `ours` for openreg's tensors; what was there, for all others."""

    @functools.wraps(ours)
    def function(
        source: torch.Tensor | Sequence[torch.Tensor], *args: object
    ) -> object:
        kind = _first(source).device.type
        if kind == "openreg" or (kind == "cpu" and _accelerates()):
            return ours(source, *args)
        if others is None:
            raise NotImplementedError(
                f"torch.nn.parallel has no {ours.__name__[1:]} for {kind} "
                f"tensors in this build of PyTorch"
            )
        return others(source, *args)

    return function


def _accelerates() -> bool:
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == "openreg"


def _install() -> None:
    for ours in (
        _broadcast,
        _broadcast_out,
        _broadcast_coalesced,
        _scatter,
        _scatter_out,
        _gather,
        _gather_out,
    ):
        before = getattr(torch._C, ours.__name__, None)
        setattr(torch._C, ours.__name__, _offer(ours, before))
