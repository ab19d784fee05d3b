"""Build the states first, and re-execute a page when its state changed.

myst-nb's cache is keyed by a page's own cells, so a change in the C++ that
they call would leave old outputs in place. This extension compares the
fingerprint of what a page runs on with the one that it last ran on; where they
differ it drops the cached outputs and has the page read again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import marks
import stages
from jupyter_cache import get_cache


def page_fingerprint(chapter: str) -> str:
    """Of what a page runs on: states, scripts, tables, the look of figures."""
    names = [marks.previous(chapter), chapter]
    text = marks.PAGES[chapter].read_text()
    if "finished" in text:
        names.append(marks.CHAPTERS[-1])  # %%finished, stages.finished()
    states = map(stages.fingerprint, names)
    scripts = (marks.ROOT / "chapters" / "scripts").rglob("*.[cp]*[py]")
    beside = [*sorted(scripts), marks.ROOT / "chapters" / "matplotlibrc"]
    beside += map(marks.ROOT.joinpath, re.findall(r"[\w/]+\.tsv", text))
    return stages.digest(*states, *(path.read_text() for path in beside))


def outdated(app, env, added, changed, removed) -> list[str]:
    names = marks.written()
    pages = [f"chapters/{marks.PAGES[name].stem}" for name in names]
    now = dict(zip(pages, map(page_fingerprint, names), strict=True))
    store = Path(app.config.nb_execution_cache_path) / "fingerprints.json"
    known = json.loads(store.read_text()) if store.exists() else {}
    app.page_fingerprints = (store, now)
    stale = {page for page in now if known.get(page) != now[page]}
    cache = get_cache(str(store.parent))
    paths = {str(env.doc2path(page)) for page in stale}
    for record in cache.list_cache_records():
        if record.uri in paths:
            cache.remove_cache(record.pk)
    # What a build warned about, the next one must say again.
    if app.config.nb_execution_mode == "force" or not known.get("clean", True):
        stale |= env.found_docs
    return sorted(stale)


def spread(app, env, docnames) -> None:
    """Order what is read so that each of the workers gets pages to run.

    Sphinx cuts the list into pieces of at most ten documents, in its order.
    """
    docnames.sort(key=lambda name: (not name.startswith("chapters/"), name))
    pieces = max(app.parallel, -(-len(docnames) // 10))
    docnames[:] = [n for i in range(pieces) for n in docnames[i::pieces]]


def finished(app, exception) -> None:
    if exception is None:
        store, now = app.page_fingerprints
        clean = app._warncount == 0
        stages.write(store, json.dumps({"clean": clean, **now}, indent=1))


def setup(app):
    states = stages.built()
    app.connect("builder-inited", lambda _: stages.build(*states), priority=100)
    app.connect("env-get-outdated", outdated)
    app.connect("env-before-read-docs", spread)
    app.connect("build-finished", finished)
    return {"version": "1", "parallel_read_safe": True}
