"""Runs subjects in forked children, so that none can harm another.

A child that dies or hangs costs the cell it was in; the rest of its subject
goes on in the next child. Forking is cheap: this process has imported torch
and the databases, and never starts the device.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sweep import calls, known
from sweep.judging import judge, total
from sweep.table import Cell, Key

LOST = 90  # exit status: the device cannot be used any more
LEAST = 0.2  # seconds between two looks at the clock


class Child:
    """A process that works on the cells of one subject."""

    def __init__(self, subject, cells: list, skipped: dict) -> None:
        self.subject, self.cells, self.skipped = subject, cells, skipped
        self.progress = mmap.mmap(-1, 5)
        self.progress[:] = b"g\0\0\0\0"
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.pipe, end = os.pipe()
        self.text = b""
        self.seen: Any = None
        self.since = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self.work(end)
        os.close(end)

    def work(self, end: int) -> None:
        status = 1
        try:
            for descriptor in (1, 2):
                os.dup2(self.errors.fileno(), descriptor)
            calls.progress = self.progress
            status = serve(self.subject, self.cells, self.skipped, end)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def read(self) -> tuple[list, bool]:
        """Messages that came, and whether the process has ended."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self.text = (self.text + data).split(b"\n")
        return list(map(json.loads, lines)), not data

    def hangs(self, timeout: float) -> bool:
        now = bytes(self.progress), len(self.cells)
        if now != self.seen:
            self.seen, self.since = now, time.monotonic()
        return time.monotonic() - self.since > timeout

    def end(self) -> str:
        """Wait; "" if it ended well, else how it died."""
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if status == LOST:
            return "the device is lost"
        if status < 0:
            return signal.Signals(-status).name
        return f"exit status {status}" if status else ""

    def last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip()
        return " / ".join(lines.splitlines()[-4:])[-600:]


def serve(subject, cells: list, skipped: dict, end: int) -> int:
    """In the child: judge every call of every cell, and say so."""
    torch.set_num_threads(1)
    for number, (dtype, mode) in enumerate(cells):
        calls.progress[:] = b"g\0\0\0\0"
        judged = []
        for i, call in enumerate(subject.calls(dtype, mode)):
            calls.progress[1:5] = i.to_bytes(4, "big")
            if i not in skipped.get((dtype, mode), ()):
                judged.append(judge(call))
                if judged[-1] is not None and not usable(judged[-1]):
                    return LOST
            calls.progress[:1] = b"g"
        name = subject.name
        judged = [
            j._replace(wrong="") if known.accepts(name, mode, *j[:2]) else j
            for j in judged
            if j is not None
        ]
        refusal = known.REFUSALS.get(f"{name} {mode}") or (
            known.REFUSALS.get(name, "")
        )
        wrong = [[j.what, j.wrong, j.detail] for j in judged if j.wrong]
        message = [number, total(judged, refusal), wrong]
        os.write(end, json.dumps(message).encode() + b"\n")
    return 0


def usable(judgement) -> bool:
    """Whether the device still works after an error."""
    if not judgement.wrong and not judgement.refused:
        return True
    try:
        return torch.ones(1).to("openreg").cpu().item() == 1
    except Exception:
        return False


class Sweep:
    """Runs subjects and collects `cells`; `report` gets what is wrong."""

    def __init__(
        self,
        jobs: int = 2,
        timeout: float = 120,
        report: Callable[[Key, str, str, str], None] = lambda *_: None,
    ) -> None:
        self.jobs, self.timeout, self.report = jobs, timeout, report
        self.cells: dict[Key, Cell] = {}

    def run(self, subjects: Iterable) -> dict[Key, Cell]:
        waiting = iter(subjects)
        with selectors.DefaultSelector() as selector:
            while True:
                while len(selector.get_map()) < self.jobs:
                    subject = next(waiting, None)
                    if subject is None:
                        break
                    cells = [(d, m) for d in subject.dtypes()
                             for m in subject.modes(d)]  # fmt: skip
                    self.start(selector, subject, cells, {})
                if not selector.get_map():
                    return self.cells
                self.turn(selector)

    def start(self, selector, subject, cells: list, skipped: dict) -> None:
        if cells:
            child = Child(subject, cells, skipped)
            selector.register(child.pipe, selectors.EVENT_READ, child)

    def turn(self, selector) -> None:
        for key, _ in selector.select(LEAST):
            child = key.data
            messages, ended = child.read()
            for message in messages:
                self.take(child, *message)
            if ended:
                selector.unregister(child.pipe)
                self.bury(selector, child, child.end())
        for key in list(selector.get_map().values()):
            if key.data.hangs(self.timeout):
                os.kill(key.data.pid, signal.SIGKILL)
                selector.unregister(key.data.pipe)
                key.data.end()
                self.bury(selector, key.data, "hangs")

    def take(self, child: Child, number: int, cell, wrong: list) -> None:
        key = self.key(child, number)
        child.done = number + 1
        if cell is not None:
            self.cells[key] = Cell(*cell)
        for what, kind, detail in wrong:
            self.report(key, what, kind, detail)

    def key(self, child: Child, number: int) -> Key:
        dtype, mode = child.cells[number]
        return Key(child.subject.name, mode, dtype.abbr)

    def bury(self, selector, child: Child, cause: str) -> None:
        """Note what a dead child was at; go on behind it."""
        done = getattr(child, "done", 0)
        rest = child.cells[done:]
        if not rest:
            return
        key = self.key(child, done)
        phase = child.progress[:1]
        index = int.from_bytes(child.progress[1:5], "big")
        words = f"call {index}, {cause}: {child.last_words()}"
        skipped = child.skipped
        if phase == b"c" and not cause.startswith("exit"):
            # The CPU's own fault: once more, without this call.
            kind, before = "CPU crash", skipped.get(rest[0], ())
            skipped = {**skipped, rest[0]: {*before, index}}
        else:
            kind, rest = "crash", rest[1:]
            where = "" if phase == b"d" else ", not on the device"
            self.cells[key] = Cell("crash", index + 1, index, 0, cause + where)
        self.report(key, f"#{index}", kind, words)
        self.start(selector, child.subject, rest, skipped)
