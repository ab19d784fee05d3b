"""What a test can run only at a later state than its chapter's own."""

import pytest
import torch

import openreg  # noqa: F401 - before the chapter `autoload`


def _has_operators():
    try:
        torch.empty(1, device="openreg")
    except NotImplementedError:
        return False
    return True


operators = pytest.mark.skipif(
    not _has_operators(), reason="the chapter `ops` adds operators"
)
