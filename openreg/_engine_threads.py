# Chapter: autograd
"""The autograd engine's threads, when the process ends."""

from __future__ import annotations

import atexit
from contextlib import suppress
from pathlib import Path

import torch
from torch.autograd import Variable

from openreg.devices import device_count


# [autograd: exit]
def _have_started() -> bool:
    """Whether the engine runs, told by its threads' names (on Linux only)."""
    with suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                name = (thread / "comm").read_text()
                if name.startswith("pt_autograd"):
                    return True
    return False


def finish() -> None:
    """Wait until the engine's threads have let go of all that was theirs.

    ``backward()`` returns when its last node has run, and the thread that ran
    it drops the graph's state a little later. This state holds a Python object
    (``torch.autograd.graph`` keeps the caller's context there), and a thread
    that asks for the interpreter while it ends is made to exit: PyTorch 2.13
    aborts with "terminate called without an active exception" then. A graph
    of one empty leaf per device, without Python objects, passes through each
    queue behind whatever is left.
    """
    if not _have_started():
        return
    # A device that is broken has nothing to wait for, and it has been reported.
    with (
        suppress(RuntimeError),
        torch.autograd.set_multithreading_enabled(True),
    ):
        for index in range(device_count()):
            device = torch.device("openreg", index)
            leaf = torch.empty(0, device=device, requires_grad=True)
            Variable._execution_engine.run_backward(
                (leaf,),
                (leaf.detach(),),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


atexit.register(finish)
# [/autograd: exit]
