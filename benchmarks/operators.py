"""What operators and training steps cost, for run.py."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

MIB = 1 << 20


class Case(NamedTuple):
    """One call, made for either device."""

    make: Callable[[str], Callable[[], object]]
    repeats: int  # calls in a round
    budget: float  # for the device's time by the CPU's
    finished: bool = True  # or the time is the host's alone


# The plain CPU's work, in a process of its own: seconds for a round.
PLAIN = """
import sys, time, torch
from torch.nn import functional
if sys.argv[1] == "1":
    x = torch.ones(1024, device="openreg")
    for _ in range(100):
        x = x + 1
    torch.openreg.synchronize()
a = torch.randn(512, 512)
small = torch.ones(1)
def work():
    for _ in range(10):
        torch.relu(a @ a).sum()
    for _ in range(5000):
        small + small
work()
start = time.perf_counter()
work()
work()
print(time.perf_counter() - start)
"""


def one_element(name: str, device: str) -> Callable:
    x, y = (torch.ones(1, device=device) for _ in range(2))
    return {
        "add": lambda: x + y,
        "mul": lambda: x * y,
        "relu": lambda: torch.relu(x),
    }[name]


def add(device: str) -> Callable:
    x, y = (torch.randn(10**6).to(device) for _ in range(2))
    return lambda: x + y


def product(size: int, device: str) -> Callable:
    matrix = torch.randn(size, size).to(device)
    return lambda: matrix @ matrix


def empty(device: str) -> Callable:
    # Both name an index: to parse that takes as long as to allocate.
    where = torch.empty(0, device=device).device
    return lambda: torch.empty(1024, device=where)


def fill(device: str) -> Callable:
    x = torch.ones(16 * MIB, device=device)
    return lambda: x.fill_(1.0)


def copy(to_device: bool, device: str) -> Callable:
    there = torch.ones(16 * MIB, device=device)
    host = torch.ones(16 * MIB, pin_memory=device != "cpu")
    target, source = (there, host) if to_device else (host, there)
    return lambda: target.copy_(source, non_blocking=True)


def cases() -> dict[str, Case]:
    found = {}
    for name in ("add", "mul", "relu"):
        make = partial(one_element, name)
        found[f"{name}, 1 element, host"] = Case(make, 300, 1.0, False)
        found[f"{name}, 1 element, finished"] = Case(make, 1000, 1.30)
    found["add, 10^6 elements"] = Case(add, 50, 1.05)
    found["mm, 256 x 256"] = Case(partial(product, 256), 50, 1.05)
    found["mm, 1024 x 1024"] = Case(partial(product, 1024), 5, 1.05)
    for name in MODELS:
        make = partial(training_step, name)
        found[f"training step, {name}"] = Case(make, 5, 1.10)
    found["empty, 4 KiB"] = Case(empty, 2000, 1.0)
    for to_device, name in ((True, "to the device"), (False, "to the host")):
        make = partial(copy, to_device)
        found[f"copy {name}, 64 MiB pinned"] = Case(make, 5, 1.11)
    found["fill_, 64 MiB"] = Case(fill, 5, 1.05)
    return found


def training_step(name: str, device: str) -> Callable:
    """Forward, backward, and an optimizer's step."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().to(device)
    x, y = (part.to(device) for part in batch())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(x).flatten(0, -2), y).backward()
        optimizer.step()

    return step


class Tokens(nn.Module):
    """A small transformer encoder that tells a class for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(128, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple]]] = {
    "MLP": (
        lambda: nn.Sequential(
            nn.Linear(256, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        ),
        lambda: (torch.randn(128, 256), torch.randint(0, 10, (128,))),
    ),
    "conv net": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 10),
        ),
        lambda: (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))),
    ),
    "transformer": (
        Tokens,
        lambda: (
            torch.randint(0, 1000, (8, 64)),
            torch.randint(0, 1000, (8 * 64,)),
        ),
    ),
}


def by_hand() -> dict[str, tuple[Callable, Callable, int, float]]:
    """The kernels written out, against the library's; no budget but honesty."""
    x, y = torch.randn(2, 10**6).to("openreg")
    wide = torch.randn(1000, 1000, device="openreg")
    a, b = torch.randn(2, 512, 512).to("openreg")
    ops = torch.ops.openreg
    return {
        "openreg::axpy, 10^6 elements": (
            lambda: ops.axpy(x, y, 2.0),
            lambda: torch.add(y, x, alpha=2.0),
            50,
            2.0,
        ),
        "openreg::row_sum, 1000 x 1000": (
            lambda: ops.row_sum(wide),
            lambda: wide.sum(1),
            50,
            4.0,
        ),
        "openreg::product, 512 x 512": (
            lambda: ops.product(a, b),
            lambda: a @ b,
            5,
            30.0,
        ),
    }


def plain(rounds: int) -> float:
    """How much longer the CPU's own work takes beside an idle backend."""

    def seconds(loaded: str) -> float:
        return float(
            subprocess.check_output(
                [sys.executable, "-c", PLAIN, loaded],
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": loaded},
            )
        )

    turns = [(seconds("1"), seconds("0")) for _ in range(rounds)]
    with_, without = (min(side) for side in zip(*turns, strict=True))
    ratios = statistics.median(a / b for a, b in turns)
    return min(ratios, with_ / without)
