"""Build and open `openreg/` as it stands at the end of a chapter.

    python chapters/stages.py build [NAME ...]
    python chapters/stages.py export NAME DIR

A page opens its state in its first cell, ``stages.use("guards")``. A process
holds one state only, because PyTorch renames PrivateUse1 once.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path

import marks
import processes
from filelock import FileLock
from marks import CHAPTERS, ROOT, previous, region, relative, render

__all__ = ["region"]  # for pages

# torch is found, never imported: building must be quick, and a page must open
# its state first.
TORCH = Path(util.find_spec("torch").origin).parent
VERSION = metadata.version("torch")
PUBLIC = VERSION.partition("+")[0]
CXX = shlex.split(os.environ.get("CXX", "g++"))
DRIVER = "-std=c++20 -O1 -fPIC -fvisibility=hidden -pthread -Wall -Wextra"
DRIVER = [*DRIVER.split(), "-Werror", "-Wno-unused-parameter"]
HEADERS = [Path(sysconfig.get_paths()["include"]), TORCH / "include"]
HEADERS.append(TORCH / "include" / "torch" / "csrc" / "api" / "include")
CSRC = [f"-isystem{path}" for path in HEADERS]
CSRC.append(f"-ffile-prefix-map={TORCH}/=torch/")
FLAGS = {"driver": DRIVER, "csrc": [*DRIVER, *CSRC]}
LIBRARIES = {
    "libopenreg.so": ["-Wl,-soname,libopenreg.so", "-pthread"],
    "_C" + sysconfig.get_config_var("EXT_SUFFIX"): [
        *("-Lopenreg", f"-L{TORCH}/lib", "-Wl,--no-as-needed", "-lopenreg"),
        *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        *("-Wl,-rpath,$ORIGIN", f"-Wl,-rpath,{TORCH}/lib"),
    ],
}
STATES = ROOT / "_build" / "states"
OBJECTS = ROOT / "_build" / "objects"
INSTALLED = ROOT / "_build" / "cmake"  # where the installed package is built
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
POINT = re.compile(r'^(\w+ = )"([\w.]+:\w+)"$', re.M)  # of torch.backends
METADATA = "Metadata-Version: 2.1\nName: torch-openreg\n"

# Ahead of every other finder, an editable install's included, and of a folder
# called openreg where Python happens to start. What the state lacks must not
# be found elsewhere. Children run this file too: the state leads PYTHONPATH.
SITE = """\
import sys
from importlib.machinery import PathFinder
class StateFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {packages}:
            return None
        here = [__file__.rpartition("/")[0]]
        found = PathFinder.find_spec(name, path or here)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return found
sys.meta_path.insert(0, StateFinder)
"""

_opened: str | None = None


class BuildError(RuntimeError):
    """A state does not compile or link; carries the compiler's message."""


def built() -> list[str]:
    """The states that the guide needs: written chapters and the last."""
    return list(dict.fromkeys([*marks.written(), CHAPTERS[-1]]))


def folder(chapter: str | None) -> Path:
    """Where a state lies; None is the state before the first chapter."""
    return STATES / (marks.PAGES[chapter].stem if chapter else "00-nothing")


def texts(chapter: str | None, *, padded: bool = False) -> dict[str, str]:
    """Every file of a state: relative path and text."""
    paths = marks.sources() if chapter else []
    found = {relative(p): render(p, chapter, padded=padded) for p in paths}
    return {name: text for name, text in found.items() if text is not None}


@functools.cache
def compiler() -> str:
    asked = [*CXX, "-dumpfullversion", "-dumpmachine"]
    return shlex.join(CXX) + subprocess.check_output(asked, text=True)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def fingerprint(chapter: str | None) -> str:
    """Changes whenever what runs at a chapter changes."""
    tools = [Path(__file__).read_text(), compiler(), VERSION, sys.version]
    return digest(*tools, str(texts(chapter)))


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, and only when it changes."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(text)
        part.replace(path)


def generated(found: dict[str, str]) -> dict[str, str]:
    """The sources that a state's own program writes, once for each text."""
    program = "openreg/csrc/structured.py"
    if program not in found:
        return {}
    parts = [found[program], found[f"{program[:-2]}yaml"], VERSION]
    target = OBJECTS / f"structured-{digest(*parts)}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=OBJECTS) as temporary:
            place = Path(temporary) / "structured.py"
            place.write_text(parts[0])
            place.with_suffix(".yaml").write_text(parts[1])
            made = place.with_name("made")
            subprocess.run([sys.executable, place, made, "8"], check=True)
            made.rename(target)
    folder = program.removesuffix(".py")
    return {f"{folder}/{p.name}": p.read_text() for p in target.iterdir()}


