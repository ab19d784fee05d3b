"""Device and page-locked memory: allocation, bounds, exhaustion, lookup."""

import ctypes

import driver
import driver_child
import pytest
from driver_gate import held, let_ready_work_run, reset_devices

SIZE_MAX = 2 ** (8 * ctypes.sizeof(ctypes.c_size_t)) - 1


@pytest.fixture(autouse=True)
def _clean():
    yield
    reset_devices()


def refused(name, call, *arguments):
    """The message of the error that a call must raise."""
    with pytest.raises(driver.DriverError) as caught:
        call(*arguments)
    assert caught.value.name == name
    return caught.value.message


def test_blocks_are_aligned_apart_and_keep_their_contents():
    blocks = {driver.upload(bytes([n]) * (1 + 301 * n)): n for n in range(20)}
    for block, n in blocks.items():
        assert block % 512 == 0
        size = 1 + 301 * n
        assert driver.download(block, size) == bytes([n]) * size
    for block in blocks:
        driver.free(block)


def test_freeing_a_large_block_leaves_its_neighbours_alone():
    """Its pages go back to the system, and the next block lies behind them."""
    for tail in (512, 1024, 3584):
        size = (1 << 20) + tail
        holes = []  # what other tests have left must be full first
        for _ in range(64):
            large, behind = driver.malloc(size), driver.upload(b"\x07" * 512)
            if 0 <= behind - (large + size) < 4096:
                break
            holes += [large, behind]
        else:
            raise AssertionError("no block was laid behind another")
        driver.free(large)
        assert driver.download(behind, 512) == b"\x07" * 512
        for block in (behind, *holes):
            driver.free(block)


@pytest.mark.parametrize("device", [0, 1])
def test_allocation_belongs_to_the_current_device(device):
    with driver.on_device(device):
        before = driver.free_memory()
        block = driver.malloc(1 << 20)
        assert driver.attributes(block).device == device
        assert driver.free_memory() <= before - (1 << 20)
    with driver.on_device(1 - device):
        elsewhere = driver.free_memory()
        driver.free(block)
        assert driver.free_memory() == elsewhere
    with driver.on_device(device):
        assert driver.free_memory() == before


def test_nothing_is_allocated_and_freed_without_fuss():
    before = driver.free_memory()
    assert driver.malloc(0) == 0
    assert driver.free_memory() == before
    driver.free(0)
    driver.free_host(0)
    block = driver.upload(b"data")
    driver.copy(block, block, 0)
    driver.Stream.default().fill(block, 1, 0)
    driver.synchronize()
    assert driver.download(block, 4) == b"data"
    driver.free(block)


def test_second_free_is_refused():
    before = driver.free_memory()
    block = driver.malloc(1000)
    neighbour = driver.upload(b"neighbour")
    driver.free(block)
    assert hex(block) in refused("orErrorInvalidPointer", driver.free, block)
    stream = driver.Stream()
    refused("orErrorInvalidPointer", stream.free, block)
    assert driver.download(neighbour, 9) == b"neighbour"
    driver.free(neighbour)
    assert driver.free_memory() == before


def test_only_the_start_of_a_live_block_can_be_freed():
    block, pinned = driver.malloc(4096), driver.malloc_host(4096)
    pageable = ctypes.create_string_buffer(64)
    unknown = [block + 512, block + 1, pinned, ctypes.addressof(pageable), 8]
    for pointer in unknown:
        message = refused("orErrorInvalidPointer", driver.free, pointer)
        assert hex(pointer) in message
    for pointer in [pinned + 64, block, ctypes.addressof(pageable), 8]:
        refused("orErrorInvalidPointer", driver.free_host, pointer)
    driver.free(block)
    driver.free_host(pinned)
    refused("orErrorInvalidPointer", driver.free_host, pinned)


