"""Random work from many threads through PyTorch: data, order, memory, exit.

The driver and the allocator's core have stress programs of their own, which
`make sanitize` runs under the sanitizers; this is the whole, without them.
`OPENREG_STRESS_SECONDS` makes it longer.
"""

import os
import random
import threading
import time

import processes
import torch

SECONDS = float(os.environ.get("OPENREG_STRESS_SECONDS", "6"))
THREADS = 8
STREAMS = 4


class Worker(threading.Thread):
    """Fills and copies tensors on streams of its own, and knows what is due."""

    def __init__(self, seed, until):
        super().__init__()
        self.random, self.until, self.error = random.Random(seed), until, None
        self.rounds = 0

    def run(self):
        try:
            self.streams = [
                torch.Stream(f"openreg:{number % 2}")
                for number in range(STREAMS)
            ]
            self.held = []  # a tensor, its value, the stream that wrote it
            while time.monotonic() < self.until:
                self.rounds += 1
                self.random.choice((self.make, self.move, self.look))()
                if len(self.held) > 12:
                    self.held.pop(self.random.randrange(12))
        except BaseException as error:
            self.error = error
        self.held = []

    def make(self):
        stream = self.random.choice(self.streams)
        size = self.random.choice((1, 77, 4096, 300_000, 1_200_000))
        with stream:
            tensor = torch.empty(size, device=stream.device)
            value = self.random.randrange(1 << 20)
            tensor.fill_(value)
        self.held.append((tensor, value, stream))

    def move(self):
        """Copy on another stream, after a wait; the source may go at once."""
        if not self.held:
            return
        index = self.random.randrange(len(self.held))
        tensor, value, writer = self.held[index]
        stream = self.random.choice(self.streams)
        event = writer.record_event()
        stream.wait_event(event)
        # A copy between devices runs on the source's current stream, and the
        # destination's waits for it.
        with writer, stream:
            copy = tensor.to(stream.device, copy=True)
        if stream.device == tensor.device:
            tensor.record_stream(stream)
            self.held[index] = (copy, value, stream)
        else:
            self.held.append((copy, value, stream))

    def look(self):
        if not self.held:
            return
        tensor, value, writer = self.random.choice(self.held)
        with writer:
            found = tensor.cpu()
        assert bool((found == value).all()), (value, found.unique())


def test_random_work_from_many_threads():
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    before = [torch.accelerator.memory_allocated(i) for i in (0, 1)]
    until = time.monotonic() + SECONDS
    workers = [Worker(seed, until) for seed in range(THREADS)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        torch.accelerator.memory_stats(random.randrange(2))
        torch.openreg.memory_snapshot()
        if random.random() < 0.2:
            torch.accelerator.empty_cache()
        time.sleep(0.02)
    for worker in workers:
        worker.join()
        assert worker.error is None, worker.error
        assert worker.rounds > 10
    for index in (0, 1):
        torch.accelerator.synchronize(index)
        assert torch.accelerator.memory_allocated(index) == before[index]
    del workers, worker
    torch.accelerator.empty_cache()
    stats = torch.accelerator.memory_stats(0)
    assert stats["active_bytes.all.current"] == before[0]


BUSY = """
import torch
streams = [torch.Stream("openreg:" + str(i % 2)) for i in range(8)]
held = []
for i in range(200):
    with streams[i % 8] as stream:
        torch.openreg._sleep(500_000)
        held.append(torch.empty(1000 + i, device=stream.device).fill_(i))
        stream.record_event()
pinned = torch.empty(1000).pin_memory()
held[0].copy_(pinned, non_blocking=True)
if {drop}:
    del held, pinned
"""


def test_fifty_processes_end_well_while_their_streams_are_busy():
    for number in range(50):
        code = BUSY.replace("{drop}", str(number % 2))
        done = processes.run(code, dict(os.environ), timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
