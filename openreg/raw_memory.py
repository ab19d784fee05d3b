# Chapter: frontend
"""Device memory as an address, for libraries that have no tensors."""

from __future__ import annotations

import torch

from openreg.devices import Device, _index
from openreg.streams import ExternalStream, current_stream
from openreg.streams import stream as use

_held: dict[int, torch.UntypedStorage] = {}


# [frontend: raw-memory]
def caching_allocator_alloc(
    size: int,
    device: Device = None,
    stream: torch.Stream | int | None = None,
) -> int:
    """The address of new memory from the cache that tensors use.

    It counts as allocated until :func:`caching_allocator_delete` takes it.

    Args:
        size: bytes; nothing is allocated for 0, and the address is 0.
        device: the current one for None.
        stream: whose work uses it, as a stream or the driver's handle; the
            device's current one for None.

    Raises:
        torch.OutOfMemoryError: the device has no more.

    >>> address = torch.openreg.caching_allocator_alloc(1024)
    >>> torch.openreg.caching_allocator_delete(address)
    """
    index = _index(device)
    if stream is None:
        stream = current_stream(index)
    elif isinstance(stream, int):
        stream = ExternalStream(stream, index)
    if stream.device_index != index:
        raise ValueError(
            f"the stream belongs to {stream.device}, not to openreg:{index}"
        )
    with use(stream):
        storage = torch.UntypedStorage(size, device=f"openreg:{index}")
    address = storage.data_ptr()
    if size:
        _held[address] = storage
    return address


def caching_allocator_delete(mem_ptr: int) -> None:
    """Give memory back; 0 is fine.

    Raises:
        ValueError: the address is none that :func:`caching_allocator_alloc`
            gave, or it was given back before.
    """
    if mem_ptr != 0 and _held.pop(mem_ptr, None) is None:
        raise ValueError(
            f"{mem_ptr:#x} is not from caching_allocator_alloc(), or it was "
            "given back before"
        )


# [/frontend: raw-memory]