def write_state(chapter: str | None) -> dict[str, str]:
    """Write a state's sources and its installed look; return the sources.

    The look is there even when it holds no entry point: it hides the installed
    package's, which torch would load.
    """
    found = texts(chapter, padded=True)
    found |= generated(found)
    root = folder(chapter)
    for old in (root / "openreg").rglob("*"):
        is_source = old.suffix in marks.MARKED
        if is_source and old.relative_to(root).as_posix() not in found:
            old.unlink()
    project = render(ROOT / "pyproject.toml", chapter or CHAPTERS[0])
    version = re.search(r'^version = "(.+)"', project, re.M)[1]
    points = "\n".join(map("".join, POINT.findall(project)))
    info = f"torch_openreg-{version}.dist-info"
    made = {
        "openreg/torch_version.txt": PUBLIC + "\n",
        "sitecustomize.py": SITE.format(packages=marks.PACKAGES),
        f"{info}/METADATA": f"{METADATA}Version: {version}\n",
        f"{info}/entry_points.txt": f"[torch.backends]\n{points}\n",
    }
    for name, text in (found | made).items():
        write(root / name, text)
    return found


def included(name: str, found: dict[str, str]) -> set[str]:
    """A file and the package's headers it includes, directly or not."""
    files = [name]
    for current in files:  # which grows
        for header in INCLUDE.findall(found[current]):
            near = os.path.normpath(os.path.join(current, "..", header))
            files += {header, near} & found.keys() - set(files)
    return set(files)


def object_path(name: str, found: dict[str, str]) -> Path:
    """Where the object of a source lies: its name says what it is made of."""
    made_of = [name, compiler(), VERSION, *FLAGS[name.split("/")[1]]]
    for part in sorted(included(name, found)):
        made_of += [part, found[part]]
    return OBJECTS / f"{Path(name).stem}-{digest(*made_of)}.o"


def borrow(objects: dict[str, Path], found: dict[str, str]) -> None:
    """Take over what the installed package's build has compiled.

    At the last state, and wherever a state agrees with it, the code is the
    package's own. An object older than its sources is not taken.
    """
    stamp = INSTALLED / "torch_version.txt"
    if not stamp.exists() or stamp.read_text().strip() != PUBLIC:
        return
    last = texts(CHAPTERS[-1], padded=True)
    made = {n: INSTALLED / n for n in generated(last)}
    last |= {n: path.read_text() for n, path in made.items() if path.exists()}
    agree = {name for name, text in found.items() if last.get(name) == text}
    for name, target in objects.items():
        folder = "driver" if "/driver/" in name else "_C"
        folder = "operators" if name in made else folder
        theirs = INSTALLED / "CMakeFiles" / f"{folder}.dir" / f"{name}.o"
        parts = included(name, found)
        if parts <= agree and theirs.exists() and not target.exists():
            origins = [made.get(part, ROOT / part) for part in parts]
            changed = max(origin.stat().st_mtime for origin in origins)
            if changed < theirs.stat().st_mtime:
                shutil.copyfile(theirs, target)


