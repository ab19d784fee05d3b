"""Which inputs an operator is called with: few, fixed, of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from sweep.calls import seed
from sweep.moving import tensors

MOST = 200  # of what PyTorch generates, so many are looked at


class Sample(NamedTuple):
    """Arguments of a call, on the CPU, and their name."""

    what: str
    arguments: tuple  # the input, the other arguments, the keywords
    process: Any = None  # what of the output has a gradient

    def map(self, what: str, function) -> Sample:
        """The same with every tensor changed, under a name of its own."""
        with torch.no_grad():
            changed = pytree.tree_map_only(
                torch.Tensor, function, self.arguments
            )
        return self._replace(what=f"{self.what} {what}", arguments=changed)


def generate(info, dtype: torch.dtype, grad: bool, most: int) -> list[Sample]:
    """`most` samples, the first, the last and evenly between.

    The best first, so that fewer are a part of more.
    """
    seed()
    made = info.sample_inputs("cpu", dtype, requires_grad=grad)
    made = list(islice(made, MOST))
    samples = [
        Sample(
            f"#{i}",
            (made[i].input, made[i].args, made[i].kwargs),
            made[i].output_process_fn_grad,
        )
        for i in spread(len(made), most)
    ]
    return samples


def spread(count: int, most: int) -> list[int]:
    """Indices all over a range: halves first, then quarters and so on."""
    order = list(dict.fromkeys([0, count - 1])) if count else []
    parts = 2
    while len(order) < min(most, count):
        for i in range(1, parts, 2):
            index = i * (count - 1) // parts
            if index not in order:
                order.append(index)
        parts *= 2
        if parts > 4 * count:
            order += [i for i in range(count) if i not in order]
    return order[:most]


def variants(sample: Sample, dtype: torch.dtype) -> Iterator[Sample]:
    """The same arguments in other forms; the CPU says which are allowed."""
    values = tensors(sample.arguments)
    if any(x.layout is not torch.strided or x.is_nested for x in values):
        return
    if any(x.dim() for x in values):
        yield sample.map("strided", strided)
    if any(x.dim() in (4, 5) for x in values):
        yield sample.map("channels last", channels_last)
    if dtype.is_complex:
        yield sample.map("conjugate", conjugate)


def extremes(sample: Sample) -> Iterator[Sample]:
    """Without elements, and without dimensions."""
    values = tensors(sample.arguments)
    if any(x.layout is not torch.strided or x.is_nested for x in values):
        return
    sizes = [x.size(0) for x in values if x.dim()]
    if sizes:

        def empty(x):
            whole = not x.dim() or x.size(0) != sizes[0]
            return keep(x, x if whole else x.narrow(0, 0, 0))

        yield sample.map("empty", empty)
    if any(x.dim() for x in values) and all(x.numel() for x in values):
        yield sample.map("0-dim", lambda x: keep(x, x.reshape(-1)[0]))


def keep(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Of its own memory, requiring a gradient as before."""
    return new.detach().clone().requires_grad_(old.requires_grad)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Every second element of a larger tensor, as PyTorch's tests have it."""
    if not x.dim() or x.numel() < 2:
        return x
    from torch.testing._internal.common_utils import noncontiguous_like

    new = noncontiguous_like(x.detach())
    return new.requires_grad_(x.requires_grad)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    names = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() not in names:
        return x
    new = x.detach().contiguous(memory_format=names[x.dim()])
    return new.requires_grad_(x.requires_grad)


def conjugate(x: torch.Tensor) -> torch.Tensor:
    """The same values, with the conjugate bit."""
    if not x.is_complex():
        return x
    new = x.detach().conj().resolve_conj().conj()
    return new.requires_grad_(x.requires_grad)
