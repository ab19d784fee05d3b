"""Streams: order within, independence between, priorities, and waiting."""

import ctypes
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import driver
import driver_child
import pytest
from driver_gate import BOUND, held, let_ready_work_run, reset_devices


@pytest.fixture(autouse=True)
def _clean():
    yield
    reset_devices()


def refused(name, call, *arguments):
    with pytest.raises(driver.DriverError) as caught:
        call(*arguments)
    assert caught.value.name == name


def test_work_runs_in_the_order_it_was_queued():
    stream, log = driver.Stream(), []
    kernel = driver.Kernel(
        lambda it: log.append(ctypes.c_int.from_address(it.arguments).value)
    )
    for n in range(1000):
        stream.launch(kernel, struct.pack("i", n))
    stream.synchronize()
    assert log == list(range(1000))


def test_one_stream_runs_one_kernel_at_a_time():
    stream = driver.Stream()
    with held(stream) as gate, held(stream) as behind:
        gate.wait_entered()
        let_ready_work_run()
        assert not behind.is_entered
        gate.release()
        behind.wait_entered()


@pytest.mark.parametrize("busy", ["created", "default"])
@pytest.mark.parametrize("free", ["created", "default", "other device"])
def test_held_stream_holds_no_other(busy, free):
    if busy == free == "default":
        free = "other default"
    streams = {"created": driver.Stream, "default": driver.Stream.default}
    blocked = streams[busy]()
    with driver.on_device(1 if free.startswith("other") else 0):
        stream = streams.get(free.split()[-1], driver.Stream)()
        with held(blocked) as gate:
            gate.wait_entered()
            ran = []
            stream.launch(lambda kernel: ran.append(kernel.device))
            stream.synchronize()
            assert ran == [stream.device]
            assert not blocked.query()


def test_no_created_stream_shares_the_default_queue():
    """However many streams there are: nothing is taken from a pool."""
    ran = []
    with held(driver.Stream.default()):
        for n in range(40):
            stream = driver.Stream()
            stream.launch(lambda _, n=n: ran.append(n))
            stream.synchronize()
    assert ran == list(range(40))


def test_null_means_the_default_stream():
    default, ran = driver.Stream.default(), []
    null = driver.Stream.default()
    null.handle = None
    with held(null) as gate:
        assert not default.query()
        default.launch(lambda _: ran.append(True))
        let_ready_work_run()
        assert not ran
        gate.release()
        default.synchronize()
        assert ran
    assert null.id == default.id == driver.Stream.default().id


@pytest.mark.parametrize("engines", [1, 2, 4, 16])
def test_priorities_count_and_engines_work_side_by_side(engines):
    code = f"""
    assert driver.properties(0).compute_engines == {engines}
    least, greatest = driver.priority_range()
    gates = [Gate(driver.Stream()) for _ in range({engines})]
    for gate in gates:
        gate.wait_entered()
    low, middle, high = (
        driver.Stream(it) for it in (least, greatest + 1, greatest)
    )
    log = []
    for n in range(3):
        low.launch(lambda _: log.append("low"))
        middle.launch(lambda _: log.append("middle"))
        high.launch(lambda _: log.append("high"))
    gates[-1].release()
    low.synchronize()
    assert log == ["high"] * 3 + ["middle"] * 3 + ["low"] * 3, log
    for gate in gates:
        gate.release()
    driver.synchronize()
    """
    driver_child.output(code, OPENREG_COMPUTE_ENGINES=str(engines))


def test_priority_is_clamped_to_its_range():
    least, greatest = driver.priority_range()
    assert greatest + 1 < least
    for asked, given in [
        (greatest, greatest),
        (greatest - 5, greatest),
        (least, least),
        (least + 5, least),
        (0, 0),
    ]:
        assert driver.Stream(asked).priority == given
    assert driver.Stream().priority == 0
    assert driver.Stream.default().priority == 0


def test_ids_are_never_used_twice():
    seen = {driver.Stream.default().id}
    for device in (1, 0) * 20:
        with driver.on_device(device):
            stream = driver.Stream()
            seen |= {stream.id, driver.Stream.default().id}
            stream.destroy()
    assert len(seen) == 42
    assert 0 not in seen


@pytest.mark.parametrize("device", [0, 1])
def test_stream_keeps_its_device(device):
    with driver.on_device(device):
        stream, default = driver.Stream(), driver.Stream.default()
    ran = []
    with driver.on_device(1 - device):
        assert stream.device == default.device == device
        stream.launch(lambda kernel: ran.append(kernel.device))
        stream.synchronize()
    assert ran == [device]


def test_query_sees_queued_and_running_work():
    stream = driver.Stream()
    assert stream.query()
    with held(stream) as gate:
        assert not stream.query()
        gate.wait_entered()
        assert not stream.query()
        gate.release()
        stream.synchronize()
        assert stream.query()


@pytest.mark.parametrize("what", ["stream", "device"])
def test_waiting_ends_when_the_work_does(what):
    """Also from a thread with another current device."""
    with driver.on_device(1):
        stream = driver.Stream()
    with held(stream) as gate:
        gate.wait_entered()
        gate.release_later()
        if what == "stream":
            stream.synchronize()
        else:
            with driver.on_device(1):
                driver.synchronize()
        assert gate.is_released
        assert stream.query()


def test_waiting_looks_at_its_own_stream_and_device():
    busy, idle = driver.Stream(), driver.Stream()
    with held(busy) as gate:
        idle.synchronize()
        with driver.on_device(1):
            driver.synchronize()
        assert not gate.is_released


def test_several_threads_wait_for_one_stream():
    stream, woken = driver.Stream(), threading.Semaphore(0)

    def wait():
        stream.synchronize()
        woken.release()

    with held(stream) as gate:
        for _ in range(4):
            threading.Thread(target=wait, daemon=True).start()
        gate.release()
        for _ in range(4):
            assert woken.acquire(timeout=BOUND)


def test_destroyed_stream_finishes_its_work():
    stream, done = driver.Stream(), threading.Event()
    with held(stream) as gate:
        stream.launch(lambda _: done.set())
        stream.destroy()
        assert not done.is_set()
        gate.release_later()
        driver.synchronize()
        assert done.is_set()


def test_destroyed_stream_takes_no_more_work():
    gone, event = driver.Stream(), driver.Event()
    gone.destroy()
    refused("orErrorInvalidHandle", gone.destroy)
    refused("orErrorInvalidHandle", gone.launch, lambda _: None)
    refused("orErrorInvalidHandle", event.record, gone)
    event.record(driver.Stream())
    refused("orErrorInvalidHandle", gone.wait, event)


def test_default_stream_cannot_be_destroyed():
    default, ran = driver.Stream.default(), []
    with pytest.raises(driver.DriverError):
        default.destroy()
    default.launch(lambda _: ran.append(True))
    default.synchronize()
    assert ran


def test_a_handle_that_is_no_stream_is_refused():
    """Also one that points at readable memory, or just beside a stream."""
    stream = driver.Stream()
    nothing = ctypes.create_string_buffer(4096)
    for handle in (16, ctypes.addressof(nothing), stream.handle + 64):
        with pytest.raises(
            driver.DriverError, match="is not a stream"
        ) as error:
            driver.Stream(handle=handle).query()
        assert error.value.name == "orErrorInvalidHandle"
    assert stream.query()


def test_streams_are_known_to_threads_that_did_not_make_them():
    streams = [driver.Stream() for _ in range(40)]  # more than are remembered
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert all(pool.map(driver.Stream.query, streams))
