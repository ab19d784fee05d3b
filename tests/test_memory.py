"""Memory of the devices: who gets which block when, and what is counted.

Most tests need storages only. What needs tensors is skipped before the chapter
`ops`.
"""

import ctypes
import gc
import inspect
import itertools
import os
import pickle
import random
import subprocess
import threading
from pathlib import Path

import needs
import processes
import pytest
import torch
from torch.cuda import _memory_viz
from torch.utils.data import DataLoader

import openreg
from openreg import memory

accelerator = torch.accelerator
KIB, MIB = 1 << 10, 1 << 20
# Settings for a child: a device of 64 MiB.
SMALL_DEVICE = {"OPENREG_MEMORY_MB": "64"}


operators = needs.operators


def allocate(size, device="openreg:0"):
    return torch.UntypedStorage(size, device=device)


def stats(name, device=0):
    return accelerator.memory_stats(device)[name]


def run(code, **environment):
    """What a process of its own prints; it must end well and say no more."""
    code = f"import torch, openreg\nMIB = 1 << 20\n{code}"
    process = processes.run(code, os.environ | environment)
    assert process.returncode == 0, process.stderr
    assert not process.stderr, process.stderr
    return process.stdout.split()


@pytest.fixture(autouse=True)
def clean():
    """Each test begins with empty caches and ends with nothing allocated."""
    openreg.set_device(0)
    if any(accelerator.memory_allocated(d) for d in range(2)):
        gc.collect()  # tests of other files leave cycles with tensors in them
    accelerator.empty_cache()
    for device in range(2):
        openreg.set_per_process_memory_fraction(1.0, device)
        memory.reset_peak_memory_stats(device)
        memory.reset_accumulated_memory_stats(device)
    yield
    openreg.set_device(0)
    memory._record_memory_history(None)
    accelerator.synchronize()
    assert [accelerator.memory_allocated(d) for d in range(2)] == [0, 0]
    accelerator.empty_cache()
    assert [accelerator.memory_reserved(d) for d in range(2)] == [0, 0]


@pytest.fixture
def chip():
    """The driver that this process has loaded, through ctypes."""
    library = Path(openreg._C.__file__).with_name("libopenreg.so")
    return ctypes.CDLL(str(library))


PROGRAM = r"""
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>

extern "C" int orLaunchHostFunc(void*, void (*)(void*), void*);

extern "C" c10::DataPtr* make(std::size_t bytes) {
  return new c10::DataPtr(
      c10::GetAllocator(c10::kPrivateUse1)->allocate(bytes));
}
extern "C" c10::DataPtr* foreign(void* memory) {
  return new c10::DataPtr(memory, c10::Device(c10::kPrivateUse1, 0));
}
extern "C" void* place(c10::DataPtr* data) {
  return data->get();
}
extern "C" void drop(c10::DataPtr* data) {
  delete data;
}
extern "C" void record(c10::DataPtr* data, int64_t id, int device) {
  const c10::Device place(c10::kPrivateUse1, static_cast<int8_t>(device));
  c10::impl::getDeviceGuardImpl(c10::kPrivateUse1)->recordDataPtrOnStream(
      *data, c10::Stream(c10::Stream::UNSAFE, place, id));
}
// A stream stands still from hold() to let_go().
std::atomic<bool> gates[8];
extern "C" int hold(int gate, void* stream) {
  gates[gate] = false;
  return orLaunchHostFunc(stream, [](void* gate) {
    static_cast<std::atomic<bool>*>(gate)->wait(false);
  }, &gates[gate]);
}
extern "C" void let_go(int gate) {
  gates[gate] = true;
  gates[gate].notify_all();
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """What PyTorch's C++ code does with the allocator, callable from here."""
    torch_folder = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("memory") / "program.so"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-"),
            *(f"-isystem{torch_folder}/include", f"-L{torch_folder}/lib"),
            *(f"-L{Path(openreg._C.__file__).parent}", "-lc10"),
            *("-l:libopenreg.so", "-o", library),
        ],
        input=PROGRAM,
        text=True,
        check=True,
    )
    loaded = ctypes.CDLL(str(library))
    loaded.make.restype = loaded.foreign.restype = ctypes.c_void_p
    loaded.place.restype = ctypes.c_void_p
    loaded.make.argtypes = [ctypes.c_size_t]
    loaded.place.argtypes = loaded.drop.argtypes = [ctypes.c_void_p]
    loaded.record.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    loaded.hold.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return loaded


