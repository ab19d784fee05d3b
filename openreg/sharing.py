# Chapter: frontend
"""Tensors on a device that several processes use: no copy, one memory.

``torch.multiprocessing`` sends a tensor as its storage and a view of it, and
has nothing for a storage on this device. This module adds it: the storage's
memory goes as a file descriptor, and so does a lifeline, by which the sender
learns that the receiver is done (see ``csrc/sharing.cpp``).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

from openreg import _C
from openreg.devices import _lazy_init
from openreg.streams import Event


# [frontend: ipc-collect]
def ipc_collect() -> None:
    """Let go of memory that other processes were sent and no longer use.

    A tensor that was sent is kept until its receivers have dropped it or have
    ended, whether or not it is still referenced here. Sending looks for such
    tensors by itself, and so does an allocation that finds no memory; a
    program that does neither for long calls this, as
    :py:func:`torch.cuda.ipc_collect`.

    >>> torch.openreg.ipc_collect()
    """
    _close_launched()
    _C._collect_shared()


# [/frontend: ipc-collect]


# [frontend: travelling]
_waiting: list[tuple[weakref.ref[Any], tuple[int, ...]]] = []
_waiting_lock = threading.Lock()


def _travelling(*descriptors: int) -> list[Any]:
    """Descriptors as they can be pickled; ours are closed as soon as may be.

    A process that is being started inherits them as they are, so they must stay
    open until it has started.
    """
    popen = context.get_spawning_popen()
    try:
        return [reduction.DupFd(descriptor) for descriptor in descriptors]
    finally:
        if popen is None:
            _close(descriptors)
        else:
            with _waiting_lock:
                _waiting.append((weakref.ref(popen), descriptors))


def _close_launched() -> None:
    with _waiting_lock:
        for entry in list(_waiting):
            popen = entry[0]()
            if popen is None or getattr(popen, "pid", None) is not None:
                _waiting.remove(entry)
                _close(entry[1])


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _after_fork() -> None:
    """A fork must not keep lifelines open that it knows nothing of."""
    global _waiting_lock
    _waiting_lock = threading.Lock()
    while _waiting:
        _close(_waiting.pop()[1])


os.register_at_fork(after_in_child=_after_fork)
# [/frontend: travelling]


# [frontend: send]
def _key(memory: int, offset: int) -> tuple[Any, ...]:
    """The same in one process for all messages with one storage."""
    status = os.fstat(memory)
    return "openreg", status.st_dev, status.st_ino, offset


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type != "openreg":
        return _before[torch.UntypedStorage](storage)
    if storage.nbytes() == 0:
        return _rebuild_empty, (storage.device.index,)
    _close_launched()
    device, memory, offset, size, lifeline = _C._share_storage(storage)
    key = _key(memory, offset)
    reductions.shared_cache[key] = reductions.StorageWeakRef(storage)
    memory, lifeline = _travelling(memory, lifeline)
    return _rebuild_storage, (device, memory, offset, size, lifeline)


# [/frontend: send]


# [frontend: receive]
def _rebuild_storage(
    device: int, memory: Any, offset: int, size: int, lifeline: Any
) -> torch.UntypedStorage:
    opened = [memory.detach(), lifeline.detach()]
    try:
        _lazy_init()
        key = _key(opened[0], offset)
        known = reductions.storage_from_cache(torch.UntypedStorage, key)
        if known is not None and known.nbytes() == size:
            return known
        storage = _C._open_shared(device, opened[0], offset, size, opened[1])
        opened.pop()  # the storage closes it
        reductions.shared_cache[key] = reductions.StorageWeakRef(storage)
        return storage
    finally:
        _close(tuple(opened))


def _rebuild_empty(device: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device=f"openreg:{device}")


# [/frontend: receive]


# [frontend: send-tensor]
def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Add what ``torch.multiprocessing`` forgets: conjugate, negative, format.

    It sends a tensor over a storage as that storage and a view, which is right
    here too.
    """
    reduced = _before[type(tensor)](tensor)
    if (
        tensor.device.type != "openreg"
        or tensor.layout != torch.strided
        or tensor.is_nested
    ):
        return reduced
    metadata = torch._utils.get_tensor_metadata(tensor)
    return (_rebuild_tensor, (*reduced, metadata)) if metadata else reduced


def _rebuild_tensor(
    rebuild: Callable[..., torch.Tensor],
    arguments: tuple[Any, ...],
    metadata: dict[str, Any],
) -> torch.Tensor:
    tensor = rebuild(*arguments)
    torch._utils.set_tensor_metadata(tensor, metadata)
    return tensor


# [/frontend: send-tensor]


def _refuse_event(event: torch.Event | Event) -> tuple[Any, ...]:
    if isinstance(event, torch.Event) and event.device.type != "openreg":
        return event.__reduce_ex__(2)  # type: ignore[return-value]
    raise TypeError(
        "an openreg event cannot be sent to another process: the driver's "
        "events order the streams of one process only. Sending a tensor waits "
        "for the work of its current stream, which needs no event"
    )


# [frontend: register-reducers]
# What others have registered stays in effect for other devices.
_before: dict[type, Callable[[Any], Any]] = {}


def _register(kind: type, reduce: Callable[[Any], Any], default: Any) -> None:
    known = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    _before[kind] = known.get(kind, default)
    reduction.register(kind, reduce)


_register(torch.UntypedStorage, _reduce_storage, reductions.reduce_storage)
_register(torch.Tensor, _reduce_tensor, reductions.reduce_tensor)
_register(torch.nn.Parameter, _reduce_tensor, reductions.reduce_tensor)
reduction.register(torch.Event, _refuse_event)
reduction.register(Event, _refuse_event)
# [/frontend: register-reducers]