def test_attributes_tell_where_a_pointer_lies():
    def look_up(pointer):
        it = driver.attributes(pointer)
        return it.type, it.device, it.base, it.size

    unknown = (driver.UNREGISTERED, -1, None, 0)
    unused = (driver.DEVICE, 1, None, 0)
    with driver.on_device(1):
        block = driver.malloc(1000)
    pinned = driver.malloc_host(100)
    pageable = ctypes.create_string_buffer(8)
    for offset in (0, 1, 999):
        found = look_up(block + offset)
        assert found == (driver.DEVICE, 1, block, 1000)
    for offset in (0, 99):
        found = look_up(pinned + offset)
        assert found == (driver.HOST, -1, pinned, 100)
    assert look_up(block + 1001) == unused
    for pointer in [pinned + 101, ctypes.addressof(pageable), 0, 8]:
        assert look_up(pointer) == unknown
    driver.free(block)
    driver.free_host(pinned)
    assert look_up(block) == unused
    assert look_up(pinned) == unknown


def test_freed_block_is_not_taken_for_the_end_of_its_neighbour():
    blocks = [driver.malloc(512) for _ in range(8)]
    gone = next(block for block in blocks if block - 512 in blocks)
    driver.free(gone)
    assert driver.attributes(gone).base is None


@pytest.mark.parametrize("operation", ["write", "read", "fill", "on device"])
@pytest.mark.parametrize(("offset", "size"), [(0, 101), (90, 11), (99, 2)])
def test_overrun_is_refused_and_changes_nothing(operation, offset, size):
    block, other = driver.upload(b"A" * 100), driver.upload(b"B" * 4096)
    host = ctypes.create_string_buffer(b"C" * 4096, 4096)
    stream = driver.Stream()
    overrun = block + offset
    calls = {
        "write": lambda: driver.copy(overrun, host, size),
        "read": lambda: driver.copy(host, overrun, size),
        "fill": lambda: stream.fill(overrun, 1, size),
        "on device": lambda: stream.copy(other, overrun, size),
    }
    message = refused("orErrorOutOfBounds", calls[operation])
    assert "100" in message
    assert str(size) in message
    stream.synchronize()
    assert driver.download(block, 100) == b"A" * 100
    assert driver.download(other, 100) == b"B" * 100
    assert host.raw == b"C" * 4096


def test_end_of_a_block_holds_nothing():
    block, host = driver.malloc(512), ctypes.create_string_buffer(8)
    stream = driver.Stream()
    driver.copy(block + 512, host, 0)
    stream.fill(block + 512, 0, 0)
    for call in (driver.copy, stream.copy):
        with pytest.raises(driver.DriverError):
            call(block + 512, host, 1)
        with pytest.raises(driver.DriverError):
            call(host, block + 512, 1)


def test_pinned_overrun_is_refused():
    block, pinned = driver.malloc(4096), driver.malloc_host(100)
    refused("orErrorOutOfBounds", driver.copy, block, pinned, 101)
    refused("orErrorOutOfBounds", driver.copy, pinned + 50, block, 51)
    driver.free_host(pinned)


def test_memory_behind_a_pinned_block_is_pageable():
    """Two allocators may put their blocks side by side."""
    block, pinned = driver.malloc(64), driver.malloc_host(64)
    assert driver.attributes(pinned + 64).type == driver.UNREGISTERED
    assert driver.attributes(pinned - 1).type == driver.UNREGISTERED
    driver.free(block)
    driver.free_host(pinned)


def test_sizes_near_the_limit_do_not_wrap():
    block, host = driver.upload(b"A" * 64), ctypes.create_string_buffer(64)
    for distance in (0, 8, 100, 511, 4096):
        size = SIZE_MAX - distance
        refused("orErrorOutOfMemory", driver.malloc, size)
        refused("orErrorOutOfBounds", driver.copy, block + 9, host, size)
        stream = driver.Stream()
        refused("orErrorOutOfBounds", stream.fill, block + 9, 0, size)
    assert driver.download(block, 64) == b"A" * 64


