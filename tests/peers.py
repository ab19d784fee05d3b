"""Processes that share memory with a test, and what they are asked to do.

A process takes seconds to import torch, so a peer serves many tests; and it
comes from a server that has torch, without a device.
"""

import ctypes
import gc
import multiprocessing
import os
import traceback
from pathlib import Path

import pytest
import torch

import openreg

KIB, MIB = 1 << 10, 1 << 20
spawn = multiprocessing.get_context("spawn")
forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(["torch", "pytest"])
chip = ctypes.CDLL(str(Path(openreg._C.__file__).with_name("libopenreg.so")))
ADDRESS = ctypes.c_void_p


def write(storage, data):
    target = ADDRESS(storage.data_ptr())
    assert chip.orMemcpy(target, data, ctypes.c_size_t(len(data)), 4) == 0


def read(storage):
    data = ctypes.create_string_buffer(storage.nbytes())
    size = ctypes.c_size_t(storage.nbytes())
    assert chip.orMemcpy(data, ADDRESS(storage.data_ptr()), size, 4) == 0
    return data.raw


def make(data, device="openreg:0"):
    storage = torch.UntypedStorage(len(data), device=device)
    with torch.openreg.device(device):
        write(storage, data)
    return storage


# What other tests of the process have left: PyTorch's ONNX exporter keeps the
# parameters of the last models.
left = [0, 0]


def allocated(device=0):
    """Bytes in use once all is given back that other processes let go of."""
    openreg.ipc_collect()
    return openreg.memory_allocated(device) - left[device]


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def handle(stream):
    return ADDRESS(
        openreg._C.stream_handle(stream.stream_id, stream.device_index)
    )


class Callback:
    """A Python function that a stream calls."""

    kept = []  # noqa: RUF012

    def __init__(self, function):
        kind = ctypes.CFUNCTYPE(None, ADDRESS)
        self.function = kind(lambda _: function())
        self.kept.append(self.function)

    def launch(self, stream):
        assert chip.orLaunchHostFunc(handle(stream), self.function, None) == 0


held = {}


def hold(name, thing):
    held[name] = thing


def recall(name):
    return held[name]


def forget(*names):
    for name in names:
        del held[name]
    gc.collect()
    for device in range(2):
        openreg.synchronize(device)


def on_held(name, function, *arguments):
    return function(held[name], *arguments)


def driver_memory():
    """Bytes that this process has from the driver, caches emptied."""
    openreg.empty_cache()
    free, total = openreg.mem_get_info()
    return total - free


def serve(pipe):
    """Call what arrives and send the result back, until nobody asks."""
    while True:
        try:
            function, arguments = pipe.recv()
            reply = None, function(*arguments)
        except EOFError:
            return
        except Exception:
            reply = traceback.format_exc(), None
        function = arguments = None
        pipe.send(reply)
        reply = None


class Peer:
    """A process that calls functions of this file."""

    def __init__(self):
        self.pipe, theirs = forkserver.Pipe()
        self.process = forkserver.Process(
            target=serve, args=(theirs,), daemon=True
        )
        self.process.start()
        theirs.close()

    def __call__(self, function, *arguments):
        self.pipe.send((function, arguments))
        assert self.pipe.poll(60), "the peer does not answer"
        error, result = self.pipe.recv()
        assert error is None, error
        return result

    def refuses(self, function, *arguments):
        self.pipe.send((function, arguments))
        assert self.pipe.poll(60), "the peer does not answer"
        error, _ = self.pipe.recv()
        assert error is not None
        return error

    def end(self):
        self.pipe.close()
        self.process.join(60)
        assert self.process.exitcode == 0


@pytest.fixture(scope="session")
def peer():
    yield from _serving()


@pytest.fixture(scope="session")
def third():
    yield from _serving()


def _serving():
    other = Peer()
    yield other
    other.end()


@pytest.fixture
def balanced(request):
    """The test ends with nothing allocated, here and there."""
    openreg.set_device(0)
    gc.collect()
    openreg.ipc_collect()
    left[:] = map(openreg.memory_allocated, range(2))
    yield
    gc.collect()
    assert [allocated(d) for d in range(2)] == [0, 0]
    for name in ("peer", "third"):
        if name in request.fixturenames:
            other = request.getfixturevalue(name)
            assert other(driver_memory) == 0
