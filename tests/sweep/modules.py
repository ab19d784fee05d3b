"""The module database: forward and backward, in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from sweep.calls import Call, seed
from sweep.making import cotangent
from sweep.moving import Mover, tensors
from sweep.operators import representative
from sweep.samples import Sample, extremes, spread, variants

MOST = 6


class Module:
    """An entry of `module_db`."""

    category = "module"

    def __init__(self, info, fast: bool = False) -> None:
        self.info = info
        self.name = info.name
        self.fast = fast

    def dtypes(self) -> list[torch.dtype]:
        every = sorted(self.info.supported_dtypes("cpu"), key=str)
        return representative(every) if self.fast else every

    def modes(self, dtype: torch.dtype) -> list[str]:
        differentiable = dtype.is_floating_point or dtype.is_complex
        return ["forward", "backward"] if differentiable else ["forward"]

    def calls(self, dtype: torch.dtype, mode: str) -> Iterator[Call]:
        make = {"forward": forward, "backward": backward}[mode]
        made = self.samples(dtype)
        for i, (training, build, sample) in enumerate(made):
            forms = [sample]
            if i < 2 and not self.fast:
                forms += variants(sample, dtype)
                forms += extremes(sample)
            for form in forms:
                run = partial(make, build, dtype, training, form)
                yield Call(form.what, run, twice=form is sample and i == 0)

    @lru_cache(1)  # noqa: B019 - a module lives as long as its process
    def samples(self, dtype: torch.dtype) -> list[tuple]:
        most = 2 if self.fast else MOST
        made = []
        for training in (True, False):
            seed()
            inputs = self.info.module_inputs_func(
                self.info, "cpu", dtype, self.modes(dtype) != ["forward"],
                training=training,
            )  # fmt: skip
            for i in spread(len(inputs), most):
                given, what = inputs[i], "train" if training else "eval"
                arguments = given.forward_input.args, given.forward_input.kwargs
                build = partial(construct, self.info, given.constructor_input)
                made.append(
                    (training, build, Sample(f"{what} #{i}", arguments))
                )
        return made


def construct(info, given) -> torch.nn.Module:
    args, kwargs = Mover("cpu").tree((given.args, given.kwargs))
    return info.module_cls(*args, **kwargs)


def prepared(build, dtype, training: bool, sample: Sample, device: str):
    """The module and its arguments on the device."""
    module = build().to(dtype).train(training)
    if isinstance(module, LazyModuleMixin):  # draws its weights when first used
        args, kwargs = Mover("cpu").tree(sample.arguments)
        seed()
        module(*args, **kwargs)
    grad = dtype.is_floating_point or dtype.is_complex
    return module.to(device), Mover(device, grad).tree(sample.arguments)


def forward(build, dtype, training: bool, sample: Sample, device: str):
    module, inputs = prepared(build, dtype, training, sample, device)
    args, kwargs = inputs

    def run():
        output = module(*args, **kwargs)
        return output, list(module.buffers())

    return run, inputs


def backward(build, dtype, training: bool, sample: Sample, device: str):
    module, inputs = prepared(build, dtype, training, sample, device)
    args, kwargs = inputs
    result = module(*args, **kwargs)
    leaves = [x for x in tensors(inputs) if x.requires_grad]
    leaves += [x for x in module.parameters() if x.requires_grad]
    outputs = [x for x in tensors(result) if x.requires_grad]
    if not leaves or not outputs:
        raise LookupError("nothing to differentiate")
    given = [cotangent(x) for x in outputs]

    def run():
        return torch.autograd.grad(outputs, leaves, given, allow_unused=True)

    return run, ()