def produce(target: Path, arguments: list, root: Path, what: str) -> None:
    """Compile or link, unless it was done before."""
    if target.exists():
        return
    part = target.with_name(f".{target.name}.{root.name}")
    command = [*CXX, *map(str, arguments), "-o", str(part)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{what} fails at {root.name}:\n{done.stderr}")
    part.replace(target)
    print(f"  {what} ({root.name})", file=sys.stderr, flush=True)


def link(root: Path, objects: dict[str, Path], part: str, target: str) -> None:
    """Put a library into a state; states that agree share one file."""
    parts = [o for name, o in objects.items() if f"/{part}/" in name]
    if not parts:
        return
    arguments = ["-shared", *parts, *LIBRARIES[target]]
    made_of = digest(compiler(), *map(str, arguments))
    shared, path = OBJECTS / f"{made_of}-{target}", root / "openreg" / target
    produce(shared, arguments, root, target)
    if not path.exists() or not path.samefile(shared):
        path.unlink(missing_ok=True)
        path.hardlink_to(shared)


def build(*chapters: str | None) -> None:
    """Bring the folders of states up to date, all their files at once."""
    STATES.mkdir(parents=True, exist_ok=True)
    OBJECTS.mkdir(exist_ok=True)
    with FileLock(STATES / ".lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        states, compiled = {}, {}
        for chapter in chapters:
            found, root = write_state(chapter), folder(chapter)
            names = [name for name in found if name.endswith(".cpp")]
            states[root] = {name: object_path(name, found) for name in names}
            borrow(states[root], found)
            for name, target in states[root].items():
                flags = [*FLAGS[name.split("/")[1]], "-I.", "-c", name]
                compiled[target] = (target, flags, root, name)
        # Each is waited for, and the first error ends all that has not begun.
        list(pool.map(produce, *zip(*compiled.values(), strict=True)))
        for part, target in zip(FLAGS, LIBRARIES, strict=True):
            jobs = [(*state, part, target) for state in states.items()]
            list(pool.map(link, *zip(*jobs, strict=True)))


def state(chapter: str | None) -> Path:
    """The folder of a chapter's state, built if need be."""
    build(chapter)
    return folder(chapter)


def environment(chapter: str | None) -> dict[str, str]:
    """Environment variables of a process that holds a chapter's state."""
    old = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [path for path in old if path and not path.startswith(str(STATES))]
    path = os.pathsep.join([str(state(chapter)), *rest])
    return {**os.environ, "PYTHONPATH": path}


def use(chapter: str) -> None:
    """Open a chapter's state in this process, before torch is imported."""
    global _opened
    if _opened == chapter:
        return
    if _opened or "torch" in sys.modules:
        has = f"the state of {_opened!r}" if _opened else "torch imported"
        raise RuntimeError(
            f"This process has {has} already, and can hold one state only. "
            f"Restart it and call stages.use({chapter!r}) first."
        )
    os.environ.update(environment(chapter))
    sys.path.insert(0, str(folder(chapter)))
    runpy.run_path(str(folder(chapter) / "sitecustomize.py"))
    _opened = chapter
    python = sys.modules.get("IPython")
    if shell := python and python.get_ipython():
        states = {"before": previous(chapter), "fresh": chapter}
        for name, at in {**states, "finished": CHAPTERS[-1]}.items():
            magic = functools.partial(run_cell, at)
            shell.register_magic_function(magic, "cell", name)
        figures = shell.config.InlineBackend  # their look: matplotlibrc
        figures.figure_formats = {"svg"}
        figures.print_figure_kwargs = {"metadata": {"Date": None}}


def tidy(text: str) -> str:
    """Text without what differs between two runs or two machines."""
    text = re.sub(r"0x[0-9a-f]{5,}", "0x…", text)
    text = re.sub(r"\b(pid|process) \d+", r"\1 …", text)
    return re.sub(r"(?<![\w/:.])/(?:[^\s/:'\"]+/)+", "…/", text)


def sentence(name: str, message: str) -> str:
    """An error as the guide quotes it: its name and its first sentence."""
    if not message.strip():
        return f"{name}."
    first = re.split(r"(?<!e\.g)(?<!i\.e)\.\s|\n", message.strip())[0]
    return tidy(f"{name}: {first.rstrip('.:')}.")


@contextlib.contextmanager
def raises(kind: type[BaseException]):
    """Print the first sentence of the error that the block must end with."""
    name = kind.__name__
    try:
        yield
    except kind as error:
        print(sentence(type(error).__name__, str(error)))
    else:
        raise AssertionError(f"{name} was expected, nothing was raised")


def displaying(cell: str) -> str:
    """The code of a cell, made to show its last value as a notebook does."""
    tree = ast.parse(cell)
    if isinstance(last := tree.body[-1], ast.Expr):
        show = ast.parse("__import__('sys').displayhook", mode="eval").body
        last.value = ast.Call(show, [last.value], [])
    return ast.unparse(tree)


def python(env: dict[str, str], *arguments) -> subprocess.CompletedProcess:
    """Run Python itself anew in an environment."""
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True
    )


def run_cell(chapter: str | None, line: str, cell: str) -> None:
    """Run a cell in a new process at a state.

    The line of the magic names the error, warning or signal that must come,
    and settings of environment variables: ``RuntimeError NAME=value``. With
    the word ``new`` the interpreter starts and imports torch anew; else torch
    is there, see `processes`.
    """
    words = shlex.split(line)
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word and word != "new"]
    code, env = displaying(cell), environment(chapter) | settings
    new = "new" in words
    done = python(env, "-c", code) if new else processes.run(code, env)
    ended, message, said = "", "", done.stderr
    if done.returncode < 0:
        ended, message = signal.Signals(-done.returncode).name, said
    elif done.returncode:
        trace = said.rpartition("Traceback (most")[2]
        last = re.search(r"^(?:\w+\.)*(\w+)(?:: (.*))?$", trace, re.M)
        ended, message = last.groups("") if last else ("exit", "")
    elif found := re.search(r"\b(\w+Warning): (.*)", said):
        ended, message = found.groups()
    if [ended] != (names or [""]):
        what = f"expected {names}, the process ended with {ended or 'no error'}"
        raise AssertionError(f"{what}\n{done.stdout}{said}")
    print(tidy(done.stdout), end="")
    if ended:
        print(sentence(ended, message))
    else:
        print(tidy(said), end="", file=sys.stderr)


def finished(code: str) -> str:
    """What a program prints that runs with the finished package."""
    done = processes.run(code, environment(CHAPTERS[-1]))
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def export(chapter: str, target: Path) -> None:
    """Write a state as a folder of its own that `pip install` builds."""
    if target.exists() and any(target.iterdir()):
        sys.exit(f"{target} is not empty; name a new or an empty folder.")
    for name, text in texts(chapter).items():
        write(target / name, text)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    print("Build it with: pip install --no-build-isolation", target.absolute())


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case "build", *names:
                build(*names or built())
            case "export", name, target:
                export(name, Path(target))
            case _:
                sys.exit(__doc__)
    except (BuildError, marks.MarkError) as error:
        sys.exit(str(error))
