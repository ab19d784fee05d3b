# Chapter: memory
"""Memory of the devices by the names that ``torch.cuda`` has for it.

``torch.accelerator`` answers most of this for any device; what it lacks is the
limit of a process, the history and the snapshot.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from openreg import _C
from openreg.devices import Device, _index

# [frontend: import-sharing]
from openreg.sharing import ipc_collect

# [/frontend: import-sharing]

_KINDS = {"all": "all", "small_pool": "small", "large_pool": "large"}


# [memory: figures]
def memory_stats(device: Device = None) -> dict[str, Any]:
    """Every counter of a device's allocator, by its name in ``torch.cuda``.

    Sizes are bytes. Empty before the first allocation of the process.
    """
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors hold."""
    return torch.accelerator.memory_allocated(_index(device))


# [/memory: figures]


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes that tensors held since the last reset."""
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Device = None) -> int:
    """Bytes that the allocator holds, in tensors and cached."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Device = None) -> int:
    """The most bytes that the allocator held since the last reset."""
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    """Start the ``peak`` counters anew, from the current figures."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Start the ``allocated`` and ``freed`` counters anew, from zero."""
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of a device, as its driver says."""
    return torch.accelerator.get_memory_info(_index(device))


def empty_cache() -> None:
    """Give cached memory back to the devices, for other processes.

    It does not make more memory available to this one.
    """
    # [frontend: collect-shared]
    ipc_collect()
    # [/frontend: collect-shared]
    torch.accelerator.empty_cache()


# [frontend: nested-stats]
def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """:func:`memory_stats`, with a dictionary for each part of a name.

    >>> x = torch.empty(256, device="openreg")
    >>> stats = torch.openreg.memory_stats_as_nested_dict()
    >>> stats["allocated_bytes"]["all"]["current"] >= x.nbytes
    True
    """
    return _nested(memory_stats(device))


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """:func:`host_memory_stats`, with a dictionary for each part of a name."""
    return _nested(host_memory_stats())


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        place = result
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return result


def device_memory_used(device: Device = None) -> int:
    """Bytes of a device that are in use, as its driver says."""
    free, total = mem_get_info(device)
    return total - free


# [/frontend: nested-stats]


# [memory: limit]
def set_per_process_memory_fraction(
    fraction: float, device: Device = None
) -> None:
    """Bound what this process may reserve, as a part of the device's memory.

    Args:
        fraction: from 0 to 1; 1 is no bound.
        device: the current one for None.

    Raises:
        ValueError: the fraction is out of range.
    """
    _C.set_memory_fraction(fraction, _index(device))


def get_per_process_memory_fraction(device: Device = None) -> float:
    """The part of a device's memory that this process may reserve."""
    return _C.get_memory_fraction(_index(device))


# [/memory: limit]


def host_memory_stats() -> dict[str, int]:
    """Counters of the page-locked host memory; sizes are bytes."""
    return _C.host_memory_stats()


def reset_peak_host_memory_stats() -> None:
    """Start the ``peak`` counters of page-locked memory anew."""
    _C.reset_host_memory_stats(True)


def reset_accumulated_host_memory_stats() -> None:
    """Start the accumulated counters of page-locked memory anew."""
    _C.reset_host_memory_stats(False)


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """A table of the counters, for people.

    Args:
        device: the current one for None.
        abbreviated: without the rows for small and large blocks.
    """
    index = _index(device)
    stats = memory_stats(index)
    sizes = {
        "Allocated memory": "allocated_bytes",
        "Active memory": "active_bytes",
        "Requested memory": "requested_bytes",
        "Reserved memory": "reserved_bytes",
        "Free, but split": "inactive_split_bytes",
    }
    counts = {
        "Allocations": "allocation",
        "Active blocks": "active",
        "Segments": "segment",
        "Free, but split": "inactive_split",
    }
    columns = ("current", "peak", "allocated", "freed")
    heads = ("now", "peak", "total allocated", "total freed")
    lines = [
        f"openreg:{index} memory, out of memory "
        f"{stats.get('num_ooms', 0)} times, retries "
        f"{stats.get('num_alloc_retries', 0)}",
        f"{'':<24}" + "".join(f"{head:>17}" for head in heads),
    ]
    for rows, is_size in ((sizes, True), (counts, False)):
        for title, name in rows.items():
            kinds = ["all"] if abbreviated else list(_KINDS)
            for kind in kinds:
                row = title if kind == "all" else f"  {_KINDS[kind]}"
                values = [stats.get(f"{name}.{kind}.{c}", 0) for c in columns]
                cells = (_size(v) if is_size else str(v) for v in values)
                lines.append(f"{row:<24}" + "".join(f"{c:>17}" for c in cells))
    return "\n".join(lines)


def _size(count: int) -> str:
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.2f} {unit}"


def _record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "python",
    max_entries: int = 100_000,
    **_: Any,
) -> None:
    """Remember allocations and frees from now on; the old ones are forgotten.

    Args:
        enabled: None stops it; ``"state"`` only keeps who allocated what is
            held; ``"all"`` keeps every event, too.
        context: None for no stacks; with them, an allocation costs some
            microseconds more.
        stacks: ``"python"``, or ``"all"`` with the frames of C++.
        max_entries: how many events of each device are kept.

    Raises:
        ValueError: an argument is none of these.
    """
    if enabled not in (None, "state", "all"):
        raise ValueError(
            f"expected enabled to be None, 'state' or 'all', got {enabled!r}"
        )
    if context not in (None, "state", "alloc", "all"):
        raise ValueError(
            "expected context to be None, 'state', 'alloc' or 'all', got "
            f"{context!r}"
        )
    if stacks not in ("python", "all"):
        raise ValueError(
            f"expected stacks to be 'python' or 'all', got {stacks!r}"
        )
    entries = {None: 0, "state": 1, "all": max_entries}[enabled]
    _C.record_memory_history(entries, context is not None, stacks == "all")


# [memory: snapshot]
def _snapshot(device: Device = None) -> dict[str, Any]:
    """All segments and blocks, and the history that was recorded.

    Args:
        device: only this one's; all for None.

    The form is that of ``torch.cuda.memory._snapshot``, which PyTorch's
    memory visualizer reads.
    """
    taken = _C.memory_snapshot()
    if device is not None:
        index = _index(device)
        taken["segments"] = [
            s for s in taken["segments"] if s["device"] == index
        ]
        taken["device_traces"] = [
            trace if place == index else []
            for place, trace in enumerate(taken["device_traces"])
        ]
    return taken


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    """Write :func:`_snapshot` to a file for PyTorch's memory visualizer."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)


def memory_snapshot() -> list[dict[str, Any]]:
    """The segments of all devices, each with its blocks."""
    return _snapshot()["segments"]


# [/memory: snapshot]
