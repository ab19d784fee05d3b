"""The verdict on a call, and on all calls of a cell of the table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from sweep.calls import Call, Outcome, attempt
from sweep.table import Cell

DEVICE = "openreg"


class Judgement(NamedTuple):
    """What one call came to. `wrong` names what differs, if something does."""

    what: str
    wrong: str = ""
    detail: str = ""
    refused: bool = False
    fallbacks: tuple[str, ...] = ()


def judge(call: Call) -> Judgement | None:
    """Make the call on both devices; None if the CPU has no such call."""
    if call.expect == "refusal":
        return judge_refusal(call)
    cpu = attempt(call, "cpu")
    if cpu.unprepared:
        return None
    device = attempt(call, DEVICE)
    if cpu.error or device.error:
        wrong, detail = compare_errors(cpu, device)
    else:
        form = call.expect == "form" or cpu.random
        tolerance = None if form else call.tolerance
        wrong, detail = compare(cpu, device, tolerance)
        if not wrong and call.twice:
            wrong, detail = compare_runs(call, device, call.expect == "form")
    refused = bool(cpu.error) and not wrong
    fallbacks = tuple(device.fallbacks)
    return Judgement(call.what, wrong, detail, refused, fallbacks)


def judge_refusal(call: Call) -> Judgement | None:
    """The CPU cannot be asked: the device must refuse and name devices."""
    outcome = attempt(call, DEVICE)
    if outcome.unprepared:
        return None
    error, wrong, detail = outcome.error, "", ""
    if error is None:
        wrong = "no error"
        detail = "tensors of several devices were taken"
    elif not isinstance(error, (RuntimeError, ValueError, TypeError)) or (
        "device" not in str(error).lower()
    ):
        wrong, detail = f"error {type(error).__name__}", first_line(error)
    return Judgement(
        call.what, wrong, detail, not wrong, tuple(outcome.fallbacks)
    )


def compare_errors(cpu: Outcome, device: Outcome) -> tuple[str, str]:
    if device.error is None:
        return "no error", f"the CPU refuses: {first_line(cpu.error)}"
    name = type(device.error).__name__
    text = first_line(device.error)
    if cpu.error is None:
        where = "inputs: " if device.unprepared else ""
        return f"error {name}", where + text
    if type(cpu.error) is type(device.error) or device.late:
        return "", ""
    told = f"{type(cpu.error).__name__}: {first_line(cpu.error)}"
    return f"other error {name}", f"{text} | CPU: {told}"


def compare(
    cpu: Outcome, device: Outcome, tolerance: dict | None
) -> tuple[str, str]:
    """Values only with a tolerance, form always."""
    if cpu.values[1].keys() != device.values[1].keys():
        changed = (sorted(values[1]) for values in (device.values, cpu.values))
        return "mutation", "inputs changed: {} instead of {}".format(*changed)
    expected, spec = pytree.tree_flatten(cpu.values)
    found, shape = pytree.tree_flatten(device.values)
    if spec != shape:
        return "structure", " ".join(f"{shape} instead of {spec}".split())
    for one, other in zip(expected, found, strict=True):
        wrong, detail = compare_leaves(one, other, tolerance)
        if wrong:
            return wrong, detail
    if cpu.aliases != device.aliases:
        return "alias", f"{device.aliases} instead of {cpu.aliases}"
    if cpu.resized != device.resized:
        return "warning", "about the size of out="
    return "", ""


def compare_leaves(
    expected: Any, found: Any, tolerance: dict | None
) -> tuple[str, str]:
    if type(expected) is not type(found):
        return "type", f"{type(found)} instead of {type(expected)}"
    if not isinstance(expected, torch.Tensor):
        if tolerance is None or isinstance(expected, torch.device):
            return "", ""
        with contextlib.suppress(Exception):
            torch.testing.assert_close(found, expected, equal_nan=True)
            return "", ""
        same = bool(expected == found)
        return ("", "") if same else ("value", f"{found!r} and {expected!r}")
    for name, one, other in forms(expected, found):
        if one != other:
            return name, f"{other} instead of {one}"
    if tolerance is None:
        return "", ""
    return compare_values(expected, found.detach().cpu(), tolerance)


def forms(expected: torch.Tensor, found: torch.Tensor):
    """What must be equal besides values: name, on the CPU, on the device."""
    yield "device", DEVICE, found.device.type
    for name in ("dtype", "layout", "shape"):
        yield name, getattr(expected, name), getattr(found, name)
    yield "grad", expected.requires_grad, found.requires_grad
    if expected.layout is torch.strided and not expected.is_nested:
        yield "stride", strides(expected), strides(found)


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that say where something lies."""
    if tensor.numel() == 0:
        return []
    pairs = zip(tensor.size(), tensor.stride(), strict=True)
    return [stride if size > 1 else 0 for size, stride in pairs]


def compare_values(
    expected: torch.Tensor, found: torch.Tensor, tolerance: dict
) -> tuple[str, str]:
    expected = expected.detach()
    if same_bits(expected, found):
        return "", ""
    if expected.dtype.itemsize == 1 and expected.is_floating_point():
        expected, found = expected.float(), found.float()
    try:
        torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    except AssertionError as error:
        return "value", " ".join(str(error).split())
    except Exception as error:  # what cannot be compared
        return "value", f"not comparable: {first_line(error)}"
    return "", ""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or one.is_nested or one.is_quantized:
        return False
    try:
        pair = (
            x.resolve_conj().resolve_neg().contiguous() for x in (one, other)
        )
        return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in pair))
    except Exception:
        return False


def compare_runs(call: Call, first: Outcome, form: bool) -> tuple[str, str]:
    """Twice the same bits, also from the generator of the device."""
    again = attempt(call, DEVICE)
    if form or again.error:
        return ("determinism", "an error") if again.error else ("", "")
    pairs = zip(
        pytree.tree_leaves(first.values),
        pytree.tree_leaves(again.values),
        strict=True,
    )
    for one, other in pairs:
        if isinstance(one, torch.Tensor):
            one, other = one.detach().cpu(), other.detach().cpu()
            if not same_bits(one, other):
                wrong, _ = compare_values(one, other, {"rtol": 0, "atol": 0})
                if wrong:
                    return "determinism", "a second run gave other values"
    return "", ""


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:300]


def total(judgements: Iterable[Judgement], refusal: str = "") -> Cell | None:
    """All calls of a cell in one verdict; `refusal` excuses errors."""
    judged = list(judgements)
    if not judged:
        return None
    wrong = sorted({j.wrong for j in judged if j.wrong})
    fell = sorted({name for j in judged for name in j.fallbacks})
    right = sum(not j.wrong for j in judged)
    native = sum(not j.wrong and not j.fallbacks for j in judged)
    counts = len(judged), right, native
    errors = ("error ", "other error NotImplementedError")
    if wrong and refusal and all(w.startswith(errors) for w in wrong):
        return Cell("refused", *counts, refusal)
    if wrong:
        return Cell("wrong", *counts, ", ".join(wrong))
    if fell:
        names = [name.removeprefix("aten::") for name in fell]
        more = [f"{len(names) - 4} more"] * (len(names) > 4)
        return Cell("falls back", *counts, ", ".join([*names[:4], *more]))
    if all(j.refused for j in judged):
        return Cell("refused", *counts, "as on the CPU")
    return Cell("native", *counts)
