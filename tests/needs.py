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


# Whether the families written by hand have their backward kernels: the chapter
# `autograd` adds them. Before it, their tests compare the forward pass alone.
GRADIENTS = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::convolution_backward_overrideable", "PrivateUse1"
)
