# Chapter: fallback
"""What ran on the CPU because the device has no kernel for it.

An operator without a kernel works all the same: its tensors are copied to the
host, the CPU computes, the results are copied back. That is slow, so it is
never silent. Each operator is named once, in a :class:`FallbackWarning` at the
line of your program that called it, and a ledger keeps what the calls cost.

**Rules** say what happens instead: ``"off"`` says nothing, ``"warn"`` warns
once for each operator, ``"error"`` raises a NotImplementedError before anything
has been copied or written. Alone, such a word is for all operators.
``aten::unique*=error`` is for those that a glob pattern fits, ``random=off``
for a category (:func:`categories`). Commas stand between rules, and the last
that fits decides. Rules come from ``OPENREG_FALLBACK``, from :func:`set_mode`
for the process, and from :func:`mode` for a block of one thread.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from openreg import _C, launch_site
from openreg.remedies import remedy


# [fallback: warning]
class FallbackWarning(UserWarning):
    """An operator runs on the CPU, because the device has no kernel for it.

    A category of its own, for ``warnings.filterwarnings``.
    """


# [/fallback: warning]


# [fallback: counts]
def fallbacks() -> dict[str, int]:
    """Calls that went to the CPU, by operator and overload.

    >>> import torch
    >>> x = torch.ones(2, device="openreg")
    >>> before = torch.openreg.fallback_count()
    >>> y = x.clone()
    >>> torch.openreg.fallback_count() - before
    0
    """
    return {record.operator: record.calls for record in records()}


def fallback_count() -> int:
    """How many calls went to the CPU so far, in all."""
    return sum(fallbacks().values())


# [/fallback: counts]


# [fallback: record]
@dataclass(frozen=True)
class Record:
    """What one operator's calls on the CPU have cost so far."""

    #: With its overload, as in ``"aten::add.out"``.
    operator: str
    #: One of :func:`categories`.
    category: str
    #: Those that failed on the CPU count too, those that were refused do not.
    calls: int
    #: Copied from the device to the host.
    bytes_to_host: int
    #: Copied from the host to the device.
    bytes_to_device: int
    #: Spent by the calling threads on copies, waiting and computing.
    seconds: float
    #: Calls by where they came from, as ``"file:line (function)"``: of the
    #: first call only, unless :func:`record_sites` asks for all.
    sites: dict[str, int]


def records() -> list[Record]:
    """The ledger: one record for each operator, the most expensive first.

    ``dataclasses.asdict`` makes dictionaries of them, for JSON.

    >>> torch.openreg.fallback.reset()
    >>> torch.openreg.fallback.records()
    []
    """
    found = [Record(**record) for record in _C.fallback_records()]
    return sorted(found, key=lambda record: record.seconds, reverse=True)


def reset() -> None:
    """Empty the ledger. Each operator will be named once more."""
    _C.fallback_reset()


def categories() -> list[str]:
    """The kinds of operators that a rule can name.

    An operator is of the first that fits it. They are taken from the namespace
    (``custom`` is all that is not PyTorch's), the name (``foreach``,
    ``backward``, ``linalg``), the tags in PyTorch's ``native_functions.yaml``
    (``random``, ``dynamic``, ``reduction``, ``pointwise``) and the schema
    (``factory`` takes no tensor).

    >>> torch.openreg.fallback.categories()[:4]
    ['custom', 'foreach', 'backward', 'random']
    """
    return _C.fallback_categories()


# [/fallback: record]


# [fallback: mode]
def set_mode(rules: str) -> None:
    """Set the rules of the process, in the place of ``OPENREG_FALLBACK``'s.

    Args:
        rules: as the top of this page says; ``""`` is ``"warn"``.

    Raises:
        ValueError: an unknown mode or category.

    >>> torch.openreg.fallback.set_mode("error, linalg=warn")
    >>> torch.openreg.fallback.get_mode("aten::linalg_qr")
    'warn'
    >>> torch.openreg.fallback.get_mode("aten::frexp.Tensor")
    'error'
    >>> torch.openreg.fallback.set_mode("warn")
    """
    _C.fallback_set_mode(rules)


def get_mode(operator: str) -> str:
    """What would happen to an operator here: ``off``, ``warn`` or ``error``.

    Args:
        operator: with its overload, as in ``"aten::add.out"``.

    Raises:
        ValueError: there is no such operator.
    """
    return _C.fallback_mode(operator)


@contextlib.contextmanager
def mode(rules: str) -> Iterator[None]:
    """Put rules over those that hold, within a ``with`` block or a function.

    They hold for the calling thread and for the backward passes it starts,
    whose threads inherit them, but not for other threads, nor for threads that
    are started in the block. Blocks nest; what the inner rules do not name, the
    outer ones decide, and after them the process's.

    Args:
        rules: as the top of this page says.

    Raises:
        ValueError: an unknown mode or category.

    >>> with torch.openreg.fallback.mode("error"):
    ...     with torch.openreg.fallback.mode("aten::unique*=off"):
    ...         torch.openreg.fallback.get_mode("aten::unique_dim")
    'off'
    """
    outer = _C.fallback_push_mode(rules)
    try:
        yield
    finally:
        _C.fallback_restore_mode(outer)


# [/fallback: mode]


# [fallback: sites]
def record_sites(every: bool = True) -> bool:
    """Say whether the ledger keeps every call's place, or the first one's.

    For every call, Python's stack is walked, which takes some microseconds.

    Returns:
        What was set before.
    """
    return _C.fallback_record_sites(every)


def _called(operator: str, warn: bool) -> str:
    """Where the running call comes from; the C++ side asks."""
    site = launch_site.described()
    if warn:
        frame = launch_site.users_frame()
        if frame is None:
            file, line, scope = f"<{site.partition(' (')[0]}>", 1, {}
        else:
            file, line = frame.f_code.co_filename, frame.f_lineno
            scope = frame.f_globals
        warnings.warn_explicit(
            f"{operator} has no kernel for openreg and runs on the CPU: its "
            "tensors are copied there and back. This is said once; "
            "torch.openreg.fallback.report() tells all, and what to do",
            FallbackWarning,
            file,
            line,
            module=scope.get("__name__", "openreg"),
            registry=scope.setdefault("__warningregistry__", {}),
        )
    return site


# [/fallback: sites]


# [fallback: report]
def report() -> str:
    """The ledger as text, each operator with what to do about it.

    >>> torch.openreg.fallback.reset()
    >>> print(torch.openreg.fallback.report())
    Nothing ran on the CPU for want of a kernel.
    """
    found = records()
    if not found:
        return "Nothing ran on the CPU for want of a kernel."
    calls = sum(record.calls for record in found)
    counts = f"{_some(calls, 'call')} of {_some(len(found), 'operator')}"
    lines = [f"{counts} ran on the CPU."]
    for record in found:
        lines += [
            "",
            f"{record.operator} ({record.category}): "
            f"{_some(record.calls, 'call')}, {record.seconds * 1e3:.2f} ms, "
            f"{_size(record.bytes_to_host)} to the host, "
            f"{_size(record.bytes_to_device)} to the device",
            *(f"    {n} x {site}" for site, n in _most(record.sites)),
            f"    -> {remedy(record.operator)}",
        ]
    return "\n".join(lines)


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _most(sites: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(sites.items(), key=lambda item: -item[1])[:5]


def _size(count: int) -> str:
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


# [/fallback: report]
