"""Devices: the name, the module, the probes, the start, the fork rule."""

import ctypes
import os
import sys
import textwrap
import threading
import types
from pathlib import Path

import processes
import pytest
import torch

import openreg
from openreg import _C, _handshake

# A child process imports what it wants to: without this, torch would load an
# installed backend by itself.
ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def run(code, **settings):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OPENREG_")
    }
    return processes.run(textwrap.dedent(code), inherited | ALONE | settings)


def output(code, **settings):
    """What a child prints; it must end well and complain of nothing."""
    done = run(code, **settings)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.split()


def error(code, **settings):
    """The last line of the exception that ends a child."""
    done = run(code, **settings)
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(autouse=True)
def device_zero():
    torch.openreg.set_device(0)
    yield
    torch.openreg.set_device(0)


# ------------------------------------------------------- name and module


def test_device_has_the_name():
    device = torch.device("openreg:1")
    assert (device.type, device.index) == ("openreg", 1)
    assert torch._C._get_privateuse1_backend_name() == "openreg"


def test_module_is_the_package():
    assert torch.openreg is openreg
    assert sys.modules["torch.openreg"] is openreg
    for named in ("openreg", torch.device("openreg"), "openreg:1"):
        assert torch.get_device_module(named) is openreg


def test_second_rename_and_second_module_are_refused():
    with pytest.raises(RuntimeError, match=r"already been set.*openreg"):
        torch.utils.rename_privateuse1_backend("otherchip")
    with pytest.raises(RuntimeError, match="openreg"):
        torch._register_device_module("openreg", types.ModuleType("openreg"))
    assert torch.openreg is openreg
    assert torch.device("openreg").type == "openreg"


def test_second_backend_is_told_who_owns_the_place():
    code = """
    import torch
    torch.utils.rename_privateuse1_backend("otherchip")
    try:
        import openreg
    except ImportError as error:
        assert "'otherchip'" in str(error), error
    else:
        raise SystemExit("two backends in one process")
    assert not hasattr(torch, "openreg")
    assert torch.device("otherchip").type == "otherchip"
    """
    output(code)


@pytest.mark.parametrize("rename", ["", "openreg"])
def test_without_a_module_the_first_use_is_an_exception(rename):
    """Nothing but torch is imported here."""
    code = "import torch\n"
    if rename:
        code += f"torch.utils.rename_privateuse1_backend({rename!r})\n"
    name = rename or "privateuseone"
    code += f"torch.empty(1, device={name!r})\n"
    message = error(code)
    assert message.startswith("ModuleNotFoundError")
    assert f"torch.{name}" in message


def test_half_a_package_is_not_left_behind():
    code = """
    import sys, torch
    sys.modules["openreg.devices"] = None  # as if it could not be imported
    try:
        import openreg
    except ImportError:
        pass
    assert not hasattr(torch, "openreg")
    assert "torch.openreg" not in sys.modules
    """
    output(code)


# ------------------------------------------------------------- handshake


def test_library_fits_every_build_of_its_release():
    line = _handshake.release(torch.__version__)
    for version in (torch.__version__, f"{line}.9", f"{line}.0+cu130"):
        _handshake.check(version)


@pytest.mark.parametrize("other", ["1.13.1", "2.1.0", "99.0.0+cpu"])
def test_library_of_another_release_is_refused(other):
    with pytest.raises(ImportError) as caught:
        _handshake.check(other)
    built_for = _handshake.release(torch.__version__)
    assert other in str(caught.value)
    assert f"Install torch {built_for}" in str(caught.value)


def test_handshake_comes_before_anything_of_torch_changes():
    code = """
    import torch
    torch.__version__ = "99.0.0"
    try:
        import openreg
    except ImportError as error:
        assert "99.0.0" in str(error)
    else:
        raise SystemExit("imported")
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not hasattr(torch, "openreg")
    """
    output(code)


# ---------------------------------------------------------------- probes


