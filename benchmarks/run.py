"""Speed as a ratio to the CPU device, both sides measured in the same run.

    python benchmarks/run.py [--rounds N] [--apart]

The two sides are in one process, or with --apart each in a process of its own.
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
from functools import partial
from pathlib import Path

import custom_operators
import operators
import torch
from sides import Apart, Here, ratio, timed

MIB = 1 << 20


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
    _, _, gain = ratio(
        lambda: timed(lambda: both(*one), 1),
        lambda: timed(lambda: both(*two), 1),
        rounds,
    )
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


def show(name: str, a: float, b: float, ratio: float, budget: float) -> None:
    """Print one line of the table."""
    print(
        f"{name:36}{a * 1e6:9.1f} µs{b * 1e6:9.1f} µs{ratio:8.2f}{budget:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--apart", action="store_true")
    arguments = parser.parse_args()
    rounds, side = arguments.rounds, Apart if arguments.apart else Here
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    print(f"{'case':36}{'device':>12}{'CPU':>12}{'ratio':>8}{'budget':>8}")
    there, here = side("openreg"), side("cpu")
    for name, case in operators.cases().items():
        found = ratio(
            partial(there.timed, name), partial(here.timed, name), rounds
        )
        show(name, *found, case.budget)
    print("By hand, against the library on the device:")
    for name, (device, library, repeats, budget) in (
        operators.by_hand() | custom_operators.cases()
    ).items():
        found = ratio(
            partial(timed, device, repeats),
            partial(timed, library, repeats),
            rounds,
        )
        show(name, *found, budget)
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
