"""Hold a stream busy, so that tests of order need no sleeps."""

import contextlib
import threading

import driver

# A bound for failures: a test that works never waits this long.
BOUND = 30
# How long a call that must block is given to come back too early.
EARLY = 0.1


class Gate:
    """A kernel that occupies its stream, and an engine, until released."""

    def __init__(self, stream):
        self._entered = threading.Event()
        self._released = threading.Event()
        stream.launch(driver.Kernel(self._run, "gate"))

    def _run(self, _context):
        self._entered.set()
        if not self._released.wait(BOUND):
            raise TimeoutError("the test never released the gate")

    @property
    def is_entered(self) -> bool:
        return self._entered.is_set()

    @property
    def is_released(self) -> bool:
        return self._released.is_set()

    def wait_entered(self) -> None:
        assert self._entered.wait(BOUND), "the gate's kernel never started"

    def release(self) -> None:
        self._released.set()

    def release_later(self) -> None:
        """Release during the blocking call that comes next.

        A call that does not block returns before, and the test then finds
        the gate unreleased.
        """
        threading.Timer(EARLY, self.release).start()


@contextlib.contextmanager
def held(stream):
    """A gate at the end of the stream's queue; released at the latest here."""
    gate = Gate(stream)
    try:
        yield gate
    finally:
        gate.release()


def let_ready_work_run(device: int = 0) -> None:
    """Return after all work that could run on the device has had its turn.

    A kernel of the least priority, queued last, is the last to start. Needs a
    free engine, or it waits for one.
    """
    with driver.on_device(device):
        stream = driver.Stream(driver.priority_range()[0])
        for _ in range(3):
            stream.launch(lambda _: None)
            stream.synchronize()
        stream.destroy()


def reset_devices() -> None:
    """Leave no pending error to the next test."""
    driver.set_device(0)
    for device in range(driver.device_count()):
        with driver.on_device(device):
            driver.lib.orDeviceReset()
