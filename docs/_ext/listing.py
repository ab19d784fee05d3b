"""Directives that show code in a page, cut out of the package's own sources.

``listing`` shows a region, a whole file or a diff; ``changes`` what the page's
chapter changes; ``files`` the files that it adds or changes, whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import marks
from sphinx.util.docutils import SphinxDirective


class Cut(NamedTuple):
    """What a directive shows: a text, and what is said of it."""

    title: str
    lexer: str
    text: str
    name: str = ""


def chapter_of(docname: str) -> str:
    """The chapter whose state a page shows: its own, or the last."""
    name = docname.removeprefix("chapters/")[3:]
    return name if name in marks.written() else marks.CHAPTERS[-1]


def lexer(path: Path) -> str:
    names = {".py": "python", ".toml": "toml", ".txt": "cmake"}
    return names.get(path.suffix, "c++")


def label(name: str, at: str) -> str:
    """The label of a whole file, on the page that last changed it."""
    chapter = at if at in marks.written() else marks.previous(at)
    while chapter:
        if marks.ROOT / name in (path for path, *_ in marks.changed(chapter)):
            return f"file-{chapter}-{name.replace('/', '-').lower()}"
        chapter = marks.previous(chapter)
    return ""


def listing(source: str, options: dict[str, str], at: str) -> Cut:
    """A region, named by the function around it, a whole file or a diff."""
    path, region, scope = marks.ROOT / source, options.get("region"), ""
    if path not in marks.sources():
        raise marks.MarkError(f"{source}: there is no such source")
    if "diff" in options:
        text = marks.diff(path, *options["diff"].split())
    elif region:
        text, scope = marks.region(path, region, at), marks.scope(path, region)
    else:
        text = marks.render(path, at)
    if not text:
        raise marks.MarkError(f"{source}: there is nothing to show at {at!r}")
    title = f", in `{scope}`" if scope else ""
    name = f"{at}-{region or path.name}".replace("/", "-")
    return Cut(title, "diff" if "diff" in options else lexer(path), text, name)


def changes(chapter: str) -> Iterator[Cut]:
    """What a chapter does to each file; a new one is only counted."""
    for path, before, after in marks.changed(chapter):
        name = f"`{marks.relative(path)}`"
        if before is None:
            yield Cut(f"{name} is new, {after.count(chr(10))} lines", "", "")
        else:
            text = marks.diff(path, marks.previous(chapter), chapter)
            signs = re.findall(r"^[+-]", text, re.M)
            counts = f"{signs.count('+')} lines in, {signs.count('-')} out"
            yield Cut(f"{name}: {counts}", "diff", text)


def files(chapter: str) -> Iterator[Cut]:
    """The files that a chapter adds or changes, whole."""
    for path, _, text in marks.changed(chapter):
        name = marks.relative(path)
        title = f"`{name}`, {text.count(chr(10))} lines"
        yield Cut(title, lexer(path), text, label(name, chapter))


def fence(cut: Cut, options: str = "") -> str:
    """A code block in MyST; a lexer that knows less than g++ is no error."""
    start = f"``````{{code-block}} {cut.lexer}\n:force:\n{options}"
    return f"{start}\n{cut.text}``````\n"


class Listing(SphinxDirective):
    required_arguments = 1
    option_spec = dict.fromkeys(("region", "diff", "emphasize"), str)

    def run(self) -> list:
        source, at = self.arguments[0], chapter_of(self.env.docname)
        self.env.note_dependency(str(marks.ROOT / source))
        try:
            cut = listing(source, self.options, at)
            lines = emphasized(cut.text, self.options.get("emphasize"))
        except ValueError as error:
            raise self.error(f"listing: {error}") from error
        known, caption = self.state.document.nameids, f"`{source}`"
        if target := label(source, at):
            caption = f"[{caption}](#{target})"
        name = cut.name + (f"-{Path(source).stem}" if cut.name in known else "")
        options = f":caption: '{caption}{cut.title}'\n:name: {name}\n{lines}"
        return self.parse_text_to_nodes(fence(cut, options))


def emphasized(text: str, pattern: str | None) -> str:
    """The option that names the lines in which a pattern is found."""
    if pattern is None:
        return ""
    lines = enumerate(text.splitlines(), 1)
    if not (found := [str(n) for n, line in lines if re.search(pattern, line)]):
        raise marks.MarkError(f"no line matches {pattern!r}")
    return f":emphasize-lines: {','.join(found)}\n"


class Folded(SphinxDirective):
    """Shows each part, collapsed where it has a text."""

    def run(self) -> list:
        out, parts = "", {"changes": changes, "files": files}[self.name]
        for cut in parts(chapter_of(self.env.docname)):
            start = f"{cut.title}\n" + (f":name: {cut.name}\n" * bool(cut.name))
            folded = f":::::::{{dropdown}} {start}\n{fence(cut)}:::::::\n\n"
            out += folded if cut.text else f"{cut.title}\n\n"
        return self.parse_text_to_nodes(out)


def setup(app):
    app.add_directive("listing", Listing)
    app.add_directive("changes", Folded)
    app.add_directive("files", Folded)
    return {"version": "1", "parallel_read_safe": True}
