"""Kernels that fail: reported later, once, and with what it cost."""

import ctypes
import re
import time

import driver
import pytest
from driver_gate import BOUND, Gate, held, reset_devices


@pytest.fixture(autouse=True)
def _clean():
    reset_devices()
    yield
    reset_devices()


def failure_of(call, name="orErrorKernelFailed") -> str:
    with pytest.raises(driver.DriverError) as caught:
        call()
    assert caught.value.name == name
    return caught.value.message


def failing(name="gather", message="index 7 is out of range for size 3"):
    return driver.Kernel(lambda kernel: kernel.fail(message), name)


def finish(stream):
    """Wait for a stream without a synchronizing call."""
    deadline = time.monotonic() + BOUND
    while not stream.query():
        assert time.monotonic() < deadline


def fail_and_finish(stream, kernel=None):
    stream.launch(kernel or failing())
    finish(stream)


def copy_pageable(stream):
    block = driver.malloc(8)
    stream.copy(ctypes.create_string_buffer(8), block, 8)


SYNCHRONIZING = {
    "device": lambda stream, event: driver.synchronize(),
    "stream": lambda stream, event: stream.synchronize(),
    "another stream": lambda stream, event: driver.Stream().synchronize(),
    "event": lambda stream, event: event.synchronize(),
    "copy": lambda stream, event: driver.download(driver.malloc(8), 8),
    "pageable copy": lambda stream, event: copy_pageable(driver.Stream()),
}


@pytest.mark.parametrize("call", SYNCHRONIZING)
def test_failure_is_reported_once_by_the_next_synchronizing_call(call):
    stream, event = driver.Stream(), driver.Event()
    event.record(stream)
    fail_and_finish(stream)
    assert event.query()
    driver.free(driver.malloc(8))
    driver.free_host(driver.malloc_host(8))
    message = failure_of(lambda: SYNCHRONIZING[call](stream, event))
    assert "gather" in message
    assert "index 7 is out of range for size 3" in message
    assert "openreg:0" in message
    assert str(stream.id) in message
    for again in SYNCHRONIZING.values():
        again(stream, event)


def test_failure_is_reported_on_its_device_only():
    with driver.on_device(1):
        stream = driver.Stream()
    fail_and_finish(stream)
    driver.synchronize()
    driver.Stream().synchronize()
    driver.free(driver.malloc(8))
    with driver.on_device(1):
        assert "openreg:1" in failure_of(driver.synchronize)


def test_work_behind_a_failure_is_skipped_and_counted():
    stream, ran = driver.Stream(), []
    block, ended = driver.upload(b"old"), []
    kernel = driver.Kernel(ran.append, "behind", destroy=ended.append)
    with held(stream) as gate:
        stream.launch(lambda _: ran.append("before"))
        stream.launch(failing())
        stream.launch(kernel, b"arguments")
        stream.fill(block, 0, 3)
        stream.launch(kernel, b"arguments")
        gate.release()
        message = failure_of(stream.synchronize)
    assert ran == ["before"]
    assert len(ended) == 2
    assert re.search(r"\b3\b", message.replace("size 3", ""))
    assert driver.download(block, 3) == b"old"


def test_work_queued_between_failure_and_report_is_skipped_too():
    stream, ran = driver.Stream(), []
    fail_and_finish(stream)
    stream.launch(lambda _: ran.append("early"))
    message = failure_of(stream.synchronize)
    assert re.search(r"\b1\b", message)
    stream.launch(lambda _: ran.append("after"))
    stream.synchronize()
    assert ran == ["after"]


def test_report_by_another_call_restarts_the_stream():
    """What waits behind the failure at the report does not run late."""
    stream, ran = driver.Stream(), []
    other = driver.Stream()
    fail_and_finish(stream)
    stream.launch(lambda _: ran.append("behind"))
    failure_of(other.synchronize)
    stream.launch(lambda _: ran.append("after"))
    stream.synchronize()
    assert ran == ["after"]


def test_count_leaves_out_what_takes_place_all_the_same():
    """Also when the stream has not come past it at the report."""
    stream, blocked = driver.Stream(), driver.Stream()
    block, event = driver.malloc(8), driver.Event()
    with held(blocked) as gate:
        event.record(blocked)
        fail_and_finish(stream)
        stream.wait(event)
        stream.launch(lambda _: None)
        event.record(stream)
        stream.launch(lambda _: None)
        stream.free(block)
        message = failure_of(driver.Stream().synchronize)
        gate.release()
    assert re.search(r"\b2\b", message), message


