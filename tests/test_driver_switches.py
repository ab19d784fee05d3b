"""Settings that change how kernels fail and what a failure tells."""

import driver_child
import pytest

STICKY = """
def attempt(call):
    try:
        call()
        print("orSuccess")
    except driver.DriverError as error:
        print(error)

block, stream = driver.upload(b"kept"), driver.Stream()
ran = []
stream.launch(driver.Kernel(lambda kernel: kernel.fail("broken"), "gather"))
attempt(stream.synchronize)
attempt(stream.synchronize)
attempt(driver.synchronize)
attempt(lambda: driver.download(block, 4))
attempt(lambda: stream.launch(lambda _: ran.append(True)))
with driver.on_device(1):
    driver.download(driver.upload(b"other device"), 5)
driver.lib.orDeviceReset()
assert not ran
assert driver.download(block, 4) == b"kept"
stream.launch(lambda _: ran.append(True))
stream.synchronize()
assert ran
"""


def test_sticky_errors_lose_the_device_until_reset():
    first, *later = driver_child.output(
        STICKY, OPENREG_STICKY_ERRORS="1"
    ).splitlines()
    assert "gather" in first
    assert "broken" in first
    assert "orDeviceReset" in first
    assert len(later) == 4
    for line in later:
        assert line.startswith("orErrorDeviceLost: ")
        assert "orDeviceReset" in line


def test_blocking_launches_wait_and_report():
    code = """
    stream, released = driver.Stream(), threading.Event()
    threading.Timer(0.1, released.set).start()
    stream.launch(lambda _: released.wait(30))
    assert released.is_set()
    try:
        stream.launch(
            driver.Kernel(lambda kernel: kernel.fail("broken"), "gather")
        )
    except driver.DriverError as error:
        print(error)
    stream.synchronize()
    """
    error = driver_child.output(code, OPENREG_LAUNCH_BLOCKING="1")
    assert error.startswith("orErrorKernelFailed: ")
    assert "gather" in error


@pytest.mark.parametrize("setting", ["0", "1"])
def test_launch_origin_is_told_when_asked_for(setting):
    code = """
    calls = []

    @driver.DESCRIBE
    def describe(text, size):
        calls.append(threading.get_ident())
        note = b"train.py, line 12"[: size - 1] + b"\\0"
        ctypes.memmove(text, note, len(note))

    driver.lib.orSetLaunchOrigin(describe)
    stream = driver.Stream()
    fail = driver.Kernel(lambda kernel: kernel.fail("broken"), "gather")
    stream.launch(fail)
    try:
        stream.synchronize()
    except driver.DriverError as error:
        print(error)
    print(calls == [threading.get_ident()])
    """
    message, called = driver_child.output(
        code, OPENREG_TRACE_LAUNCHES=setting
    ).splitlines()
    assert ("train.py, line 12" in message) is (setting == "1")
    assert called == str(setting == "1")