@pytest.mark.parametrize("count", [0, 3])
def test_probes_agree_with_the_count(count):
    code = """
    import torch, openreg
    found = openreg.device_count(), torch.accelerator.device_count()
    print(*found, openreg.is_available(), torch.accelerator.is_available())
    """
    said = output(code, OPENREG_DEVICE_COUNT=str(count))
    assert said == [str(count)] * 2 + [str(count > 0)] * 2


def test_without_devices_only_their_use_fails():
    code = """
    import torch, openreg
    assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert not openreg.is_initialized() and not openreg._is_in_bad_fork()
    uses = [
        openreg.init,
        lambda: openreg.set_device(0),
        lambda: openreg.get_device_properties(),
        lambda: torch.empty(1, device="openreg"),
    ]
    for use in uses:
        try:
            use()
        except RuntimeError as error:
            assert "there is no openreg device" in str(error), error
        else:
            raise SystemExit("a device that is not there was used")
    """
    output(code, OPENREG_DEVICE_COUNT="0")


@pytest.mark.parametrize("value", ["two", "-1", "17"])
def test_a_count_that_cannot_be_used_is_named(value):
    code = """
    import torch, openreg
    assert not openreg.is_available() and not openreg.is_initialized()
    assert not torch.accelerator.is_available()
    try:
        openreg.device_count()
    except RuntimeError as error:
        raise SystemExit(f"said: {error}")
    """
    message = error(code, OPENREG_DEVICE_COUNT=value)
    assert message.startswith("said: ")
    assert f"OPENREG_DEVICE_COUNT='{value}'" in message


# -------------------------------------------------------- current device


def test_block_makes_a_device_current_and_restores():
    with openreg.device(1):
        assert openreg.current_device() == 1
        with openreg.device("openreg:0"):
            assert openreg.current_device() == 0
        assert openreg.current_device() == 1
    assert openreg.current_device() == 0


@pytest.mark.parametrize("nothing", [None, -1])
def test_block_without_a_device_changes_nothing(nothing):
    openreg.set_device(1)
    with openreg.device(nothing):
        assert openreg.current_device() == 1
    assert openreg.current_device() == 1


def test_block_restores_after_an_exception():
    with pytest.raises(KeyError), openreg.device(1):
        raise KeyError
    assert openreg.current_device() == 0


def test_device_is_current_for_one_thread():
    openreg.set_device(1)
    seen = []

    def other():
        seen.append(openreg.current_device())
        openreg.set_device(0)
        entered.wait()
        seen.append(openreg.current_device())

    entered = threading.Barrier(2, timeout=60)
    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    openreg.set_device(1)
    thread.join()
    assert seen == [0, 0]
    assert openreg.current_device() == 1


@pytest.mark.parametrize("index", [2, 99, "openreg:2"])
def test_index_out_of_range_names_index_and_range(index):
    openreg.set_device(1)
    number = torch.device(index).index if isinstance(index, str) else index
    for use in (openreg.set_device, openreg.get_device_properties):
        with pytest.raises(RuntimeError) as caught:
            use(index)
        assert f"openreg:{number}" in str(caught.value)
        assert "0 to 1" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError), openreg.device(index):
        pass
    assert openreg.current_device() == 1


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("asked", [0, 1, "openreg:0", torch.device("cpu")])
def test_queries_leave_the_current_device_alone(current, asked):
    openreg.set_device(current)
    queries = (
        openreg.get_device_properties,
        openreg.get_device_name,
        openreg.get_device_capability,
    )
    for query in queries:
        if isinstance(asked, torch.device):
            with pytest.raises(ValueError, match="openreg"):
                query(asked)
        else:
            query(asked)
        assert openreg.current_device() == current
    openreg.device_count(), openreg.is_available()
    assert openreg.current_device() == current


def test_every_form_of_a_device_is_understood(monkeypatch):
    """Index 0 is an index, and not "the current one"."""
    openreg.set_device(1)
    asked = []
    monkeypatch.setattr(_C, "get_device_properties", asked.append)
    forms = (0, "openreg:0", torch.device("openreg", 0))
    for form in (*forms, None, "openreg", torch.device("openreg")):
        openreg.get_device_properties(form)
    assert asked == [0, 0, 0, 1, 1, 1]


