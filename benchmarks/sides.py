"""The two sides of a case, taking turns: in one process, or each in its own.

In one process they disturb each other. The thread that calls and the device's
engine each get a team of OpenMP threads; that is more threads than there are
cores, and then a team sleeps sooner between two parallel regions. A program
that computes on both is like that, and one that computes on one is not.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import operators
import torch

BUSY = 0.05  # cores that other processes may use while a side is timed
TRIES = 5
ROUND = 0.2  # seconds at least: what others use is counted in hundredths


def others() -> float:
    """Seconds of processor time that other processes have used so far."""
    with open("/proc/stat") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:]]
    used = sum(ticks[:3]) + sum(ticks[5:8])
    return used / os.sysconf("SC_CLK_TCK") - time.process_time()


def timed(
    run: Callable[[], object], repeats: int, finished: bool = True
) -> tuple[float, float]:
    """Seconds for one call, and how many cores others used meanwhile.

    The device's work is included if `finished`, else it is the host's alone.
    """
    seconds, calls = 0.0, 0
    before, start = others(), time.perf_counter()
    while (passed := time.perf_counter() - start) < ROUND:
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        if finished:
            torch.openreg.synchronize()  # nothing to wait for after CPU calls
        seconds += time.perf_counter() - begin
        calls += repeats
        torch.openreg.synchronize()
    return seconds / calls, (others() - before) / passed


def settle() -> None:
    """Wait until this process is idle: OpenMP's threads spin for a while."""
    used = 1.0
    while used > 0.0005:
        before = time.process_time()
        time.sleep(0.005)
        used = time.process_time() - before


def serve(device: str, pipe: Connection) -> None:
    """Time the cases that the other end asks for by name."""
    cases = operators.cases()
    last = run = None
    while True:
        name = pipe.recv()
        make, repeats, _, finished = cases[name]
        if name != last:
            last, run = name, None  # what was made for the last case goes
            # In a thread, since its team of OpenMP threads ends with it.
            with ThreadPoolExecutor(1) as builder:
                run = builder.submit(make, device).result()
        found = timed(run, repeats, finished)
        settle()
        pipe.send(found)


class Here:
    """Times the cases on one device in this process."""

    def __init__(self, device: str) -> None:
        self.device, self.cases = device, operators.cases()
        self.made: dict[str, Callable[[], object]] = {}

    def timed(self, name: str) -> tuple[float, float]:
        make, repeats, _, finished = self.cases[name]
        if name not in self.made:
            self.made = {name: make(self.device)}  # the last case's goes
        return timed(self.made[name], repeats, finished)


class Apart:
    """A process that times the cases on one device, and is idle otherwise."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        context.Process(
            target=serve, args=(device, theirs), daemon=True
        ).start()
        theirs.close()  # or nobody would notice that the process has failed

    def timed(self, name: str) -> tuple[float, float]:
        self.pipe.send(name)
        return self.pipe.recv()


def ratio(
    first: Callable[[], tuple[float, float]],
    second: Callable[[], tuple[float, float]],
    rounds: int,
) -> tuple[float, float, float]:
    """Medians of the first side's seconds, the second's, and of their ratio."""
    first(), second()  # warm caches and engines
    pairs = []
    for _ in range(rounds):
        for _ in range(TRIES):
            (a, busy), (b, busy_too) = first(), second()
            if max(busy, busy_too) < BUSY:
                break
        pairs.append((a, b))
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(a / b for a, b in pairs),
    )
