"""Write notebooks/ from the written chapters, one way.

    python docs/_ext/notebooks.py [--check]

Cells stay as they are. Listings are set out in full, and what only the guide
understands (directives, roles, labels) becomes plain Markdown.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import jupytext
import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "chapters"))

import listing
import marks

FIRST = """\
# A chapter runs in chapters/, where stages.py and the scripts lie.
import os

if not os.path.exists("stages.py"):
    os.chdir("../chapters" if os.path.exists("../chapters") else "chapters")"""

FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})\{(?P<name>[\w:-]+)\}[ ]*(?P<argument>.*)\n"
    r"(?P<options>(?::[\w-]+:.*\n)*)(?P<body>(?:.*\n)*?)(?P=fence)[ ]*$",
    re.M,
)
ROLE = re.compile(r"\{([\w:-]+)\}`([^`<]+?)(?:\s*<([^`]+)>)?`")
LABEL = re.compile(r"^\(([\w-]+)\)=\n+(?:#+ (.*))?", re.M)
TEXT_ROLES = {"term", "abbr", "numref"}
CODE = {"code-block": "", "code": "", "doctest": "pycon"}
DROPPED = {"ladder", "symptoms", "toctree"}


class Converter:
    """Turns a chapter's Markdown into a notebook's."""

    def __init__(self, chapter: str) -> None:
        self.chapter = chapter
        pages = "\n".join(page.read_text() for page in marks.PAGES.values())
        self.titles = dict(LABEL.findall(pages))

    def markdown(self, text: str) -> str:
        text = FENCE.sub(self.directive, text)
        text = re.sub(r"^\([\w-]+\)=\n", "", text, flags=re.M)
        return ROLE.sub(self.role, text)

    def role(self, match: re.Match) -> str:
        name, text, target = match.groups()
        if name in {"ref", "doc"} and not target:
            return self.titles.get(re.sub(r".*/(\d\d-)?", "", text), text)
        return text if target or name in TEXT_ROLES else f"`{text.lstrip('~')}`"

    def directive(self, match: re.Match) -> str:
        name, argument, body = match["name"], match["argument"], match["body"]
        if name == "listing":
            options = dict(
                re.findall(r":([\w-]+):[ ]*(.*)\n", match["options"])
            )
            at = options.get("at", self.chapter)
            cut = listing.Cut(argument, options, at)
            where = f", in `{cut.scope}`" if cut.scope else ""
            title = f"*{cut.name}*: `{argument}`{where}"
            return code(title, cut.language, cut.text)
        if name == "changes":
            parts = listing.changes(self.chapter)
            return "\n\n".join(code(*part[:3]) for part in parts)
        if name == "files":
            command = f"python stages.py export {self.chapter} DIR"
            return f"`{command}` writes every file at this point."
        if name in CODE:
            return code("", argument or CODE[name], body)
        if name in {"figure", "image"}:
            return f"![{' '.join(body.split())}]({argument})"
        title = f"**{argument or name.capitalize()}.**"
        return (
            "" if name in DROPPED else f"{title} {self.markdown(body).strip()}"
        )


def code(title: str, language: str, text: str) -> str:
    block = f"```{language}\n{text}```" if text else ""
    return f"{title}\n\n{block}".strip()


def notebook(chapter: str) -> str:
    """The text of a chapter's notebook."""
    book = jupytext.reads(marks.PAGES[chapter].read_text(), fmt="md:myst")
    book.metadata = {"kernelspec": book.metadata["kernelspec"]}
    book.nbformat, book.nbformat_minor = 4, 5
    book.cells.insert(0, nbformat.v4.new_code_cell(FIRST))
    convert = Converter(chapter)
    for number, cell in enumerate(book.cells):
        if cell.cell_type == "markdown":
            cell.source = convert.markdown(cell.source + "\n").strip()
        cell.metadata.pop("mystnb", None)
        text = f"{number}\0{cell.source}"
        cell.id = hashlib.sha256(text.encode()).hexdigest()[:8]
    return nbformat.writes(book) + "\n"


def generate() -> dict[Path, str]:
    """Every notebook: path and text."""
    folder = marks.ROOT / "notebooks"
    names = {c: f"{marks.PAGES[c].stem}.ipynb" for c in marks.written()}
    return {folder / name: notebook(chapter) for chapter, name in names.items()}


def stale(books: dict[Path, str]) -> list[Path]:
    """The notebooks that are missing, out of date, or one too many."""
    there = set((marks.ROOT / "notebooks").glob("*.ipynb"))
    same = {p for p in there & books.keys() if p.read_text() == books[p]}
    return sorted((there | books.keys()) - same)


def main() -> None:
    books = generate()
    names = [marks.relative(path) for path in stale(books)]
    if "--check" in sys.argv and names:
        sys.exit(f"out of date: {', '.join(names)}; run make notebooks")
    for path in stale(books):
        path.write_text(books[path]) if path in books else path.unlink()


if __name__ == "__main__":
    main()
