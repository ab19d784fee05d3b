"""Launches: arguments, host functions, and many threads on one stream."""

import ctypes
import struct
import threading

import driver
import pytest
from driver_gate import held, let_ready_work_run, reset_devices


@pytest.fixture(autouse=True)
def _clean():
    yield
    reset_devices()


def test_host_functions_run_in_stream_order():
    stream, log = driver.Stream(), []
    first = driver.DESTROY(lambda data: log.append(data))
    with held(stream) as gate:
        driver.lib.orLaunchHostFunc(stream.handle, first, 7)
        stream.launch(lambda _: log.append("kernel"))
        driver.lib.orLaunchHostFunc(stream.handle, first, 8)
        let_ready_work_run()
        assert not log
        gate.release()
        stream.synchronize()
    assert log == [7, "kernel", 8]


def test_arguments_are_copied_at_launch_and_ended_once():
    """The queue's copy is built by `move` and ended by `destroy`."""
    alive, seen = set(), []

    def move(dst, src):
        ctypes.memmove(dst, src, 4096)
        assert dst % 16 == 0
        alive.add(dst)

    def run(kernel):
        assert kernel.arguments in alive
        seen.append(ctypes.string_at(kernel.arguments, 4096))

    kernel = driver.Kernel(run, "run", move, alive.remove)
    stream = driver.Stream()
    with held(stream) as gate:
        for n in range(20):
            stream.launch(kernel, bytes([n]) * 4096)
        assert len(alive) == 20
        gate.release()
        stream.synchronize()
    assert seen == [bytes([n]) * 4096 for n in range(20)]
    assert not alive


def test_eight_threads_queue_a_hundred_thousand_kernels_on_one_stream():
    producers, each = 8, 12_500
    stream, log = driver.Stream(), []
    kernel = driver.Kernel(
        lambda it: log.append(ctypes.string_at(it.arguments, 8))
    )
    failures = []

    def produce(producer):
        try:
            for n in range(each):
                stream.launch(kernel, struct.pack("ii", producer, n))
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=produce, args=(n,)) for n in range(producers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize()
    assert not failures
    orders = [[] for _ in range(producers)]
    for entry in log:
        producer, n = struct.unpack("ii", entry)
        orders[producer].append(n)
    assert orders == [list(range(each))] * producers
