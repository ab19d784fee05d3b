"""Find the names that code looks up on a device's module, by its syntax.

`torch.get_device_module(...)` and its relatives give the module `torch.cuda`,
or `torch.openreg`, or that of any other device. Whatever is read from such a
module, a backend has to have. Nothing is imported or run here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Functions that return a device's module, what they are given aside.
FINDERS = {"get_device_module", "_get_device_module", "_get_device_handle"}
FINDERS |= {"from_device"}  # of _FSDPDeviceHandle
# Functions that call what they are given with one.
CALLERS = {"_get_device_attr"}
# `getattr(torch, X)` is one if X looks like this.
DEVICE = re.compile(r"device|backend_name|accelerator|\bacc\b|\bgpu\b", re.I)
# What one is called where it comes in as an argument or an attribute.
NAMED = re.compile(r"_?(custom_)?(device|backend)_(mod|module|handle)")
# Modules of one device: who asks them has a branch for each device.
ONE = re.compile(r"torch\.(cuda|hpu|mlu|mtia|musa|npu|sdaa|xpu)")
# What a file has to contain to be worth its syntax tree.
WORDS = ("device_mod", "device_handle", "backend_mod", "backend_handle")
WORDS += ("_get_device_attr", "_get_custom_mod_func")
GETATTR = re.compile(r"getattr\(\s*torch\s*,")


# What a name that is not there raises; RuntimeError, from PyTorch's own search.
MISSING = re.compile(r"^$|Exception|AttributeError|RuntimeError")


class Lookup(NamedTuple):
    """One place where a name is looked up on a device's module."""

    name: str  # dotted where it belongs to a submodule
    file: str
    line: int
    optional: bool  # asked for by hasattr or with a default
    any_device: bool  # not in a branch for one device


