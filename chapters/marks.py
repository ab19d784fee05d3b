"""The marks in the sources, and what they leave of a file at a chapter.

The first line of a file, ``// Chapter: guards``, names the chapter that adds
it. ``// [guards: name]`` to ``// [/guards: name]`` fences lines that a chapter
adds to the file, or only names lines for a listing; regions nest and never
cross. ``// [devices: name until ops]`` is a stand-in that `ops` removes: its
lines are comments, ``//| code``, which only a state before `ops` uncomments.
The build's own files carry regions and no first line.
"""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("openreg", "openreg_autoload", "torch_openreg")
MARKED = {".cpp", ".h", ".py"}

HEAD = re.compile(r"(?://|#) Chapter: ([\w-]+)")
MARK = re.compile(
    r"\s*(?://|#) \[(?P<close>/?)(?P<key>(?P<chapter>[\w-]+): [\w-]+)"
    r"(?: until (?P<until>[\w-]+))?\]"
)
STAND_IN = re.compile(r"(\s*)(?://|#)\| ?(.*)")
LOOKS_LIKE_A_MARK = re.compile(r"\s*(?://|#)\s*\[\s*/?\s*[\w-]+\s*:")
SCOPE = re.compile(
    r"\s*(?:class|struct|(?:async )?def) (\w+)"
    r"|(?!\s*(?:if|for|while|switch|return|else|catch)\b)[\w:<>,&*~\s]*?"
    r"\b([\w:~]+)\("
)


class MarkError(ValueError):
    """A mark, a listing or a page breaks a rule; the text says where."""


class Region(NamedTuple):
    key: str  # "guards: name"
    first: int  # the chapters, by number, between which its lines are there
    until: int
    start: int  # the line of the opening mark


class Source(NamedTuple):
    first: int
    lines: list[tuple[str | None, Region]]  # None: a mark; the innermost region
    spans: dict[str, tuple[int, int]]  # the lines of a region's two marks


pages = sorted((ROOT / "chapters").glob("[0-9][0-9]-*.md"))
PAGES = {page.stem[3:]: page for page in pages}
CHAPTERS = list(PAGES)


@functools.cache
def written() -> list[str]:
    """The chapters whose page opens its own state; the others are stubs."""
    texts = {name: page.read_text() for name, page in PAGES.items()}
    return [n for n, text in texts.items() if f'\nstages.use("{n}")\n' in text]


def previous(chapter: str) -> str | None:
    """The written chapter before this one; None before the first."""
    earlier = CHAPTERS[: CHAPTERS.index(chapter)]
    return next((c for c in reversed(earlier) if c in written()), None)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def order(chapter: str, where: str) -> int:
    if chapter not in CHAPTERS:
        raise MarkError(f"{where}: no chapter is called {chapter!r}")
    return CHAPTERS.index(chapter)


def sources() -> list[Path]:
    """Every file that a state may hold, the build's own files included."""
    patterns = ["pyproject.toml", "CMakeLists.txt", "cmake/*"]
    patterns += [f"{package}/**/*" for package in PACKAGES]
    found = [p for pattern in patterns for p in sorted(ROOT.glob(pattern))]
    made = {".so", ".pyc"}
    return [p for p in found if p.is_file() and p.suffix not in made]


def parse(path: Path) -> Source:
    return _parse(path, path.read_text())


@functools.cache
def _parse(path: Path, text: str) -> Source:
    name, end = relative(path), len(CHAPTERS)
    head = HEAD.fullmatch(text.partition("\n")[0])
    if path.suffix in MARKED and name.split("/")[0] in PACKAGES and not head:
        raise MarkError(f"{name}:1: the first line must say 'Chapter: NAME'")
    first = order(head[1], f"{name}:1") if head else 0
    source, stack = Source(first, [], {}), [Region(name, first, end, 0)]
    for number, line in enumerate(text.splitlines(), 1):
        where, inner, mark = f"{name}:{number}", stack[-1], MARK.fullmatch(line)
        if mark and not mark["close"]:
            stack.append(_open(mark, source, stack, number, where))
        elif mark and mark["key"] != inner.key:
            what = f"closes {mark['key']!r} inside {inner.key!r}"
            raise MarkError(f"{where}: {what}")
        elif mark:
            source.spans[inner.key] = (stack.pop().start, number)
        elif LOOKS_LIKE_A_MARK.match(line):
            raise MarkError(f"{where}: not a mark: {line.strip()}")
        elif inner.until < end:
            line = _stand_in(line, where)
        gone = mark or (head and number == 1)
        source.lines.append((None if gone else line, inner))
    for region in stack[1:]:
        where = f"{name}:{region.start}"
        raise MarkError(f"{where}: region {region.key!r} is never closed")
    return source


