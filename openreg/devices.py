# Chapter: devices
"""Devices: how many, which one is current, what they are."""

from __future__ import annotations

from typing import Any, Literal

import torch

from openreg import _C

# [frontend: import-deferred]
from openreg.deferred import _run_queued

# [/frontend: import-deferred]

Device = torch.device | str | int | None


# [devices: index]
def _index(device: Device, *, optional: bool = True) -> int:
    """The index a device argument means; the current device for None."""
    if device is None and optional:
        return current_device()
    if isinstance(device, int):
        return device
    parsed = torch.device(device)  # type: ignore[arg-type]
    if parsed.type != "openreg":
        raise ValueError(f"expected an openreg device, got {device!r}")
    return current_device() if parsed.index is None else parsed.index


# [/devices: index]


# [devices: probes]
def device_count() -> int:
    """How many devices there are; does not start any.

    Raises:
        RuntimeError: an environment variable of the driver cannot be used.

    >>> torch.openreg.device_count()
    2
    """
    return _C.device_count()


def is_available() -> bool:
    """Whether there is a device. Never raises and never starts one.

    >>> torch.openreg.is_available()
    True
    """
    try:
        return device_count() > 0
    except RuntimeError:
        return False


# [/devices: probes]


# [devices: lazy]
def is_initialized() -> bool:
    """Whether this process has started a device. Never raises."""
    return _C.is_initialized()


def _is_in_bad_fork() -> bool:
    """Whether this process is a fork of one that had started the driver."""
    return _C.is_in_bad_fork()


def _lazy_init() -> None:
    """Start the driver, once. PyTorch calls this before it needs a device.

    The driver keeps threads apart. A lock here could be held by another
    thread at the moment of a fork, and the child would wait for it for ever.
    """
    _C.init()
    # [frontend: run-deferred]
    _run_queued()
    # [/frontend: run-deferred]


def init() -> None:
    """Start the driver now instead of at the first use of a device.

    Raises:
        RuntimeError: there is no device, or the process was forked after the
            driver had been started.
    """
    _lazy_init()
    # [streams: init-notes-use]
    _C.note_use()
    # [/streams: init-notes-use]


# [/devices: lazy]


# [devices: current]
def current_device() -> int:
    """The index of the calling thread's current device."""
    return _C.current_device()


def set_device(device: Device) -> None:
    """Make a device current for the calling thread.

    Negative indices are ignored, as by :py:func:`torch.cuda.set_device`.

    Raises:
        RuntimeError: there is no such device.
    """
    index = _index(device, optional=False)
    if index >= 0:
        _C.set_device(index)


class device:  # noqa: N801 - torch.cuda calls it so
    """Make a device current within a ``with`` block.

    Args:
        device: an index, a device, a string such as ``"openreg:1"``; None or
            a negative index changes nothing.

    >>> with torch.openreg.device(1):
    ...     torch.openreg.current_device()
    1
    >>> torch.openreg.current_device()
    0
    """

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        set_device(self.prev_idx)


# [/devices: current]


# [frontend: exchange]
class device_of(device):  # noqa: N801 - torch.cuda calls it so
    """Make an object's device current within a ``with`` block.

    Args:
        obj: a tensor or a storage; one that is elsewhere changes nothing.

    >>> with torch.openreg.device_of(torch.UntypedStorage(8)):
    ...     torch.openreg.current_device()
    0
    """

    def __init__(self, obj: Any) -> None:
        place = obj.device
        super().__init__(place.index if place.type == "openreg" else -1)


def _exchange_device(device: int) -> int:
    """Make a device current and return the one before.

    A negative index changes nothing and gives -1, as in ``torch.cuda``.
    """
    if device < 0:
        return -1
    previous = current_device()
    _C.set_device(device)
    return previous


def _maybe_exchange_device(device: int) -> int:
    """As :func:`_exchange_device`: no device starts by becoming current."""
    return _exchange_device(device)


class _DeviceGuard:
    """As :class:`device`, for an index only; compiled code uses it."""

    def __init__(self, index: int) -> None:
        self.idx = index
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> Literal[False]:
        self.idx = _maybe_exchange_device(self.prev_idx)
        return False


# [/frontend: exchange]


# [devices: describe]
def get_device_properties(device: Device = None) -> Any:
    """Name, memory in bytes and engines of a device; starts nothing.

    Raises:
        RuntimeError: there is no such device.

    >>> torch.openreg.get_device_properties(1).name
    'OpenReg simulated device'
    """
    return _C.get_device_properties(_index(device))


def get_device_name(device: Device = None) -> str:
    """The name of a device."""
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Version and revision of a device's architecture.

    >>> torch.openreg.get_device_capability()
    (1, 0)
    """
    properties = get_device_properties(device)
    return properties.major, properties.minor


# [/devices: describe]


# [guards: python-synchronize]
def synchronize(device: Device = None) -> None:
    """Wait for all work of a device.

    Raises:
        RuntimeError: there is no such device.
        torch.AcceleratorError: a kernel failed since the last call that waits.
    """
    _C.synchronize(_index(device))


# [/guards: python-synchronize]
