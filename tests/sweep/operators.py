"""The operator database: which calls make up a cell of the table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.opinfo import core

from sweep import known
from sweep.calls import Call, seed
from sweep.making import (
    OUT_FORMS,
    backward,
    forward,
    in_place,
    mixed,
    out,
)
from sweep.moving import tensors
from sweep.samples import Sample, extremes, generate, variants

PREFIXES = [
    "linalg",
    "fft",
    "nn.functional",
    "special",
    "masked",
    "signal",
    "sparse",
]
# How many samples a mode takes: in the sweep, and in its slice.
MOST = {"forward": 10, "backward": 5, "in-place": 4, "out": 3}
FAST = {"forward": 3, "backward": 2}


class Operator:
    """An entry of `op_db`, or of a list like it."""

    def __init__(self, info, fast: bool = False) -> None:
        self.info = info
        self.name = info.formatted_name
        self.most = FAST if fast else MOST
        self.fast = fast

    @property
    def category(self) -> str:
        for prefix in PREFIXES:
            if self.info.name.startswith(prefix + "."):
                return prefix
        for kind, name in KINDS.items():
            if isinstance(self.info, kind):
                return name
        return "tensor"

    def dtypes(self) -> list[torch.dtype]:
        every = sorted(self.info.supported_dtypes("cpu"), key=str)
        return representative(every) if self.fast else every

    def modes(self, dtype: torch.dtype) -> list[str]:
        info = self.info
        modes = ["forward"]
        if self.differentiable(dtype):
            modes.append("backward")
        if not self.fast:
            if info.get_inplace() is not None:
                modes.append("in-place")
            if info.supports_out:
                modes.append("out")
            if dtype == representative(self.info.supported_dtypes("cpu"))[0]:
                modes.append("refusals")
        return modes

    def differentiable(self, dtype: torch.dtype) -> bool:
        info = self.info
        return info.supports_autograd and dtype in (
            info.supported_backward_dtypes("cpu")
        )

    def calls(self, dtype: torch.dtype, mode: str) -> Iterator[Call]:
        if mode == "refusals":
            yield from self.refusals(dtype)
            return
        samples = self.samples(dtype)[: self.most[mode]]
        make = {"forward": forward, "backward": backward,
                "in-place": in_place, "out": out}[mode]  # fmt: skip
        call = partial(self.call, dtype, make)
        for i, sample in enumerate(samples):
            yield call(sample, twice=i == 0 and mode in MOST)
            if mode == "out":
                for form in OUT_FORMS:
                    yield call(sample, form, form=form)
            elif i < (1 if self.fast else 3):
                yield from map(call, variants(sample, dtype))
        if mode in ("forward", "backward") and not self.fast:
            for sample in samples[:1]:
                yield from map(call, extremes(sample))

    @lru_cache(1)  # noqa: B019 - an operator lives as long as its process
    def samples(self, dtype: torch.dtype) -> list[Sample]:
        grad = self.differentiable(dtype)
        return generate(self.info, dtype, grad, max(self.most.values()))

    def call(
        self,
        dtype: torch.dtype,
        make,
        sample: Sample,
        suffix: str = "",
        twice: bool = False,
        **options,
    ) -> Call:
        form = self.info.name in known.UNINITIALIZED or draws(self.info)
        return Call(
            f"{sample.what} {suffix}".strip(),
            partial(make, self.info, sample, **options),
            "form" if form else "values",
            tolerance(self.info, dtype),
            twice,
        )

    def refusals(self, dtype: torch.dtype) -> Iterator[Call]:
        """Wrong arguments, and tensors of two devices."""
        seed()
        wrong = (
            self.info.error_inputs("cpu") if self.info.error_inputs_func else []
        )
        for i, error in enumerate(wrong):
            given = error.sample_input
            sample = (given.input, given.args, given.kwargs)
            sample = Sample(f"error #{i}", sample)
            yield self.call(dtype, forward, sample)
        if self.info.name in known.MIXED:
            return
        for sample in self.samples(dtype):
            values = tensors(sample.arguments)
            if len(values) > 1 and all(x.dim() and x.numel() for x in values):
                for other in ("cpu", "openreg:1"):
                    yield Call(
                        f"{sample.what} with {other}",
                        partial(mixed, self.info, sample, other),
                        "refusal",
                    )
                return


KINDS = {
    core.UnaryUfuncInfo: "elementwise",
    core.BinaryUfuncInfo: "elementwise",
    core.ReductionOpInfo: "reduction",
    core.ShapeFuncInfo: "shape",
}


def representative(dtypes) -> list[torch.dtype]:
    """float32 and one integer dtype, or what there is."""
    floats = [torch.float32, torch.float64, torch.complex64]
    integers = [torch.int64, torch.int32, torch.uint8, torch.bool]
    found = [
        next((d for d in group if d in dtypes), None)
        for group in (floats, integers)
    ]
    return [d for d in found if d] or sorted(dtypes, key=str)[:1]


def tolerance(info, dtype: torch.dtype) -> dict:
    """The widest that PyTorch's own tests allow the CPU for this dtype."""
    found = [
        override.d[dtype]
        for decorator in info.decorators or ()
        if isinstance(decorator, core.DecorateInfo)
        and decorator.device_type in (None, "cpu")
        for override in decorator.decorators
        if isinstance(override, toleranceOverride) and dtype in override.d
    ]
    if not found:
        return {}
    rtol, atol = (max(getattr(t, n) for t in found) for n in ("rtol", "atol"))
    return {"rtol": rtol, "atol": atol}


def draws(info) -> bool:
    """PyTorch's tests give it a seed of its own and hide that it drew."""
    code = getattr(info.op, "__code__", None)
    return code is not None and "wrapper_set_seed" in code.co_names
