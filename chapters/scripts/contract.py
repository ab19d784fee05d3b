"""Who asks a device's module for what, and what this backend answers.

    python contract.py                  print the table
    python contract.py --places NAME    every place that asks for a name
    python contract.py --libraries DIR  make contract.libraries.toml again

DIR holds wheels as `pip download --no-deps -d DIR accelerate ...` leaves them;
a wheel of another torch release tells which names are new there.

The table joins a scan of the installed torch, what C++ code looks up and what
was decided about each name (contract.toml, kept by hand), what libraries look
up (contract.libraries.toml, made by the line above), and `torch.cuda.__all__`.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import inspect
import operator
import re
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from lookups import Lookup, lookups

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
MADE = HERE / "contract.libraries.toml"
# Each device's own code, and what tests it, are not generic.
SKIP = re.compile(r"^torch/(cuda|xpu|mps|mtia|testing)/")
# Nor is what a library's users do not run.
SKIP_LIBRARY = re.compile(
    r"(^|/)(tests?|test_utils|experiments|prototype|benchmarks?|examples)/"
)


class Row(NamedTuple):
    """One name of the contract."""

    name: str  # dotted in a submodule
    askers: tuple[str, ...]  # modules of torch, "C++" where it is that
    libraries: tuple[str, ...]  # "name (CUDA)" with a branch for each device
    since: str  # the torch release that first asks, if it is a later one
    required: bool  # some asker has no way out
    without: str  # what happens where the name is missing
    ours: str  # "yes", a later chapter, or why it is left out; "" is a gap


# ---------------------------------------------------------------------- scans


@functools.cache
def torch_lookups(root: Path | None = None) -> tuple[Lookup, ...]:
    """What torch's Python code looks up; the installed torch for None.

    Args:
        root: the folder that holds the package `torch`.
    """
    if root is None:
        root = Path(find_spec("torch").origin).parent.parent
    return tuple(lookups(root, SKIP, folder="torch"))


def make_libraries(wheels: Path) -> str:
    """The text of contract.libraries.toml, from a folder of wheels."""
    versions, newer = {}, {}
    asked: dict[str, dict[str, set[str]]] = defaultdict(
        lambda: defaultdict(set)
    )
    known = {each.name for each in torch_lookups()}
    for wheel in sorted(wheels.glob("*.whl"), key=_release):
        name, version = wheel.name.split("-")[:2]
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(wheel) as archive:
                files = [f for f in archive.namelist() if f.endswith(".py")]
                archive.extractall(folder, files)
            if name == "torch":
                found = {each.name for each in torch_lookups(Path(folder))}
                newer[version] = sorted(found - known)
                known |= found
                continue
            versions[name] = version
            for each in lookups(Path(folder), SKIP_LIBRARY, branches=True):
                kind = "any" if each.any_device else "one"
                asked[each.name][kind].add(name)
    for kinds in asked.values():
        kinds["one"] -= kinds["any"]
    lines = ["# Made by contract.py --libraries; see there."]
    lines += ["", "[versions]", *(f'{k} = "{v}"' for k, v in versions.items())]
    lines += ["", "# First asked for by these releases of torch.", "[torch]"]
    lines += [f'"{k}" = {_list(v)}' for k, v in newer.items()]
    lines += [
        "",
        "# Of any device's module; of one device, in a branch for it.",
    ]
    lines += ["[names]"]
    for name, kinds in sorted(asked.items()):
        fields = (f"{k} = {_list(sorted(v))}" for k, v in kinds.items() if v)
        lines.append(f'"{name}" = {{ {", ".join(sorted(fields))} }}')
    return "\n".join(lines) + "\n"


def _release(wheel: Path) -> tuple:
    name, version = wheel.name.split("-")[:2]
    return name, [int(n) for n in re.findall(r"\d+", version)]


def _list(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


# ---------------------------------------------------------------------- table


@functools.cache
def reviewed() -> dict[str, Any]:
    """contract.toml."""
    return tomllib.loads((HERE / "contract.toml").read_text())


@functools.cache
def libraries() -> dict[str, Any]:
    """contract.libraries.toml."""
    return tomllib.loads(MADE.read_text())


def rows(backend: Any = None) -> list[Row]:
    """The contract, one row for each name, by name.

    Args:
        backend: the module that answers; `torch.openreg` for None.
    """
    import torch

    backend = torch.openreg if backend is None else backend
    places: dict[str, list[Lookup]] = defaultdict(list)
    for each in torch_lookups():
        places[each.name].append(each)
    since = {n: v for v, names in libraries()["torch"].items() for n in names}
    names = {*places, *since, *libraries()["names"], *torch.cuda.__all__}
    names |= reviewed()["cpp"].keys() | reviewed()["also"].keys()
    return [
        _row(
            name,
            places[name],
            "" if places[name] else since.get(name, ""),
            backend,
        )
        for name in sorted(names, key=str.lower)
    ]


def _row(name: str, places: list[Lookup], since: str, backend: Any) -> Row:
    asked = libraries()["names"].get(name, {})
    cpp = reviewed()["cpp"].get(name)
    required = any(not each.optional for each in places)
    askers = sorted({_module(each.file) for each in places})
    if cpp:
        askers.append("C++")
        required = required or cpp["required"]
    if name in reviewed()["also"]:
        askers.append(reviewed()["also"][name])
    without = cpp["without"] if cpp else reviewed()["without"].get(name, "")
    if not without and askers:
        without = "AttributeError" if required else "core does without"
    return Row(
        name,
        tuple(askers),
        (*asked.get("any", ()), *(f"{n} (CUDA)" for n in asked.get("one", ()))),
        since,
        required,
        without,
        answer(name, backend),
    )


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def answer(name: str, backend: Any) -> str:
    """What the backend has for a name: see :class:`Row`."""
    try:
        operator.attrgetter(name)(backend)
        return "yes"
    except AttributeError:
        pass
    if chapter := _match(name, reviewed()["later"]):
        return f"chapter {chapter}"
    return _match(name, reviewed()["left-out"]) or ""


def _match(name: str, decided: dict[str, str]) -> str | None:
    patterns = [p for p in decided if fnmatch.fnmatchcase(name, p)]
    return decided[patterns[0]] if patterns else None


# ----------------------------------------------------------------- signatures


def signature(function: Any) -> str | None:
    """The parameters of a function or class, None where Python cannot say.

    Names, kinds and defaults count, annotations do not. A default that names
    the device is written as `<device>`.
    """
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    bare = [
        p.replace(
            annotation=p.empty,
            default=_Device()
            if p.default in ("cuda", "openreg")
            else p.default,
        )
        for p in found.parameters.values()
    ]
    return str(inspect.Signature(bare))


class _Device:
    def __repr__(self) -> str:
        return "<device>"


# ------------------------------------------------------------------- printing


def markdown(table: Iterable[Row], askers: int = 3) -> str:
    """The rows as a table in Markdown, with the first `askers` of each."""
    lines = ["| name | who asks | needed | without it | `torch.openreg` |"]
    lines.append("|---|---|---|---|---|")
    for row in table:
        who = [f"`{each}`" if "." in each else each for each in row.askers]
        more = len(who) - askers
        who = who[:askers] + ([f"{more} more"] if more > 0 else [])
        if row.since:
            who.append(f"torch {row.since}")
        who += row.libraries
        needed = "yes" if row.required else "no" if row.askers else ""
        cells = [f"`{row.name}`", ", ".join(who), needed, row.without]
        cells.append(row.ours or "**missing**")
        lines.append(
            "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table, or what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--places", metavar="NAME")
    parser.add_argument("--libraries", metavar="DIR", type=Path)
    arguments = parser.parse_args()
    if arguments.libraries:
        MADE.write_text(make_libraries(arguments.libraries))
    elif arguments.places:
        for each in torch_lookups():
            if each.name == arguments.places:
                how = "optional" if each.optional else "required"
                print(f"{each.file}:{each.line}: {how}")
    else:
        print(markdown(rows()))


if __name__ == "__main__":
    sys.exit(main())