def test_freed_memory_cannot_be_copied():
    block, live = driver.malloc(100), driver.upload(b"A" * 100)
    driver.free(block)
    refused("orErrorInvalidPointer", driver.copy, live, block, 100)
    refused("orErrorInvalidPointer", driver.copy, block, live, 100)
    stream = driver.Stream()
    refused("orErrorInvalidPointer", stream.fill, block, 0, 100)
    assert driver.download(live, 100) == b"A" * 100


def test_exhaustion_is_an_error_that_freeing_ends():
    code = """
    def refused(size):
        try:
            driver.malloc(size)
        except driver.DriverError as error:
            assert error.name == "orErrorOutOfMemory"
            return error.message
        raise AssertionError(f"{size} bytes fitted")

    MB = 1 << 20
    assert "openreg:0" in refused(16 * MB + 1)
    assert driver.free_memory() == 16 * MB
    blocks = [driver.malloc(MB) for _ in range(16)]
    assert driver.free_memory() == 0
    assert "1048576" in refused(MB)
    refused(1)
    with driver.on_device(1):
        assert driver.malloc(16 * MB)
    for block in blocks[::2]:
        driver.free(block)
    refused(2 * MB)
    driver.free(blocks[5])
    driver.malloc(3 * MB)
    refused(2 * MB)
    driver.malloc(MB)
    """
    driver_child.output(code, OPENREG_MEMORY_MB="16")


@pytest.mark.parametrize("order", [1, -1])
def test_free_ranges_grow_together_again(order):
    code = f"""
    for _ in range(3):
        blocks = [driver.malloc(1 << 20) for _ in range(16)]
        for block in blocks[::2] + blocks[1::2][::{order}]:
            driver.free(block)
        driver.free(driver.malloc(16 << 20))
    """
    driver_child.output(code, OPENREG_MEMORY_MB="16")


def test_free_waits_for_the_device():
    stream, block = driver.Stream(), driver.malloc(8)
    with held(stream) as gate:
        gate.release_later()
        driver.free(block)
        assert gate.is_released


def test_free_async_keeps_the_block_until_the_stream_gets_there():
    stream, before = driver.Stream(), driver.free_memory()
    block, pinned = driver.upload(b"used"), driver.malloc_host(4)
    with held(stream) as gate:
        stream.copy(pinned, block, 4)
        stream.free(block)
        let_ready_work_run()
        others = [driver.malloc(4) for _ in range(100)]
        assert block not in others
        for other in others:
            driver.Stream.default().free(other)
        driver.Stream.default().synchronize()
        assert driver.free_memory() < before
        gate.release()
        stream.synchronize()
    assert ctypes.string_at(pinned, 4) == b"used"
    assert driver.free_memory() == before
    refused("orErrorInvalidPointer", driver.free, block)


def test_free_async_that_is_refused_leaves_the_block_alone():
    before, stream = driver.free_memory(), driver.Stream()
    block = driver.upload(b"data")
    with driver.on_device(1):
        elsewhere = driver.Stream()
    refused("orErrorInvalidPointer", elsewhere.free, block)
    stream.destroy()
    refused("orErrorInvalidHandle", stream.free, block)
    assert driver.download(block, 4) == b"data"
    driver.free(block)
    assert driver.free_memory() == before


def test_pinned_memory_is_ordinary_memory_for_the_host():
    pinned = driver.malloc_host(1000)
    assert pinned % 64 == 0
    ctypes.memset(pinned, 7, 1000)
    block = driver.malloc(1000)
    driver.copy(block, pinned, 1000, driver.HOST_TO_DEVICE)
    assert driver.download(block, 1000) == b"\7" * 1000
    driver.free_host(pinned)


def test_pinned_free_waits_for_copies_that_use_it():
    stream, block = driver.Stream(), driver.malloc(8)
    pinned = driver.malloc_host(8)
    with held(stream) as gate:
        stream.copy(block, pinned, 8)
        gate.release_later()
        driver.free_host(pinned)
        assert gate.is_released
