# Chapter: streams
"""Streams and events by the names that ``torch.cuda`` has for them.

``torch.Stream``, ``torch.Event`` and ``torch.accelerator`` do all of this for
any device; the names here serve code that was written for one device.
"""

from __future__ import annotations

from typing import Any

import torch

from openreg import _C
from openreg.devices import Device, _index


# [streams: stream-class]
class Stream(torch.Stream):
    """A queue of work on a device, taken from a pool of 32 per priority.

    Args:
        device: whose stream; the current device for None.
        priority: the smaller the more urgent; clamped to
            :func:`Stream.priority_range`.

    >>> stream = torch.openreg.Stream(priority=-1)
    >>> stream.device, stream.priority
    (device(type='openreg', index=0), -1)
    """

    def __new__(  # noqa: D102 - the class says it
        cls, device: Device = None, priority: int = 0, **kwargs: Any
    ) -> Stream:
        if kwargs:  # stream_id, device_index, device_type
            return super().__new__(cls, priority=priority, **kwargs)
        named = torch.device("openreg", _index(device))
        return super().__new__(cls, device=named, priority=priority)

    @property
    def priority(self) -> int:
        """The stream's priority."""
        return _C.stream_priority(self.stream_id, self.device_index)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the most urgent priority.

        >>> torch.openreg.Stream.priority_range()
        (0, -2)
        """
        return _C.stream_priority_range()


class ExternalStream(Stream):
    """A stream that another library made, from the driver's handle.

    Whoever made the stream destroys it, after its last use here.

    Args:
        stream_ptr: the ``orStream_t``, as an integer.

    Raises:
        RuntimeError: the driver knows no such stream.
    """

    def __new__(  # noqa: D102 - the class says it
        cls, stream_ptr: int, device: Device = None
    ) -> ExternalStream:
        stream_id, index = _C.stream_from_handle(stream_ptr)
        if device is not None and _index(device) != index:
            raise ValueError(
                f"the stream belongs to openreg:{index}, not to {device!r}"
            )
        return super().__new__(  # type: ignore[return-value]
            cls,
            stream_id=stream_id,
            device_index=index,
            device_type=_C.device_type,
        )


# [/streams: stream-class]


# [streams: event-class]
class _EventType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Event) and value.device.type == "openreg"


class Event(metaclass=_EventType):
    """A point in a stream that other streams and the host can wait for.

    Args:
        enable_timing: take time stamps, for ``elapsed_time``.
        blocking: accepted, as the waiting host always sleeps in the end.
        interprocess: refused: an event belongs to one process.

    What it makes is a :class:`torch.Event`, because PyTorch's own functions
    take exactly that class.
    """

    def __new__(  # type: ignore[misc] # noqa: D102 - the class says both
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> torch.Event:
        if interprocess:
            raise ValueError("openreg events cannot be shared with a process")
        return torch.Event(
            "openreg", enable_timing=enable_timing, blocking=blocking
        )


# [/streams: event-class]


# [streams: functions]
def current_stream(device: Device = None) -> torch.Stream:
    """The calling thread's current stream of a device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Device = None) -> torch.Stream:
    """The stream that is current where no other was set.

    >>> torch.openreg.default_stream() == torch.openreg.current_stream()
    True
    """
    return torch.Stream(
        stream_id=0,
        device_index=_index(device),
        device_type=_C.device_type,
    )


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream current for its device; None changes nothing."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Make a stream and its device current within a ``with`` block.

    Args:
        stream: None changes nothing.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def stream(stream: torch.Stream | None) -> StreamContext:
    """As :class:`StreamContext`, under the name that ``torch.cuda`` has.

    >>> side = torch.openreg.Stream()
    >>> with torch.openreg.stream(side):
    ...     torch.openreg.current_stream() == side
    True
    """
    return StreamContext(stream)


# [frontend: stream-questions]
def get_stream_from_external(data_ptr: int, device: Device = None) -> Stream:
    """As :class:`ExternalStream`, under the name that ``torch.cuda`` has.

    Args:
        data_ptr: the ``orStream_t``, as an integer.
        device: whose stream it must be; any for None.
    """
    return ExternalStream(data_ptr, device)


def is_current_stream_capturing() -> bool:
    """Whether work is recorded instead of run: never, without graphs.

    >>> torch.openreg.is_current_stream_capturing()
    False
    """
    return False


# [/frontend: stream-questions]


def _sleep(nanoseconds: int) -> None:
    """Keep the current stream busy, for tests of order.

    ``torch.cuda._sleep`` is the same, in cycles; PyTorch's own tests use it.
    """
    _C.sleep(nanoseconds)


# [/streams: functions]
