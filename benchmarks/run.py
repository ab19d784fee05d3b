"""Speed as a ratio to the CPU device, both sides measured in the same run.

    python benchmarks/run.py [--rounds N]

On a machine with few cores a neighbor's work shows up as factors, so the two
sides take turns, a round in which other processes ran is repeated, and what is
printed is the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

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


def timed(run: Callable[[], object], repeats: int) -> float:
    """Seconds for one call, the device's work included."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.openreg.synchronize()
    return (time.perf_counter() - start) / repeats


def ratio(
    device: Callable[[], object],
    cpu: Callable[[], object],
    rounds: int,
    repeats: int,
) -> tuple[float, float, float]:
    """Medians of the device's seconds, the CPU's, and of their ratio."""
    timed(device, repeats), timed(cpu, repeats)  # warm caches and engines
    pairs = []
    for _ in range(rounds):
        for attempt in range(TRIES):
            before, start = others(), time.perf_counter()
            pair = timed(device, repeats), timed(cpu, repeats)
            busy = (others() - before) / (time.perf_counter() - start)
            if busy < BUSY or attempt == TRIES - 1:
                break
        pairs.append(pair)
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(a / b for a, b in pairs),
    )


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
    return {
        "empty, 4 KiB": (
            lambda: torch.empty(1024, device="openreg"),
            lambda: torch.empty(1024),
            2000,
            # No cache yet: the chapter on memory brings the budget to 1.0.
            8.0,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    print(f"{'case':36}{'device':>12}{'CPU':>12}{'ratio':>8}{'budget':>8}")
    for name, (device, cpu, repeats, budget) in cases().items():
        a, b, r = ratio(device, cpu, rounds, repeats)
        print(
            f"{name:36}{a * 1e6:9.1f} µs{b * 1e6:9.1f} µs{r:8.2f}{budget:8.2f}"
        )
    turns = [
        import_seconds("1") - import_seconds("0") for _ in range(max(rounds, 5))
    ]
    cost = statistics.median(turns)
    print(f"import torch costs {cost * 1e3:+.0f} ms with the backend, of 60 ms")


if __name__ == "__main__":
    main()