def lookups(
    root: Path, skip: re.Pattern, *, folder: str = ".", branches: bool = False
) -> list[Lookup]:
    """All lookups in Python files.

    Args:
        root: the files of the result are relative to this folder.
        folder: in which folder of it they are.
        skip: files whose relative path it finds are not read.
        branches: what is asked of torch.cuda, torch.npu and so on, too.
    """
    found: list[Lookup] = []
    for path in sorted((root / folder).rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if skip.search(relative):
            continue
        source = path.read_text(errors="replace")
        if _worth(source, branches):
            scan = _File(relative, source, branches)
            scan.visit(ast.parse(source))
            found += scan.found
    return found


def _worth(source: str, branches: bool) -> bool:
    return (
        any(word in source for word in WORDS)
        or bool(GETATTR.search(source))
        or (branches and bool(ONE.search(source)))
    )


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` of such an expression, empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        front = _dotted(node.value)
        return front and f"{front}.{node.attr}"
    return ""


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


class _File(ast.NodeVisitor):
    """The lookups of one file, function by function."""

    def __init__(self, file: str, source: str, branches: bool) -> None:
        self.file = file
        self.lines = source.splitlines()
        self.branches = branches
        self.found: list[Lookup] = []
        self.modules: set[str] = set()  # variables that hold one
        self.strings: dict[str, list[str]] = {}  # and those that hold names
        self.asked: set[str] = set()  # by hasattr or with a default
        self.needed: set[str] = set()  # by hasattr, else an exception

    # --------------------------------------------------------------- scopes

    def visit_Module(self, node: ast.Module) -> None:
        for child in ast.walk(node):
            # What an object keeps is known in all its methods.
            if isinstance(child, ast.Assign) and self._is_module(child.value):
                kept = map(_dotted, child.targets)
                self.modules |= {name for name in kept if "." in name}
        for child in node.body:
            self._bind(child)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        text = "\n".join(self.lines[node.lineno - 1 : node.end_lineno])
        if not _worth(text, self.branches) and not any(
            name.rpartition(".")[2] in text for name in self.modules
        ):
            return
        outer = self.modules, self.strings, self.asked, self.needed
        self.modules, self.strings = set(self.modules), dict(self.strings)
        self.asked, self.needed = set(self.asked), set(self.needed)
        inside = list(ast.walk(node))
        for child in inside:
            self._bind(child)
        for child in inside:
            self._guard(child)
        self.generic_visit(node)
        self.modules, self.strings, self.asked, self.needed = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _bind(self, node: ast.AST) -> None:
        """Remember a variable that holds a module, or names of its members."""
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets, value = [node.target], node.value
        elif isinstance(node, ast.For):
            targets, value = [node.target], node.iter
        elif isinstance(node, ast.Call) and _last(node.func) in CALLERS:
            lambdas = [a for a in node.args if isinstance(a, ast.Lambda)]
            self.modules |= {each.args.args[0].arg for each in lambdas}
            return
        else:
            return
        for name in filter(None, map(_dotted, targets)):
            if value is not None and self._is_module(value):
                self.modules.add(name)
            elif texts := self._texts(value):
                self.strings[name] = texts

    def _guard(self, node: ast.AST) -> None:
        """Remember a name that is asked for before it is used."""
        if isinstance(node, ast.Call):
            self.asked |= {
                name for name, optional in self._ask(node) if optional
            }
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            for call in ast.walk(node.test):
                if isinstance(call, ast.Call) and _last(call.func) == "hasattr":
                    self.needed |= {name for name, _ in self._ask(call)}

    # -------------------------------------------------------- what it means

    def _is_module(self, node: ast.AST) -> bool:
        if isinstance(node, ast.IfExp):
            return self._is_module(node.body) or self._is_module(node.orelse)
        if isinstance(node, ast.Call):
            name = _last(node.func)
            if name == "cast" and len(node.args) == 2:
                return self._is_module(node.args[1])
            if name == "getattr" and _dotted(node.args[0]) == "torch":
                asked = node.args[1]
                text = ast.unparse(asked)
                constant = isinstance(asked, ast.Constant) or "dtype" in text
                return not constant and bool(DEVICE.search(text))
            return name in FINDERS
        name = _dotted(node)
        return bool(name) and (
            name in self.modules
            or bool(NAMED.fullmatch(name.rpartition(".")[2]))
            or self._is_one(name)
        )

    def _is_one(self, name: str) -> bool:
        return self.branches and bool(ONE.fullmatch(name))

    def _texts(self, node: ast.AST | None) -> list[str]:
        """The strings that an expression can be, where that is plain."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.List | ast.Tuple):
            return [text for each in node.elts for text in self._texts(each)]
        return self.strings.get(_dotted(node), []) if node is not None else []

    def _path(self, node: ast.AST) -> str | None:
        """The way from a module to what the expression is; None for no way."""
        if self._is_module(node):
            return ""
        if isinstance(node, ast.Attribute):
            path = self._path(node.value)
            if path is not None:
                return f"{path}.{node.attr}" if path else node.attr
        return None

    def _ask(self, node: ast.Call) -> Iterator[tuple[str, bool]]:
        """What a call looks up by name, and whether it may be missing."""
        function, arguments = _last(node.func), node.args
        if function == "_get_custom_mod_func" and arguments:
            for text in self._texts(arguments[0]):
                yield text, False
        if function in ("hasattr", "getattr") and len(arguments) > 1:
            path = self._path(arguments[0])
            if path is not None:
                for text in self._texts(arguments[1]):
                    name = f"{path}.{text}" if path else text
                    yield name, function == "hasattr" or len(arguments) > 2

    # -------------------------------------------------------------- lookups

    def visit_Call(self, node: ast.Call) -> None:
        one = bool(node.args) and self._is_one(_dotted(node.args[0]))
        for name, optional in self._ask(node):
            self._add(name, node, optional, one)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path and isinstance(node.ctx, ast.Load):
            one = self.branches and bool(ONE.match(_dotted(node)))
            self._add(path, node, False, one)
        else:
            self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        before = len(self.found)
        for child in node.body:
            self.visit(child)
        caught = [ast.unparse(h.type) if h.type else "" for h in node.handlers]
        if any(MISSING.search(each) for each in caught):
            here = [
                each._replace(optional=True) for each in self.found[before:]
            ]
            self.found[before:] = here
        for child in [*node.handlers, *node.orelse, *node.finalbody]:
            self.visit(child)

    def _add(
        self, name: str, node: ast.expr, optional: bool, one: bool
    ) -> None:
        if "__" in name:
            return
        optional = (optional or name in self.asked) and name not in self.needed
        self.found.append(
            Lookup(name, self.file, node.lineno, optional, not one)
        )
