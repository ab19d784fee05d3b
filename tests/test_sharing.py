"""Storages of a device that several processes use, and how long."""

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
from multiprocessing import reduction, resource_sharer

import needs
import peers
import processes
import pytest
import torch
from peers import (
    KIB,
    MIB,
    Callback,
    Peer,
    allocated,
    chip,
    driver_memory,
    forget,
    forkserver,
    held,
    hold,
    make,
    on_held,
    open_descriptors,
    read,
    recall,
    spawn,
    write,
)
from torch.utils.data import DataLoader

import openreg

balanced, peer, third = peers.balanced, peers.peer, peers.third
operators = needs.operators
pytestmark = pytest.mark.usefixtures("balanced")


# ------------------------------------------------------------------ storages


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
def test_both_sides_see_what_the_other_writes(peer, device):
    storage = make(b"first" * 1000, device)
    peer(hold, "it", storage)
    assert peer(on_held, "it", read) == b"first" * 1000
    peer(on_held, "it", write, b"there")
    assert read(storage)[:10] == b"therefirst"
    write(storage, b"again")
    assert peer(on_held, "it", read)[:10] == b"againfirst"
    peer(forget, "it")


def test_storages_of_one_segment_stay_apart(peer):
    """And the segment is mapped once."""
    sizes = [1, 511, 512, 513, 5000, 100 * KIB]
    storages = [make(bytes([i]) * n) for i, n in enumerate(sizes, 1)]
    peer(hold, "all", storages)
    assert peer(on_held, "all", list) is not None
    for i, n in enumerate(sizes, 1):
        assert peer(read_one, "all", i - 1) == bytes([i]) * n
    assert peer(driver_memory) == 2 * MIB
    peer(forget, "all")


def read_one(name, index):
    return read(held[name][index])


def test_one_storage_sent_twice_arrives_as_one(peer):
    storage = make(b"x" * 100)
    peer(hold, "first", storage)
    peer(hold, "second", [storage, storage])
    assert peer(are_one, "first", "second")
    peer(forget, "first", "second")


def are_one(first, second):
    places = {held[first]._cdata, *(s._cdata for s in held[second])}
    return len(places) == 1


def test_a_storage_that_comes_back_is_the_one_that_was_sent(peer, third):
    storage = make(b"x" * 100)
    peer(hold, "it", storage)
    assert peer(recall, "it")._cdata == storage._cdata
    third(hold, "it", peer(recall, "it"))
    assert third(recall, "it")._cdata == storage._cdata
    for other in (peer, third):
        other(forget, "it")


def test_empty_storage_arrives_on_its_device(peer):
    for device in ("openreg:0", "openreg:1"):
        peer(hold, "it", torch.UntypedStorage(0, device=device))
        assert peer(on_held, "it", device_and_size) == (device, 0)
        peer(forget, "it")


def device_and_size(storage):
    return str(storage.device), storage.nbytes()


def test_other_storages_are_sent_as_before(peer):
    storage = torch.UntypedStorage(3)
    storage[1] = 7
    peer(hold, "it", storage)
    peer(on_held, "it", set_item, 2, 9)
    assert storage[1] == 7
    assert storage[2] == 9
    peer(forget, "it")


def set_item(storage, index, value):
    storage[index] = value


def test_work_queued_before_is_done_when_the_storage_arrives(peer):
    storage = make(b"old")
    stream = torch.Stream("openreg:0")
    gate = threading.Event()
    later = Callback(lambda: gate.wait(30))
    with stream:
        later.launch(stream)
        chip.orMemsetAsync(
            ctypes.c_void_p(storage.data_ptr()),
            5,
            ctypes.c_size_t(3),
            peers.handle(stream),
        )
        threading.Timer(0.1, gate.set).start()
        peer(hold, "it", storage)
        assert gate.is_set()
    assert peer(on_held, "it", read) == b"\5\5\5"
    peer(forget, "it")


def test_pending_failure_is_reported_by_sending():
    """Rather than that the receiver gets what the failed kernel left."""
    code = """
    import ctypes, multiprocessing.reduction as reduction, torch, openreg
    from pathlib import Path
    RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    chip = ctypes.CDLL(
        str(Path(openreg._C.__file__).with_name("libopenreg.so"))
    )
    chip.orKernelFail.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    fails = RUN(lambda context, _: chip.orKernelFail(context, b"on purpose"))
    class Kernel(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("run", RUN),
                    ("move", ctypes.c_void_p), ("destroy", ctypes.c_void_p)]
    storage = torch.UntypedStorage(8, device="openreg")
    kernel = Kernel(b"broken", fails, None, None)
    assert not chip.orLaunchKernel(None, ctypes.byref(kernel), None, 0)
    try:
        reduction.ForkingPickler.dumps(storage)
    except torch.AcceleratorError as error:
        print("on purpose" in str(error))
    """
    assert run(code) == ["True"]


def run(code, **environment):
    """What a process of its own prints; it must end well and say no more."""
    process = processes.run(textwrap.dedent(code), os.environ | environment)
    assert process.returncode == 0, process.stderr
    assert not process.stderr, process.stderr
    return process.stdout.split()


