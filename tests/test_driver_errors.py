"""Errors of calls: names, sentences, and the last one of each thread."""

import ctypes
import re
import threading

import driver
import pytest
from driver_gate import held, reset_devices


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


def test_every_error_has_a_name_and_a_sentence():
    names = [driver.lib.orGetErrorName(n).decode() for n in range(15)]
    assert names[0] == "orSuccess"
    assert len(set(names)) == 15
    assert all(
        re.fullmatch("or(Success|Error[A-Z][A-Za-z]+)", n) for n in names
    )
    sentences = [driver.lib.orGetErrorString(n) for n in range(15)]
    assert len(set(sentences)) == 15
    for unknown in (-1, 15, 9999):
        assert driver.lib.orGetErrorName(unknown).decode() not in names
        assert driver.lib.orGetErrorString(unknown) not in sentences


def test_last_error_is_kept_until_it_is_fetched():
    failure_of(lambda: driver.set_device(9), "orErrorInvalidDevice")
    driver.set_device(0)
    message = driver.lib.orGetLastErrorMessage()
    assert b"9" in message
    assert driver.lib.orPeekAtLastError() == 3
    assert driver.lib.orGetLastError() == 3
    assert driver.lib.orGetLastError() == 0
    assert driver.lib.orPeekAtLastError() == 0


def test_last_error_belongs_to_the_thread():
    failure_of(lambda: driver.set_device(9), "orErrorInvalidDevice")
    seen = []
    thread = threading.Thread(
        target=lambda: seen.append(driver.lib.orGetLastError())
    )
    thread.start()
    thread.join()
    assert seen == [0]
    assert driver.lib.orGetLastError() == 3


def test_not_ready_is_an_answer_and_not_an_error():
    driver.lib.orGetLastError()
    stream, event = driver.Stream(), driver.Event()
    with held(stream):
        event.record(stream)
        assert not stream.query()
        assert not event.query()
        assert driver.lib.orPeekAtLastError() == 0


def test_null_results_are_refused():
    null = ctypes.c_void_p()
    lib = driver.lib
    for call in [
        lambda: lib.orGetDeviceCount(None),
        lambda: lib.orGetDevice(None),
        lambda: lib.orGetDeviceProperties(None, 0),
        lambda: lib.orMalloc(None, 8),
        lambda: lib.orMallocHost(None, 8),
        lambda: lib.orMemGetInfo(None, None),
        lambda: lib.orPointerGetAttributes(None, null),
        lambda: lib.orStreamCreate(None),
        lambda: lib.orStreamGetDefault(None),
        lambda: lib.orEventCreate(None),
        lambda: lib.orLaunchKernel(None, None, None, 0),
        lambda: lib.orLaunchHostFunc(None, driver.DESTROY(), None),
        lambda: lib.orMemcpy(None, driver.malloc(8), 8, driver.DEFAULT),
    ]:
        failure_of(call, "orErrorInvalidValue")
