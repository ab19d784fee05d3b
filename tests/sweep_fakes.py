"""Operators that go wrong on the device, each in its own way.

    python sweep_fakes.py

prints the verdicts on them, for test_sweep.py.
"""

import itertools
import os
import signal
import sys

import torch
from sweep import table
from sweep.children import Sweep
from sweep.operators import Operator
from torch.testing._internal.common_dtype import floating_types
from torch.testing._internal.opinfo.core import ErrorInput, OpInfo, SampleInput

numbers = itertools.count()
library = torch.library.Library("fakes", "DEF")
library.define("negative(Tensor x) -> Tensor")
library.impl("negative", torch.Tensor.neg, "CPU")


def on_device(x):
    return x.device.type == "openreg"


def copies(x):
    return x.clone()


def falls_back(x):
    return torch.ops.fakes.negative(x)


def gives_other_values(x):
    return torch.zeros_like(x) if on_device(x) else x.clone()


def gives_other_strides(x):
    return x.clone() if on_device(x) else column_major(x)


def column_major(x):
    return x.mT.contiguous().mT if x.dim() > 1 else x.clone()


def gives_another_dtype(x):
    return x.to(torch.float16) if on_device(x) else x.clone()


def gives_a_view(x):
    return x.view(x.shape) if on_device(x) else x.clone()


def changes_its_input(x):
    return x.clone() if on_device(x) else x.fill_(1).clone()


def raises(x):
    if on_device(x):
        raise ValueError("not today")
    return x.clone()


def never_raises(x):
    if not on_device(x):
        raise ValueError("never")
    return x.clone()


def raises_something_else(x):
    raise ValueError("here") if on_device(x) else IndexError("there")


def is_refused(x):
    raise ValueError("on every device")


def gives_other_values_each_time(x):
    return torch.full_like(x, 1 + next(numbers) * 1e-8 * on_device(x))


def draws(x):
    return torch.empty_like(x).uniform_()


def crashes_with_doubles(x):
    if on_device(x) and x.dtype == torch.float64:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x.clone()


def hangs_with_doubles(x):
    if on_device(x) and x.dtype == torch.float64:
        signal.pause()
    return x.clone()


def crashes_the_cpu(x):
    if not on_device(x) and not x.is_contiguous():
        os.abort()
    return x.clone()


class Twisted(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.on_device = on_device(x)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return torch.zeros_like(gradient) if context.on_device else gradient


def forgets_out(x, *, out=None):
    if out is None:
        return x.clone()
    return x.clone() if on_device(x) else out.resize_(x.shape).copy_(x)


def takes_any_device(x, y=None):
    return x.clone()


def copies_in_place(x):
    return x.fill_(0).clone() if on_device(x) else x.fill_(0)


def samples(info, device, dtype, requires_grad, **kwargs):
    x = torch.arange(1, 7, dtype=dtype).reshape(2, 3)
    x.requires_grad_(requires_grad)
    yield SampleInput(x, args=(x.detach() + 1,) * (info.name in BINARY))


def error_inputs(info, device, **kwargs):
    x = torch.ones(2, dtype=torch.float32)
    yield ErrorInput(SampleInput(x), error_regex="")


BINARY = {"takes_any_device"}
OPTIONS = {
    Twisted.apply: {"name": "twists_gradients", "supports_autograd": True},
    forgets_out: {"supports_out": True},
    copies_in_place: {"inplace_variant": copies_in_place},
    never_raises: {"error_inputs_func": error_inputs},
}
PLAIN = [
    copies,
    falls_back,
    gives_other_values,
    gives_other_strides,
    gives_another_dtype,
    gives_a_view,
    changes_its_input,
    raises,
    raises_something_else,
    is_refused,
    gives_other_values_each_time,
    draws,
    crashes_with_doubles,
    hangs_with_doubles,
    crashes_the_cpu,
    takes_any_device,
]


def fake(function, name=None, **options):
    options = {"supports_out": False, "supports_autograd": False} | options
    options = {"inplace_variant": None, "method_variant": None} | options
    return OpInfo(
        name or function.__name__,
        op=function,
        dtypes=floating_types(),
        sample_inputs_func=samples,
        **options,
    )


def main():
    made = [fake(function) for function in PLAIN]
    made += [fake(function, **more) for function, more in OPTIONS.items()]
    subjects = [Operator(info) for info in made]

    def report(*words):
        print(*words, file=sys.stderr)

    cells = Sweep(jobs=2, timeout=10, report=report).run(subjects)
    for key, cell in sorted(cells.items()):
        print(*key, table.tell(cell), sep="\t")


if __name__ == "__main__":
    main()
