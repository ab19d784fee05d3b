"""The table of verdicts: read, written, compared, summed up. No torch here.

A line says what became of one mode (forward, backward, in-place, `out=` ...)
of one operator for the dtypes it names, each with as many calls. Dtypes of one
verdict share a line, so the file is short and a change is a short diff.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

COVERAGE = Path(__file__).with_name("coverage.tsv")
# From best to worst. `refused`: as the CPU refuses it, or for a reason that
# known.py gives.
VERDICTS = ("native", "refused", "falls back", "wrong", "crash")
COLUMNS = "category name mode dtypes verdict calls right native reason"


class Key(NamedTuple):
    """What a verdict is about."""

    name: str
    mode: str
    dtype: str


class Cell(NamedTuple):
    """What became of a number of calls."""

    verdict: str
    calls: int = 0
    right: int = 0  # as on the CPU: values, forms, errors
    native: int = 0  # right, and nothing ran on the CPU
    reason: str = ""


class Table(NamedTuple):
    """All verdicts, and the category of each name."""

    cells: dict[Key, Cell]
    categories: dict[str, str]


def write(table: Table, path: Path = COVERAGE) -> None:
    lines = defaultdict(list)
    for (name, mode, dtype), cell in table.cells.items():
        lines[table.categories[name], name, mode, cell].append(dtype)
    rows = ["\t".join(COLUMNS.split())]
    for (category, name, mode, cell), dtypes in sorted(lines.items()):
        row = [category, name, mode, " ".join(sorted(dtypes)), *cell]
        rows.append("\t".join(map(str, row)).rstrip())
    path.write_text("\n".join(rows) + "\n")


def read(path: Path = COVERAGE) -> Table:
    table = Table({}, {})
    if not path.exists():
        return table
    for line in path.read_text().splitlines()[1:]:
        category, name, mode, dtypes, verdict, *rest = line.split("\t")
        counts, reason = map(int, rest[:3]), "".join(rest[3:])
        table.categories[name] = category
        for dtype in dtypes.split():
            key = Key(name, mode, dtype)
            table.cells[key] = Cell(verdict, *counts, reason)
            counts = table.cells[key][1:4]
    return table


def compare(old: Table, new: Table, whole: bool = True) -> tuple[list, list]:
    """What got better and what got worse, a line of text each.

    A slice makes fewer calls than the table it is compared with: what it did
    not run is no loss, and numbers of calls mean nothing.
    """
    better, worse = [], []
    for key in sorted(old.cells.keys() | new.cells.keys()):
        before, after = old.cells.get(key), new.cells.get(key)
        if after is None:
            if whole:
                worse.append(f"{' '.join(key)}: {before.verdict} -> not run")
            continue
        if before is None:
            if whole:
                better.append(f"{' '.join(key)}: new, {after.verdict}")
            continue
        change = rank(after, whole), rank(before, whole)
        if change[0] == change[1]:
            continue
        text = f"{' '.join(key)}: {tell(before)} -> {tell(after)}"
        (worse if change[0] > change[1] else better).append(text)
    return better, worse


def rank(cell: Cell, counted: bool) -> tuple:
    """The smaller, the better."""
    # What the CPU refuses and what runs are equally good.
    place = max(1, VERDICTS.index(cell.verdict))
    return (place, cell.calls - cell.right if counted else 0,
            cell.calls - cell.native if counted else 0)  # fmt: skip


def tell(cell: Cell) -> str:
    good = cell.right if cell.verdict in ("wrong", "crash") else cell.native
    counts = f" ({good} of {cell.calls})" if good != cell.calls else ""
    return f"{cell.verdict}{counts}{': ' * bool(cell.reason)}{cell.reason}"


class Share(NamedTuple):
    """Numbers of calls, and what part of them is good."""

    calls: int = 0
    right: int = 0
    native: int = 0

    @property
    def correct(self) -> float:
        """Percent of the calls that did what the CPU does."""
        return 100 * self.right / self.calls if self.calls else 100.0

    @property
    def without_fallback(self) -> float:
        """Percent of the calls that were right and ran on the device alone."""
        return 100 * self.native / self.calls if self.calls else 100.0


def summary(table: Table, mode: str | None = None) -> dict[str, Share]:
    """The shares of each category, and under "all" of everything."""
    shares: dict[str, Share] = defaultdict(Share)
    for key, cell in table.cells.items():
        if mode in (None, key.mode):
            for group in (table.categories[key.name], "all"):
                counts = zip(shares[group], cell[1:4], strict=True)
                shares[group] = Share(*map(sum, counts))
    return dict(sorted(shares.items()))
