"""Write notebooks/ from the written chapters, one way.

    python docs/_ext/notebooks.py

Cells stay as they are. Listings are set out in full, and what only the guide
understands (directives, roles, labels) becomes plain Markdown.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from pathlib import Path

import jupytext
import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "chapters"))

import listing
import marks

FOLDER = marks.ROOT / "notebooks"
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
PAGES = "\n".join(page.read_text() for page in marks.PAGES.values())
TITLES = dict(LABEL.findall(PAGES))


def markdown(chapter: str, text: str) -> str:
    """A chapter's Markdown as a notebook's."""
    text = FENCE.sub(functools.partial(directive, chapter), text)
    text = re.sub(r"^\([\w-]+\)=\n", "", text, flags=re.M)
    return ROLE.sub(role, text)


def role(match: re.Match) -> str:
    name, text, target = match.groups()
    if name in {"ref", "doc"} and not target:
        return TITLES.get(re.sub(r".*/(\d\d-)?", "", text), text)
    plain = target or name in {"term", "numref"}
    return text if plain else f"`{text.lstrip('~')}`"


def directive(chapter: str, match: re.Match) -> str:
    name, argument, body = match["name"], match["argument"], match["body"]
    if name == "listing":
        options = dict(re.findall(r":([\w-]+):[ ]*(.*)\n", match["options"]))
        cut = listing.listing(argument, options, chapter)
        title = f"*{cut.name}*: `{argument}`{cut.title}"
        return code(title, cut.lexer, cut.text)
    if name == "changes":
        return "\n\n".join(code(*cut[:3]) for cut in listing.changes(chapter))
    if name == "files":
        command = f"python stages.py export {chapter} DIR"
        return f"`{command}` writes every file at this point."
    if name == "code-block":
        return code("", argument, body)
    title = f"**{argument or name.capitalize()}.**"
    return f"{title} {markdown(chapter, body).strip()}"


def code(title: str, lexer: str, text: str) -> str:
    block = f"```{lexer}\n{text}```" if text else ""
    return f"{title}\n\n{block}".strip()


def notebook(chapter: str) -> str:
    """The text of a chapter's notebook."""
    book = jupytext.reads(marks.PAGES[chapter].read_text(), fmt="md:myst")
    book.metadata = {"kernelspec": book.metadata["kernelspec"]}
    book.nbformat, book.nbformat_minor = 4, 5
    book.cells.insert(0, nbformat.v4.new_code_cell(FIRST))
    for number, cell in enumerate(book.cells):
        if cell.cell_type == "markdown":
            cell.source = markdown(chapter, cell.source + "\n").strip()
        cell.metadata.pop("mystnb", None)
        text = f"{number}\0{cell.source}"
        cell.id = hashlib.sha256(text.encode()).hexdigest()[:8]
    return nbformat.writes(book) + "\n"


def generate() -> dict[Path, str]:
    """Every notebook: path and text."""
    pages = {c: marks.PAGES[c].stem for c in marks.written()}
    return {FOLDER / f"{pages[c]}.ipynb": notebook(c) for c in pages}


def stale(books: dict[Path, str]) -> list[Path]:
    """The notebooks that are missing, out of date, or one too many."""
    there = {path: path.read_text() for path in FOLDER.glob("*.ipynb")}
    paths = sorted(there.keys() | books.keys())
    return [path for path in paths if there.get(path) != books.get(path)]


if __name__ == "__main__":
    books = generate()
    for path in stale(books):
        path.write_text(books[path]) if path in books else path.unlink()
