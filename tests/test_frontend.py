"""What Python asks of the device's module: names, files, memory of others."""

import io
import os
import warnings

import marks
import processes
import pytest
import torch
from needs import operators
from torch.utils.checkpoint import checkpoint

SCRIPTS = marks.ROOT / "chapters" / "scripts"
CHIP = """
import ctypes, torch
from pathlib import Path
place = Path(torch.openreg._C.__file__).with_name("libopenreg.so")
chip = ctypes.CDLL(str(place))
def copy(target, source, size):
    assert chip.orMemcpy(target, source, ctypes.c_size_t(size), 4) == 0
def address(storage):
    return ctypes.c_void_p(storage.data_ptr())
"""


def run(code, **environment):
    """The lines that a process of its own prints; it must end well."""
    process = processes.run(f"import torch\n{code}", os.environ | environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


# -------------------------------------------------------------- the contract


@pytest.mark.parametrize(
    "name",
    [
        "_utils._get_device_index",
        "_lazy_call",
        "_initialized",
        "_exchange_device",
        "get_amp_supported_dtype",
        "can_device_access_peer",
        "caching_allocator_alloc",
        "set_sync_debug_mode",
        "memory_stats_as_nested_dict",
        "ipc_collect",
        "to_tiled",
    ],
)
def test_a_name_that_others_ask_for_is_there(name):
    found = torch.openreg
    for part in name.split("."):
        found = getattr(found, part)


def test_checkpointing_on_the_cpu_is_not_disturbed():
    x = torch.ones(2, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert torch.allclose(x.grad, torch.ones(2).cos())


def test_a_seed_is_set_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(11)
    assert torch.openreg.initial_seed() == 11


def test_what_an_import_asks_of_the_device_waits_for_it():
    assert run(
        "torch.openreg._lazy_call(lambda: print('called'))\n"
        "print(torch.openreg._initialized)\n"
        "torch.UntypedStorage(8, device='openreg')\n"
        "print(torch.openreg._initialized)"
    ) == ["False", "called", "True"]


@pytest.mark.parametrize(
    ("device", "index"), [("openreg:1", 1), (1, 1), ("openreg", 1)]
)
def test_an_index_is_read_from_what_a_file_names(device, index):
    with torch.openreg.device(1):
        found = torch.openreg._utils._get_device_index(device, optional=True)
    assert found == index


def test_raw_memory_comes_from_the_cache_and_goes_back():
    before = torch.openreg.memory_allocated()
    address = torch.openreg.caching_allocator_alloc(1000)
    assert torch.openreg.memory_allocated() == before + 1024
    torch.openreg.caching_allocator_delete(address)
    assert torch.openreg.memory_allocated() == before
    with pytest.raises(ValueError, match="given back before"):
        torch.openreg.caching_allocator_delete(address)


def test_a_wait_can_be_forbidden():
    torch.openreg.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="waits for the device"):
            torch.Stream(device="openreg").synchronize()
    finally:
        torch.openreg.set_sync_debug_mode("default")
    torch.Stream(device="openreg").synchronize()


# ------------------------------------------------------- generated methods


def test_every_tensor_and_storage_says_where_it_is():
    assert torch.ones(1).is_openreg is False
    assert torch.UntypedStorage(1).is_openreg is False
    assert torch.UntypedStorage(1, device="openreg").is_openreg is True


@operators
def test_methods_with_the_name_of_the_device_move_things():
    x = torch.arange(3.0)
    packed = torch.nn.utils.rnn.pack_sequence([x])
    for moved in (
        x.openreg(1),
        x.untyped_storage().openreg(1),
        torch.nn.Linear(2, 1).openreg(1).weight,
        packed.openreg(1).data,
    ):
        assert moved.device == torch.device("openreg:1")
    assert packed.openreg().is_openreg


@operators
def test_a_module_that_moves_keeps_what_its_layers_share():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    weight = model[0].weight
    model.openreg()
    assert model[0].weight is model[1].weight is weight
    assert weight.is_openreg


# -------------------------------------------------------------------- files


@operators
@pytest.mark.parametrize(
    ("map_location", "expected"),
    [
        (None, "openreg:1"),
        ("cpu", "cpu"),
        ("openreg", "openreg:0"),
        ({"openreg:1": "openreg:0"}, "openreg:0"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: None, "openreg:1"),
        ("meta", "meta"),
    ],
)
def test_a_file_goes_where_it_is_told(map_location, expected):
    file = io.BytesIO()
    torch.save(torch.arange(3.0).to("openreg:1"), file)
    file.seek(0)
    found = torch.load(file, map_location=map_location)
    assert found.device == torch.device(expected)
    assert expected == "meta" or found.tolist() == [0, 1, 2]


@operators
def test_devices_that_are_not_here_can_be_folded():
    def fold(storage, location):
        kind, _, index = location.partition(":")
        if kind == "openreg":
            count = torch.openreg.device_count()
            return storage.openreg(int(index or 0) % count)
        return None

    for location in ("openreg:7", "openreg:4", "openreg"):
        storage = torch.arange(3.0).untyped_storage()
        found = fold(storage, location)
        assert found.device.index == int(location[8:] or 0) % 2
        assert found.tolist() == storage.tolist()
    assert fold(torch.UntypedStorage(1), "cpu") is None


@operators
@pytest.mark.parametrize("place", [None, "openreg:1", "cpu"])
def test_a_private_layout_survives_a_file(place):
    matrix = torch.arange(512.0).reshape(16, 32)
    file = io.BytesIO()
    torch.save(torch.openreg.to_tiled(matrix.to("openreg")), file)
    file.seek(0)
    found = torch.load(file, map_location=place)
    assert torch.openreg.is_tiled(found) == (place != "cpu")
    assert torch.equal(found.cpu(), matrix)


# --------------------------------------------------- others' memory, others


@operators
def test_dlpack_copies_nothing():
    x = torch.arange(3.0).to("openreg:1")
    y = torch.from_dlpack(x)
    assert (y.device, y.data_ptr()) == (x.device, x.data_ptr())


@operators
def test_data_parallel_computes_what_one_device_does():
    model, x = torch.nn.Linear(3, 2), torch.randn(5, 3)
    expected = model(x)
    found = torch.nn.DataParallel(model.openreg(), [0, 1])(x.openreg())
    torch.testing.assert_close(found.cpu(), expected)


def test_a_storage_can_be_taken_apart_for_another_process():
    # What was sent is kept for a receiver that never comes: not in here.
    code = """
from multiprocessing import reduction
storage = torch.UntypedStorage(8, device="openreg")
print(len(reduction.ForkingPickler.dumps(storage)) > 0)
"""
    assert run(code) == ["True"]


def test_two_processes_have_one_memory_as_long_as_both_need_it():
    lines = run(
        CHIP
        + """
import multiprocessing
def child():
    storage = there.recv()
    copy(address(storage), b"hello", 5)
    there.send("written")
    there.recv()
    del storage
    torch.accelerator.synchronize()
    there.send("let go")
fork = multiprocessing.get_context("fork")
here, there = fork.Pipe()
fork.Process(target=child, daemon=True).start()
there.close()
storage = torch.UntypedStorage(1024, device="openreg")
here.send(storage)
print(here.recv())
text = ctypes.create_string_buffer(5)
copy(text, address(storage), 5)
print(text.raw.decode())
del storage
torch.openreg.ipc_collect()
print(torch.openreg.memory_allocated())
here.send("drop it")
print(here.recv())
torch.openreg.ipc_collect()
print(torch.openreg.memory_allocated())
"""
    )
    assert lines == ["written", "hello", "1024", "let go", "0"]


def test_memory_comes_back_from_a_process_that_was_killed():
    lines = run(
        """
import multiprocessing, os, signal
def child():
    storage = there.recv()
    there.send("has it")
    signal.pause()
fork = multiprocessing.get_context("fork")
here, there = fork.Pipe()
process = fork.Process(target=child, daemon=True)
process.start()
there.close()
here.send(torch.UntypedStorage(1024, device="openreg"))
print(here.recv(), torch.openreg.memory_allocated())
os.kill(process.pid, signal.SIGKILL)
process.join()
torch.openreg.ipc_collect()
print(torch.openreg.memory_allocated())
"""
    )
    assert lines == ["has it 1024", "0"]


def test_a_fork_after_the_start_is_refused():
    (line,) = run(
        """
import os
torch.openreg.init()
if os.fork() == 0:
    try:
        torch.UntypedStorage(8, device="openreg")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    )
    assert "before this process was forked" in line
    assert "spawn" in line


# ------------------------------------------------------------------ programs


@operators
def test_a_script_without_a_device_in_it_trains_the_same_everywhere():
    code = f"""
import runpy, sys
for device in ("cpu", "openreg", "openreg:1"):
    sys.argv = ["train.py", device]
    runpy.run_path({str(SCRIPTS / "train.py")!r}, run_name="__main__")
"""
    lines = run(code, OPENREG_FALLBACK="off")
    losses = [float(n.split()[1]) for n in lines if n.startswith("loss")]
    assert losses[:4] == sorted(losses[:4], reverse=True)
    assert losses[4:8] == pytest.approx(losses[:4], rel=1e-4)
    assert losses[8:] == pytest.approx(losses[:4], rel=1e-4)


@operators
def test_a_process_trains_a_model_that_lies_in_another():
    code = f"""
import runpy, sys
sys.argv = ["share.py", "openreg"]
runpy.run_path({str(SCRIPTS / "share.py")!r}, run_name="__main__")
"""
    assert run(code, OPENREG_FALLBACK="off") == ["trained by the worker: True"]
