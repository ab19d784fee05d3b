# Chapter: streams
"""The stream sanitizer: finds accesses that no event or wait puts in order.

It watches every operator, and which stream waits for which, and raises when
two streams use the same memory, one of them writing, with nothing that orders
the two. ``OPENREG_SANITIZER=1`` turns it on, or :func:`enable`. What it knows
about order is ``torch.cuda._sanitizer``'s, which is not bound to a device.

It sees operators and their arguments, not the memory: views that start at
different addresses count as different tensors, and work that C++ code queues
by itself is not seen.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from openreg import _C, _gpu_trace


class RaceError(RuntimeError):
    """Two streams use the same memory, and nothing puts them in order."""


# [streams: message]
def _line(stack: traceback.StackSummary) -> str:
    """Where the user's program stands: the last line outside PyTorch."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    for frame in reversed(stack):
        if not frame.filename.startswith(inside):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return "an unknown place"


def _describe(access: Any, names: dict[int, str]) -> str:
    verb = "writes" if access.type.name == "WRITE" else "reads"
    names_of = ", ".join(dict.fromkeys(access.aliases)) or "its result"
    operator = str(access.operator).partition("(")[0]
    return (
        f"{operator} {verb} {names_of} on {names[access.stream]}, "
        f"at {_line(access.stack_trace)}"
    )


def _message(error: Any, names: dict[int, str]) -> str:
    return (
        f"two streams use the memory at {error.data_ptr:#x} and nothing "
        f"orders them.\n"
        f"  now:    {_describe(error.current_access, names)}\n"
        f"  before: {_describe(error.previous_access, names)}\n"
        f"Let the later stream wait: stream.wait_stream(other), or "
        f"stream.wait_event(event) for an event recorded after the earlier "
        f"access."
    )


# [/streams: message]


# [streams: mode]
class _Mode(TorchDispatchMode):
    """Tells what each operator reads and writes, and on which stream."""

    def __init__(self) -> None:
        super().__init__()
        from torch.cuda import _sanitizer

        self.core = _sanitizer
        self.handler = _sanitizer.EventHandler()
        self.names: dict[int, str] = {}
        torch._C._activate_gpu_trace()
        for name in dir(_gpu_trace):
            if name.endswith("Callbacks"):
                words = name.removesuffix("Callbacks")
                registry = getattr(_gpu_trace, name)
                registry.add_callback(getattr(self.handler, _snake(words)))

    def stream_of(self, device: int) -> int:
        """The driver's handle of a device's current stream."""
        stream = torch.accelerator.current_stream(device)
        handle = _C.stream_handle(stream.stream_id, device)
        kind = "stream" if stream.stream_id else "the default stream"
        number = f" {handle:#x}" if stream.stream_id else ""
        self.names[handle] = f"{kind}{number} of openreg:{device}"
        return handle

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func in (aten.record_stream.default, aten.detach.default):
            return func(*args, **kwargs)
        schema = func._schema
        factory = bool(self.core.FACTORY_FUNCTION_REGEX.match(schema.name))
        accesses = _Accesses(self.core)
        accesses.parse_inputs(schema, args, kwargs, is_factory=factory)
        result = func(*args, **kwargs)
        accesses.parse_outputs(schema, result, is_factory=factory)
        streams = [self.stream_of(index) for index in sorted(accesses.devices)]
        errors = []
        self.order(streams)
        for stream in streams:
            errors += self.handler._handle_kernel_launch(
                stream,
                accesses.dataptrs_read - accesses.dataptrs_written,
                accesses.dataptrs_written,
                accesses.outputs,
                schema,
                accesses.tensor_aliases,
            )
            self.order(streams)
        if errors:
            raise RaceError(_message(errors[0], self.names))
        return result

    def order(self, streams: list[int]) -> None:
        """A copy between devices makes each of the two streams wait."""
        for earlier in streams:
            for later in streams:
                if earlier != later:
                    event = -1
                    self.handler._handle_event_creation(event)
                    self.handler._handle_event_record(event, earlier)
                    self.handler._handle_event_wait(event, later)
                    self.handler._handle_event_deletion(event)


# [/streams: mode]


# [streams: accesses]
def _Accesses(core: Any) -> Any:  # noqa: N802 - a class, made when asked for
    """PyTorch's reader of arguments, for this device's tensors."""

    class Accesses(core.ArgumentHandler):
        def __init__(self) -> None:
            super().__init__()
            self.devices: set[int] = set()

        def _handle_argument(
            self,
            value: Any,
            is_write: bool,
            metadata_only: bool,
            name: str | None = None,
            is_output: bool = False,
        ) -> None:
            for tensor in pytree.tree_leaves(value):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.device.type != "openreg":
                    continue
                self.devices.add(tensor.device.index)
                pointer = tensor.data_ptr() or id(tensor)
                if is_write:
                    self.dataptrs_written.add(pointer)
                elif not metadata_only:
                    self.dataptrs_read.add(pointer)
                aliases = self.tensor_aliases.setdefault(pointer, [])
                if name is not None:
                    aliases.append(name)
                if is_output:
                    self.outputs.add(pointer)

    return Accesses()


def _snake(words: str) -> str:
    """The handler's method for a registry: EventWait, _handle_event_wait."""
    spaced = "".join(f"_{c.lower()}" if c.isupper() else c for c in words)
    return f"_handle{spaced}"


# [/streams: accesses]


# [streams: enable]
_mode: _Mode | None = None


def enable() -> None:
    """Watch this thread's operators from now on; a second call does nothing.

    The start of the watch is the start of its knowledge: enable it first.
    """
    global _mode
    if _mode is None:
        _mode = _Mode()
        _mode.__enter__()


def disable() -> None:
    """Stop watching."""
    global _mode
    if _mode is not None:
        _mode.__exit__(None, None, None)
        _mode = None


def _enable_if_asked() -> None:
    asked = os.environ.get("OPENREG_SANITIZER", "")
    if asked not in ("", "0", "1"):
        raise RuntimeError(
            f"OPENREG_SANITIZER={asked!r} is neither 0 nor 1; correct it"
        )
    if asked == "1":
        enable()


# [/streams: enable]