@pytest.fixture
def held(program):
    """Hold streams: they stand still until let go, or the test ends."""
    used = itertools.count()

    def hold(stream):
        gate = next(used)
        assert program.hold(gate, stream.stream_id) == 0
        return lambda: (program.let_go(gate), stream.synchronize())

    yield hold
    for gate in range(next(used)):
        program.let_go(gate)


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("size", [1, 512, 4 * KIB, MIB, 3 * MIB, 30 * MIB])
def test_a_freed_block_is_handed_out_again(size):
    storage = allocate(size)
    place = storage.data_ptr()
    del storage
    assert allocate(size).data_ptr() == place
    assert stats("num_device_alloc") == 1


def test_a_free_waits_for_nothing_and_its_stream_has_the_block_at_once(held):
    stream = torch.Stream(device="openreg")
    with stream:
        storage = allocate(MIB)
        place = storage.data_ptr()
        let_go = held(stream)
        del storage
        again = allocate(MIB)
        assert not stream.query()
        assert again.data_ptr() == place
        let_go()
        del again


@pytest.mark.parametrize("size", [4 * KIB, 3 * MIB])
def test_a_block_goes_back_to_its_own_stream(size):
    side = torch.Stream(device="openreg")
    storage = allocate(size)
    place = storage.data_ptr()
    with side:
        del storage  # whatever is current for the one who frees
        other = allocate(size)
    assert other.data_ptr() != place
    assert allocate(size).data_ptr() == place
    del other


def test_a_block_belongs_to_the_device_that_was_asked_for():
    here, there = allocate(KIB), allocate(KIB, "openreg:1")
    assert (here.device.index, there.device.index) == (0, 1)
    assert openreg.current_device() == 0
    place = there.data_ptr()
    assert accelerator.memory_allocated(1) == KIB
    del there
    assert accelerator.memory_allocated(1) == 0
    assert accelerator.memory_allocated(0) == KIB
    assert allocate(KIB, "openreg:1").data_ptr() == place
    with accelerator.device_index(1):
        assert allocate(KIB, "openreg").device.index == 1


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
        (101 * MIB, 102 * MIB, 102 * MIB),  # too little to split off
    ],
)
def test_sizes(size, block, segment):
    storage = allocate(size)
    assert accelerator.memory_allocated() == block
    assert accelerator.memory_reserved() == segment
    assert stats("requested_bytes.all.current") == size
    kind = "small_pool" if block <= MIB else "large_pool"
    assert stats(f"segment.{kind}.current") == stats("segment.all.current") == 1
    assert storage.data_ptr() % 512 == 0


def test_live_blocks_are_apart():
    chance = random.Random(1)
    live = []
    for _ in range(500):
        if live and chance.random() < 0.4:
            live.pop(chance.randrange(len(live)))
        live.append(allocate(int(2 ** chance.uniform(0, 23))))
    spans = sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in live)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_free_neighbors_are_joined(order):
    blocks = [allocate(5 * MIB) for _ in range(4)]  # one segment
    for index in order:
        blocks[index] = None
    whole = allocate(20 * MIB)
    assert stats("num_device_alloc") == 1
    assert stats("inactive_split.all.current") == 0
    del whole


def test_small_blocks_hold_no_large_segment():
    large = allocate(5 * MIB)
    small = allocate(KIB)
    del large
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 2 * MIB
    del small


# ------------------------------------------------ use by other streams


@pytest.mark.parametrize("size", [16 * MIB, 32 * MIB])
def test_a_recorded_block_waits_for_the_stream_that_uses_it(
    program, held, size
):
    side = torch.Stream(device="openreg")
    for recorded in (False, True):
        data = program.make(size)
        place = program.place(data)
        let_go = held(side)
        if recorded:
            program.record(data, side.stream_id, 0)
        program.drop(data)
        early = allocate(size)
        assert (early.data_ptr() == place) is not recorded
        let_go()
        late = allocate(size)
        assert (late.data_ptr() == place) is recorded
        del early, late
        accelerator.empty_cache()


def test_a_block_waits_for_every_stream_that_uses_it(program, held):
    streams = [torch.Stream(device=f"openreg:{d}") for d in (0, 0, 1)]
    data = program.make(16 * MIB)
    place = program.place(data)
    for stream in streams * 2:  # twice is as good as once
        program.record(data, stream.stream_id, stream.device.index)
    gates = [held(stream) for stream in streams]
    program.drop(data)
    for let_go in gates:
        assert allocate(16 * MIB).data_ptr() != place
        assert stats("active.all.current") == 1
        let_go()
    held_back = [allocate(16 * MIB), allocate(16 * MIB)]
    assert place in [storage.data_ptr() for storage in held_back]
    assert stats("active_bytes.all.current") == 32 * MIB
    del held_back


def test_a_block_waits_for_what_was_queued_before_the_free_only(program, held):
    side = torch.Stream(device="openreg")
    data = program.make(16 * MIB)
    place = program.place(data)
    program.record(data, side.stream_id, 0)
    program.drop(data)
    side.synchronize()
    let_go = held(side)  # later work has nothing to do with the block
    assert allocate(16 * MIB).data_ptr() == place
    let_go()