def _stand_in(line: str, where: str) -> str:
    if not (code := STAND_IN.fullmatch(line)):
        raise MarkError(f"{where}: a stand-in's lines are comments, '//| code'")
    return (code[1] + code[2]).rstrip()


def _open(mark, source, stack, number, where) -> Region:
    key, first = mark["key"], order(mark["chapter"], where)
    until = order(mark["until"], where) if mark["until"] else len(CHAPTERS)
    if key in {*source.spans, *(region.key for region in stack)}:
        raise MarkError(f"{where}: region {key!r} is opened twice")
    if first < source.first or until <= first:
        raise MarkError(f"{where}: region {key!r} ends before it begins")
    outer = stack[-1]
    return Region(key, max(first, outer.first), min(until, outer.until), number)


def lines_at(path: Path, chapter: str) -> list[str | None] | None:
    """Each line of a file at a chapter, None for one that is not there."""
    source, now = parse(path), order(chapter, relative(path))
    if source.first > now:
        return None
    lines = source.lines
    return [line if r.first <= now < r.until else None for line, r in lines]


def clean(lines: list[str | None]) -> str:
    """The text without the lines that are gone, nor the blanks they leave."""
    kept: list[str] = []
    gap = True
    for line in lines:
        if line is None:
            gap = True
        elif line or not gap or (kept and kept[-1]):
            if gap and kept and not kept[-1] and line.strip()[:1] in set("})]"):
                kept.pop()
            kept.append(line)
            gap = False
    return "".join(line + "\n" for line in kept)


def render(path: Path, chapter: str, *, padded: bool = False) -> str | None:
    """A file at the end of a chapter, or None before it exists.

    `padded` keeps every line at its number in the source, so that compilers
    (told the file's name by ``#line``) and tracebacks point at the source.
    """
    lines = lines_at(path, chapter)
    if lines is None or not padded:
        return None if lines is None else clean(lines)
    if path.suffix in {".cpp", ".h"}:
        lines[0] = f'#line 2 "{relative(path)}"'
    return "".join((line or "") + "\n" for line in lines)


def find(path: Path, name: str) -> tuple[int, int]:
    """A region's marks, by `name` or, where that is not enough, its chapter."""
    spans, asked = parse(path).spans, name.replace("/", ": ")
    found = [key for key in spans if asked in (key, key.split()[-1])]
    if len(found) != 1:
        what = f"{len(found) or 'no'} regions called {name!r}"
        raise MarkError(f"{relative(path)}: {what} among {', '.join(spans)}")
    return spans[found[0]]


def region(path: Path, name: str, at: str) -> str:
    """The lines of a region as they stand at chapter `at`."""
    start, end = find(path, name)
    text = clean((lines_at(path, at) or [])[start : end - 1])
    if not text:
        where = f"{relative(path)}:{start}"
        raise MarkError(f"{where}: region {name!r} is not there at {at!r}")
    return text


def scope(path: Path, name: str) -> str:
    """The class or function around a region, as far as indentation tells."""
    start, end = find(path, name)
    text = [line for line, _ in parse(path).lines]
    depth = min(map(indent, filter(None, text[start : end - 1])))
    for line in filter(None, reversed(text[:start])):
        if indent(line) < depth:
            if found := SCOPE.match(line):
                return found[1] or found[2]
            depth = indent(line)
    return ""


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def diff(path: Path, before: str | None, after: str) -> str:
    """What happens to a file between two chapters, as a unified diff."""
    old, new = ((at and render(path, at)) or "" for at in (before, after))
    body = difflib.unified_diff(old.splitlines(True), new.splitlines(True))
    return "".join(list(body)[2:])


def changed(chapter: str) -> list[tuple[Path, str | None, str]]:
    """Files that a chapter adds or changes: path, old text, new text."""
    before, found = previous(chapter), []
    for path in sources():
        old, new = before and render(path, before), render(path, chapter)
        if new not in (None, old):
            found.append((path, old, new))
    return found
