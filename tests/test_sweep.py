"""The device against PyTorch's databases, and the machine that compares.

Every operator, module and optimizer runs here with float32 and one integer
dtype, forward and backward; `make sweep` runs everything.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import verdicts
from sweep import known, table
from sweep.table import Cell, Key, Share, Table

TESTS = Path(__file__).parent
PARTS = 6  # each imports the databases once, and runs its own processes


def child(*arguments, **options):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), str(TESTS)])
        ),
        "OMP_NUM_THREADS": "1",
        "OPENREG_FALLBACK": "off",
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        **options,
    )


def test_there_is_a_table():
    assert table.read().cells, "run make sweep and commit tests/sweep"


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_worse_than_in_the_table(part, tmp_path):
    report = tmp_path / "report"
    options = ["--fast", "--jobs", 1, "--report", report]
    done = child("-m", "sweep", *options, "--part", f"{part}/{PARTS}")
    said = f"{done.stdout}\n{done.stderr[-2000:]}\n{report.read_text()[:9000]}"
    assert done.returncode == 0, said


# ------------------------------------------------------------- the machinery


@pytest.fixture(scope="module")
def fakes():
    """What the sweep says of operators that go wrong on purpose."""
    done = child(TESTS / "sweep_fakes.py")
    assert done.returncode == 0, done.stderr
    said = [line.split("\t") for line in done.stdout.splitlines()]
    return {tuple(key): verdict for *key, verdict in said}


@pytest.mark.parametrize(
    ("name", "verdict"),
    {
        "copies": "native",
        "draws": "native",
        "falls_back": "falls back (0 of 4): fakes::negative",
        "is_refused": "refused: as on the CPU",
        "gives_other_values": "wrong (1 of 4): value",
        "gives_other_strides": "wrong (2 of 4): stride",
        "gives_another_dtype": "wrong (0 of 4): dtype",
        "gives_a_view": "wrong (1 of 4): alias, stride",
        "changes_its_input": "wrong (0 of 4): mutation",
        "raises": "wrong (0 of 4): error ValueError",
        "never_raises": "wrong (0 of 4): no error",
        "raises_something_else": "wrong (0 of 4): other error ValueError",
        "gives_other_values_each_time": "wrong (3 of 4): determinism",
        "crashes_with_doubles": "crash (0 of 1): SIGSEGV",
        "hangs_with_doubles": "crash (0 of 1): hangs",
    }.items(),
)
def test_each_verdict_occurs(fakes, name, verdict):
    assert fakes[name, "forward", "f64"] == verdict


@pytest.mark.parametrize("how", ["crashes", "hangs"])
def test_the_rest_goes_on_after_a_death(fakes, how):
    assert fakes[f"{how}_with_doubles", "forward", "f32"] == "native"


def test_a_call_that_kills_the_cpu_is_left_out(fakes):
    assert fakes["crashes_the_cpu", "forward", "f64"] == "native"


def test_gradients_are_compared(fakes):
    assert fakes["twists_gradients", "forward", "f32"] == "native"
    assert fakes["twists_gradients", "backward", "f32"].startswith("wrong")


def test_in_place_must_give_its_input_back(fakes):
    assert fakes["copies_in_place", "in-place", "f32"].startswith("wrong")


def test_out_must_be_written(fakes):
    assert fakes["forgets_out", "forward", "f32"] == "native"
    assert fakes["forgets_out", "out", "f32"].startswith("wrong (0 of 5)")


def test_tensors_of_two_devices_must_be_refused(fakes):
    verdict = fakes["takes_any_device", "refusals", "f32"]
    assert verdict == "wrong (0 of 2): no error"


# ----------------------------------------------------------------- the table


def some(**changes):
    cells = {
        Key("add", "forward", "f32"): Cell("native", 4, 4, 4),
        Key("add", "forward", "f64"): Cell("native", 4, 4, 4),
        Key("sub", "forward", "f32"): Cell("falls back", 4, 4, 1, "sub.out"),
        Key("sub", "out", "f32"): Cell("wrong", 4, 3, 2, "stride, value"),
    }
    for name, cell in changes.items():
        cells[Key(name, "forward", "f32")] = cell
    return Table(cells, {"add": "elementwise", "sub": "other"})


def test_a_table_is_read_as_it_was_written(tmp_path):
    table.write(some(), tmp_path / "table")
    assert table.read(tmp_path / "table") == some()


def test_dtypes_of_one_verdict_share_a_line(tmp_path):
    table.write(some(), tmp_path / "table")
    lines = (tmp_path / "table").read_text().splitlines()
    assert lines[1] == "elementwise\tadd\tforward\tf32 f64\tnative\t4\t4\t4"
    assert len(lines) == 4


@pytest.mark.parametrize(
    "cell",
    [
        Cell("falls back", 4, 4, 3),
        Cell("wrong", 4, 3, 3),
        Cell("crash", 4, 3, 0),
        Cell("native", 4, 4, 3),
    ],
)
def test_what_shrinks_is_worse(cell):
    better, worse = table.compare(some(), some(add=cell))
    assert not better
    assert len(worse) == 1
    assert worse[0].startswith("add forward f32: native -> ")
    assert table.compare(some(add=cell), some())[0]


def test_more_fallbacks_in_one_cell_are_worse():
    more = some(sub=Cell("falls back", 4, 4, 0, "sub.out"))
    assert table.compare(some(), more)[1]
    assert not table.compare(some(), more, whole=False)[1]


def test_what_is_gone_is_worse_unless_it_was_not_run():
    less = some()
    del less.cells["add", "forward", "f32"]
    worse = ["add forward f32: native -> not run"]
    assert table.compare(some(), less) == ([], worse)
    assert table.compare(some(), less, whole=False) == ([], [])


def test_what_the_cpu_refuses_is_as_good_as_what_runs():
    refused = some(add=Cell("refused", 4, 4, 4, "as on the CPU"))
    assert table.compare(some(), refused) == ([], [])


def test_the_summary_counts_calls():
    shares = table.summary(some())
    assert shares["all"] == Share(16, 15, 11)
    assert shares["elementwise"].without_fallback == 100
    assert table.summary(some(), "out")["all"].correct == 75


# ------------------------------------------------------------------ the page


def test_the_page_can_be_searched_for_names_categories_and_reasons():
    html = verdicts.page(some())
    add, sub = html.partition("<tbody>")[2].split("</tr>")[:2]
    assert "<b>add</b> <small>elementwise</small>" in add
    assert "f32 f64: native" in add
    assert "<b>sub</b> <small>other</small>" in sub
    for text in ("falls back (1 of 4): sub.out", "wrong (3 of 4): stride"):
        assert text in sub


def test_the_page_shows_the_worst_verdict_of_a_cell():
    cell = Cell("wrong", 4, 3, 3, "value")
    found = some()
    found.cells["add", "forward", "f16"] = cell
    row = verdicts.page(found).partition("<b>add</b>")[2].partition("</tr>")[0]
    assert row.partition("<summary>")[2].startswith('<b class="wrong">')


def test_the_pages_summary_is_of_all_calls():
    *_, last = verdicts.summary(some()).splitlines()
    assert last.startswith("| **all** | 16 | 93.7\N{NO-BREAK SPACE}% |")


def test_what_is_accepted_can_be_narrowed(monkeypatch):
    monkeypatch.setattr(
        known,
        "ACCEPTED",
        {
            "a": ("stride", ""),
            "b out": ("value", ""),
            "c out empty": ("value", ""),
        },
    )
    assert known.accepts("a", "forward", "#0", "stride")
    assert not known.accepts("a", "forward", "#0", "value")
    assert not known.accepts("a", "forward", "#0", "")
    assert known.accepts("b", "out", "#0 strided", "value")
    assert not known.accepts("b", "forward", "#0", "value")
    assert known.accepts("c", "out", "#0 empty", "value")
    assert not known.accepts("c", "out", "#0", "value")
