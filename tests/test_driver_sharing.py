"""Memory objects: device memory that several processes map."""

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
import textwrap
import threading

import driver
import driver_child
import pytest
from driver_gate import held, reset_devices

PAGE, MIB = 4096, 1 << 20


@pytest.fixture(autouse=True)
def _clean():
    before = [open_descriptors(), free_everywhere()]
    yield
    reset_devices()
    assert [open_descriptors(), free_everywhere()] == before


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def free_everywhere():
    free = []
    for device in range(driver.device_count()):
        with driver.on_device(device):
            driver.synchronize()
            free.append(driver.free_memory())
    return free


@contextlib.contextmanager
def exported(pointer):
    descriptor, _ = driver.export(pointer)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def elsewhere(code, descriptor, **environment):
    """Run a snippet that has the descriptor, in a process of its own."""
    code = f"descriptor = {descriptor}\n{textwrap.dedent(code)}"
    process = subprocess.run(
        [sys.executable, "-c", driver_child.PRELUDE + code],
        env=os.environ | {"PYTHONPATH": str(driver_child.TESTS)} | environment,
        pass_fds=[descriptor],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def refused(name, call, *arguments):
    """The message of the error that a call must raise."""
    with pytest.raises(driver.DriverError) as caught:
        call(*arguments)
    assert caught.value.name == name, caught.value
    return caught.value.message


def pattern(size, seed=1):
    return bytes((seed * 31 + i * 7) % 251 for i in range(251)) * (
        size // 251
    ) + bytes(size % 251)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("size", [PAGE, PAGE + 1, 3 * MIB - 5])
def test_two_processes_see_each_others_writes(size, device):
    with driver.on_device(device):
        block = driver.upload(pattern(size))
    code = f"""
    driver.set_device({device})
    block, size = driver.import_(descriptor)
    data = driver.download(block, size)
    driver.copy(block, data[::-1], size)
    print(driver.attributes(block).size)
    """
    with exported(block) as descriptor:
        assert elsewhere(code, descriptor) == str(size)
    assert driver.download(block, size) == pattern(size)[::-1]
    driver.free(block)


def test_kernels_and_copies_use_imported_memory_like_any():
    block = driver.upload(pattern(MIB))
    with exported(block) as descriptor:
        view, size = driver.import_(descriptor)
    assert size == MIB
    assert view != block
    stream, other = driver.Stream(), driver.malloc(MIB)
    stream.launch(lambda context: context.write(view + 5, b"from a kernel"))
    stream.copy(other, view, MIB)
    stream.fill(view, 0, 3)
    stream.synchronize()
    changed = bytearray(pattern(MIB))
    changed[5:18] = b"from a kernel"
    assert driver.download(other, MIB) == changed
    assert driver.download(block, 3) == bytes(3)
    for pointer in (block, view, other):
        driver.free(pointer)


def test_import_counts_as_memory_and_is_checked_like_any():
    block = driver.upload(pattern(PAGE + 100))
    before = driver.free_memory()
    with exported(block) as descriptor:
        view, size = driver.import_(descriptor)
    assert driver.free_memory() <= before - size
    it = driver.attributes(view + 1)
    assert (it.type, it.device, it.base, it.size) == (2, 0, view, size)
    data = ctypes.create_string_buffer(size + 1)
    refused("orErrorOutOfBounds", driver.copy, data, view, size + 1)
    refused("orErrorOutOfBounds", driver.copy, view + size - 1, data, 2)
    driver.free(view)
    assert driver.free_memory() == before
    refused("orErrorInvalidPointer", driver.copy, data, view, 1)
    refused("orErrorInvalidPointer", driver.free, view)
    driver.free(block)


def test_memory_stays_while_anybody_has_it():
    block = driver.upload(pattern(MIB))
    with exported(block) as descriptor:
        first, _ = driver.import_(descriptor)
        driver.free(block)
        second, _ = driver.import_(descriptor)
    driver.free(first)
    assert driver.download(second, MIB) == pattern(MIB)
    driver.free(second)


def test_memory_outlives_the_process_that_allocated_it():
    ours, theirs = socket.socketpair()
    code = f"""
    import socket
    block = driver.upload(b"left behind" * 1000)
    exported, _ = driver.export(block)
    peer = socket.socket(fileno={theirs.fileno()})
    socket.send_fds(peer, [b"x"], [exported])
    os._exit(0)
    """
    elsewhere(code, theirs.fileno())
    theirs.close()
    with ours:
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    view, _ = driver.import_(descriptor)
    os.close(descriptor)
    assert driver.download(view, 11000) == b"left behind" * 1000
    driver.free(view)


def test_imported_memory_can_be_sent_on():
    block = driver.upload(pattern(MIB))
    with exported(block) as descriptor:
        view, _ = driver.import_(descriptor)
        with exported(view) as again:
            assert os.path.sameopenfile(descriptor, again)
            third, _ = driver.import_(again)
    driver.copy(third, b"third", 5)
    assert driver.download(block, 5) == b"third"
    for pointer in (block, view, third):
        driver.free(pointer)


def test_second_export_gives_the_same_object_and_the_place_of_the_pointer():
    block = driver.upload(pattern(MIB))
    first, at_start = driver.export(block)
    second, inside = driver.export(block + 1000)
    assert first != second
    assert os.path.sameopenfile(first, second)
    assert (at_start, inside) == (0, 1000)
    assert not os.get_inheritable(first)
    os.close(first)
    os.close(second)
    driver.free(block)


def test_neighbours_are_not_in_the_object():
    """The last fits in no gap before the one that is exported."""
    sizes = (1024, 2 * PAGE + 300, 3500)
    blocks = [driver.upload(pattern(size, size)) for size in sizes]
    code = """
    block, size = driver.import_(descriptor)
    stream = driver.Stream()
    end = (size + 4095) // 4096 * 4096  # of the last page; unchecked
    stream.launch(lambda context: context.write(block, b"x" * end))
    stream.synchronize()
    """
    with exported(blocks[1]) as descriptor:
        elsewhere(code, descriptor)
    assert driver.download(blocks[1], sizes[1]) == b"x" * sizes[1]
    for block, size in list(zip(blocks, sizes, strict=True))[::2]:
        assert driver.download(block, size) == pattern(size, size)
    for block in blocks:
        driver.free(block)


@pytest.mark.parametrize("size", [PAGE, 2 * MIB])
def test_freed_memory_is_private_again(size):
    block = driver.upload(pattern(size))
    with exported(block) as descriptor:
        view, _ = driver.import_(descriptor)
    driver.free(block)
    again = driver.malloc(size)
    assert again == block  # else nothing is tested
    assert driver.download(again, size) == bytes(size)
    driver.copy(again, b"secret", 6)
    assert driver.download(view, size) == pattern(size)
    driver.free(again)
    driver.free(view)


def test_free_in_stream_order_waits_for_what_uses_the_mapping():
    block = driver.upload(pattern(MIB))
    with exported(block) as descriptor:
        view, _ = driver.import_(descriptor)
    stream, pinned = driver.Stream(), driver.malloc_host(MIB)
    with held(stream) as gate:
        stream.copy(pinned, view, MIB)
        stream.free(view)
        gate.release()
        stream.synchronize()
    assert ctypes.string_at(pinned, MIB) == pattern(MIB)
    driver.free_host(pinned)
    driver.free(block)


@pytest.mark.parametrize("device", [0, 1])
def test_export_loses_nothing_that_a_stream_writes_meanwhile(device):
    """Whichever device the stream is on."""
    size, begun = 32 * MIB, threading.Event()
    block, data = driver.malloc(size), bytes([7]) * size
    place = driver.backing_offset() + block

    def write(_context):
        begun.set()
        ctypes.memmove(place, data, size)  # without the interpreter lock

    with driver.on_device(device):
        stream = driver.Stream()
    for _ in range(3):
        begun.clear()
        driver.Stream.default().fill(block, 1, size)
        driver.Stream.default().synchronize()
        stream.launch(write)
        assert begun.wait(30)
        os.close(driver.export(block)[0])
        stream.synchronize()
        assert driver.download(block, size) == data
        driver.free(block)
        assert driver.malloc(size) == block  # private again
    driver.free(block)


def test_export_waits_for_running_kernels_of_every_device():
    block = driver.upload(pattern(MIB))
    with driver.on_device(1):
        stream = driver.Stream()
        with held(stream) as gate:
            gate.wait_entered()
            gate.release_later()
            descriptor, _ = driver.export(block)
            assert gate.is_released
        stream.synchronize()
    os.close(descriptor)
    driver.free(block)


def test_work_queued_while_engines_pause_runs_afterwards():
    blocks = [driver.malloc(MIB) for _ in range(16)]
    ran, stream = [], driver.Stream()
    kernel = driver.Kernel(lambda _: ran.append(1))
    queued = 0

    def export(part):
        for block in part:
            os.close(driver.export(block)[0])

    threads = [
        threading.Thread(target=export, args=(blocks[i::4],)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stream.launch(kernel)
        queued += 1
    stream.synchronize()
    assert len(ran) == queued
    for block in blocks:
        driver.free(block)


@pytest.mark.parametrize("device", [0, 1])
def test_export_from_the_device_is_refused(device):
    block, result = driver.malloc(MIB), []
    driver.set_device(device)
    stream = driver.Stream()

    def attempt(*_):
        try:
            driver.export(block)
        except driver.DriverError as error:
            result.append(error.name)

    stream.launch(driver.Kernel(attempt))
    function = driver.DESTROY(attempt)
    driver.lib.orLaunchHostFunc(stream.handle, function, None)
    stream.synchronize()
    assert result == ["orErrorNotPermitted"] * 2
    driver.free(block)


def test_what_is_no_live_allocation_is_not_exported():
    block, pinned = driver.malloc(MIB), driver.malloc_host(MIB)
    pageable = ctypes.create_string_buffer(8)
    driver.free(block)
    for pointer in (block, pinned, ctypes.addressof(pageable), 0, 8):
        refused("orErrorInvalidPointer", driver.export, pointer)
    driver.free_host(pinned)
    refused("orErrorInvalidValue", driver.lib.orMemExport, None, None, block)
    refused("orErrorInvalidValue", driver.lib.orMemImport, None, None, 0)


def test_memory_that_shares_a_page_is_not_exported():
    small = driver.malloc(PAGE - 1)
    message = refused("orErrorInvalidValue", driver.export, small)
    assert "4095" in message
    assert "4096" in message
    driver.free(small)


def test_descriptors_of_other_things_are_not_imported(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE))
    closed = os.open(path, os.O_RDWR)
    foreign = [
        os.open(path, os.O_RDWR),
        os.memfd_create("foreign", os.MFD_ALLOW_SEALING),
        *os.pipe(),
    ]
    os.truncate(foreign[1], 4 * PAGE)
    os.close(closed)
    for descriptor in (closed, -1):
        message = refused("orErrorInvalidValue", driver.import_, descriptor)
        assert "not open" in message
    for descriptor in foreign:
        message = refused("orErrorInvalidValue", driver.import_, descriptor)
        assert "orMemExport" in message
        os.close(descriptor)


def test_nobody_can_cut_an_object_short():
    block = driver.malloc(MIB)
    with exported(block) as descriptor:
        for size in (0, 100 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    driver.free(block)


def test_memory_is_imported_on_its_own_device():
    with driver.on_device(1):
        block = driver.malloc(MIB)
    with exported(block) as descriptor:
        message = refused("orErrorInvalidDevice", driver.import_, descriptor)
        assert "openreg:1" in message
        assert "openreg:0" in message
    driver.free(block)


def test_import_finds_no_room():
    block = driver.malloc(20 * MIB)
    with exported(block) as descriptor:
        code = """
        try:
            driver.import_(descriptor)
        except driver.DriverError as error:
            print(error.name, driver.free_memory() >> 20)
        """
        found = elsewhere(code, descriptor, OPENREG_MEMORY_MB="16")
        assert found == "orErrorOutOfMemory 16"
    driver.free(block)


def test_export_without_a_free_descriptor_changes_nothing():
    block = driver.upload(pattern(MIB))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(1))
        message = refused("orErrorSystem", driver.export, block)
        assert "open files" in message
        os.close(opened.pop())  # enough for the object, not for its copy
        refused("orErrorSystem", driver.export, block)
        os.close(opened.pop())
        assert driver.download(block, MIB) == pattern(MIB)
        os.close(driver.export(block)[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)
    driver.free(block)


def test_fork_is_refused_and_told_to_spawn():
    code = """
    block = driver.malloc(1 << 20)
    descriptor, _ = driver.export(block)
    if child := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for call in (
        lambda: driver.export(block),
        lambda: driver.import_(descriptor),
    ):
        try:
            call()
        except driver.DriverError as error:
            print(error, flush=True)
    os._exit(0)
    """
    lines = driver_child.output(code).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("orErrorForked")
        assert "spawn" in line


def test_untouched_memory_takes_no_room_when_it_is_exported():
    block = driver.malloc(256 * MIB)
    driver.copy(block + 100 * MIB, b"one page", 8)
    with exported(block) as descriptor:
        assert os.fstat(descriptor).st_blocks * 512 < 8 * MIB
    assert driver.download(block + 100 * MIB, 8) == b"one page"
    driver.free(block)
