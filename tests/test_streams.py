"""Streams and events: what is ordered, what is not, and who notices."""

import ctypes
import json
import os
import textwrap
import threading
import time
from pathlib import Path

import needs
import processes
import pytest
import torch

import openreg

accelerator = torch.accelerator
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # no import by torch itself
BEAT = 40_000_000  # nanoseconds of sleep
POOL = 32


def new(device=0, **options):
    return torch.Stream(device=f"openreg:{device}", **options)


def timed():
    return torch.Event("openreg", enable_timing=True)


def run(code, **environment):
    """What a process of its own prints; it must end well."""
    code = f"import torch, openreg\n{textwrap.dedent(code)}"
    done = processes.run(code, os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def error(code, **environment):
    """The last line of the exception that ends a process."""
    code = f"import torch, openreg\n{textwrap.dedent(code)}"
    done = processes.run(code, os.environ | environment)
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    return done.stderr.strip().splitlines()[-1]


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def eventually(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it never happens"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def defaults():
    """Each test begins and ends on the default streams, with device 0."""
    yield
    for index in (1, 0):
        accelerator.set_stream(openreg.default_stream(index))
        accelerator.synchronize(index)


@pytest.fixture
def chip():
    """The driver that this process has loaded, through ctypes."""
    library = Path(openreg._C.__file__).with_name("libopenreg.so")
    return ctypes.CDLL(str(library))


@pytest.fixture
def queue(chip):
    """Returns a function that queues a Python function on a stream."""
    kept = []

    def later(stream, function):
        call = CALLBACK(lambda _: function())
        kept.append(call)
        handle = ctypes.c_void_p(stream.native_handle)
        assert chip.orLaunchHostFunc(handle, call, None) == 0

    yield later
    for device in (0, 1):
        accelerator.synchronize(device)


@pytest.fixture
def hold(queue):
    """Returns a function that stops a stream, and gives the gate to open.

    Each stopped stream keeps one of its device's engines.
    """
    gates = []

    def stop(stream):
        gates.append(threading.Event())
        queue(stream, lambda gate=gates[-1]: gate.wait(60))
        return gates[-1]

    yield stop
    for gate in gates:
        gate.set()


@pytest.fixture
def external(chip):
    """Returns a function that makes a stream past PyTorch."""

    def make(device=0):
        handle = ctypes.c_void_p()
        with accelerator.device_index(device):
            assert chip.orStreamCreate(ctypes.byref(handle)) == 0
        return handle

    return make


# ------------------------------------------------------------ the values


@pytest.mark.parametrize("device", [0, 1])
def test_a_new_stream_belongs_to_its_device(device):
    stream = new(device)
    assert stream.device == torch.device("openreg", device)
    assert stream.device_index == device
    assert stream != openreg.default_stream(device)
    assert accelerator.current_device_index() == 0
    assert stream.query()


def test_without_an_index_a_stream_is_of_the_current_device():
    with accelerator.device_index(1):
        for stream in (
            torch.Stream(device="openreg"),
            torch.Stream(),
            openreg.Stream(),
            accelerator.current_stream(),
            accelerator.current_stream("openreg"),
            openreg.default_stream(),
        ):
            assert stream.device_index == 1


@pytest.mark.parametrize("device", [0, 1])
def test_the_default_stream_has_the_id_0(device):
    default = openreg.default_stream(device)
    assert (default.stream_id, default.device_index) == (0, device)
    assert default == accelerator.current_stream(device)
    assert default == openreg.current_stream(device)
    assert default.native_handle not in (0, None)


def test_default_streams_are_queues_of_their_own(hold):
    gate = hold(openreg.default_stream(0))
    side, other = new(0), openreg.default_stream(1)
    for stream in (side, other):
        with stream:
            openreg._sleep(1)
        stream.synchronize()
    assert not openreg.default_stream(0).query()
    gate.set()


def test_equal_streams_have_equal_hashes():
    stream = new()
    copies = [
        torch.Stream(
            stream_id=stream.stream_id,
            device_index=0,
            device_type=stream.device_type,
        ),
        openreg.ExternalStream(stream.native_handle),
    ]
    with stream:
        copies.append(accelerator.current_stream())
    for copy in copies:
        assert copy == stream
        assert hash(copy) == hash(stream)
    assert len({stream, *copies}) == 1
    assert stream != new()
    assert openreg.default_stream(0) != openreg.default_stream(1)


def test_nothing_is_captured():
    assert not new().is_capturing()
    assert not openreg.default_stream().is_capturing()


def test_making_a_stream_starts_only_its_device():
    code = """
    event = torch.Event("openreg")
    event.synchronize()
    torch.openreg.Event()
    print(torch.openreg.is_initialized())
    torch.Stream(device="openreg:1")
    print(openreg._C.is_started(0), openreg._C.is_started(1))
    """
    assert run(code).split() == ["False", "False", "True"]


def test_the_default_stream_takes_nothing_from_the_pool():
    code = """
    first = torch.Stream(device="openreg")
    for _ in range(40):
        torch.openreg.default_stream()
        torch.openreg.ExternalStream(first.native_handle)
    rest = {torch.Stream(device="openreg") for _ in range(31)}
    print(len(rest - {first}))
    """
    assert run(code) == "31"


# -------------------------------------------------------------- the pool


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("priority", [0, -1, -2])
def test_the_pool_gives_out_its_streams_in_turn(device, priority):
    made = [new(device, priority=priority) for _ in range(3 * POOL)]
    assert len(set(made)) == POOL
    assert made[:POOL] == made[POOL : 2 * POOL] == made[2 * POOL :]


def test_pools_of_devices_and_priorities_share_nothing():
    made = {
        new(device, priority=priority)
        for device in (0, 1)
        for priority in (0, -1, -2)
        for _ in range(POOL)
    }
    assert len(made) == 6 * POOL
    assert len({stream.native_handle for stream in made}) == 6 * POOL


def test_threads_share_the_pool():
    meet = threading.Barrier(8, timeout=60)
    made = []

    def work():
        meet.wait()
        made.extend(new() for _ in range(2 * POOL))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made) == 16 * POOL
    assert len(set(made)) == POOL


@pytest.mark.parametrize(
    ("asked", "given"), [(5, 0), (0, 0), (-1, -1), (-2, -2), (-99, -2)]
)
def test_priorities_are_clamped(asked, given):
    assert openreg.Stream.priority_range() == (0, -2)
    assert openreg.Stream(priority=asked).priority == given
    assert openreg.Stream(1, priority=asked).priority == given
    known = {openreg.Stream(priority=given) for _ in range(POOL)}
    assert new(priority=asked) in known


# ---------------------------------------------------- the current stream


def test_a_context_makes_stream_and_device_current():
    here, there = new(0), new(1)
    with here:
        assert accelerator.current_stream() == here
        with there:
            assert accelerator.current_stream() == there
            assert accelerator.current_device_index() == 1
            assert accelerator.current_stream(0) == here
        assert accelerator.current_device_index() == 0
        assert accelerator.current_stream() == here
        assert accelerator.current_stream(1) == openreg.default_stream(1)
    assert accelerator.current_stream() == openreg.default_stream()


def test_a_context_is_left_by_an_exception():
    with pytest.raises(KeyError), new(1):
        raise KeyError
    assert accelerator.current_device_index() == 0
    assert accelerator.current_stream(1) == openreg.default_stream(1)


def test_contexts_of_one_stream_nest():
    stream = new()
    with stream:
        with stream:
            pass
        assert accelerator.current_stream() == stream
    assert accelerator.current_stream() == openreg.default_stream()


def test_the_module_has_the_context_of_torch_cuda():
    stream = openreg.Stream(1)
    with openreg.stream(stream), openreg.stream(None):
        assert openreg.current_stream() == stream
        assert accelerator.current_device_index() == 1
    with pytest.raises(KeyError), openreg.StreamContext(stream):
        raise KeyError
    assert accelerator.current_device_index() == 0
    assert openreg.current_stream(1) == openreg.default_stream(1)


@pytest.mark.parametrize("module", [accelerator, openreg])
def test_setting_a_stream_sets_its_device(module):
    here, there = new(0), new(1)
    module.set_stream(here)
    module.set_stream(there)
    assert accelerator.current_device_index() == 1
    assert [accelerator.current_stream(i) for i in (0, 1)] == [here, there]
    openreg.set_stream(None)
    assert accelerator.current_stream() == there


def test_each_thread_has_its_own_current_streams():
    here = new()

    def other():
        before = accelerator.current_stream()
        accelerator.set_stream(new())
        return before

    with here:
        assert in_a_thread(other) == openreg.default_stream()
        assert accelerator.current_stream() == here


def test_work_goes_to_the_current_stream(hold):
    """`_sleep` and `record()` without a stream."""
    stream, event = new(), torch.Event("openreg")
    gate = hold(stream)
    with stream:
        event.record()
    assert not event.query()
    assert torch.Event("openreg").query()
    openreg.default_stream().synchronize()
    gate.set()
    event.synchronize()


def test_another_devices_stream_does_not_get_the_work(hold):
    stream = new(1)
    gate = hold(stream)
    accelerator.set_stream(stream)
    openreg.set_device(0)
    openreg._sleep(1)  # on openreg:0's default stream
    accelerator.current_stream().synchronize()
    gate.set()


# ------------------------------------------------- streams of other libraries


def test_native_handles_come_back_as_the_same_stream():
    for stream in (new(0), new(1), *map(openreg.default_stream, (0, 1))):
        again = openreg.ExternalStream(stream.native_handle)
        assert again == stream
        assert again.device == stream.device
        assert again.native_handle == stream.native_handle


@pytest.mark.parametrize("device", [0, 1])
def test_a_stream_of_another_library_is_a_stream(external, device):
    handle = external(device)
    stream = openreg.ExternalStream(handle.value, device)
    assert isinstance(stream, torch.Stream)
    assert stream.device_index == device
    assert stream.native_handle == handle.value
    assert lead(stream_waits, stream, new(0)) >= 0
    assert lead(stream_waits, new(1), stream) >= 0


def test_a_pool_never_gives_out_an_external_stream(external):
    stream = openreg.ExternalStream(external().value)
    assert stream not in {new() for _ in range(2 * POOL)}


def test_an_external_stream_of_another_device_is_refused(external):
    handle = external(1).value
    with pytest.raises(ValueError, match=r"belongs to openreg:1.*0"):
        openreg.ExternalStream(handle, device=0)


def test_a_destroyed_external_stream_ends_its_work_and_takes_no_more(
    chip, external, hold
):
    handle = external()
    stream = openreg.ExternalStream(handle.value)
    gate = hold(stream)
    last = stream.record_event()
    assert chip.orStreamDestroy(handle) == 0
    assert not stream.query()
    for call in (
        stream.record_event,
        lambda: stream.wait_stream(new()),
        lambda: openreg._sleep(1),
    ):
        with stream, pytest.raises(RuntimeError, match="was destroyed"):
            call()
    gate.set()
    stream.synchronize()
    assert stream.query()
    assert last.query()


# ----------------------------------------------------------------- order


def stream_waits(event, later, earlier):
    later.wait_stream(earlier)


def stream_waits_for_event(event, later, earlier):
    later.wait_event(event)


def event_waits(event, later, earlier):
    event.wait(later)


def event_waits_on_current(event, later, earlier):
    with later:
        event.wait()


def new_event(event, later, earlier):
    later.wait_event(earlier.record_event())


def nothing(event, later, earlier):
    pass


WAITS = [
    stream_waits,
    stream_waits_for_event,
    event_waits,
    event_waits_on_current,
    new_event,
]
PAIRS = {
    "two streams": lambda: (new(0), new(0)),
    "default first": lambda: (openreg.default_stream(0), new(0)),
    "default last": lambda: (new(0), openreg.default_stream(0)),
    "across": lambda: (new(0), new(1)),
    "back": lambda: (new(1), openreg.default_stream(0)),
    "priorities": lambda: (new(0), new(0, priority=-2)),
}


def lead(wait, earlier, later):
    """How long after the earlier stream's work the later one's comes, in ms."""
    written, read = timed(), timed()
    with earlier:
        openreg._sleep(BEAT)
        written.record()
    wait(written, later, earlier)
    read.record(later)
    assert not earlier.query(), "the host waited"
    for stream in (earlier, later):
        stream.synchronize()
    return written.elapsed_time(read)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_orders_two_streams(wait, pair):
    assert lead(wait, *pair()) >= 0


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_without_a_wait_two_streams_overlap(pair):
    assert lead(nothing, *pair()) < 0


def test_one_stream_keeps_its_order(queue):
    stream, done = new(), []
    for step in range(50):
        queue(stream, lambda step=step: done.append(step))
    stream.synchronize()
    assert done == list(range(50))


def test_waiting_is_for_what_was_queued_before(hold):
    earlier, later = new(), new()
    later.wait_stream(earlier)
    gate = hold(earlier)
    later.synchronize()  # would hang if it waited for all that ever comes
    gate.set()


def test_waits_chain(queue, hold):
    streams, done = [new(0), new(1), new(0), new(1)], []
    gate = hold(streams[0])
    for number, stream in enumerate(streams):
        if number:
            stream.wait_stream(streams[number - 1])
        queue(stream, lambda number=number: done.append(number))
    gate.set()
    streams[-1].synchronize()
    assert done == [0, 1, 2, 3]


def test_a_dropped_event_still_orders(queue, hold):
    earlier, later, done = new(), new(), []
    gate = hold(earlier)
    queue(earlier, lambda: done.append("earlier"))
    event = earlier.record_event()
    later.wait_event(event)
    queue(later, lambda: done.append("later"))
    del event
    # A new event may get the place of the old one.
    again = [later.record_event() for _ in range(8)]
    gate.set()
    again[-1].synchronize()
    assert done == ["earlier", "later"]


# ---------------------------------------------------- asking and waiting


def test_query_is_false_while_work_is_pending(hold):
    stream = new()
    before = stream.record_event()
    before.synchronize()
    gate = hold(stream)
    after = stream.record_event()
    assert [stream.query(), before.query(), after.query()] == [
        False,
        True,
        False,
    ]
    gate.set()
    after.synchronize()
    eventually(stream.query)
    assert after.query()


@pytest.mark.parametrize("what", ["stream", "event", "device"])
def test_the_host_waits(queue, what):
    """And lets go of the interpreter, which the queued functions need."""
    stream, done = new(1), []
    with stream:
        openreg._sleep(BEAT)
    for step in range(20):
        queue(stream, lambda step=step: done.append(step))
    {
        "stream": stream.synchronize,
        "event": stream.record_event().synchronize,
        "device": lambda: accelerator.synchronize(1),
    }[what]()
    assert done == list(range(20))


@pytest.mark.parametrize("module", [accelerator, openreg])
def test_waiting_for_a_device_is_for_the_one_that_is_named(hold, module):
    stream = new(1)
    gate = hold(stream)
    module.synchronize(0)  # would hang
    with accelerator.device_index(1):
        module.synchronize("openreg:0")
    assert not stream.query()
    gate.set()
    module.synchronize(1)
    assert stream.query()
    assert accelerator.current_device_index() == 0


def test_the_first_wait_of_a_process_is_for_a_device_too():
    code = """
    stream = torch.Stream(device="openreg:0")
    with stream:
        torch.openreg._sleep(200_000_000)
    torch.accelerator.synchronize(0)
    print(stream.query())
    """
    assert run(code) == "True"


# ---------------------------------------------------------------- events


def test_an_event_without_a_record_is_done_and_orders_nothing(hold):
    event, stream = torch.Event("openreg"), new()
    assert event.query()
    event.synchronize()
    stream.wait_event(event)
    event.wait(stream)
    gate = hold(new())  # an engine is busy, the other is not
    stream.synchronize()
    assert stream.query()
    gate.set()


@pytest.mark.parametrize("device", [0, 1])
def test_an_event_gets_its_device_at_its_first_record(device):
    event = torch.Event("openreg")
    assert event.event_id == 0
    event.record(new(device))
    assert event.device == torch.device("openreg", device)
    assert event.event_id != 0
    assert accelerator.current_device_index() == 0


def test_recording_leaves_the_current_device_and_stream_alone():
    with new(0) as here:
        new(1).record_event()
        assert accelerator.current_device_index() == 0
        assert accelerator.current_stream() == here


@pytest.mark.parametrize("device", [0, 1])
def test_an_event_of_another_device_is_refused_and_stays(device, hold):
    event, own, other = torch.Event("openreg"), new(device), new(1 - device)
    gate = hold(own)
    event.record(own)
    message = rf"belongs to openreg:{device} .*stream of openreg:{1 - device}"
    with pytest.raises(RuntimeError, match=message):
        event.record(other)
    assert event.device.index == device
    assert not event.query()
    assert accelerator.current_device_index() == 0
    gate.set()
    event.synchronize()
    event.record(own)


def test_a_wait_means_the_record_before_it(hold):
    earlier, later, event = new(), new(), torch.Event("openreg")
    first = hold(earlier)
    event.record(earlier)
    later.wait_event(event)
    second = hold(earlier)
    event.record(earlier)
    first.set()
    eventually(later.query)  # the second record is still to come
    assert not event.query()
    second.set()
    event.synchronize()


def test_a_wait_does_not_mean_a_record_after_it(hold):
    stream, later, event = new(), new(), torch.Event("openreg")
    event.record(stream)
    later.wait_event(event)
    gate = hold(stream)
    event.record(stream)
    eventually(later.query)
    gate.set()


def test_a_second_record_replaces_the_first(hold):
    one, two, event = new(), new(), torch.Event("openreg")
    gate = hold(one)
    event.record(one)
    event.record(two)
    event.synchronize()  # the first one is still pending
    assert event.query()
    assert not one.query()
    gate.set()


def test_record_event_returns_the_event_that_it_got():
    stream, event = new(), torch.Event("openreg")
    assert stream.record_event(event) is event
    assert isinstance(stream.record_event(), torch.Event)


def test_events_of_the_module():
    event = openreg.Event(blocking=True)
    assert isinstance(event, torch.Event)
    event.record(new(1))
    event.synchronize()
    assert event.device.index == 1
    with pytest.raises(ValueError, match="cannot be shared"):
        openreg.Event(interprocess=True)


def test_events_of_the_module_go_where_those_of_torch_go():
    start, end = (openreg.Event(enable_timing=True) for _ in range(2))
    stream = new()
    stream.record_event(start)
    stream.record_event(end)
    stream.synchronize()
    assert start.elapsed_time(end) >= 0


# ------------------------------------------------------------------ time


def test_time_is_the_devices():
    stream, marks = new(), [timed() for _ in range(3)]
    best = 1e9
    for _ in range(3):  # a loaded machine adds time and never takes any
        with stream:
            marks[0].record()
            openreg._sleep(50_000_000)
            marks[1].record()
            openreg._sleep(10_000_000)
            marks[2].record()
        stream.synchronize()
        first = marks[0].elapsed_time(marks[1])
        second = marks[1].elapsed_time(marks[2])
        assert first >= 50
        assert second >= 10
        assert marks[0].elapsed_time(marks[2]) == pytest.approx(first + second)
        assert marks[1].elapsed_time(marks[0]) == -first
        best = min(best, first)
    assert best < 75


def test_time_runs_across_devices_and_streams():
    start, end, there = timed(), timed(), new(1)
    here = new(0)
    start.record(here)
    there.wait_stream(here)
    with there:
        openreg._sleep(BEAT)
        end.record()
    there.synchronize()
    assert start.elapsed_time(end) >= BEAT / 1e6


def test_only_events_with_timing_have_times():
    plain, with_time, stream = torch.Event("openreg"), timed(), new()
    for event in (plain, with_time):
        event.record(stream)
    stream.synchronize()
    for pair in ((plain, plain), (plain, with_time), (with_time, plain)):
        with pytest.raises(ValueError, match="enable_timing=True"):
            pair[0].elapsed_time(pair[1])


def test_only_recorded_events_have_times(hold):
    recorded, never, stream = timed(), timed(), new()
    recorded.record(stream)
    for pair in ((recorded, never), (never, recorded), (never, never)):
        with pytest.raises(ValueError, match="must be recorded"):
            pair[0].elapsed_time(pair[1])
    gate = hold(stream)
    never.record(stream)
    with pytest.raises(RuntimeError, match="must be completed"):
        recorded.elapsed_time(never)
    gate.set()
    stream.synchronize()
    assert recorded.elapsed_time(never) > 0


# ------------------------------------------------------------- bad input


def by_number(number, device):
    kind = new().device_type
    return torch.Stream(stream_id=number, device_index=device, device_type=kind)


USES = {
    "query": lambda stream: stream.query(),
    "synchronize": lambda stream: stream.synchronize(),
    "record": lambda stream: stream.record_event(),
    "wait": lambda stream: stream.wait_event(new().record_event()),
    "wait for": lambda stream: new().wait_stream(stream),
    "set": lambda stream: accelerator.set_stream(stream),
    "handle": lambda stream: stream.native_handle,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_number_that_is_no_stream_is_refused(use):
    with pytest.raises(RuntimeError, match="is not a stream of this process"):
        use(by_number(12345, 0))
    assert accelerator.current_stream() == openreg.default_stream()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_stream_under_the_wrong_device_is_refused(use):
    with pytest.raises(RuntimeError, match=r"belongs to openreg:0, not .*:1"):
        use(by_number(new(0).stream_id, 1))
    assert accelerator.current_stream(1) == openreg.default_stream(1)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_stream_of_a_device_that_is_not_there_is_refused(use):
    with pytest.raises(RuntimeError, match=r"openreg:7; 2 devices"):
        use(by_number(0, 7))


def test_a_stream_without_an_index_is_understood_or_named():
    try:
        by_number(0, -1).query()
    except RuntimeError as error:
        assert "openreg" in str(error)  # noqa: PT017


def test_new_streams_of_a_device_that_is_not_there():
    with pytest.raises(RuntimeError, match=r"openreg:7; 2 devices"):
        new(7)
    with pytest.raises(RuntimeError, match=r"openreg:7; 2 devices"):
        openreg.Stream(7)
    with pytest.raises(ValueError, match="expected an openreg device"):
        openreg.Stream("cpu")
    with pytest.raises(RuntimeError, match="is not a stream"):
        openreg.ExternalStream(12345)


def test_a_stream_of_the_cpu_cannot_be_set():
    with pytest.raises(RuntimeError, match=r"(?i)cpu.*openreg"):
        accelerator.set_stream(torch.Stream(device="cpu"))


# --------------------------------------------------------------- the end


BUSY = """
import threading
torch.accelerator.set_device_index(1)
streams = [torch.Stream(device=f"openreg:{i % 2}") for i in range(6)]
for stream in streams:
    with stream:
        torch.openreg._sleep(60_000_000_000)
events = [stream.record_event() for stream in streams]
for stream, event in zip(streams, events[::-1]):
    stream.wait_event(event)
late = torch.Stream(device="openreg:0")
late.wait_stream(streams[1])
"""


def test_processes_end_well_while_streams_are_busy():
    for _ in range(10):
        assert run(f"{BUSY}\nprint('end')") == "end"


def test_a_process_ends_while_a_thread_waits():
    code = f"""{BUSY}
threading.Thread(target=late.synchronize, daemon=True).start()
threading.Thread(target=events[0].synchronize, daemon=True).start()
print("end")
"""
    assert run(code) == "end"


def test_an_exception_ends_a_busy_process_as_usual():
    code = f"{BUSY}\nraise KeyError('mine')"
    assert error(code) == "KeyError: 'mine'"


# ----------------------------------------------- the sanitizer: the order

# Accesses are made up here, since there are no operators yet; streams, events
# and waits are real ones, seen through PyTorch's trace.
SCENARIOS = """
import json, sys
import torch, openreg

torch.openreg.sanitizer.enable()
handler = torch.openreg.sanitizer._mode.handler
fresh = iter(range(1000, 2000))


def new(device=0):
    return torch.Stream(device=f"openreg:{device}")


def access(stream, place, *, write):
    read, written = (set(), {place}) if write else ({place}, set())
    return len(handler._handle_kernel_launch(
        stream.native_handle, read, written, set(), "op", {place: ["x"]}
    ))


def pair(between, first=True, then=True, devices=(0, 0)):
    place, (a, b) = next(fresh), map(new, devices)
    seen = access(a, place, write=first)
    assert not seen
    between(a, b)
    return access(b, place, write=then)


nothing = lambda a, b: None
event = torch.Event("openreg")


def recorded_before():
    place, a, b = next(fresh), new(), new()
    early = a.record_event()
    access(a, place, write=True)
    b.wait_event(early)
    return access(b, place, write=True)


def first_version():
    place, a, b = next(fresh), new(), new()
    event.record(a)
    access(a, place, write=True)
    b.wait_event(event)
    event.record(a)
    return access(b, place, write=True)


def chain():
    place, a, b, c = next(fresh), new(), new(1), new()
    access(a, place, write=True)
    b.wait_stream(a)
    c.wait_stream(b)
    return access(c, place, write=True)


def wrong_way():
    place, a, b = next(fresh), new(), new()
    access(a, place, write=True)
    a.wait_stream(b)
    return access(b, place, write=True)


def after_wait():
    place, a, b = next(fresh), new(), new()
    b.wait_stream(a)
    access(a, place, write=True)
    return access(b, place, write=True)


def two_reads_then_write():
    place, a, b, c = next(fresh), new(), new(), new()
    access(a, place, write=False)
    access(b, place, write=False)
    c.wait_stream(a)
    return access(c, place, write=True)


print(json.dumps(dict(
    none=pair(nothing),
    write_read=pair(nothing, True, False),
    read_write=pair(nothing, False, True),
    read_read=pair(nothing, False, False),
    wait_stream=pair(lambda a, b: b.wait_stream(a)),
    across=pair(lambda a, b: b.wait_stream(a), devices=(0, 1)),
    across_none=pair(nothing, devices=(0, 1)),
    wait_event=pair(lambda a, b: b.wait_event(a.record_event())),
    event_wait=pair(lambda a, b: a.record_event().wait(b)),
    unrecorded=pair(lambda a, b: b.wait_event(torch.Event("openreg"))),
    host_stream=pair(lambda a, b: a.synchronize()),
    host_event=pair(lambda a, b: a.record_event().synchronize()),
    host_other=pair(lambda a, b: new().synchronize()),
    host_device=pair(lambda a, b: torch.accelerator.synchronize()),
    host_module=pair(lambda a, b: torch.openreg.synchronize()),
    recorded_before=recorded_before(),
    first_version=first_version(),
    chain=chain(),
    wrong_way=wrong_way(),
    after_wait=after_wait(),
    two_reads_then_write=two_reads_then_write(),
)))
"""


@pytest.fixture(scope="module")
def verdicts():
    return json.loads(run(SCENARIOS).splitlines()[-1])


@pytest.mark.parametrize(
    "scenario",
    [
        "none",
        "write_read",
        "read_write",
        "across_none",
        "unrecorded",
        "host_other",
        "recorded_before",
        "first_version",
        "wrong_way",
        "after_wait",
        "two_reads_then_write",
    ],
)
def test_the_sanitizer_finds_a_missing_wait(verdicts, scenario):
    assert verdicts[scenario] == 1


@pytest.mark.parametrize(
    "scenario",
    [
        "read_read",
        "wait_stream",
        "across",
        "wait_event",
        "event_wait",
        "host_stream",
        "host_event",
        "host_device",
        "chain",
    ],
)
def test_the_sanitizer_knows_every_wait(verdicts, scenario):
    assert verdicts[scenario] == 0


def test_the_sanitizer_knows_the_modules_synchronize(verdicts):
    assert verdicts["host_module"] == 0


def test_the_trace_tells_what_happens_and_to_what():
    code = """
    from openreg import _gpu_trace

    torch._C._activate_gpu_trace()
    default = torch.accelerator.current_stream()
    names = {}
    for registry in (n for n in dir(_gpu_trace) if n.endswith("Callbacks")):
        def call(*arguments, registry=registry):
            known = [names.get(a, "new") for a in arguments]
            print(registry.removesuffix("Callbacks"), *known)
        getattr(_gpu_trace, registry).add_callback(call)
    a = torch.Stream(device="openreg:0")
    b = torch.Stream(device="openreg:1")
    names |= {a.native_handle: "a", b.native_handle: "b"}
    event = a.record_event()
    names[event.event_id] = "event"
    b.wait_event(event)
    event.synchronize()
    b.synchronize()
    torch.accelerator.synchronize(1)
    b.wait_event(torch.Event("openreg"))
    torch.Event("openreg").synchronize()
    del event
    names.clear()
    default.record_event()
    """
    assert run(code).splitlines() == [
        "StreamCreation new",
        "StreamCreation new",
        "EventCreation new",
        "EventRecord new a",
        "EventWait event b",
        "EventSynchronization event",
        "StreamSynchronization b",
        "DeviceSynchronization",
        "EventDeletion event",
        "EventCreation new",
        "EventRecord new new",
        "EventDeletion new",
    ]


@pytest.mark.parametrize(
    ("setting", "on"), [("", False), ("0", False), ("1", True)]
)
def test_the_sanitizer_is_off_unless_asked_for(setting, on):
    code = "print(torch.openreg.sanitizer._mode is not None)"
    assert run(code, OPENREG_SANITIZER=setting) == str(on)


@pytest.mark.parametrize("setting", ["7", "yes", "-1"])
def test_another_setting_is_named(setting):
    message = error("", OPENREG_SANITIZER=setting, **ALONE)
    assert message.startswith("RuntimeError: OPENREG_SANITIZER=")
    assert repr(setting) in message
    assert "0 nor 1" in message


def test_a_wrong_setting_leaves_no_half_a_package():
    code = """
    try:
        import openreg
    except RuntimeError:
        print(hasattr(torch, "openreg"))
    """
    environment = os.environ | ALONE | {"OPENREG_SANITIZER": "7"}
    done = processes.run(f"import torch\n{textwrap.dedent(code)}", environment)
    assert done.stdout.strip() == "False"


def test_the_sanitizer_goes_on_once_and_off():
    code = """
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    sanitizer = torch.openreg.sanitizer
    sanitizer.enable()
    mode = sanitizer._mode
    sanitizer.enable()
    assert sanitizer._mode is mode is _get_current_dispatch_mode()
    sanitizer.disable()
    assert _get_current_dispatch_mode() is sanitizer._mode is None
    sanitizer.disable()
    print(torch.ones(2).sum().item())
    """
    assert run(code) == "2.0"


# ------------------------------------------- the sanitizer: the operators


operators = needs.operators

PROGRAM = """\
import threading
import torch, openreg
side = torch.Stream(device="openreg")
main = torch.accelerator.current_stream()
RaceError = torch.openreg.sanitizer.RaceError
x = torch.zeros(4, device="openreg")
torch.accelerator.synchronize()
def write(to=side):
    with to:
        x.fill_(7)
def read(on=side):
    with on:
        return x.clone()
"""


def watched(code):
    """Run a program under the sanitizer; what it prints, or the RaceError."""
    code = PROGRAM + textwrap.dedent(code)
    environment = os.environ | {"OPENREG_SANITIZER": "1"}
    done = processes.run(code, environment)
    if done.returncode:
        assert "RaceError" in done.stderr, done.stderr
        return done.stderr.partition("RaceError: ")[2]
    return done.stdout.strip()


CURES = {
    "wait_stream": "main.wait_stream(side)",
    "wait_event": "main.wait_event(side.record_event())",
    "synchronize": "side.synchronize()",
    "event": "side.record_event().synchronize()",
    "device": "torch.accelerator.synchronize()",
}


@operators
def test_a_race_is_described():
    message = watched("write()\nread(main)\n")
    assert "two streams use the memory at 0x" in message
    now, before = (
        next(line for line in message.splitlines() if word in line)
        for word in ("now:", "before:")
    )
    assert "aten::clone reads self on the default stream of openreg:0" in now
    assert "<string>:13, in read" in now
    assert "aten::fill_" in before
    assert "writes self on stream 0x" in before
    assert "<string>:10, in write" in before
    assert "wait_stream" in message


@operators
@pytest.mark.parametrize("cure", CURES.values(), ids=CURES)
def test_a_wait_cures_the_race(cure):
    code = f"write()\n{cure}\nprint(read(main).cpu().tolist())"
    assert watched(code) == str([7.0] * 4)


@operators
@pytest.mark.parametrize(
    "race",
    [
        "write(); write(main)",
        "write(main); write()",
        "read(); write(main)",
        "write(); x.add_(1)",
        "write(); x[:2].zero_()",
        "write(); x.view(2, 2).clone()",
        "write(); x.cpu()",
        "write(); x.copy_(torch.ones(4))",
        "write(); torch.cat([torch.ones(2, device='openreg'), x])",
        "y = read(); y.clone()",
        "e = side.record_event(); write(); main.wait_event(e); read(main)",
    ],
)
def test_races_of_operators_are_found(race):
    assert watched(race).startswith("two streams use the memory")


@operators
@pytest.mark.parametrize(
    "program",
    [
        "read(main); read()",
        "write(main); write(main); read(main)",
        "write(); x.shape, x.stride(), x.view(2, 2), x.detach(), x.t()",
        "write(); torch.empty(4, device='openreg').fill_(1)",
        "write(); torch.ones(4).add_(1)",
        "write(); x.record_stream(main)",
    ],
)
def test_what_is_no_race_is_not_reported(program):
    assert watched(f"{program}\nprint('fine')") == "fine"


@operators
def test_a_training_step_on_a_side_stream_is_no_race():
    code = """
    w = torch.ones(4, device="openreg", requires_grad=True)
    side.wait_stream(main)
    with side:
        loss = (w * w).sum()
        loss.backward()
    main.wait_stream(side)
    print(w.grad.cpu().tolist())
    """
    assert watched(code) == str([2.0] * 4)


@operators
def test_a_copy_between_devices_orders_itself():
    code = """
    y = torch.ones(4, device="openreg:1")
    print(y.to("openreg:0").cpu().tolist())
    """
    assert watched(code) == str([1.0] * 4)


@operators
@pytest.mark.parametrize(
    "race",
    [
        "x[1:].fill_(1); write()",  # another address
        "write(main)\n"  # another thread
        "t = threading.Thread(target=write)\nt.start(); t.join()",
    ],
    ids=["view", "thread"],
)
def test_the_limits_are_as_documented(race):
    assert watched(f"{race}\nprint('not seen')") == "not seen"


# -------------------------------------------------------------- autograd


@operators
def test_backward_runs_on_the_forwards_stream_and_is_waited_for():
    code = """
    side = torch.Stream(device="openreg")

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            print(torch.accelerator.current_stream() == side)
            result = torch.zeros_like(grad)
            torch.openreg._sleep(200_000_000)
            return result.fill_(2)

    weight = torch.ones(3, device="openreg", requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        result = Slow.apply(weight)
    result.backward(torch.ones(3, device="openreg"))
    print(side.query())
    print(weight.grad.cpu().tolist())
    """
    assert run(code).splitlines() == ["True", "False", "[2.0, 2.0, 2.0]"]
