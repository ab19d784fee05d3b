"""The hooks: what PyTorch asks an accelerator without a tensor at hand."""

import ctypes
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
import torch
from torch.utils.data import DataLoader

import openreg

CURRENT = torch._C._accelerator_hooks_get_current_device
SET = torch._C._accelerator_hooks_set_current_device
EXCHANGE = torch._C._accelerator_hooks_exchange_device
MAYBE = torch._C._accelerator_hooks_maybe_exchange_device
TORCH = Path(torch.__file__).parent
FLOAT32, PRIVATEUSE1 = 6, 20  # as torch's C interface numbers them

# What only C++ code can ask.
PROBE = """
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstdio>
#include <cstdlib>

extern "C" {
int built() { return at::detail::getPrivateUse1Hooks().isBuilt(); }
int available() { return at::detail::getPrivateUse1Hooks().isAvailable(); }
int started(int index) {
  return at::detail::getPrivateUse1Hooks().hasPrimaryContext(index);
}
int pinned(const void* data) {
  return at::detail::getPrivateUse1Hooks().isPinnedPtr(data);
}
void ask_last() {
  std::atexit([] { std::puts(built() && available() ? "alive" : "gone"); });
}
}
"""


def fresh(code, first="import torch, openreg", **settings):
    """What a new process prints; it must end well and say nothing else."""
    done = processes.run(f"{first}\n{code}", os.environ | settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


@pytest.fixture(autouse=True)
def device_zero():
    yield
    torch.openreg.set_device(0)


@pytest.fixture(scope="module")
def driver():
    """The driver, as a library beside PyTorch calls it."""
    return ctypes.CDLL(
        str(Path(openreg._C.__file__).with_name("libopenreg.so"))
    )


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    source, library = folder / "probe.cpp", folder / "probe.so"
    source.write_text(PROBE)
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared"]
    flags += [f"-isystem{TORCH}/include", f"-L{TORCH}/lib"]
    links = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH}/lib"]
    command = [*compiler, *flags, source, "-o", library, *links]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(library)


# ------------------------------------------------------------------ probes


def test_cpp_names_the_accelerator():
    assert torch._C._get_accelerator() == torch.device("openreg")
    assert torch.get_device_module() is torch.openreg
    count = torch._C._accelerator_hooks_device_count()
    assert count == torch.openreg.device_count()


def test_without_a_device_the_cpu_is_named():
    code = """
print(torch._C._get_accelerator(), torch.get_device_module().__name__)
print(torch._C._accelerator_hooks_device_count(), torch.empty(1).is_pinned())
"""
    answers = fresh(code, OPENREG_DEVICE_COUNT="0")
    assert answers == ["cpu", "torch.cpu", "0", "False"]


def test_probes_do_not_raise_when_the_driver_refuses_its_settings():
    code = """
print(torch._C._get_accelerator())
print(torch._C._accelerator_hooks_device_count())
"""
    assert fresh(code, OPENREG_DEVICE_COUNT="many") == ["cpu", "0"]


def test_no_probe_starts_a_device(probe):
    code = f"""
import ctypes
probe = ctypes.CDLL({probe!r})
assert probe.built() and probe.available()
torch._C._get_accelerator(), torch.get_device_module()
torch._C._accelerator_hooks_device_count()
torch._C._accelerator_hooks_exchange_device(1)
torch._C._accelerator_hooks_maybe_exchange_device(0)
torch.empty(1).is_pinned()
assert not probe.pinned(ctypes.create_string_buffer(8))
print(probe.started(0), probe.started(1))
"""
    assert fresh(code) == ["0", "0"]


# ------------------------------------------------------------------- start


def test_only_the_current_device_starts(probe):
    """The autograd engine asks this for every index; none may raise."""
    code = f"""
import ctypes
probe = ctypes.CDLL({probe!r})
torch._C._accelerator_hooks_set_current_device(1)
torch.empty(1).pin_memory()
print(*[probe.started(index) for index in (0, 1, -1, 2, 99)])
"""
    assert fresh(code) == ["0", "1", "0", "0", "0"]