def test_its_own_stream_is_no_other_stream(program, held):
    stream = torch.Stream(device="openreg")
    with stream:
        data = program.make(16 * MIB)
        place = program.place(data)
        let_go = held(stream)
        program.record(data, stream.stream_id, 0)
        program.drop(data)
        again = allocate(16 * MIB)
    assert again.data_ptr() == place
    let_go()
    del again


def test_memory_from_elsewhere_is_left_alone(program):
    side = torch.Stream(device="openreg")
    for memory_of in (None, ctypes.create_string_buffer(16)):
        data = program.foreign(memory_of)
        program.record(data, side.stream_id, 0)
        program.drop(data)
    data = program.make(0)
    program.record(data, side.stream_id, 0)
    program.drop(data)


def test_a_pending_block_is_active_and_no_longer_allocated(program, held):
    side = torch.Stream(device="openreg")
    data = program.make(16 * MIB)
    program.record(data, side.stream_id, 0)
    let_go = held(side)
    program.drop(data)
    assert accelerator.memory_allocated() == 0
    assert stats("active_bytes.all.current") == 16 * MIB
    [segment] = openreg.memory_snapshot()
    assert segment["blocks"][0]["state"] == "active_pending_free"
    assert (segment["allocated_size"], segment["active_size"]) == (0, 16 * MIB)
    let_go()


def test_memory_that_waits_is_waited_for_before_it_is_missed(program, held):
    """A request that does not fit waits for the foreign stream."""
    openreg.set_per_process_memory_fraction(32 * MIB / capacity())
    side = torch.Stream(device="openreg")
    data = program.make(32 * MIB)
    program.record(data, side.stream_id, 0)
    let_go = held(side)
    program.drop(data)
    timer = threading.Timer(0.05, let_go)
    timer.start()
    data = program.make(32 * MIB)  # without the interpreter lock
    timer.join()
    assert stats("num_sync_all_streams") == 1
    program.drop(data)


# -------------------------------------------------------------- figures


def capacity(device=0):
    return accelerator.get_memory_info(device)[1]


def consistent(of):
    """What holds of the counters at any time."""
    for name in (
        *("allocation", "segment", "active", "inactive_split"),
        *("allocated_bytes", "reserved_bytes", "active_bytes"),
        *("inactive_split_bytes", "requested_bytes"),
    ):
        for kind in ("all", "small_pool", "large_pool"):
            current, peak, allocated, freed = (
                of[f"{name}.{kind}.{column}"]
                for column in ("current", "peak", "allocated", "freed")
            )
            assert current == allocated - freed, name
            assert peak >= current >= 0, name
        for column in ("current", "allocated", "freed"):
            small, large = (
                of[f"{name}.{kind}.{column}"]
                for kind in ("small_pool", "large_pool")
            )
            assert of[f"{name}.all.{column}"] == small + large, name
    requested, allocated, active, reserved = (
        of[f"{name}_bytes.all.current"]
        for name in ("requested", "allocated", "active", "reserved")
    )
    assert requested <= active
    assert allocated <= active <= reserved


