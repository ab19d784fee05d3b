"""Try every probe at the state that this process holds, one letter each.

`w` works, `b` works with the help of the CPU fallback, `f` fails. Each probe
runs in a child forked from here, where torch and openreg are imported and the
device is not started: a child may use a device that its parent never started.
"""

import copy
import multiprocessing
import os

import torch
import torch._dynamo
import torch.export
from probes import PROBES

import openreg

TIMEOUT = 120  # seconds
FELL_BACK = 3  # an exit code
FORK = multiprocessing.get_context("fork")


def same(on_device, on_host) -> None:
    if isinstance(on_host, tuple):
        on_device, on_host = on_device[0], on_host[0]
    assert on_device.device.type == "openreg"
    torch.testing.assert_close(on_device.detach().cpu(), on_host.detach().cpu())


def same_module(module, sample) -> None:
    found = copy.deepcopy(module).to("openreg")(sample.to("openreg"))
    same(found, module(sample))


def run(code: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    tools = {"torch": torch, "same": same, "same_module": same_module}
    count = getattr(openreg, "fallback_count", lambda: 0)
    before = count()
    exec(code, {**tools, "d": "openreg", "x": torch.arange(16.0).view(4, 4)})
    os._exit(FELL_BACK if count() > before else 0)


def verdict(code: str) -> str:
    child = FORK.Process(target=run, args=(code,))
    child.start()
    child.join(TIMEOUT)
    child.kill()
    child.join()
    return {0: "w", FELL_BACK: "b"}.get(child.exitcode, "f")


print(
    *(verdict(code) for part in PROBES.values() for code in part.values()),
    sep="",
)
