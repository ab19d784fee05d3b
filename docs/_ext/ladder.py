"""The ladder: which probes work at which chapter, as a table or a picture."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import marks
import stages
from docutils import nodes
from docutils.parsers.rst import directives
from probes import PROBES
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

HERE = Path(__file__).parent
MEASURED = marks.ROOT / "_build" / "ladder"
RUNGS = MEASURED / "rungs.json"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_CACHE_DIR": str(marks.ROOT / "_build" / "inductor"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
# What climb.py's letters mean: a sign, and a class for the colour.
VERDICTS = {"w": ("✓", "works"), "b": ("↩", "falls-back"), "f": ("·", "fails")}


def measure(chapter: str) -> str:
    """The verdicts on all probes at a state, found out once."""
    tools = [(HERE / name).read_text() for name in ("climb.py", "probes.py")]
    key = stages.digest(stages.fingerprint(chapter), *tools)
    if not (store := MEASURED / key).exists():
        print(f"{chapter}: probes for the ladder", file=sys.stderr, flush=True)
        env = stages.environment(chapter) | SETTINGS
        done = stages.python(env, HERE / "climb.py")
        if done.returncode:
            raise ExtensionError(f"no probe ran at {chapter}:\n{done.stderr}")
        stages.write(store, done.stdout.strip())
    return store.read_text()


def climb(app) -> None:
    """Note the verdicts at each written chapter and of the whole package."""
    names = stages.built()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(names, pool.map(measure, names), strict=True))
    rungs = {name: found[name] for name in marks.written()}
    rungs["whole package"] = found[marks.CHAPTERS[-1]]
    stages.write(RUNGS, json.dumps(rungs))


class Ladder(SphinxDirective):
    option_spec = dict.fromkeys(["picture"], directives.flag)

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(RUNGS))
        rungs = json.loads(RUNGS.read_text())
        if "picture" in self.options:
            return [nodes.raw("", picture(rungs), format="html")]
        return self.parse_text_to_nodes(table(rungs))


def table(rungs: dict[str, str]) -> str:
    """One row a probe, one column a chapter, in Markdown."""
    pages = [marks.PAGES[name].stem for name in marks.written()]
    heads = [f"{{doc}}`{page[3:]} </chapters/{page}>`" for page in pages]
    rows = [["", *heads, "whole package"], ["---", *[":-:"] * len(rungs)]]
    verdicts = zip(*rungs.values(), strict=True)
    for part, tried in PROBES.items():
        rows.append([f"**{part}**", *[""] * len(rungs)])
        for name in tried:
            signs = [VERDICTS[letter] for letter in next(verdicts)]
            signs = [f"[{sign}]{{.{word}}}" for sign, word in signs]
            rows.append([name, *signs])
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"::::{{div}} ladder\n\n{lines}\n::::"


def picture(rungs: dict[str, str]) -> str:
    """One line a chapter, one square a probe, in HTML."""
    out, names = "", [name for part in PROBES.values() for name in part]
    for chapter, letters in rungs.items():
        out += f"<div><span>{chapter}</span>"
        for letter, name in zip(letters, names, strict=True):
            word = VERDICTS[letter][1]
            out += f'<i class="{word}" title="{name}: {word}"></i>'
        out += "</div>"
    label = "Which programs run at the end of each chapter"
    start = f'<div class="ladder-picture" role="img" aria-label="{label}">'
    return f"{start}{out}</div>"


def setup(app):
    app.add_directive("ladder", Ladder)
    app.connect("builder-inited", climb, priority=200)
    return {"version": "1", "parallel_read_safe": True}
