"""The optimizer database: three steps, one by one, foreach and fused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from sweep.calls import Call
from sweep.moving import Mover

STEPS = 3
SHAPES = [(2, 3), (5, 1), (4, 4)]
COUNTERS = {"step", "n_iter", "mu_product", "eta", "mu"}
FLAT = [(2, 3), (5,), ()]


class Optimizer:
    """An entry of `optim_db`."""

    category = "optimizer"

    def __init__(self, info, fast: bool = False) -> None:
        self.info = info
        self.name = f"optim.{info.name}"
        self.fast = fast

    def dtypes(self) -> list[torch.dtype]:
        if self.fast:
            return [torch.float32]
        dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
        return dtypes + [torch.complex64] * self.info.supports_complex

    def modes(self, dtype: torch.dtype) -> list[str]:
        modes = ["one by one"]
        if "foreach" in self.info.supported_impls:
            modes.append("foreach")
        if "cpu" in self.info.supports_fused_on and not dtype.is_complex:
            modes.append("fused")
        return modes

    def calls(self, dtype: torch.dtype, mode: str) -> Iterator[Call]:
        made = self.info.optim_inputs_func("cpu")
        for given in made[:2] if self.fast else made:
            flags = {"foreach": mode == "foreach", "fused": mode == "fused"}
            flags = {
                flag: on
                for flag, on in flags.items()
                if flag in self.info.supported_impls
            }
            run = partial(train, self.info, dtype, {**given.kwargs, **flags})
            yield Call(given.desc or "default", run, twice=given is made[0])


def train(info, dtype: torch.dtype, kwargs: dict, device: str):
    shapes = SHAPES if info.name in ("Muon",) else FLAT
    values = [torch.randn(shape, dtype=dtype) for shape in shapes]
    grads = [
        [torch.randn(shape, dtype=dtype) for shape in shapes]
        for _ in range(STEPS)
    ]
    if info.only_supports_sparse_grads:
        grads = [[g.reshape(g.shape or (1,)).to_sparse() for g in step]
                 for step in grads]  # fmt: skip
        values = [v.reshape(v.shape or (1,)) for v in values]
    mover = Mover(device)
    params = [torch.nn.Parameter(v) for v in mover.tree(values)]
    grads = mover.tree(grads)
    optimizer = info.optim_cls(params, **mover.tree(kwargs))

    def run():
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.clone()
            optimizer.step(*[lambda: 1.0] * info.step_requires_closure)
        states = [optimizer.state[p] for p in params]
        tensors = [[s[k] for k in sorted(s) if torch.is_tensor(s[k])]
                   for s in map(moments, states)]  # fmt: skip
        return [p.detach() for p in params], tensors

    return run, ()


def moments(state: dict) -> dict:
    """Without the counters, which lie on the CPU where the device allows."""
    return {k: v for k, v in state.items() if k not in COUNTERS}
