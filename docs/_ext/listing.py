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
from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective


def chapter_of(docname: str) -> str:
    """The chapter whose state a page shows: its own, or the last."""
    pages = {
        f"chapters/{marks.PAGES[name].stem}": name for name in marks.written()
    }
    return pages.get(docname, marks.CHAPTERS[-1])


def language(path: Path) -> str:
    names = {".py": "python", ".toml": "toml", ".txt": "cmake"}
    return names.get(path.suffix, "c++")


class Cut:
    """A listing: its text, language, caption and default name."""

    def __init__(self, source: str, options: dict[str, str], at: str) -> None:
        path, region = marks.ROOT / source, options.get("region")
        if path not in marks.sources():
            raise marks.MarkError(f"{source}: there is no such source")
        self.language, self.scope = language(path), ""
        what = region or Path(source).name
        if "diff" in options:
            before, after = options["diff"].split()
            self.text, self.language = marks.diff(path, before, after), "diff"
            what = f"diff-{what}"
        elif region:
            self.text = marks.region(path, region, at)
            self.scope = marks.scope(path, region)
        else:
            self.text = marks.render(path, at)
        if not self.text:
            raise marks.MarkError(
                f"{source}: there is nothing to show at {at!r}"
            )
        self.name = options.get("name", f"{at}-{what.replace('/', '-')}")


def label(name: str, at: str) -> str:
    """The label of a whole file, on the page that last changed it."""
    known = marks.CHAPTERS[: marks.CHAPTERS.index(at) + 1]
    for chapter in filter(marks.written().__contains__, reversed(known)):
        if marks.ROOT / name in (path for path, *_ in marks.changed(chapter)):
            return f"file-{chapter}-{name.replace('/', '-').lower()}"
    return ""


class Listing(SphinxDirective):
    required_arguments = 1
    option_spec = dict.fromkeys(
        ("region", "diff", "at", "emphasize", "name"), str
    )

    def run(self) -> list[nodes.Node]:
        source = self.arguments[0]
        at = self.options.get("at", chapter_of(self.env.docname))
        self.env.note_dependency(str(marks.ROOT / source))
        try:
            cut = Cut(source, self.options, at)
            lines = self.emphasized(cut.text)
        except ValueError as error:
            raise self.error(f"listing: {error}") from error
        block = nodes.literal_block(cut.text, cut.text, language=cut.language)
        block["force"] = True  # a lexer that knows less than g++ is no error
        block["highlight_args"] = {"hl_lines": lines}
        caption = nodes.caption("", "", self.link(source, at))
        if cut.scope:
            caption += [nodes.Text(", in "), nodes.literal("", cut.scope)]
        node = nodes.container("", caption, block, literal_block=True)
        node["classes"].append("literal-block-wrapper")
        for part in (block, caption, node):
            self.set_source_info(part)
        taken = {} if "name" in self.options else self.state.document.nameids
        again = f"-{Path(source).stem}" if cut.name in taken else ""
        self.options["name"] = cut.name + again
        self.add_name(node)
        return [node]

    def emphasized(self, text: str) -> list[int]:
        if (pattern := self.options.get("emphasize")) is None:
            return []
        lines = enumerate(text.splitlines(), 1)
        found = [number for number, line in lines if re.search(pattern, line)]
        if not found:
            raise marks.MarkError(f"no line matches {pattern!r}")
        return found

    def link(self, source: str, at: str) -> nodes.Node:
        if not (target := label(source, at)):
            return nodes.literal("", source)
        xref = addnodes.pending_xref("", nodes.inline("", source))
        xref.attributes |= {
            "refdomain": "std",
            "reftype": "ref",
            "refwarn": True,
        }
        xref.attributes |= {"refexplicit": True, "reftarget": target}
        xref["refdoc"] = self.env.docname
        return nodes.literal("", "", xref)


class Part(NamedTuple):
    """A file in a collected listing: what is said of it, and its text."""

    title: str
    language: str
    text: str
    name: str = ""


def changes(chapter: str) -> Iterator[Part]:
    """What a chapter does to each file; a new one is only counted."""
    for path, before, after in marks.changed(chapter):
        name = f"`{marks.relative(path)}`"
        if before is None:
            yield Part(f"{name} is new, {after.count(chr(10))} lines", "", "")
        else:
            text = marks.diff(path, marks.previous(chapter), chapter)
            signs = re.findall(r"^[+-]", text, re.M)
            counts = f"{signs.count('+')} lines in, {signs.count('-')} out"
            yield Part(f"{name}: {counts}", "diff", text)


def files(chapter: str) -> Iterator[Part]:
    """The files that a chapter adds or changes, whole."""
    for path, _, text in marks.changed(chapter):
        name = marks.relative(path)
        title = f"`{name}`, {text.count(chr(10))} lines"
        yield Part(title, language(path), text, label(name, chapter))


class Folded(SphinxDirective):
    """Shows each part, collapsed where it has a text."""

    def run(self) -> list[nodes.Node]:
        out, parts = "", {"changes": changes, "files": files}[self.name]
        for title, lexer, text, name in parts(chapter_of(self.env.docname)):
            option = f":name: {name}\n" if name else ""
            code = f"``````{{code-block}} {lexer}\n:force:\n\n{text}``````"
            block = f":::::::{{dropdown}} {title}\n{option}\n{code}\n:::::::"
            out += f"{block if text else title}\n\n"
        return self.parse_text_to_nodes(out)


def setup(app):
    app.add_directive("listing", Listing)
    app.add_directive("changes", Folded)
    app.add_directive("files", Folded)
    return {"version": "1", "parallel_read_safe": True}
