"""What tests of gradients share."""

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def double(*sizes, device="openreg"):
    x = torch.randn(sizes, dtype=torch.double)
    return x.to(device).requires_grad_()


class Log(TorchDispatchMode):
    """The names of the operators that are called, and by which thread."""

    def __init__(self):
        super().__init__()
        self.names, self.threads = [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        self.threads.add(threading.get_native_id())
        return function(*args, **(kwargs or {}))
