"""All subjects of the sweep, in a fixed order."""

from __future__ import annotations

import sys

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

from sweep.modules import Module
from sweep.operators import Operator
from sweep.optimizers import Optimizer


def subjects(fast: bool = False, names: list[str] | None = None) -> list:
    if not hasattr(torch, "openreg"):
        sys.exit("There is no device: `import torch` says why.")
    torch.set_num_threads(1)
    every = [Operator(info, fast) for info in op_db]
    every += [Module(info, fast) for info in module_db]
    every += [Optimizer(info, fast) for info in optim_db]
    return [s for s in every if not names or s.name in names]
