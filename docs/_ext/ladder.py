"""The ladder: which probes work at which chapter, as a table or a picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import marks
import stages
from docutils import nodes
from docutils.parsers.rst import directives
from probes import PROBES
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

HERE = Path(__file__).parent
STORE = marks.ROOT / "_build" / "ladder.json"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(STORE.parent / "inductor"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
# What climb.py's letters mean: a sign, and a class for the colour.
VERDICTS = {"w": ("✓", "works"), "b": ("↩", "falls-back"), "f": ("·", "fails")}


def climb(app) -> None:
    """Run the probes at each state that is not known yet."""
    tools = [(HERE / name).read_text() for name in ("climb.py", "probes.py")]
    known = json.loads(STORE.read_text()) if STORE.exists() else {}
    names = stages.built()
    keys = {c: stages.digest(stages.fingerprint(c), *tools) for c in names}
    done = {key: letters for key, letters in known.values()}
    todo = {key: name for name, key in keys.items() if key not in done}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done |= zip(todo, pool.map(measure, todo.values()), strict=True)
    found = {name: (key, done[key]) for name, key in keys.items()}
    stages.write(STORE, json.dumps(found, indent=1))


def measure(chapter: str) -> str:
    print(f"{chapter}: probes for the ladder", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, HERE / "climb.py"],
        env=stages.environment(chapter) | SETTINGS,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ExtensionError(f"no probe ran at {chapter!r}:\n{done.stderr}")
    return done.stdout.strip()


def columns() -> dict[str, str]:
    """Verdicts at each written chapter and of the whole package."""
    found = {
        name: row[1] for name, row in json.loads(STORE.read_text()).items()
    }
    rungs = {name: found[name] for name in marks.written()}
    return {**rungs, "whole package": found[marks.CHAPTERS[-1]]}


class Ladder(SphinxDirective):
    option_spec: ClassVar = {"picture": directives.flag}

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(STORE))
        if "picture" in self.options:
            return [nodes.raw("", picture(), format="html")]
        return self.parse_text_to_nodes(table())


def table() -> str:
    """One row a probe, one column a chapter, in Markdown."""
    rungs = columns()
    pages = [f"/chapters/{marks.PAGES[name].stem}" for name in marks.written()]
    heads = [f"{{doc}}`{page[13:]} <{page}>`" for page in pages]
    rows = [["", *heads, "whole package"], ["---", *[":-:"] * len(rungs)]]
    verdicts = zip(*rungs.values(), strict=True)
    for part, tried in PROBES.items():
        rows.append([f"**{part}**", *[""] * len(rungs)])
        for name in tried:
            signs = [VERDICTS[letter] for letter in next(verdicts)]
            rows.append(
                [name, *(f"[{sign}]{{.{word}}}" for sign, word in signs)]
            )
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"::::{{div}} ladder\n\n{lines}\n::::"


def picture() -> str:
    """One line a chapter, one square a probe, as SVG."""
    out, y, names = "", 0, [name for part in PROBES.values() for name in part]
    for chapter, letters in columns().items():
        out += f'<text x="0" y="{y + 10}">{chapter}</text>'
        for x, (letter, name) in enumerate(zip(letters, names, strict=True)):
            word = VERDICTS[letter][1]
            out += f'<rect class="{word}" x="{90 + 9 * x}" y="{y + 2}">'
            out += f"<title>{name}: {word}</title></rect>"
        y += 16
    size = f'viewBox="0 0 {90 + 9 * len(names)} {y}"'
    label = "Which programs run at the end of each chapter"
    svg = f'<svg {size} role="img" aria-label="{label}">{out}</svg>'
    return f'<div class="ladder-picture">{svg}</div>'


def setup(app):
    app.add_directive("ladder", Ladder)
    app.connect("builder-inited", climb, priority=200)
    return {"version": "1", "parallel_read_safe": True}
