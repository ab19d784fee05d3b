"""What PyTorch's own code gets when it sets, reads and waits for a device."""

import ctypes
import os
import threading
from pathlib import Path

import processes
import pytest
import torch

import openreg

accelerator = torch.accelerator
BACKWARD = "(torch.ones(2, requires_grad=True) * 2).sum().backward()"


def run(code, **environment):
    """What a process of its own prints; it must end well."""
    code = f"import torch, openreg\n{code}"
    process = processes.run(code, os.environ | environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.fixture(autouse=True)
def device_zero():
    openreg.set_device(0)
    yield
    openreg.set_device(0)


@pytest.fixture
def chip():
    """The driver that this process has loaded, through ctypes."""
    library = Path(openreg._C.__file__).with_name("libopenreg.so")
    return ctypes.CDLL(str(library))


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


# -------------------------------------------------- the current device


def test_both_views_of_the_current_device_agree():
    accelerator.set_device_index(1)
    assert accelerator.current_device_index() == openreg.current_device() == 1
    openreg.set_device(0)
    assert accelerator.current_device_index() == openreg.current_device() == 0


@pytest.mark.parametrize("index", [2, 7, 127])
@pytest.mark.parametrize(
    "call",
    [
        accelerator.set_device_index,
        accelerator.synchronize,
        accelerator.current_stream,
        accelerator.get_device_capability,
        lambda index: accelerator.device_index(index).__enter__(),
    ],
    ids=["set", "synchronize", "stream", "capability", "context"],
)
def test_an_index_that_is_not_there_is_named_with_the_count(call, index):
    accelerator.set_device_index(1)
    with pytest.raises(RuntimeError, match=rf"openreg:{index}; 2 devices"):
        call(index)
    assert accelerator.current_device_index() == 1


@pytest.mark.parametrize("index", [2, 256, 257, 1 << 20])
def test_a_great_index_does_not_wrap_round(index):
    with pytest.raises(RuntimeError, match=f"openreg:{index};"):
        openreg.synchronize(index)


def test_without_an_index_the_current_device_is_meant():
    accelerator.set_device_index(1)
    accelerator.set_device_index(-1)
    assert accelerator.current_stream(-1).device_index == 1
    assert accelerator.get_device_capability(-1)
    accelerator.synchronize(-1)
    with accelerator.device_index(-1):
        assert accelerator.current_device_index() == 1
    assert accelerator.current_device_index() == 1


def test_contexts_nest_and_undo_what_happens_inside():
    with accelerator.device_index(1):
        with accelerator.device_index(0):
            assert accelerator.current_device_index() == 0
        assert accelerator.current_device_index() == 1
        accelerator.set_device_index(0)
    assert accelerator.current_device_index() == 0


def test_an_exception_restores_the_device():
    with pytest.raises(KeyError), accelerator.device_index(1):
        raise KeyError
    assert accelerator.current_device_index() == 0


def test_restoring_never_throws():
    accelerator.set_device_index(1)
    for index in (7, 127):
        torch._C._accelerator_maybeExchangeDevice(index)
    assert accelerator.current_device_index() == 1


def test_each_thread_has_its_own_current_device():
    accelerator.set_device_index(1)

    def other():
        before = accelerator.current_device_index()
        accelerator.set_device_index(1)
        accelerator.set_device_index(0)
        return before

    assert in_a_thread(other) == 0
    assert accelerator.current_device_index() == 1


def test_two_threads_inside_contexts_do_not_disturb_each_other():
    meet, seen = threading.Barrier(2, timeout=60), {}

    def work(index):
        with accelerator.device_index(index):
            meet.wait()
            seen[index] = accelerator.current_device_index()
            meet.wait()

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert seen == {0: 0, 1: 1}


def test_queries_leave_the_current_device_alone():
    for current in (0, 1):
        accelerator.set_device_index(current)
        for index in (0, 1):
            openreg.get_device_properties(index)
            openreg.get_device_name(index)
            openreg.get_device_capability(index)
            openreg.synchronize(index)
            accelerator.synchronize(index)
            accelerator.current_stream(index)
            accelerator.get_device_capability(index)
            assert accelerator.current_device_index() == current


def test_without_an_index_tensors_are_wanted_on_the_current_device():
    code = """
def kernel(size, stride, *, device=None, **options):
    print(device)
    raise NotImplementedError

library = torch.library.Library("aten", "IMPL")
library.impl("empty_strided", kernel, "PrivateUse1")
for index in (1, 0):
    torch.accelerator.set_device_index(index)
    try:
        torch.ones(2).to("openreg")
    except NotImplementedError:
        pass
"""
    assert run(code).split() == ["openreg:1", "openreg:0"]


def test_a_renamed_backend_without_a_guard_gets_the_known_message():
    code = """
import types, torch
torch.utils.rename_privateuse1_backend("bare")
torch._register_device_module("bare", types.ModuleType("bare"))
try:
    torch.ones(2).to("bare")
except RuntimeError as error:
    print(error)
"""
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = processes.run(code, os.environ | off)
    assert "not linked with support for bare devices" in process.stdout
    assert accelerator.current_device_index() == 0  # ours answers


# ------------------------------------------------------------ autograd


def engine_threads(count, code=BACKWARD):
    """How many threads the code makes, and how many devices there are."""
    code = f"""
import os
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
{code}
print(threads() - before)
print(torch.openreg.device_count() if torch.openreg.is_available() else 0)
"""
    seen = run(code, OPENREG_DEVICE_COUNT=count).split()
    return [int(number) for number in seen]


@pytest.mark.parametrize("count", [1, 3, 16])
def test_autograd_gets_a_queue_for_every_device(count):
    assert engine_threads(str(count)) == [count, count]


@pytest.mark.parametrize("count", ["0", "many"])
def test_autograd_works_where_no_device_can_be_counted(count):
    assert engine_threads(count) == [0, 0]


def test_the_count_never_changes_after_it_was_asked_for():
    code = f"""
import os
torch.openreg.device_count()
os.environ["OPENREG_DEVICE_COUNT"] = "1"
{BACKWARD}
"""
    assert engine_threads("3", code) == [3, 3]


def test_the_engine_starts_no_device():
    assert run(f"{BACKWARD}\nprint(openreg.is_initialized())") == "False"


def test_processes_end_well_after_a_backward():
    code = f"""
for index in range(2):
    with torch.accelerator.device_index(index):
        openreg.init()
{BACKWARD}
"""
    for _ in range(12):
        run(code)


# ---------------------------------------------------- waiting for a device

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(params=[openreg, accelerator], ids=["openreg", "accelerator"])
def synchronize(request):
    return request.param.synchronize


@pytest.fixture
def queue(chip):
    """Returns a function that queues a Python function on a device."""
    kept = []

    def later(device, function):
        call = CALLBACK(lambda _: function())
        kept.append(call)
        openreg.set_device(device)
        code = chip.orLaunchHostFunc(None, call, None)
        openreg.set_device(0)
        assert code == 0

    yield later
    for device in (0, 1):
        openreg.synchronize(device)


def test_waiting_is_for_the_device_that_is_named(queue, synchronize):
    gate, done = threading.Event(), []

    def held():
        assert gate.wait(60)
        done.append(1)

    queue(1, held)
    synchronize(0)
    assert done == [], "device 0 waited for device 1"
    gate.set()
    synchronize(1)
    assert done == [1]
    assert accelerator.current_device_index() == 0


def test_waiting_lets_go_of_the_interpreter(queue, synchronize):
    done = []
    for step in range(20):
        queue(0, lambda step=step: done.append(step))
    synchronize(0)
    assert done == list(range(20))


def test_the_capability_is_the_cpus():
    types = accelerator.get_device_capability(0)["supported_dtypes"]
    assert {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.int64,
        torch.uint8,
        torch.bool,
    } <= types