# ------------------------------------------------------------------ lifetime


def test_memory_is_kept_exactly_while_the_receiver_has_it(peer):
    storage = make(b"kept" * 256)
    place = storage.data_ptr()
    peer(hold, "it", storage)
    peer(hold, "again", storage)
    del storage
    assert allocated() == KIB
    peer(forget, "it")
    assert allocated() == KIB
    assert peer(on_held, "again", read) == b"kept" * 256
    other = make(b"new" * 256)
    assert other.data_ptr() != place
    peer(forget, "again")
    assert allocated() == KIB  # the other one
    del other


@pytest.mark.parametrize(
    "collect", ["ipc_collect", "empty_cache", "sending", "shortage"]
)
def test_memory_comes_back(collect):
    """Whoever closes the lifeline stands for a receiver that is done."""
    code = f"""
    import os, torch, openreg
    storage = torch.UntypedStorage(48 << 20, device="openreg")
    *_, memory, _, _, lifeline = openreg._C._share_storage(storage)
    os.close(memory)
    del storage
    openreg.ipc_collect()
    print(openreg.memory_allocated() >> 20)
    os.close(lifeline)
    collect = {collect!r}
    if collect == "sending":
        other = torch.UntypedStorage(1, device="openreg")
        openreg._C._share_storage(other)
    elif collect == "shortage":
        other = torch.UntypedStorage(40 << 20, device="openreg")
    else:
        getattr(openreg, collect)()
    print(openreg.memory_allocated() >> 20)
    """
    after = "40" if collect == "shortage" else "0"
    assert run(code, OPENREG_MEMORY_MB="64") == ["48", after]


def test_receivers_that_crash_give_everything_back():
    before = open_descriptors()
    storages = [make(b"x" * 1000) for _ in range(10)]
    peer = Peer()
    peer(hold, "all", storages)
    del storages
    assert allocated() == 10 * KIB
    with pytest.raises(EOFError):
        peer(os._exit, 1)
    peer.process.join(60)
    assert peer.process.exitcode == 1
    assert allocated() == 0
    peer.pipe.close()
    peer.process.close()
    assert open_descriptors() == before


def test_memory_outlives_the_sender(peer):
    """A process that ends, and one that dies."""
    for end in ("end", "crash"):
        sender = Peer()
        storage = sender(make, b"left" * 1000)
        if end == "end":
            sender.end()
        else:
            sender.process.kill()
            sender.process.join(60)
        assert read(storage) == b"left" * 1000
        write(storage, b"more")
        peer(hold, end, storage)
        del storage
        assert peer(on_held, end, read)[:8] == b"moreleft"
        peer(forget, end)


def test_storage_that_was_sent_on_is_kept_for_the_last_receiver(peer, third):
    storage = make(b"passed on" * 100)
    size = storage.nbytes()
    peer(hold, "it", storage)
    third(hold, "it", peer(recall, "it"))
    del storage
    gc.collect()
    peer(forget, "it")
    assert allocated() >= size
    assert third(on_held, "it", read) == b"passed on" * 100
    third(forget, "it")
    assert allocated() == 0


def test_descriptors_are_closed(peer):
    def rounds():
        for _ in range(3):
            storages = [make(b"x" * 1000) for _ in range(20)]
            peer(hold, "all", storages)
            peer(forget, "all")
        del storages
        allocated()
        return open_descriptors(), peer(open_descriptors)

    assert rounds() == rounds()


def test_message_that_is_never_read_costs_no_crash():
    storage = make(b"x" * 1000)
    reduction.ForkingPickler.dumps(storage)
    del storage
    # Nobody can tell whether somebody will still ask for the descriptors.
    code = """
    import torch, openreg
    from multiprocessing import reduction
    reduction.ForkingPickler.dumps(torch.UntypedStorage(9, device="openreg"))
    print(openreg.memory_allocated())
    """
    assert run(code) == ["512"]
    resource_sharer.stop()
    resource_sharer._resource_sharer._cache.clear()


def test_receiver_gives_memory_up_after_its_queued_work(peer):
    storage = make(b"x" * 1000)
    peer(hold, "it", storage)
    del storage
    peer(drop_while_held, "it")
    assert allocated() == KIB
    peer(let_go)
    assert allocated() == 0


def drop_while_held(name):
    held["gate"] = threading.Event()
    stream = torch.accelerator.current_stream()
    Callback(lambda: held["gate"].wait(30)).launch(stream)
    del held[name]
    gc.collect()


def let_go():
    held.pop("gate").set()
    openreg.synchronize()


@operators
def test_receiver_gives_memory_up_after_streams_that_were_recorded(peer):
    storage = make(b"x" * 1000)
    peer(hold, "it", storage)
    del storage
    peer(record_and_drop, "it")
    assert allocated() == KIB
    peer(let_go)
    assert allocated() == 0