def test_the_start_may_come_from_both_sides_at_once():
    code = """
import threading
pin = lambda: torch.empty(1).pin_memory()
steps = [threading.Thread(target=f) for f in 4 * [pin, torch.openreg.init]]
[step.start() for step in steps]
[step.join() for step in steps]
print(pin().is_pinned(), torch._C._accelerator_hooks_get_current_device())
"""
    assert fresh(code) == ["True", "0"]


def test_a_start_that_fails_fails_again_with_its_reason():
    code = """
for _ in range(2):
    try:
        torch.empty(1).pin_memory()
    except RuntimeError as error:
        print("no openreg device" in str(error))
"""
    assert fresh(code, OPENREG_DEVICE_COUNT="0") == ["True", "True"]


def test_after_a_fork_probes_answer_and_pinning_says_why():
    code = """
import os
torch.empty(1).pin_memory()
if os.fork() == 0:
    print(torch.ones(2).sum().item(), torch.empty(1).is_pinned())
    print(torch._C._accelerator_hooks_device_count())
    try:
        torch.empty(1).pin_memory()
    except RuntimeError as error:
        print("spawn" in str(error), flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    assert fresh(code) == ["2.0", "False", "2", "True"]


# ---------------------------------------------------------- current device


def test_exchange_gives_the_device_before():
    SET(1)
    assert CURRENT() == torch.openreg.current_device() == 1
    assert EXCHANGE(0) == 1
    assert EXCHANGE(0) == 0
    assert MAYBE(1) == 0
    assert CURRENT() == 1


@pytest.mark.parametrize("index", [2, 99, -1])
def test_an_index_that_is_not_there(index):
    """An error to whoever asks for it, no event to whoever restores."""
    SET(1)
    for ask in (SET, EXCHANGE):
        with pytest.raises(RuntimeError, match=f"openreg:{index}"):
            ask(index)
        assert CURRENT() == 1
    assert MAYBE(index) == 1
    assert CURRENT() == 1


def test_each_thread_has_its_own_device():
    SET(1)

    def work(index):
        first = CURRENT()
        SET(index)
        for _ in range(500):
            assert EXCHANGE(1 - index) == index
            assert MAYBE(index) == 1 - index
        return first

    threads = 8
    pools = [ThreadPoolExecutor(1) for _ in range(threads)]
    jobs = [pool.submit(work, i % 2) for i, pool in enumerate(pools)]
    assert [job.result() for job in jobs] == [0] * threads
    [pool.shutdown() for pool in pools]
    assert CURRENT() == 1


# ------------------------------------------------------------------ pinned


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(10)[::3],
        torch.tensor(3, dtype=torch.int8),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.arange(4, dtype=torch.bfloat16),
    ],
    ids=["transposed", "strided", "scalar", "bool", "complex", "bfloat16"],
)
def test_a_pinned_copy_is_the_same_tensor(tensor):
    pinned = tensor.pin_memory()
    assert pinned.is_pinned()
    assert not tensor.is_pinned()
    assert pinned.device.type == "cpu"
    assert pinned.dtype == tensor.dtype
    assert torch.equal(pinned, tensor)
    assert pinned.pin_memory() is pinned


def test_whatever_shares_pinned_memory_is_pinned():
    pinned = torch.arange(8).pin_memory()
    assert pinned[5:].is_pinned()
    assert pinned.view(2, 4).t().is_pinned()
    assert torch.from_numpy(pinned[3:].numpy()).is_pinned()
    assert not pinned.clone().is_pinned()
    assert not (pinned + 0).is_pinned()


def test_every_way_to_pinned_memory():
    assert torch.zeros(3, pin_memory=True).is_pinned()
    assert torch.UntypedStorage(8).pin_memory().is_pinned()
    assert torch.empty(0).pin_memory().shape == (0,)
    data = torch.arange(6.0)
    batches = list(DataLoader(data, batch_size=2, pin_memory=True))
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat(batches), data)


def test_pinned_memory_is_given_back():
    class Attributes(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_int),
            ("device", ctypes.c_int),
            ("base", ctypes.c_void_p),
            ("size", ctypes.c_size_t),
        ]

    library = ctypes.CDLL(
        str(Path(openreg._C.__file__).with_name("libopenreg.so"))
    )

    def kind(address):
        found = Attributes()
        pointer = ctypes.c_void_p(address)
        assert not library.orPointerGetAttributes(ctypes.byref(found), pointer)
        return found.type

    pinned = torch.empty(4096).pin_memory()
    address, view = pinned.data_ptr(), pinned[100:]
    assert kind(address) == kind(address + 4 * 4096 - 1) == 1
    del pinned
    assert kind(address) == 1, "a view still needs the block"
    del view
    if hasattr(openreg, "host_memory_stats"):  # from `memory` on it is cached
        torch.UntypedStorage(1, device="openreg")  # else torch does nothing
        torch.accelerator.empty_host_cache()
    assert kind(address) == 0


def test_any_pointer_may_be_asked_about(probe, driver):
    library = ctypes.CDLL(probe)
    block = ctypes.create_string_buffer(8)
    pinned = torch.empty(16).pin_memory()
    device = ctypes.c_void_p()
    driver.orMalloc(ctypes.byref(device), ctypes.c_size_t(64))
    odd = [ctypes.c_void_p(1), ctypes.c_void_p(2**64 - 1)]
    asked = [None, *odd, block, device]
    assert [library.pinned(pointer) for pointer in asked] == [0] * 5
    assert library.pinned(ctypes.c_void_p(pinned.data_ptr() + 63))
    assert not library.pinned(ctypes.c_void_p(pinned.data_ptr() + 64))
    driver.orFree(device)


# --------------------------------------------------------- foreign pointers


def test_a_foreign_pointer_is_on_the_device_that_owns_it(driver):
    aten = ctypes.CDLL(str(TORCH / "lib" / "libtorch_cpu.so"))

    def accepted(address, index):
        made, zero = ctypes.c_void_p(), ctypes.c_int64(0)
        one = (ctypes.c_int64 * 1)(1)
        error = aten.aoti_torch_create_tensor_from_blob(
            ctypes.c_void_p(address),
            ctypes.c_int64(1),
            one,
            one,
            zero,
            FLOAT32,
            PRIVATEUSE1,
            index,
            ctypes.byref(made),
        )
        if not error:
            aten.aoti_torch_delete_tensor_object(made)
        return not error

    address = ctypes.c_void_p()
    for owner, other in ((0, 1), (1, 0)):
        with torch.openreg.device(owner):
            driver.orMalloc(ctypes.byref(address), ctypes.c_size_t(64))
        assert accepted(address.value, owner)
        assert accepted(address.value + 60, owner), "the middle of a block"
        assert not accepted(address.value, other)
        driver.orFree(address)
    host = torch.empty(1).pin_memory()
    assert not accepted(host.data_ptr(), 0)
    assert not accepted(host.data_ptr(), -1)


# ------------------------------------------------------------ registration


def test_a_missing_hook_is_named():
    """Until a chapter overrides it; nothing asks to register hooks again."""
    said = "getNewGenerator"
    try:
        torch.Generator(device="openreg")
    except NotImplementedError as error:
        said = str(error)
    assert "getNewGenerator" in said


def test_a_second_set_of_hooks_is_refused():
    hooks = torch._C._acc.PrivateUse1Hooks()
    assert not torch._C._acc.register_python_privateuseone_hook(hooks)
    assert torch.get_device_module() is torch.openreg


def test_the_hooks_answer_until_the_process_is_gone(probe):
    """Asked last of all: exit handlers run in the opposite order."""
    first = f"""
import ctypes, torch
ctypes.CDLL({probe!r}).ask_last()
import openreg
"""
    code = "torch.empty(1).pin_memory()"
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert fresh(code, first, **off) == ["alive"]
