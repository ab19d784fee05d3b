"""What an operator of one's own costs in its forms, for run.py."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent


def load_stable() -> None:
    """Compile and load the library of the chapter `autograd`."""
    torch_folder = Path(torch.__file__).parent
    driver = Path(torch.openreg._C.__file__).with_name("libopenreg.so")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "silu_mul.so"
        subprocess.run(
            [
                *shlex.split(os.environ.get("CXX", "g++")),
                *("-std=c++20", "-O2", "-shared", "-fPIC"),
                ROOT / "chapters/scripts/stable/silu_mul.cpp",
                "-DTORCH_TARGET_VERSION=0x020d000000000000",
                *(f"-isystem{torch_folder}/include", f"-I{ROOT}"),
                *(f"-L{torch_folder}/lib", "-ltorch_cpu", driver),
                *("-o", library),
            ],
            check=True,
        )
        torch.ops.load_library(library)


def in_python(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(gate).mul_(gate).mul_(up)


def cases() -> dict[str, tuple[Callable, Callable, int, float]]:
    """Name: one form, the form it is compared with, calls, the budget."""
    load_stable()
    python = torch.library.custom_op(
        "benchmark::silu_mul", in_python, mutates_args=()
    )
    ops = torch.ops
    one = torch.randn(2, 1, device="openreg")
    many = torch.randn(2, 10**6, device="openreg")

    def ordinary() -> None:
        ops.openreg.silu_mul(*one)

    def two() -> torch.Tensor:
        return functional.silu(one[0]) * one[1]

    return {
        "silu_mul, 1, and two operators": (ordinary, two, 1000, 1.0),
        "silu_mul, 10^6, and two operators": (
            lambda: ops.openreg.silu_mul(*many),
            lambda: functional.silu(many[0]) * many[1],
            50,
            1.0,
        ),
        "silu_mul by the stable ABI": (
            lambda: ops.stable.silu_mul(*one),
            ordinary,
            1000,
            3.0,
        ),
        "silu_mul by custom_op": (lambda: python(*one), ordinary, 200, 20.0),
    }
