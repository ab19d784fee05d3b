"""Devices: how many, what they are, which is current, and when they start."""

import threading

import driver
import driver_child
import pytest


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 2),
        ({"OPENREG_DEVICE_COUNT": "0"}, 0),
        ({"OPENREG_DEVICE_COUNT": "1"}, 1),
        ({"OPENREG_DEVICE_COUNT": "16"}, 16),
    ],
)
def test_count_follows_the_environment(environment, count):
    code = """
    count = driver.device_count()
    for device in range(count):
        driver.set_device(device)
        assert driver.get_device() == device
        driver.download(driver.upload(b"data"), 4)
    print(count)
    """
    assert driver_child.output(code, **environment) == str(count)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("OPENREG_DEVICE_COUNT", ["17", "-1", "two", "1.5", "2x"]),
        ("OPENREG_MEMORY_MB", ["-5", "much", "1e3"]),
        ("OPENREG_COMPUTE_ENGINES", ["0", "17", "-1", "some"]),
    ],
)
def test_unusable_setting_is_named_with_its_value(name, values):
    for value in values:
        error = driver_child.error(
            "driver.device_count(); driver.properties(0)", **{name: value}
        )
        assert error.startswith("orErrorInvalidConfiguration: ")
        assert name in error
        assert value in error


def test_without_devices_work_is_refused_but_counting_is_not():
    code = """
    assert driver.device_count() == 0
    attempts = [
        lambda: driver.set_device(0),
        lambda: driver.properties(0),
        lambda: driver.started(0),
        lambda: driver.malloc(8),
        lambda: driver.Stream(),
        lambda: driver.Event(),
        lambda: driver.synchronize(),
    ]
    for attempt in attempts:
        try:
            attempt()
        except driver.DriverError as error:
            print(error.name)
    """
    names = driver_child.output(code, OPENREG_DEVICE_COUNT="0").split()
    assert names == ["orErrorInvalidDevice"] * 7


@pytest.mark.parametrize("device", [2, -1, 1000])
def test_device_out_of_range_is_refused_with_index_and_count(device):
    for call in (driver.set_device, driver.properties, driver.started):
        with pytest.raises(driver.DriverError) as caught:
            call(device)
        assert caught.value.name == "orErrorInvalidDevice"
        assert str(device) in caught.value.message
        assert "2" in caught.value.message
    assert driver.get_device() == 0


def test_current_device_belongs_to_the_thread():
    seen = []

    def other_thread():
        seen.append(driver.get_device())
        driver.set_device(0)

    with driver.on_device(1):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert seen == [0]
        assert driver.get_device() == 1


def test_properties_follow_the_environment():
    code = """
    for device in range(2):
        it = driver.properties(device)
        assert it.name
        assert it.copy_engines >= 1
        print(it.total_memory, it.compute_engines)
    """
    changed = driver_child.output(
        code, OPENREG_MEMORY_MB="48", OPENREG_COMPUTE_ENGINES="5"
    )
    assert changed.split() == [str(48 << 20), "5"] * 2
    assert driver_child.output(code).split()[1::2] == ["2", "2"]


def test_probing_starts_nothing_and_needs_no_threads():
    code = """
    driver.device_count()
    for device in (1, 0):
        driver.set_device(device)
        driver.get_device()
        driver.properties(device)
        driver.priority_range()
        assert not driver.started(device)
    print(len(os.listdir("/proc/self/task")))
    """
    assert driver_child.output(code) == "1"


@pytest.mark.parametrize(
    "start",
    [
        "driver.lib.orInit()",
        "driver.malloc(8)",
        "driver.Stream()",
        "driver.Event()",
        "driver.Stream.default()",
    ],
)
def test_first_use_starts_the_current_device_alone(start):
    code = f"""
    driver.set_device(1)
    {start}
    print(driver.started(0), driver.started(1))
    """
    assert driver_child.output(code) == "False True"


FORK = """
def in_fork(function):
    child = os.fork()
    if child == 0:
        function()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_fork_after_probing_may_use_the_device():
    code = FORK + (
        "def work():\n"
        "    driver.set_device(1)\n"
        "    stream = driver.Stream()\n"
        "    block = driver.malloc(4)\n"
        "    stream.launch(lambda kernel: kernel.write(block, b'fork'))\n"
        "    stream.synchronize()\n"
        "    assert driver.download(block, 4) == b'fork'\n"
        "driver.device_count()\n"
        "driver.properties(1)\n"
        "driver.set_device(1)\n"
        "in_fork(work)\n"
        "assert not driver.started(1)\n"
        "work()\n"
    )
    driver_child.output(code)


def test_fork_after_start_is_refused_with_a_sentence():
    code = FORK + (
        "block = driver.malloc(8)\n"
        "stream, event = driver.Stream(), driver.Event()\n"
        "stream.launch(lambda _: None)\n"
        "data = ctypes.create_string_buffer(8)\n"
        "attempts = [\n"
        "    lambda: driver.lib.orInit(),\n"
        "    lambda: driver.malloc(8),\n"
        "    lambda: driver.free(block),\n"
        "    lambda: driver.copy(block, data, 8),\n"
        "    lambda: driver.Stream(),\n"
        "    lambda: driver.Event(),\n"
        "    lambda: stream.launch(lambda _: None),\n"
        "    lambda: event.record(stream),\n"
        "    lambda: stream.synchronize(),\n"
        "    lambda: driver.synchronize(),\n"
        "]\n"
        "def work():\n"
        "    for attempt in attempts:\n"
        "        try:\n"
        "            attempt()\n"
        "            print('no error')\n"
        "        except driver.DriverError as error:\n"
        "            print(error, flush=True)\n"
        "in_fork(work)\n"
        "assert driver.download(driver.upload(b'parent'), 6) == b'parent'\n"
    )
    lines = driver_child.output(code).splitlines()
    assert len(lines) == 10
    for line in lines:
        assert line.startswith("orErrorForked: ")
        assert "fork" in line.removeprefix("orErrorForked: ")
