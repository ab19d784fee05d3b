"""Times between events, by the device's clock."""

import time

import driver
import pytest
from driver_gate import held, reset_devices


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


def test_elapsed_time_covers_the_work_between_the_records():
    """The clock starts when the device gets there, not at the call."""
    stream, pause = driver.Stream(), []
    start, middle, end = (driver.Event() for _ in range(3))

    def work(_context):
        begin = time.perf_counter()
        time.sleep(0.02)
        pause.append((time.perf_counter() - begin) * 1e3)

    with held(stream) as gate:
        start.record(stream)
        stream.launch(work)
        middle.record(stream)
        stream.launch(work)
        end.record(stream)
        gate.wait_entered()
        begin = time.perf_counter()
        gate.release()
        end.synchronize()
        limit = (time.perf_counter() - begin) * 1e3
    rounding = 0.01
    assert pause[0] <= start.elapsed(middle) + rounding
    assert sum(pause) <= start.elapsed(end) + rounding
    assert start.elapsed(end) <= limit + rounding
    assert end.elapsed(start) == -start.elapsed(end)
    assert start.elapsed(start) == 0


def test_elapsed_time_is_that_of_the_last_record():
    """Also when an earlier one happens later, on another stream."""
    first, idle = driver.Stream(), driver.Stream()
    start, event = recorded(idle), driver.Event()
    with held(first) as gate:
        event.record(first)
        event.record(idle)
        event.synchronize()
        elapsed = start.elapsed(event)
        gate.release()
        first.synchronize()
    assert start.elapsed(event) == elapsed


def test_elapsed_time_needs_two_time_stamps():
    stream, never = driver.Stream(), driver.Event()
    untimed = driver.Event(driver.DISABLE_TIMING)
    untimed.record(stream)
    timed = recorded(stream)
    stream.synchronize()
    assert untimed.query()
    for other in (never, untimed):
        refused("orErrorInvalidValue", timed.elapsed, other)
        refused("orErrorInvalidValue", other.elapsed, timed)
    with held(stream) as gate:
        pending = recorded(stream)
        refused("orErrorNotReady", timed.elapsed, pending)
        refused("orErrorNotReady", pending.elapsed, timed)
        gate.release()
        pending.synchronize()
    assert timed.elapsed(pending) > 0