def test_the_counters_agree_with_a_count_of_ones_own():
    chance = random.Random(2)
    live, peak = [], 0
    for step in range(600):
        if live and chance.random() < 0.45:
            live.pop(chance.randrange(len(live)))
        else:
            live.append(allocate(int(2 ** chance.uniform(0, 24))))
        blocks = [-(-s.nbytes() // 512) * 512 for s in live]
        peak = max(peak, sum(blocks))
        if step % 20 == 0:
            now = accelerator.memory_stats()
            consistent(now)
            large = [size for size in blocks if size > MIB]
            assert now["allocation.all.current"] == len(live)
            assert now["allocation.large_pool.current"] == len(large)
            small = sum(blocks) - sum(large)
            assert now["allocated_bytes.small_pool.current"] == small
            assert now["requested_bytes.all.current"] == sum(
                s.nbytes() for s in live
            )
            # A remainder up to 1 MiB of a large block stays with it.
            waste = now["allocated_bytes.all.current"] - sum(blocks)
            assert 0 <= waste <= MIB * len(large)
    assert accelerator.max_memory_allocated() >= peak
    live.clear()
    assert accelerator.memory_allocated() == 0


def test_peaks_and_their_reset():
    storage = allocate(3 * MIB)
    del storage
    storage = allocate(MIB)
    assert accelerator.max_memory_allocated() == 3 * MIB
    assert accelerator.max_memory_reserved() == 22 * MIB
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == MIB
    del storage
    accelerator.reset_accumulated_memory_stats()
    now = accelerator.memory_stats()
    assert now["allocation.all.allocated"] == now["num_device_alloc"] == 0
    assert now["allocated_bytes.all.peak"] == MIB


def test_the_driver_agrees(chip):
    def ask():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        chip.orMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    start = ask()
    assert accelerator.get_memory_info() == openreg.mem_get_info() == start
    storages = [allocate(2**power) for power in range(25)]
    assert ask()[0] == start[0] - accelerator.memory_reserved()
    storages.clear()
    assert ask()[0] < start[0]  # it is cached
    accelerator.empty_cache()
    assert ask() == start
    assert stats("num_device_alloc") == stats("num_device_free") > 0


@pytest.mark.parametrize(
    "name",
    [
        *("memory_stats", "memory_allocated", "max_memory_allocated"),
        *("memory_reserved", "max_memory_reserved", "memory_summary"),
        *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
        *("set_per_process_memory_fraction", "empty_cache", "mem_get_info"),
        *("get_per_process_memory_fraction", "host_memory_stats"),
    ],
)
def test_names_and_parameters_are_those_of_cuda(name):
    ours = inspect.signature(getattr(openreg, name)).parameters
    assert list(ours) == list(
        inspect.signature(getattr(torch.cuda, name)).parameters
    )


@pytest.mark.parametrize(
    "device", [None, 1, "openreg:1", torch.device("openreg", 1)]
)
def test_a_device_is_named_in_any_form(device):
    openreg.set_device(1)
    storage = allocate(KIB, "openreg")
    assert openreg.memory_allocated(device) == KIB
    assert openreg.max_memory_allocated(device) == KIB
    assert openreg.memory_reserved(device) == 2 * MIB
    assert openreg.memory_stats(device) == accelerator.memory_stats(1)
    assert "openreg:1" in openreg.memory_summary(device)
    assert openreg.memory_allocated(0) == 0
    del storage


def test_questions_start_nothing():
    assert run(
        "accelerator = torch.accelerator\n"
        "accelerator.empty_cache(); openreg.empty_cache()\n"
        "accelerator.reset_peak_memory_stats()\n"
        "accelerator.reset_accumulated_memory_stats()\n"
        "accelerator.empty_host_cache(); openreg.host_memory_stats()\n"
        "openreg.memory_summary(); openreg.memory_snapshot()\n"
        "openreg.set_per_process_memory_fraction(0.5)\n"
        "print(len(accelerator.memory_stats()), openreg.memory_allocated(),\n"
        "      openreg.memory_reserved(), openreg.is_initialized())"
    ) == ["0", "0", "0", "False"]


# ------------------------------------------------------------ giving back


def test_emptying_keeps_what_is_held():
    blocks = [allocate(4 * MIB) for _ in range(7)]
    assert accelerator.memory_reserved() == 40 * MIB
    del blocks[1:]
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 20 * MIB
    assert accelerator.memory_allocated() == 4 * MIB
    blocks.clear()
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == 0


def test_emptying_serves_all_streams_and_devices():
    for stream in (torch.Stream(device=f"openreg:{d}") for d in (0, 0, 1)):
        with stream:
            allocate(MIB, stream.device)
    assert accelerator.memory_reserved(0) == 4 * MIB
    accelerator.empty_cache()
    assert accelerator.memory_reserved(0) == accelerator.memory_reserved(1) == 0


def test_memory_of_queued_work_is_given_back_in_its_order():
    side = torch.Stream(device="openreg")
    accelerator.empty_cache()
    before, _ = accelerator.get_memory_info()
    with side:
        storage = allocate(MIB)
        openreg._sleep(20_000_000)
        del storage
    assert accelerator.get_memory_info()[0] < before
    accelerator.empty_cache()
    assert accelerator.get_memory_info()[0] == before
    assert side.query()


# --------------------------------------------------------- out of memory


def limited(size, device=0):
    openreg.set_per_process_memory_fraction(size / capacity(device), device)


def test_the_error_says_what_there_is_and_what_to_do():
    limited(64 * MIB)
    storage = allocate(60 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        allocate(8 * MIB)
    text = str(caught.value)
    for part in (
        *("openreg:0 is out of memory", "tried to allocate 8.00 MiB"),
        f"The device has {capacity() / 2**30:.2f} GiB",
        *("may use 64.00 MiB", "PyTorch holds 60.00 MiB"),
        *("60.00 MiB in tensors", "the largest free block of 0.00"),
        "Use a smaller batch",
    ):
        assert part in text
    assert "\n" not in text  # no stack of C++
    assert stats("num_ooms") == 1
    del storage
    assert allocate(8 * MIB).nbytes() == 8 * MIB


def test_fragments_are_called_by_their_name():
    limited(40 * MIB)
    blocks = [allocate(5 * MIB) for _ in range(8)]
    del blocks[1:4], blocks[2:]
    with pytest.raises(torch.OutOfMemoryError, match="it is fragmented") as at:
        allocate(20 * MIB)
    assert "the largest free block of 15.00 MiB" in str(at.value)
    blocks.clear()
    assert allocate(20 * MIB).nbytes() == 20 * MIB


def test_the_cache_is_emptied_before_a_request_fails():
    limited(64 * MIB)
    side = torch.Stream(device="openreg")
    with side:
        pieces = [allocate(16 * MIB) for _ in range(2)]
    pieces += [allocate(16 * MIB) for _ in range(2)]
    del pieces
    assert accelerator.memory_reserved() == 64 * MIB
    assert allocate(60 * MIB).nbytes() == 60 * MIB
    assert (stats("num_alloc_retries"), stats("num_ooms")) == (1, 0)


def test_a_request_may_take_the_last_bytes():
    """The segment that it would share with others does not fit."""
    limited(22 * MIB)
    storage = allocate(16 * MIB)
    assert allocate(6 * MIB).nbytes() == 6 * MIB
    assert accelerator.memory_reserved() == 22 * MIB
    del storage


def test_failed_requests_leave_nothing_behind():
    limited(32 * MIB)
    for _ in range(200):
        with pytest.raises(torch.OutOfMemoryError):
            allocate(33 * MIB)
    assert accelerator.memory_allocated() == accelerator.memory_reserved() == 0
    assert stats("num_ooms") == 200


def test_the_device_itself_is_full():
    code = (
        "storages = []\n"
        "try:\n"
        "    while True: storages.append("
        "torch.UntypedStorage(20 * MIB, device='openreg'))\n"
        "except torch.OutOfMemoryError as error:\n"
        "    assert 'The device has 64.00 MiB, of which 4.00' in str(error)\n"
        "    assert 'may use' not in str(error)\n"
        "    print(len(storages))\n"
        "other = torch.UntypedStorage(60 * MIB, device='openreg:1')\n"
        "storages.clear()\n"
        "last = torch.UntypedStorage(64 * MIB, device='openreg')\n"
        "print(last.nbytes() // MIB)"
    )
    assert run(code, **SMALL_DEVICE) == ["3", "64"]


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
def test_the_limit_is_a_part_of_the_device(fraction):
    openreg.set_per_process_memory_fraction(fraction, 1)
    assert openreg.get_per_process_memory_fraction(1) == fraction
    assert openreg.get_per_process_memory_fraction(0) == 1.0
    size = int(capacity(1) * fraction)
    with pytest.raises(torch.OutOfMemoryError):
        allocate(size + 2 * MIB, "openreg:1")
    # What other tests of this process hold beside the cache is not ours.
    size = min(size, openreg.mem_get_info(1)[0] - 64 * MIB)
    if size > 0:
        assert allocate(size, "openreg:1").nbytes() == size


@pytest.mark.parametrize("fraction", [-0.1, 1.01, float("nan"), float("inf")])
def test_a_limit_out_of_range_is_refused_and_changes_nothing(fraction):
    limited(64 * MIB)
    before = openreg.get_per_process_memory_fraction()
    with pytest.raises(ValueError, match="from 0 to 1"):
        openreg.set_per_process_memory_fraction(fraction)
    assert openreg.get_per_process_memory_fraction() == before


def test_a_limit_below_what_is_held_takes_nothing_away():
    storage = allocate(30 * MIB)
    limited(10 * MIB)
    place = storage.data_ptr()
    del storage
    assert allocate(30 * MIB).data_ptr() == place
    with pytest.raises(torch.OutOfMemoryError):
        allocate(31 * MIB)


# --------------------------------------------------------------- bad input


def test_no_bytes_are_no_block():
    storage = allocate(0, "openreg:1")
    assert (storage.data_ptr(), storage.device.index) == (0, 1)
    assert accelerator.memory_reserved(1) == 0


@pytest.mark.parametrize(
    "size", [2**40, 2**62, 2**63 - 1, 2**63 - 512, -1, -(2**61)]
)
def test_absurd_sizes_are_out_of_memory(size):
    held = allocate(KIB)
    with pytest.raises(torch.OutOfMemoryError):
        allocate(size)
    assert accelerator.memory_allocated() == KIB
    consistent(accelerator.memory_stats())
    del held


@pytest.mark.parametrize("index", [2, 7, 127])
@pytest.mark.parametrize(
    "call",
    [
        lambda index: allocate(1, f"openreg:{index}"),
        *(accelerator.memory_stats, accelerator.memory_allocated),
        *(accelerator.get_memory_info, accelerator.reset_peak_memory_stats),
        *(openreg.memory_allocated, openreg.mem_get_info),
        openreg.get_per_process_memory_fraction,
        lambda index: openreg.set_per_process_memory_fraction(0.5, index),
    ],
)
def test_a_device_that_is_not_there(call, index):
    allocate(1)  # so that there is something to ask about
    with pytest.raises(RuntimeError, match=f"there is no openreg:{index}"):
        call(index)
    assert openreg.current_device() == 0


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "sizes", "reserved"),
    [
        ("", "5", 20),
        ("large_segment_size_mb:32", "5", 32),
        ("", "33", 34),
        ("roundup_power2_divisions:4", "33", 40),
        ("roundup_power2_divisions:[16:1,32:4,>:1]", "33", 40),
        ("", "-100 12 100", 200),
        ("max_split_size_mb:64", "-100 12 100", 112),
        ("", "-30 40", 70),
        ("garbage_collection_threshold:0.01", "-30 40", 40),
        ("garbage_collection_threshold:0.9", "-30 40", 70),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_setting_has_its_effect(settings, sizes, reserved, late):
    """Set before the start, and while the program runs."""
    change = f"torch._C._accelerator_setAllocatorSettings({settings!r})\n"
    environment = (
        {} if late or not settings else {"PYTORCH_ALLOC_CONF": settings}
    )
    first = "torch.UntypedStorage(1, device='openreg'); openreg.empty_cache()\n"
    assert run(
        f"{first + change if late else ''}"
        "held = []\n"
        f"for size in map(int, {sizes!r}.split()):\n"
        "    s = torch.UntypedStorage(abs(size) * MIB, device='openreg')\n"
        "    held += [s] if size > 0 else []\n"
        "    del s\n"
        "print(openreg.memory_reserved() // MIB)",
        **environment,
    ) == [str(reserved)]


def test_settings_that_cannot_be_had():
    code = (
        "import warnings\n"
        "for _ in range(2):\n"
        "    with warnings.catch_warnings(record=True) as seen:\n"
        "        storage = torch.UntypedStorage(5 * MIB, device='openreg')\n"
        "    print(*(str(w.message).split()[3] for w in seen))\n"
        "print(openreg.memory_reserved() // MIB)"
    )
    both = "expandable_segments:True,large_segment_size_mb:32"
    assert run(code, PYTORCH_ALLOC_CONF=both) == ["expandable_segments,", "32"]
    code = (
        "for _ in range(2):\n"
        "    try: torch.UntypedStorage(1, device='openreg')\n"
        "    except ValueError as error: print('no_such_key' in str(error))"
    )
    assert "False" not in run(code, PYTORCH_ALLOC_CONF="no_such_key:1")


# ------------------------------------------------------ snapshot, history


def test_a_snapshot_adds_up():
    storages = [allocate(2**power + 1) for power in range(25)]
    storages += [allocate(3 * MIB, "openreg:1")]
    del storages[3:20:4]
    taken = memory._snapshot()
    assert openreg.memory_snapshot() == taken["segments"]
    for device in range(2):
        now = accelerator.memory_stats(device)
        segments = [s for s in taken["segments"] if s["device"] == device]
        assert memory._snapshot(device)["segments"] == segments
        for part in ("allocated", "active", "total"):
            name = {"total": "reserved"}.get(part, part)
            assert now[f"{name}_bytes.all.current"] == sum(
                segment[f"{part}_size"] for segment in segments
            )
        for segment in segments:
            end = segment["address"]
            for block in segment["blocks"]:
                assert block["address"] == end
                end += block["size"]
            assert end == segment["address"] + segment["total_size"]
    held = {
        block["address"]: block["requested_size"]
        for segment in taken["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert held == {s.data_ptr(): s.nbytes() for s in storages}


def trace(device=0):
    return memory._snapshot(device)["device_traces"][device]


def test_the_history_tells_what_happened_and_who_asked():
    memory._record_memory_history()

    def somebody():
        return allocate(5 * MIB)

    storage = somebody()
    place = storage.data_ptr()
    del storage
    accelerator.empty_cache()
    limited(MIB)
    with pytest.raises(torch.OutOfMemoryError):
        allocate(5 * MIB)
    events = trace()
    assert [event["action"] for event in events] == [
        *("segment_alloc", "alloc", "free_requested", "free_completed"),
        *("segment_free", "oom", "snapshot"),
    ]
    alloc = events[1]
    assert (alloc["addr"], alloc["size"]) == (place, 5 * MIB)
    assert "somebody" in [frame["name"] for frame in alloc["frames"]]
    assert any(f["filename"] == __file__ for f in alloc["frames"])
    assert "device_free" in events[5]
    times = [event["time_us"] for event in events]
    assert times == sorted(times)
    assert {event["action"] for event in trace(1)} == {"snapshot"}


def test_a_block_knows_who_holds_it():
    memory._record_memory_history("state")
    storage = allocate(5 * MIB)
    [segment] = openreg.memory_snapshot()
    names = [frame["name"] for frame in segment["blocks"][0]["frames"]]
    assert "test_a_block_knows_who_holds_it" in names
    assert segment["blocks"][1]["frames"] == []
    assert len(trace()) <= 1
    del storage


def test_the_history_is_bounded_begins_anew_and_ends():
    memory._record_memory_history(max_entries=4)
    for _ in range(10):
        allocate(1)
    assert len(trace()) == 4
    memory._record_memory_history(context=None)
    allocate(1)
    assert all(event["frames"] == [] for event in trace())
    memory._record_memory_history(None)
    allocate(1)
    assert trace() == []


@pytest.mark.parametrize("name", ["enabled", "context", "stacks"])
def test_history_that_cannot_be_had_is_refused(name):
    with pytest.raises(ValueError, match=f"expected {name} to be"):
        memory._record_memory_history(**{name: "everything"})


def test_the_frames_of_cpp_are_there_on_request():
    memory._record_memory_history(stacks="all")
    allocate(1)
    alloc = next(event for event in trace() if event["action"] == "alloc")
    files = [frame["filename"] for frame in alloc["frames"]]
    assert any(not name.endswith(".py") for name in files)


def test_pytorchs_visualizer_reads_a_dump(tmp_path):
    memory._record_memory_history()
    storages = [allocate(5 * MIB), allocate(KIB)]
    storages[0] = allocate(30 * MIB)
    path = tmp_path / "dump.pickle"
    memory._dump_snapshot(str(path))
    read = pickle.loads(path.read_bytes())
    assert f"total_allocated: {30.001:.1f}MiB" in _memory_viz.segsum(read)
    assert "free completed" in _memory_viz.trace(read)
    assert "<script" in _memory_viz.trace_plot(read)
    assert "<script" in _memory_viz.segment_plot(read)
    del storages


# ----------------------------------------------------- page-locked memory


@pytest.fixture
def host():
    """The counters of page-locked memory, from zero."""
    accelerator.synchronize()
    accelerator.empty_host_cache()
    openreg.reset_accumulated_host_memory_stats()
    openreg.reset_peak_host_memory_stats()
    yield lambda name: openreg.host_memory_stats()[name]
    accelerator.empty_host_cache()


def test_page_locked_memory_is_cached(host):
    data = torch.arange(1000).pin_memory()
    assert data.is_pinned()
    assert data.tolist() == list(range(1000))
    assert host("active_bytes.current") >= 8000
    place = data.data_ptr()
    del data
    again = torch.zeros(1000, dtype=torch.long).pin_memory()
    assert again.data_ptr() == place
    assert host("num_host_alloc") == 1
    assert host("num_host_free") == 0
    accelerator.empty_host_cache()
    assert again.is_pinned()
    assert host("num_host_free") == 0
    del again
    accelerator.empty_host_cache()
    assert host("num_host_free") == 1
    assert host("allocated_bytes.current") == host("active_bytes.current") == 0
    assert host("allocated_bytes.peak") >= 8000
    openreg.reset_peak_host_memory_stats()
    assert host("allocated_bytes.peak") == 0


def test_a_storage_is_pinned_and_page_locked_memory_counts_on_no_device(host):
    storage = torch.UntypedStorage(MIB).pin_memory()
    assert storage.is_pinned()
    assert host("active_bytes.current") == MIB
    assert accelerator.memory_reserved() == 0


class Batch:
    def __init__(self, samples):
        self.data = torch.stack(samples)

    def pin_memory(self):
        self.data = self.data.pin_memory()
        return self


@pytest.mark.filterwarnings("error")
def test_a_loader_pins_its_batches(host):
    data = [torch.full((3,), index) for index in range(4)]
    for batch in DataLoader(data, 2, pin_memory=True):
        assert batch.is_pinned()
    for batch in DataLoader(data, 2, pin_memory=True, collate_fn=Batch):
        assert batch.data.is_pinned()


@operators
def test_a_copy_that_does_not_wait_keeps_its_source(host, held):
    size = MIB
    stream = torch.Stream(device="openreg")
    source = torch.ones(size).pin_memory()
    place = source.data_ptr()
    let_go = held(stream)
    with stream:
        copy = source.to("openreg", non_blocking=True)
    del source
    other = torch.zeros(size).pin_memory()
    assert other.data_ptr() != place
    assert not stream.query()
    let_go()
    assert copy.min().item() == 1
    assert torch.zeros(size).pin_memory().data_ptr() == place
    del copy, other


# ------------------------------------------------- threads, exit, fork


def test_a_block_is_freed_by_any_thread():
    holder = [allocate(MIB, "openreg:1")]
    place = holder[0].data_ptr()
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert accelerator.memory_allocated(1) == 0
    assert allocate(MIB, "openreg:1").data_ptr() == place


def test_threads_share_the_caches():
    errors, exchange = [], []

    def work(seed):
        try:
            chance = random.Random(seed)
            stream = torch.Stream(device=f"openreg:{seed % 2}")
            live = []
            with stream:
                for _ in range(400):
                    if live and chance.random() < 0.5:
                        exchange.append(live.pop(chance.randrange(len(live))))
                    if exchange and chance.random() < 0.5:
                        exchange.pop()  # another one's, as often as not
                    live.append(
                        allocate(int(2 ** chance.uniform(0, 22)), stream.device)
                    )
                    if chance.random() < 0.01:
                        accelerator.empty_cache()
        except IndexError:
            pass  # somebody else has emptied the exchange
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    exchange.clear()
    assert not errors
    for device in range(2):
        consistent(accelerator.memory_stats(device))


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_exits_with_live_storages(busy):
    assert run(
        "class Late:\n"
        "    def __init__(self):\n"
        "        self.s = torch.UntypedStorage(MIB, device='openreg:1')\n"
        "    def __del__(self): self.s = None\n"
        "late, kept = Late(), torch.UntypedStorage(MIB, device='openreg')\n"
        "late.itself, pinned = late, torch.ones(10).pin_memory()\n"
        f"{'openreg._sleep(20_000_000)' if busy else ''}\n"
        "print('end')"
    ) == ["end"]


def test_a_fork_has_none_of_the_parents_memory():
    assert run(
        "import os\n"
        "kept = torch.UntypedStorage(MIB, device='openreg')\n"
        "gone = torch.UntypedStorage(MIB, device='openreg')\n"
        "if os.fork() == 0:\n"
        "    del gone\n"
        "    try: torch.UntypedStorage(1, device='openreg')\n"
        "    except RuntimeError as error:\n"
        "        print('fork' in str(error), flush=True)\n"
        "    os._exit(0)\n"
        "print(os.wait()[1], flush=True)\n"
        "print(openreg.memory_allocated() // MIB)"
    ) == ["True", "0", "2"]


def test_a_fork_while_others_allocate_leaves_no_lock_behind():
    assert run(
        "import os, threading\n"
        "stop = threading.Event()\n"
        "def work():\n"
        "    while not stop.is_set():\n"
        "        torch.UntypedStorage(100, device='openreg')\n"
        "threads = [threading.Thread(target=work) for _ in range(2)]\n"
        "kept = [torch.UntypedStorage(100, device='openreg')]\n"
        "[t.start() for t in threads]\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        kept.clear()\n"
        "        try: torch.UntypedStorage(1, device='openreg')\n"
        "        except RuntimeError: os._exit(0)\n"
        "        os._exit(1)\n"
        "    assert os.wait()[1] == 0\n"
        "stop.set()\n"
        "[t.join() for t in threads]\n"
        "print('end')"
    ) == ["end"]


def test_a_fork_before_the_start_has_memory_of_its_own():
    assert run(
        "import os\n"
        "if os.fork() == 0:\n"
        "    s = torch.UntypedStorage(MIB, device='openreg')\n"
        "    os._exit(openreg.memory_allocated() // MIB)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))"
    ) == ["1"]


# ------------------------------------------------------------- tensors


@operators
def test_record_stream_keeps_a_tensor_for_the_other_stream(held):
    side, size = torch.Stream(device="openreg"), 8 << 20
    for recorded in (False, True):
        source = torch.ones(size, device="openreg")
        side.wait_stream(accelerator.current_stream())
        let_go = held(side)
        with side:
            copy = source.clone()
        if recorded:
            source.record_stream(side)
        del source
        other = torch.zeros(size, device="openreg")
        accelerator.current_stream().synchronize()
        let_go()
        assert copy.min().item() == int(recorded)
        del copy, other
        accelerator.empty_cache()


@operators
def test_a_tensor_grows_shrinks_and_grows_from_nothing():
    data = torch.ones(3, device="openreg")
    data.resize_(5000)
    assert data[:3].tolist() == [1, 1, 1]
    storage = data.untyped_storage()
    storage.resize_(0)
    assert accelerator.memory_allocated() == 0
    storage.resize_(20000)
    assert accelerator.memory_allocated() >= 20000
    del data, storage


@operators
@pytest.mark.filterwarnings("ignore:aten::")  # no kernel yet, no matter
def test_rounds_of_work_leave_no_memory_behind():
    def work():
        data = torch.ones(1000, device="openreg")
        return (data + data).cpu()

    work()
    before = accelerator.memory_allocated()
    for _ in range(20):
        work()
    assert accelerator.memory_allocated() == before