def record_and_drop(name):
    held["gate"] = threading.Event()
    tensor = torch.empty(0, dtype=torch.uint8, device="openreg")
    tensor.set_(held.pop(name))
    stream = torch.Stream("openreg:0")
    Callback(lambda: held["gate"].wait(30)).launch(stream)
    tensor.record_stream(stream)
    del tensor
    gc.collect()
    other = torch.Stream("openreg:0")
    other.synchronize()


@operators
def test_shared_storage_cannot_be_resized_until_it_is_not_shared(peer):
    storage = make(b"x" * 100)
    assert storage.resizable()
    peer(hold, "first", storage)
    peer(hold, "second", storage)
    for name in ("first", "second"):
        assert not storage.resizable()
        with pytest.raises(RuntimeError, match="not resizable"):
            storage.resize_(10)
        assert "not resizable" in peer.refuses(on_held, name, resize)
        peer(forget, name)
        openreg.ipc_collect()
    assert storage.resizable()
    del storage


def resize(storage):
    storage.resize_(10)


# ------------------------------------------------------------------- refusals


def test_fork_is_refused_and_told_to_spawn():
    code = """
    import os, sys, torch, openreg
    from multiprocessing import reduction
    storage = torch.UntypedStorage(8, device="openreg")
    message = bytes(reduction.ForkingPickler.dumps(storage))
    for attempt in (
        lambda: reduction.ForkingPickler.dumps(storage),
        lambda: openreg.sharing._rebuild_storage(
            0, *[type("", (), {"detach": lambda _: os.dup(1)})()] * 1, 0, 8,
            type("", (), {"detach": lambda _: os.dup(1)})()),
    ):
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            continue
        try:
            attempt()
        except RuntimeError as error:
            print("spawn" in str(error), flush=True)
        os._exit(0)
    """
    assert run(code) == ["True", "True"]


def test_fork_of_a_receiver_does_not_keep_memory(peer):
    storage = make(b"x" * 1000)
    peer(hold, "it", storage)
    del storage
    child = peer(fork_that_waits)
    peer(forget, "it")
    assert allocated() == 0
    peer(end_fork, child)


def fork_that_waits():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    return child, writing


def end_fork(child):
    os.close(child[1])
    return os.waitpid(child[0], 0)[1]


def test_events_are_refused():
    for event in (torch.Event("openreg"), openreg.Event()):
        with pytest.raises(TypeError, match=r"event.*one process"):
            reduction.ForkingPickler.dumps(event)


def test_storage_of_a_device_that_the_receiver_lacks_is_refused():
    storage = make(b"x", "openreg:1")
    _, memory, offset, _, lifeline = openreg._C._share_storage(storage)
    call = f"openreg._C._open_shared(1, {memory}, {offset}, 1, 0)"
    code = f"import openreg\n{call}"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OPENREG_DEVICE_COUNT": "1"},
        pass_fds=[memory],
        capture_output=True,
        text=True,
    )
    assert "there is no openreg:1" in process.stderr
    os.close(memory)
    os.close(lifeline)


def test_place_outside_of_the_object_is_refused():
    storage = make(b"x" * 100)
    device, memory, _, _, lifeline = openreg._C._share_storage(storage)
    for offset, size in ((2 * MIB, 1), (0, 2 * MIB + 1), (1, 2**64 - 1)):
        with pytest.raises(RuntimeError, match="has no"):
            openreg._C._open_shared(device, memory, offset, size, lifeline)
    os.close(memory)
    os.close(lifeline)


# ---------------------------------------------------------------- ways to send


def test_arguments_queues_and_pools():
    storage = make(b"to and fro")
    queue, answers = spawn.Queue(), spawn.SimpleQueue()
    process = spawn.Process(target=answer, args=(storage, queue, answers))
    process.start()
    assert answers.get() == b"to and fro"
    queue.put(storage)
    returned = answers.get()
    assert returned._cdata == storage._cdata
    made = answers.get()
    assert read(made) == b"made there"
    del storage, returned
    queue.put(None)
    process.join(60)
    assert process.exitcode == 0
    assert read(made) == b"made there"
    del made
    gc.collect()
    assert allocated() == 0
    queue.close()
    queue.join_thread()
    with forkserver.Pool(1) as pool:
        storages = [make(bytes([i])) for i in range(3)]
        assert pool.map(read, storages) == [b"\0", b"\1", b"\2"]
        made = pool.apply(make, (b"pool",))
        assert read(made) == b"pool"
        del storages, made


def answer(storage, queue, answers):
    answers.put(read(storage))
    answers.put(queue.get())
    made = make(b"made there")
    answers.put(made)
    queue.get()


def test_workers_of_a_loader_return_tensors_for_pinning():
    loader = DataLoader(range(8), batch_size=4, num_workers=1, pin_memory=True)
    batches = list(loader)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(batch.is_pinned() for batch in batches)


def test_share_memory_changes_nothing():
    storage = make(b"x")
    place = storage.data_ptr()
    assert storage.is_shared()
    assert storage.share_memory_() is storage
    assert storage.data_ptr() == place
    assert storage.resizable()
