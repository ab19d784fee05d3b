"""A process may end at any time: with work queued, running, or endless."""

from concurrent.futures import ThreadPoolExecutor

import driver_child
import pytest

# Kernels here are functions of the C library: a process that ends takes its
# interpreter down first, and code of Python's could not run any more.
QUEUE = """
nothing = ctypes.cast(libc.getpid, driver.RUN)
endless = ctypes.cast(libc.pause, driver.RUN)

def c_kernel(code):
    kernel = driver.Kernel(None, "c_kernel")
    kernel.struct.run = code
    return kernel

nothing, endless = c_kernel(nothing), c_kernel(endless)

def fill_queues(streams, rounds=200):
    for stream in streams:
        with driver.on_device(stream.device):
            block, event = driver.malloc(1 << 20), driver.Event()
        for _ in range(rounds):
            stream.fill(block, 1, 1 << 20)
            stream.launch(nothing, b"arguments")
            event.record(stream)
            streams[0].wait(event)
        stream.free(block)

streams = []
for device in (0, 1):
    with driver.on_device(device):
        streams += [driver.Stream() for _ in range(3)]
"""
EXITS = {
    "work queued": "fill_queues(streams)",
    "one kernel never ends": """
streams[0].launch(endless)
fill_queues(streams)
""",
    "no kernel ever ends": """
for stream in streams * 2:
    stream.launch(endless)
fill_queues(streams, 20)
""",
    "threads queue": """
def produce(stream):
    while True:
        stream.launch(nothing)

for stream in streams:
    threading.Thread(target=produce, args=(stream,), daemon=True).start()
fill_queues(streams, 20)
""",
    "threads wait": """
streams[0].launch(endless)
for wait in (streams[0].synchronize, driver.synchronize):
    threading.Thread(target=wait, daemon=True).start()
fill_queues(streams, 20)
""",
}


@pytest.mark.parametrize("situation", EXITS)
def test_exit_is_clean_and_does_not_hang(situation):
    code = QUEUE + EXITS[situation]
    with ThreadPoolExecutor(5) as pool:
        processes = list(pool.map(driver_child.run, [code] * 10))
    for process in processes:
        assert (process.returncode, process.stderr) == (0, "")
