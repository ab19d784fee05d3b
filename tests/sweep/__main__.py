"""The sweep from the command line; exits with 1 if the table got worse."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

# Before torch is imported: one thread everywhere, so that sums are added in
# one order and a fork finds no threads; the ledger counts, and says nothing.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ["OPENREG_FALLBACK"] = "off"

from sweep import table
from sweep.table import COVERAGE, Table

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "_build" / "sweep.txt"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sweep", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", help="subjects, such as nn_functional_relu")
    add("--fast", action="store_true", help="float32 and one integer dtype")
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--timeout", type=float, default=120, help="seconds a call may take")
    add("--part", default="0/1", help="I/N: every Nth subject from the Ith on")
    add("--output", type=Path, help="write the table there")
    add("--update", action="store_true", help="write the committed table")
    add("--report", type=Path, default=REPORT, help="where details go")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    from sweep.children import Sweep
    from sweep.databases import subjects

    part, parts = map(int, options.part.split("/"))
    chosen = subjects(options.fast, options.names)[part::parts]
    start, old = time.monotonic(), table.read()
    options.report.parent.mkdir(parents=True, exist_ok=True)
    with options.report.open("w") as file:

        def report(key, *words: str) -> None:
            print(*key, *words, sep="\t", file=file, flush=True)

        sweep = Sweep(options.jobs, options.timeout, report)
        cells = sweep.run(show(chosen, start))
    new = Table(cells, {s.name: s.category for s in chosen})
    whole = not options.fast and not options.names and parts == 1
    better, worse = table.compare(old, new, whole)
    tell(new, better, worse, options.report)
    if options.output:
        table.write(new, options.output)
    if options.update:
        table.write(new if whole else merge(old, new, options.fast), COVERAGE)
    return bool(worse)


def show(chosen: list, start: float):
    """Say where the sweep is, if somebody looks."""
    for i, subject in enumerate(chosen):
        if sys.stderr.isatty() or i % 100 == 0:
            seconds = time.monotonic() - start
            end = "\r" if sys.stderr.isatty() else "\n"
            text = f"{i}/{len(chosen)} {seconds:.0f} s {subject.name}"
            print(f"{text:79.79}", end=end, file=sys.stderr, flush=True)
        yield subject


def merge(old: Table, new: Table, fast: bool) -> Table:
    """Some names are run again: only their lines are replaced."""
    if fast:
        sys.exit("The slice makes fewer calls than the table needs.")
    kept = {k: c for k, c in old.cells.items() if k.name not in new.categories}
    return Table(kept | new.cells, old.categories | new.categories)


def tell(new: Table, better: list, worse: list, report: Path) -> None:
    counts = Counter(cell.verdict for cell in new.cells.values())
    print(*(f"{counts[v]} {v}" for v in table.VERDICTS), sep=", ")
    for mode in (None, "forward", "backward", "in-place", "out"):
        share = table.summary(new, mode).get("all")
        if share:
            print(
                f"{mode or 'all':10}{share.calls:8} calls"
                f"{share.correct:8.2f} % correct"
                f"{share.without_fallback:8.2f} % without fallback"
            )
    for title, lines in (("Better", better), ("Worse", worse)):
        if lines:
            print(f"{title} than {COVERAGE.name} ({len(lines)}):")
            print(*(f"  {line}" for line in lines), sep="\n")
    print(f"Details of what is wrong: {report}")


sys.exit(main())
