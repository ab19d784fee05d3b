"""Speed as a ratio to the CPU device, both sides measured in the same run.

    python benchmarks/run.py [--rounds N]

On a machine with few cores a neighbor's work shows up as factors, so the two
sides take turns, a round in which other processes ran is repeated, and what is
printed is the median.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import custom_operators
import operators
import torch

BUSY = 0.05  # cores that other processes may use while a round counts
TRIES = 5
MIB = 1 << 20


def others() -> float:
    """Seconds of processor time that other processes have used so far."""
    with open("/proc/stat") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:]]
    used = sum(ticks[:3]) + sum(ticks[5:8])
    return used / os.sysconf("SC_CLK_TCK") - time.process_time()


def timed(
    run: Callable[[], object], repeats: int, finished: bool = True
) -> float:
    """Seconds for one call; the device's work included, or the host's alone."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    if finished:
        torch.openreg.synchronize()  # nothing to wait for after CPU calls
    seconds = (time.perf_counter() - start) / repeats
    torch.openreg.synchronize()
    return seconds


def ratio(
    device: Callable[[], object],
    cpu: Callable[[], object],
    rounds: int,
    repeats: int,
    finished: bool = True,
) -> tuple[float, float, float]:
    """Medians of the device's seconds, the CPU's, and of their ratio."""
    timed(device, repeats), timed(cpu, repeats)  # warm caches and engines
    pairs = []
    for _ in range(rounds):
        for attempt in range(TRIES):
            before, start = others(), time.perf_counter()
            pair = timed(device, repeats, finished), timed(cpu, repeats)
            busy = (others() - before) / (time.perf_counter() - start)
            if busy < BUSY or attempt == TRIES - 1:
                break
        pairs.append(pair)
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(a / b for a, b in pairs),
    )


def launches(rounds: int) -> None:
    """Print what a launch costs a host thread; see launch.cpp."""
    library = Path(torch.openreg._C.__file__).with_name("libopenreg.so")
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "launch"
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        flags = ["-std=c++20", "-O2", "-pthread", f"-I{root}"]
        source = Path(__file__).with_name("launch.cpp")
        links = [library, f"-Wl,-rpath,{library.parent}", "-o", program]
        subprocess.run([*compiler, *flags, source, *links], check=True)
        for producers, shared in ((1, 0), (2, 0), (4, 0), (2, 1), (4, 1)):
            command = [program, str(producers), str(shared)]
            costs = [
                float(subprocess.check_output(command)) for _ in range(rounds)
            ]
            where = "one stream" if shared else "own streams"
            name = f"launch, {producers} threads, {where}"
            print(f"{name:36}{statistics.median(costs):9.1f} ns, of 80 ns")


def overlap(rounds: int) -> None:
    """Print how much faster a copy and a kernel are on two streams."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the kernel takes one core, the copy the other
    pinned = torch.empty(16 * MIB).pin_memory()
    device = torch.empty(16 * MIB, device="openreg")
    numbers = torch.empty(4 * MIB, device="openreg")
    sides = torch.Stream("openreg"), torch.Stream("openreg")

    def both(first: torch.Stream, second: torch.Stream) -> None:
        with first:
            for _ in range(4):
                device.copy_(pinned, non_blocking=True)
        with second:
            numbers.uniform_()

    one, two = (sides[0], sides[0]), sides
    _, _, gain = ratio(lambda: both(*one), lambda: both(*two), rounds, 1)
    print(f"{'copy and kernel on two streams':36}{gain:9.2f} times, of 1.50")
    torch.set_num_threads(threads)


def import_seconds(autoload: str) -> float:
    """What `import torch` takes in a process of its own."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import torch"],
        check=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
    )
    return time.perf_counter() - start


def cases() -> dict[str, tuple[Callable, Callable, int, float]]:
    """Name: device side, CPU side, calls in a round, budget for the ratio."""
    pinned = torch.randn(16 * MIB).pin_memory()
    device = torch.empty(16 * MIB, device="openreg")
    host = torch.empty(16 * MIB).fill_(0)
    back = torch.empty(16 * MIB).pin_memory().fill_(0)
    plain = pinned.clone()
    # Both name a device: to parse that argument takes as long as to allocate.
    there, here = torch.device("openreg:0"), torch.device("cpu")
    return {
        "empty, 4 KiB": (
            lambda: torch.empty(1024, device=there),
            lambda: torch.empty(1024, device=here),
            2000,
            1.0,
        ),
        "copy to the device, 64 MiB pinned": (
            lambda: device.copy_(pinned, non_blocking=True),
            lambda: host.copy_(plain),
            5,
            1.11,
        ),
        "copy to the host, 64 MiB pinned": (
            lambda: back.copy_(device, non_blocking=True),
            lambda: host.copy_(plain),
            5,
            1.11,
        ),
        "fill_, 64 MiB": (
            lambda: device.fill_(1.0),
            lambda: host.fill_(1.0),
            5,
            1.05,
        ),
    }


def show(name: str, a: float, b: float, ratio: float, budget: float) -> None:
    """Print one line of the table."""
    print(
        f"{name:36}{a * 1e6:9.1f} µs{b * 1e6:9.1f} µs{ratio:8.2f}{budget:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    print(f"{'case':36}{'device':>12}{'CPU':>12}{'ratio':>8}{'budget':>8}")
    for name, (device, cpu) in operators.one_element().items():
        found = ratio(device, cpu, rounds, 300, finished=False)
        show(f"{name}, 1 element, host", *found, 1.0)
    for name, (device, cpu, repeats, budget) in (
        operators.cases() | cases()
    ).items():
        show(name, *ratio(device, cpu, rounds, repeats), budget)
    print("By hand, against the library on the device:")
    for name, (device, library, repeats, budget) in (
        operators.by_hand() | custom_operators.cases()
    ).items():
        show(name, *ratio(device, library, rounds, repeats), budget)
    beside = operators.plain(rounds)
    print(f"{'plain CPU work beside the backend':36}{beside:9.2f}, of 1.02")
    overlap(rounds)
    launches(min(rounds, 5))
    turns = [
        import_seconds("1") - import_seconds("0") for _ in range(max(rounds, 5))
    ]
    cost = statistics.median(turns)
    print(f"import torch costs {cost * 1e3:+.0f} ms with the backend, of 60 ms")


if __name__ == "__main__":
    main()
