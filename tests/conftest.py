"""The machinery of the guide is importable in tests as it is in pages."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "chapters"), str(ROOT / "docs" / "_ext")]


@pytest.fixture
def seeded():
    """Device 0, and the same numbers in every run."""
    import torch

    import openreg

    torch.manual_seed(0)
    openreg.set_device(0)
    yield
    openreg.set_device(0)
    openreg.synchronize()
