"""One call: made on a device, and what came of it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import torch

from sweep.moving import tensors

SEED = 2013
# Where the process is: `c` in a call on the CPU, `d` on the device, `g` while
# inputs are generated; then the number of the call. Shared with who watches.
progress: Any = bytearray(b"g\0\0\0\0")


NO_TOLERANCE: Mapping = MappingProxyType({})


class Call(NamedTuple):
    """A call that can be made on any device.

    `make(device)` prepares the inputs, which is not judged, and returns the
    call itself and the inputs whose changes matter.
    """

    what: str
    make: Callable[[str], tuple[Callable[[], Any], Any]]
    # "values"; "form" when values mean nothing; "refusal" when it must fail
    expect: str = "values"
    tolerance: Mapping = (
        NO_TOLERANCE  # rtol and atol, if the dtype's are not right
    )
    twice: bool = False  # the same call must give the same bits again


@dataclass
class Outcome:
    """What came of a call."""

    values: Any = None
    error: Exception | None = None
    late: bool = False  # the error came when the device was waited for
    unprepared: bool = False  # the inputs could not even be made
    random: bool = False  # it drew numbers
    resized: bool = False  # it warned that `out=` had another size
    aliases: list = field(default_factory=list)  # output i shares input j
    fallbacks: list = field(default_factory=list)  # operators, sorted


def attempt(call: Call, device: str) -> Outcome:
    outcome = Outcome()
    progress[:1] = b"c" if device == "cpu" else b"d"
    seed()
    try:
        run, inputs = call.make(device)
    except Exception as error:
        outcome.error, outcome.unprepared = plain(error), True
        settle()
        return outcome
    inputs = tensors(inputs)
    versions = [x._version for x in inputs]
    seed()
    generator = torch.default_generator.get_state()
    before = torch.openreg.fallbacks()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            outcome.values = run()
        except Exception as error:
            outcome.error = plain(error)
        late = settle() if device != "cpu" else None
    if outcome.error is None and late:
        outcome.error, outcome.late = late, True
    outcome.resized = any("was resized" in str(w.message) for w in said)
    after = torch.openreg.fallbacks() if device != "cpu" else before
    outcome.fallbacks = sorted(n for n in after if after[n] != before.get(n))
    drawn = torch.default_generator.get_state()
    outcome.random = not torch.equal(generator, drawn)
    changed = zip(inputs, versions, strict=True)
    changed = {i: x for i, (x, v) in enumerate(changed) if x._version != v}
    outcome.aliases = aliases(outcome.values, inputs)
    outcome.values = outcome.values, changed
    return outcome


def seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


def settle() -> Exception | None:
    """Wait for the device; an error that it only reports now."""
    try:
        torch.openreg.synchronize()
    except Exception as error:
        return plain(error)
    return None


def plain(error: Exception) -> Exception:
    """The error without the frames, which hold the tensors."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def aliases(values: Any, inputs: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Which outputs lie in the memory of which inputs."""
    owned = [memory(x) for x in inputs]
    return [
        (i, j)
        for i, x in enumerate(tensors(values))
        if (place := memory(x))
        for j, other in enumerate(owned)
        if other == place
    ]


def memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # sparse, functional, no storage
        return 0