def test_record_behind_a_reported_failure_still_holds_work_back():
    stream, blocked, ran = driver.Stream(), driver.Stream(), []
    dependent, event = driver.Stream(), driver.Event()
    with held(blocked) as gate:
        event.record(blocked)
        fail_and_finish(stream)
        stream.wait(event)
        stream.launch(lambda _: ran.append("skipped"))
        event.record(stream)
        dependent.wait(event)
        dependent.launch(lambda _: ran.append("would use what was skipped"))
        failure_of(driver.Stream().synchronize)
        dependent.launch(lambda _: ran.append("after"))
        gate.release()
        driver.synchronize()
    assert ran == ["after"]


def test_skipped_frees_and_records_still_take_place():
    before, stream = driver.free_memory(), driver.Stream()
    block, event = driver.malloc(1 << 20), driver.Event()
    with held(stream) as gate:
        stream.launch(failing())
        stream.free(block)
        event.record(stream)
        gate.release()
        failure_of(event.synchronize)
    assert event.query()
    assert driver.free_memory() == before


def test_independent_streams_do_not_notice_a_failure():
    stream, other, ran = driver.Stream(), driver.Stream(), []
    event = driver.Event()
    event.record(stream)
    fail_and_finish(stream)
    other.wait(event)
    other.launch(lambda _: ran.append("other"))
    with driver.on_device(1):
        elsewhere = driver.Stream()
        elsewhere.launch(lambda _: ran.append("elsewhere"))
        elsewhere.synchronize()
    finish(other)
    assert sorted(ran) == ["elsewhere", "other"]
    failure_of(driver.synchronize)


@pytest.mark.parametrize("device", [0, 1])
def test_stream_that_waits_for_failed_work_skips_as_well(device):
    stream, ran = driver.Stream(), []
    with driver.on_device(device):
        dependent = driver.Stream()
    with held(stream) as gate:
        stream.launch(failing())
        event = driver.Event()
        event.record(stream)
        dependent.launch(lambda _: ran.append("before"))
        dependent.wait(event)
        dependent.launch(lambda _: ran.append("behind"))
        gate.release()
        failure_of(stream.synchronize)
    dependent.launch(lambda _: ran.append("after"))
    dependent.synchronize()
    assert ran == ["before", "after"]


def test_every_failure_is_told():
    first, second = driver.Stream(), driver.Stream()
    fail_and_finish(first, failing("first_kernel"))
    fail_and_finish(second, failing("second_kernel"))
    message = failure_of(driver.synchronize)
    assert "first_kernel" in message
    assert "second_kernel" in message
    driver.synchronize()


def test_first_of_two_messages_and_any_length_survive():
    stream = driver.Stream()

    def fails_twice(kernel):
        kernel.fail("the cause " + "x" * 5000)
        kernel.fail("the consequence")

    stream.launch(driver.Kernel(fails_twice, "fails_twice"))
    message = failure_of(stream.synchronize)
    assert "fails_twice" in message
    assert "the cause xxx" in message


@pytest.mark.parametrize(
    "call", ["device", "stream", "event", "copy", "free", "reset"]
)
def test_waiting_inside_a_kernel_is_refused(call):
    calls = SYNCHRONIZING | {
        "free": lambda *_: driver.free(block),
        "reset": lambda *_: driver.lib.orDeviceReset(),
    }
    block = driver.malloc(8)
    stream, event, seen = driver.Stream(), driver.Event(), []

    def waits(_context):
        try:
            calls[call](stream, event)
        except driver.DriverError as error:
            seen.append(error.name)

    stream.launch(waits)
    stream.synchronize()
    assert seen == ["orErrorNotPermitted"]


def test_reset_forgets_the_failure_and_keeps_memory():
    stream, block = driver.Stream(), driver.upload(b"kept")
    gate = Gate(stream)
    stream.launch(failing())
    gate.release_later()
    driver.lib.orDeviceReset()
    assert gate.is_released
    driver.synchronize()
    assert driver.download(block, 4) == b"kept"
    ran = []
    stream.launch(lambda _: ran.append(True))
    stream.synchronize()
    assert ran