def test_properties_follow_the_environment():
    code = """
    import openreg
    found = openreg.get_device_properties(0)
    print(found.total_memory, found.compute_engines, openreg.is_initialized())
    """
    settings = {"OPENREG_MEMORY_MB": "7", "OPENREG_COMPUTE_ENGINES": "3"}
    assert output(code, **settings) == [str(7 << 20), "3", "False"]


# ------------------------------------------------------------ lazy start

PROBES = {
    "device": "torch.device('openreg', 1)",
    "module": "torch.get_device_module('openreg')",
    "count": "openreg.device_count(), torch.accelerator.device_count()",
    "available": "openreg.is_available(), torch.accelerator.is_available()",
    "current": "openreg.current_device()",
    "set": "openreg.set_device(1)",
    "properties": "openreg.get_device_properties(1)",
    "capability": "openreg.get_device_capability()",
    "state": "openreg.is_initialized(), openreg._is_in_bad_fork()",
    "cpu": "torch.ones(2).sum().item()",
}


def test_probing_starts_nothing():
    """Each in a child that is forked; it then starts a device of its own."""
    code = f"""
    import os, torch, openreg
    for name, probe in {PROBES}.items():
        if os.fork() == 0:
            exec(probe)
            if openreg.is_initialized():
                os._exit(3)
            openreg.init()
            os._exit(0 if openreg.is_initialized() else 4)
        status = os.waitstatus_to_exitcode(os.wait()[1])
        assert status == 0, (name, status)
    assert not openreg.is_initialized()
    """
    output(code)


def test_first_use_starts_the_current_device_only():
    code = """
    import openreg
    openreg.set_device(1)
    openreg.init()
    print(*[openreg._C.is_started(index) for index in range(2)])
    """
    assert output(code) == ["False", "True"]


def test_torch_asks_for_the_start_once():
    """Through a factory and through torch.load; both need later chapters."""
    code = """
    import io, torch, openreg
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    calls, old = [], openreg._lazy_init
    openreg._lazy_init = lambda: (calls.append(1), old())
    def load():
        file.seek(0)
        torch.load(file, map_location="openreg")
    for use in (load, lambda: torch.empty(1, device="openreg:1"), load):
        try:
            use()
        except (NotImplementedError, RuntimeError):
            pass
        assert openreg.is_initialized()
    print(len(calls))
    """
    assert output(code) == ["1"]


def test_a_failed_start_is_tried_again():
    code = """
    import torch, openreg
    calls = []
    def refuse():
        calls.append(1)
        raise RuntimeError("not yet")
    openreg._lazy_init = refuse
    for _ in range(2):
        try:
            torch.empty(1, device="openreg")
        except RuntimeError as error:
            assert "not yet" in str(error)
    print(len(calls), openreg.is_initialized())
    """
    assert output(code) == ["2", "False"]


def test_threads_may_start_it_together():
    code = """
    import threading, openreg
    barrier, started = threading.Barrier(8), []
    def start(index):
        openreg.set_device(index % 2)
        barrier.wait()
        openreg.init()
        started.append(openreg.is_initialized())
    threads = [threading.Thread(target=start, args=(i,)) for i in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(len(started), all(started))
    """
    assert output(code) == ["8", "True"]


def test_a_start_behind_pythons_back_counts():
    code = """
    import ctypes, pathlib, openreg
    folder = pathlib.Path(openreg._C.__file__).parent
    assert ctypes.CDLL(str(folder / "libopenreg.so")).orInit() == 0
    print(openreg.is_initialized())
    """
    assert output(code) == ["True"]


# ------------------------------------------------------------- fork rule

