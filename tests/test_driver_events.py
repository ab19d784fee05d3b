"""Events: order across streams, versions, and time on the device's clock."""

import threading

import driver
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


def recorded(stream) -> driver.Event:
    event = driver.Event()
    event.record(stream)
    return event


@pytest.mark.parametrize("waiter", ["created", "default", "other device"])
def test_wait_orders_work_across_streams(waiter):
    first, log = driver.Stream(), []
    device = int(waiter == "other device")
    with driver.on_device(device):
        greatest = driver.priority_range()[1]
        second = (
            driver.Stream.default()
            if waiter == "default"
            else driver.Stream(greatest)
        )
    with held(first) as gate:
        first.launch(lambda _: log.append("first"))
        event = recorded(first)
        second.wait(event)
        second.launch(lambda _: log.append("second"))
        let_ready_work_run(device)
        assert not log
        assert not second.query()
        gate.release()
        second.synchronize()
    assert log == ["first", "second"]


def test_wait_holds_copies_as_well():
    first, second = driver.Stream(), driver.Stream()
    block, target = driver.upload(b"old"), driver.malloc(3)
    with held(first) as gate:
        first.launch(lambda kernel: kernel.write(block, b"new"))
        second.wait(recorded(first))
        second.copy(target, block, 3)
        let_ready_work_run()
        gate.release()
        second.synchronize()
    assert driver.download(target, 3) == b"new"


def test_wait_holds_only_what_is_queued_after_it():
    first, second = driver.Stream(), driver.Stream()
    with held(first):
        ran = threading.Event()
        second.launch(lambda _: ran.set())
        second.wait(recorded(first))
        second.launch(lambda _: None)
        assert ran.wait(BOUND)
        assert not second.query()


def test_wait_for_an_event_never_recorded_is_nothing():
    stream, event = driver.Stream(), driver.Event()
    stream.wait(event)
    ran = []
    stream.launch(lambda _: ran.append(True))
    stream.synchronize()
    assert ran
    assert event.query()
    event.synchronize()


def test_later_record_does_not_release_an_earlier_wait():
    first, second, idle = (driver.Stream() for _ in range(3))
    log = []
    with held(first) as gate:
        first.launch(lambda _: log.append("first"))
        event = recorded(first)
        second.wait(event)
        event.record(idle)
        event.synchronize()
        second.launch(lambda _: log.append("second"))
        let_ready_work_run()
        assert not log
        gate.release()
        second.synchronize()
    assert log == ["first", "second"]


def test_later_record_does_not_release_a_wait_not_reached_yet():
    first, idle, log = driver.Stream(), driver.Stream(), []
    with driver.on_device(1):
        second = driver.Stream()
    with held(first) as gate, held(second) as before_the_wait:
        first.launch(lambda _: log.append("first"))
        event = recorded(first)
        second.wait(event)
        second.launch(lambda _: log.append("second"))
        event.record(idle)
        event.synchronize()
        before_the_wait.release()
        let_ready_work_run(1)
        assert not log
        gate.release()
        second.synchronize()
    assert log == ["first", "second"]


def test_later_record_does_not_prolong_an_earlier_wait():
    """Neither for a wait already queued nor for one that is blocked."""
    first, second = driver.Stream(), driver.Stream()
    ran, event = threading.Event(), driver.Event()
    event.record(first)
    second.wait(event)
    second.launch(lambda _: None)
    with held(first) as gate, held(first) as later:
        event.record(first)
        second.wait(event)
        second.launch(lambda _: ran.set())
        event.record(first)
        let_ready_work_run()
        assert not ran.is_set()
        gate.release()
        later.wait_entered()
        assert not ran.is_set()
    assert ran.wait(BOUND)


def test_wait_refers_to_the_record_before_it():
    first, second, ran = driver.Stream(), driver.Stream(), threading.Event()
    event = driver.Event()
    with held(first) as gate:
        event.record(first)
        second.wait(event)
        second.launch(lambda _: ran.set())
        with held(first) as later:
            event.record(first)
            gate.release()
            later.wait_entered()
            assert ran.wait(BOUND)
            assert not event.query()


def test_query_and_synchronize_refer_to_the_last_record():
    first, idle, event = driver.Stream(), driver.Stream(), driver.Event()
    with held(first) as gate:
        event.record(first)
        assert not event.query()
        event.record(idle)
        event.synchronize()
        assert event.query()
        assert not gate.is_released
        event.record(first)
        assert not event.query()
        gate.release_later()
        event.synchronize()
        assert gate.is_released
        assert event.query()


@pytest.mark.parametrize("flags", [0, driver.BLOCKING_SYNC])
def test_synchronize_waits_for_the_record(flags):
    """Also from a thread with another current device."""
    stream, event = driver.Stream(), driver.Event(flags)
    with held(stream) as gate:
        event.record(stream)
        with held(stream) as behind, driver.on_device(1):
            gate.release_later()
            event.synchronize()
            assert gate.is_released
            assert not behind.is_released


def test_destroyed_event_still_orders_what_was_queued():
    first, second, log = driver.Stream(), driver.Stream(), []
    with held(first) as gate:
        first.launch(lambda _: log.append("first"))
        event = recorded(first)
        second.wait(event)
        event.destroy()
        second.launch(lambda _: log.append("second"))
        let_ready_work_run()
        assert not log
        gate.release()
        second.synchronize()
    assert log == ["first", "second"]


def test_destroyed_event_is_refused():
    stream, gone, other = driver.Stream(), driver.Event(), driver.Event()
    other.record(stream)
    other.synchronize()
    gone.destroy()
    refused("orErrorInvalidHandle", gone.record, stream)
    refused("orErrorInvalidHandle", stream.wait, gone)
    refused("orErrorInvalidHandle", gone.query)
    refused("orErrorInvalidHandle", gone.synchronize)
    refused("orErrorInvalidHandle", gone.destroy)
    refused("orErrorInvalidHandle", gone.elapsed, other)
    refused("orErrorInvalidHandle", other.elapsed, gone)


def test_unknown_flags_are_refused():
    refused("orErrorInvalidValue", driver.Event, 1 << 10)


@pytest.mark.parametrize("device", [0, 1])
def test_event_is_recorded_on_its_own_device(device):
    with driver.on_device(device):
        event, own = driver.Event(), driver.Stream()
    with driver.on_device(1 - device):
        other = driver.Stream()
        assert event.device == device
        event.record(own)
        event.synchronize()
        refused("orErrorInvalidHandle", event.record, other)


def test_long_chain_of_waits_across_devices_stays_in_order():
    streams = []
    for device in (0, 1, 0, 1):
        with driver.on_device(device):
            streams.append(driver.Stream())
    log, previous = [], None
    with held(streams[0]) as gate:
        for n in range(200):
            stream = streams[n % 4]
            if previous:
                stream.wait(previous)
            stream.launch(lambda _, n=n: log.append(n))
            with driver.on_device(n % 2):
                previous = recorded(stream)
        gate.release()
        previous.synchronize()
    assert log == list(range(200))
