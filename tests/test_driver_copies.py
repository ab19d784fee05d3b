"""Copies and fills: directions, devices, and who waits for whom."""

import contextlib
import ctypes

import driver
import pytest
from driver_gate import held, let_ready_work_run, reset_devices

KINDS = {
    ("host", "host"): driver.HOST_TO_HOST,
    ("device", "host"): driver.HOST_TO_DEVICE,
    ("host", "device"): driver.DEVICE_TO_HOST,
    ("device", "device"): driver.DEVICE_TO_DEVICE,
}
DATA = bytes(range(256)) * 33


@pytest.fixture(autouse=True)
def _clean():
    yield
    reset_devices()


def pageable(data: bytes) -> int:
    """The address of ordinary memory that lives as long as the tests."""
    buffer = ctypes.create_string_buffer(data, len(data))
    _buffers.append(buffer)
    return ctypes.addressof(buffer)


def pinned(data: bytes) -> int:
    pointer = driver.malloc_host(len(data))
    ctypes.memmove(pointer, data, len(data))
    return pointer


def on_other_device(data: bytes) -> int:
    with driver.on_device(1):
        return driver.upload(data)


_buffers = []
PLACES = {
    "pageable": pageable,
    "pinned": pinned,
    "device 0": driver.upload,
    "device 1": on_other_device,
}


def contents(pointer: int, size: int) -> bytes:
    if driver.attributes(pointer).type == driver.DEVICE:
        return driver.download(pointer, size)
    return ctypes.string_at(pointer, size)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("looked_up", [False, True])
@pytest.mark.parametrize("src", PLACES)
@pytest.mark.parametrize("dst", PLACES)
def test_copy_between_any_two_places(dst, src, looked_up, asynchronous):
    source = PLACES[src](DATA)
    target = PLACES[dst](b"\xaa" * len(DATA))
    kinds = [
        "device" if place.startswith("device") else "host"
        for place in (dst, src)
    ]
    kind = driver.DEFAULT if looked_up else KINDS[tuple(kinds)]
    if asynchronous:
        stream = driver.Stream()
        stream.copy(target + 1, source + 3, len(DATA) - 5, kind)
        stream.synchronize()
    else:
        driver.copy(target + 1, source + 3, len(DATA) - 5, kind)
    expected = b"\xaa" + DATA[3:-2] + b"\xaa" * 4
    assert contents(target, len(DATA)) == expected


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        (places, kind)
        for places, right in KINDS.items()
        for kind in [*KINDS.values(), 5, -1]
        if kind != right
    ],
)
def test_wrong_direction_is_refused(places, kind):
    make = {"host": pageable, "device": driver.upload}
    target, source = (make[place](b"12345678") for place in places)
    before = contents(target, 8)
    stream = driver.Stream()
    for copy in (driver.copy, stream.copy):
        with pytest.raises(driver.DriverError) as caught:
            copy(target, source, 8, kind)
        assert caught.value.name == "orErrorInvalidValue"
    assert contents(target, 8) == before


@pytest.mark.parametrize("device", [0, 1])
def test_fill_sets_exactly_its_bytes(device):
    with driver.on_device(device):
        block = driver.upload(b"." * 1000)
        stream = driver.Stream()
        stream.fill(block + 10, 0x1FF, 980)
        stream.synchronize()
        expected = b"." * 10 + b"\xff" * 980 + b"." * 10
        assert driver.download(block, 1000) == expected


def test_fill_is_for_device_memory():
    stream = driver.Stream()
    for pointer in (pageable(b"1234"), pinned(b"1234")):
        with pytest.raises(driver.DriverError) as caught:
            stream.fill(pointer, 0, 4)
        assert caught.value.name == "orErrorInvalidPointer"
        assert ctypes.string_at(pointer, 4) == b"1234"


def test_copies_and_fills_keep_stream_order():
    stream, block = driver.Stream(), driver.upload(b"0000")
    first, second, third = (pinned(b"????") for _ in range(3))
    with held(stream) as gate:
        stream.copy(first, block, 4)
        stream.fill(block, ord("1"), 4)
        stream.copy(second, block, 4)
        stream.launch(lambda kernel: kernel.write(block, b"2222"))
        stream.copy(third, block, 4)
        let_ready_work_run()
        for pointer in (first, second, third):
            assert ctypes.string_at(pointer, 4) == b"????"
        gate.release()
        stream.synchronize()
    results = [ctypes.string_at(it, 4) for it in (first, second, third)]
    assert results == [b"0000", b"1111", b"2222"]


@pytest.mark.parametrize("target_device", [0, 1])
def test_pinned_copies_return_at_once(target_device):
    """The source is read when the stream gets there, not at the call."""
    source, target = pinned(b"early"), pinned(b".....")
    with driver.on_device(target_device):
        block, twin = driver.upload(b"....."), driver.upload(b".....")
        stream = driver.Stream()
        with held(stream) as gate:
            stream.copy(block, source, 5)
            stream.copy(twin, block, 5)
            stream.copy(target, twin, 5)
            assert not gate.is_released
            assert not stream.query()
            ctypes.memmove(source, b"later", 5)
            gate.release()
            stream.synchronize()
    assert ctypes.string_at(target, 5) == b"later"


def test_device_to_device_copies_return_at_once():
    source, target = driver.upload(b"data"), on_other_device(b"....")
    stream = driver.Stream()
    with held(stream) as gate:
        stream.copy(target, source, 4)
        assert not gate.is_released
        assert driver.download(target, 4) == b"...."
        gate.release()
        stream.synchronize()
    assert driver.download(target, 4) == b"data"


@pytest.mark.parametrize("upload", [True, False])
def test_pageable_copies_return_when_done(upload):
    stream, block = driver.Stream(), driver.upload(b"....")
    host = pageable(b"host")
    with held(stream) as gate:
        stream.launch(lambda kernel: kernel.write(block, b"dev."))
        gate.release_later()
        if upload:
            stream.copy(block, host, 4)
        else:
            stream.copy(host, block, 4)
        assert gate.is_released
        assert stream.query()
    assert contents(block, 4) == (b"host" if upload else b"dev.")
    assert contents(host, 4) == (b"host" if upload else b"dev.")


def test_plain_copy_follows_the_default_stream():
    block = driver.upload(b"old")
    default, other = driver.Stream.default(), driver.Stream()
    with held(default) as gate, held(other):
        default.launch(lambda kernel: kernel.write(block, b"new"))
        gate.release_later()
        assert driver.download(block, 3) == b"new"
        assert gate.is_released


def test_copies_run_beside_kernels():
    """All compute engines are busy; the copy engine is not."""
    streams = [
        driver.Stream() for _ in range(driver.properties(0).compute_engines)
    ]
    block, target = driver.upload(b"data"), pinned(b"....")
    copying = driver.Stream()
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(held(stream)).wait_entered()
        copying.copy(target, block, 4)
        copying.synchronize()
        assert ctypes.string_at(target, 4) == b"data"
        assert not any(stream.query() for stream in streams)