USES = {
    "init": "openreg.init()",
    "lazy": "openreg._lazy_init()",
    "factory": "torch.empty(1, device='openreg')",
    "set": "openreg.set_device(1)",
    "block": "openreg.device(1).__enter__()",
    "properties": "openreg.get_device_properties(0)",
}


def test_child_of_a_started_process_is_told():
    code = f"""
    import os, signal, torch, openreg
    def child(use):
        signal.alarm(60)  # ends the child if it hangs
        assert openreg._is_in_bad_fork() and not openreg.is_initialized()
        assert (torch.ones(2) + 1).tolist() == [2, 2]
        try:
            exec(use)
        except RuntimeError as error:
            return 0 if "spawn" in str(error) else 3
        return 4
    openreg.init()
    for name, use in {USES}.items():
        if os.fork() == 0:
            status = 5
            try:
                status = child(use)
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.wait()[1])
        assert status == 0, (name, status)
    assert openreg.is_initialized() and not openreg._is_in_bad_fork()
    """
    output(code)


def test_child_forked_while_another_thread_starts_does_not_hang():
    """Whatever Python holds at the fork, the child gets its answer."""
    code = """
    import os, signal, threading, openreg
    openreg.init()
    inside, leave = threading.Event(), threading.Event()
    def slow():
        inside.set()
        leave.wait()
        init()
    init, openreg._C.init = openreg._C.init, slow
    thread = threading.Thread(target=openreg._lazy_init)
    thread.start()
    inside.wait()
    if os.fork() == 0:
        signal.alarm(20)
        openreg._C.init = init
        try:
            openreg._lazy_init()
        except RuntimeError:
            os._exit(0)
        os._exit(3)
    status = os.waitstatus_to_exitcode(os.wait()[1])
    leave.set()
    thread.join()
    print(status)
    """
    assert output(code) == ["0"]


def test_spawned_child_starts_a_device_of_its_own():
    code = """
    import multiprocessing, openreg
    openreg.init()
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=openreg.init)
    child.start()
    child.join()
    print(child.exitcode)
    """
    assert output(code) == ["0"]


# ---------------------------------------------------------- error mapping


@pytest.fixture(scope="module")
def chip():
    """The very library that `_C` has opened."""
    folder = Path(_C.__file__).parent
    library = ctypes.CDLL(str(folder / "libopenreg.so"))
    library.orGetErrorName.restype = ctypes.c_char_p
    return library


def test_memory_error_is_torchs(chip):
    pointer = ctypes.c_void_p()
    code = chip.orMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 50))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _C.check(code)
    assert "openreg:0 is out of memory" in str(caught.value)
    assert str(1 << 50) in str(caught.value)


@pytest.fixture
def failing(chip):
    """A kernel, as the C API takes it, that says why it fails."""
    run_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)

    class Kernel(ctypes.Structure):
        _fields_ = [
            ("name", ctypes.c_char_p),
            ("run", run_type),
            ("move", ctypes.c_void_p),
            ("destroy", ctypes.c_void_p),
        ]

    def fail(context, _arguments):
        chip.orKernelFail(ctypes.c_void_p(context), b"the reason")

    return Kernel(b"the_kernel", run_type(fail))


def test_failed_kernel_is_an_accelerator_error_once(chip, failing):
    nothing = None, ctypes.c_size_t(0)
    _C.check(chip.orLaunchKernel(None, ctypes.byref(failing), *nothing))
    code = chip.orDeviceSynchronize()
    with pytest.raises(torch.AcceleratorError) as caught:
        _C.check(code)
    for part in ("openreg:0", "the_kernel", "the reason"):
        assert part in str(caught.value)
    assert caught.value.error_code == code
    _C.check(chip.orDeviceSynchronize())


def test_other_errors_are_plain_and_carry_no_stack(chip):
    code = chip.orSetDevice(-3)
    with pytest.raises(RuntimeError) as caught:
        _C.check(code)
    assert type(caught.value) is RuntimeError
    assert str(caught.value).startswith("there is no openreg:-3")
    assert "\n" not in str(caught.value)
    _C.check(0)
