"""How one call of an operator is made, in each mode, on any device."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils import _pytree as pytree

from sweep import known
from sweep.moving import Mover, tensors
from sweep.samples import Sample

OUT_FORMS = ("empty", "larger", "strided", "other dtype")


def place(info, sample: Sample, mover: Mover) -> tuple:
    """The arguments where the operator wants them."""
    first, args, kwargs = sample.arguments
    if info.name in known.HOST_ARGUMENTS:
        host = Mover("cpu")
        return mover.tree(first), host.tree(args), host.tree(kwargs)
    if info.name in known.FACTORIES:
        kwargs = {"device": torch.device("cpu"), **kwargs}
    return mover.tree((first, args, kwargs))


def forward(info, sample: Sample, device: str):
    first, args, kwargs = inputs = place(info, sample, Mover(device))
    return lambda: info.op(first, *args, **kwargs), inputs


def in_place(info, sample: Sample, device: str):
    first, args, kwargs = inputs = place(info, sample, Mover(device))
    function = info.get_inplace()

    def run():
        result = function(first, *args, **kwargs)
        return result, result is first

    return run, inputs


def backward(info, sample: Sample, device: str):
    """The gradient alone; what leads to it is the preparation."""
    mover = Mover(device, grad=True)
    first, args, kwargs = inputs = place(info, sample, mover)
    leaves = [x for x in tensors(inputs) if x.requires_grad]
    result = info.op(first, *args, **kwargs)
    if sample.process is not None:
        result = sample.process(result)
    outputs = [x for x in tensors(result) if x.requires_grad]
    if not leaves or not outputs:
        raise LookupError("nothing to differentiate")
    given = [cotangent(x) for x in outputs]

    def run():
        return torch.autograd.grad(outputs, leaves, given, allow_unused=True)

    return run, ()


def cotangent(output: torch.Tensor) -> torch.Tensor:
    """Numbers that are the same on every device."""
    numbers = torch.arange(output.numel(), dtype=torch.float64)
    numbers = ((numbers * 7 + 3) % 11 / 8 - 0.5).reshape(output.shape)
    return numbers.to(output.dtype).to(output.device)


def out(info, sample: Sample, device: str, form: str = "same"):
    """`out=` of the right form and of others, made after the CPU's result."""
    first, args, kwargs = place(info, sample, Mover("cpu"))
    with torch.no_grad():
        expected = info.op(first, *args, **kwargs)
    if not tensors(expected):
        raise LookupError("no tensor comes out")
    made = pytree.tree_map_only(torch.Tensor, partial(shaped, form), expected)
    mover = Mover(device)
    first, args, kwargs = inputs = place(info, sample, mover)
    target = mover.tree(made)

    def run():
        result = info.op(first, *args, out=target, **kwargs)
        pairs = zip(tensors(result), tensors(target), strict=True)
        return result, [x is y for x, y in pairs]

    return run, (inputs, target)


def shaped(form: str, like: torch.Tensor) -> torch.Tensor:
    """A tensor full of ones for a result like this."""
    size, dtype = list(like.shape), like.dtype
    if form == "empty":
        return torch.empty(0, dtype=dtype)
    if form == "larger":
        size = [s + 1 for s in size] or [2]
    if form == "strided":
        new = torch.ones(
            [*size[:-1], 2 * size[-1]] if size else [], dtype=dtype
        )
        return new[..., ::2] if size else new
    if form == "other dtype":
        dtype = torch.int64 if dtype != torch.int64 else torch.bool
    return torch.ones(size, dtype=dtype)


def mixed(info, sample: Sample, other: str, device: str):
    """The first tensor on the device, the next ones elsewhere."""
    leaves, spec = pytree.tree_flatten(sample.arguments)
    here, there = Mover(f"{device}:0"), Mover(other)
    first = next(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    leaves = [
        (here if i <= first or not isinstance(x, torch.Tensor) else there).leaf(
            x
        )
        for i, x in enumerate(leaves)
    ]
    first, args, kwargs = inputs = pytree.tree_unflatten(leaves, spec)
    return lambda: info.op(first, *args, **kwargs), inputs
