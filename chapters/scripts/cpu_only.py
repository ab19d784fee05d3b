"""A library of operators that was written for the CPU: `cpu_only::…`.

Chapter `fallback` calls them with tensors of the device.
"""

import torch

LIBRARY = torch.library.Library("cpu_only", "DEF")
ops = torch.ops.cpu_only


def on_the_cpu(schema, **options):
    """Define an operator; the decorated function is its kernel on the CPU."""

    def register(kernel):
        LIBRARY.define(schema, **options)
        LIBRARY.impl(schema.partition("(")[0], kernel, "CPU")
        return kernel

    return register


@on_the_cpu("half(Tensor x) -> Tensor")
def half(x):
    return x * 0.5


@on_the_cpu("half.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
def half_out(x, out):
    return torch.mul(x, 0.5, out=out)


@on_the_cpu("halve_(Tensor(a!) x) -> Tensor(a!)")
def halve_(x):
    return x.mul_(0.5)


@on_the_cpu("halve_all_(Tensor(a!)[] xs) -> ()")
def halve_all_(xs):
    for x in xs:
        x.mul_(0.5)


@on_the_cpu("plus(Tensor a, Tensor b) -> Tensor")
def plus(a, b):
    return a + b


@on_the_cpu("is_same(Tensor a, Tensor b) -> bool")
def is_same(a, b):
    return a is b


@on_the_cpu("first(Tensor(a) x) -> Tensor(a)")
def first(x):
    return x[0]


@on_the_cpu("spoil_(Tensor(a!) x) -> ()")
def spoil_(x):
    x.zero_()
    raise ValueError("spoiled on purpose")


@on_the_cpu("count_(Tensor x, Tensor counter) -> Tensor")
def count_(x, counter):
    """Writes `counter`, which its schema does not mark with an `!`."""
    counter.add_(1)
    return x.clone()


@on_the_cpu("draw(Tensor x, *, Generator? generator=None) -> Tensor")
def draw(x, generator=None):
    return torch.rand(x.shape, generator=generator)


@on_the_cpu("sparsely(Tensor x) -> Tensor")
def sparsely(x):
    return x.to_sparse()


LIBRARY.define("nowhere(Tensor x) -> Tensor")  # without any kernel

LIBRARY.define("fails(Tensor x) -> Tensor")
LIBRARY.impl("fails", half, "CPU")


def fails(x):
    raise NotImplementedError("the kernel of the device says no")


LIBRARY.impl("fails", fails, "PrivateUse1")
