"""What the book promises of its chapters, its sources and its pages."""

import doctest
import importlib
import io
import json
import pkgutil
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import listing
import marks
import pytest
import stages

import notebooks

ROOT = marks.ROOT
LAST = marks.CHAPTERS[-1]
LISTING = re.compile(
    r"^[`:]{3,}\{listing\}[ ]*(\S+)\n((?::[\w-]+:.*\n)*)", re.M
)
# Content, which the bound on the machinery's size leaves out.
# Data, and the table of the sweep: neither makes states, pages or notebooks.
LISTS = {"probes.py", "inventory.py", "verdicts.py"}


def run(chapter, *command):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=stages.environment(chapter),
        capture_output=True,
        text=True,
        timeout=300,
    )


def accept(chapter, state):
    """Run a chapter's acceptance test at a state, in a process of its own."""
    test = f"tests/test_{chapter}.py"
    return run(state, "-m", "pytest", "-q", "-x", "--no-header", test)


# ------------------------------------------------------- 1, 2: the states


@pytest.mark.parametrize("chapter", stages.built())
def test_a_state_builds_and_imports(chapter):
    """Also from the root, where a folder is called openreg too."""
    code = "import torch, openreg; print(openreg.__file__, openreg._C.__file__)"
    done = run(chapter, "-c", code)
    assert done.returncode == 0, done.stderr
    for path in done.stdout.split():
        assert Path(path).parent == stages.folder(chapter) / "openreg"


@pytest.mark.parametrize("chapter", marks.written())
def test_the_acceptance_test_needs_its_chapter(chapter):
    """It passes here, and at the last state when it is collected itself."""
    assert (ROOT / f"tests/test_{chapter}.py").exists()
    before = accept(chapter, marks.previous(chapter))
    message = f"tests/test_{chapter}.py passes before its chapter:\n"
    assert before.returncode in (1, 2), message + before.stdout
    here = accept(chapter, chapter)
    assert here.returncode == 0, here.stdout + here.stderr


# ------------------------------------------------------------ 3: the pages


@pytest.mark.skipif(
    not (ROOT / "_build/html/index.html").exists(), reason="no guide built"
)
@pytest.mark.parametrize("chapter", marks.written())
def test_a_page_was_executed(chapter):
    page = f"chapters/{marks.PAGES[chapter].stem}"
    html = (ROOT / "_build" / "html" / f"{page}.html").read_text()
    cells = marks.PAGES[chapter].read_text().count("{code-cell}")
    shown = html.count('class="cell_input')
    assert 'class="cell_output' in html, f"{page}: no output; run make guide"
    assert shown <= cells
    store = ROOT / "_build" / "jupyter_cache" / "fingerprints.json"
    assert page in json.loads(store.read_text())


# ----------------------------------------------- 4: the sources and pages


def shown_lines():
    """Lines of each source that some listing shows: path, first, last."""
    pages = [*marks.PAGES.values(), *(ROOT / "docs").rglob("*.md")]
    for page in [*pages, ROOT / "index.md"]:
        for source, options in LISTING.findall(page.read_text()):
            path = ROOT / source
            name = re.search(r"^:region:[ ]*(\S+)", options, re.M)
            if name:
                yield path, *marks.find(path, name[1])
            elif ":diff:" not in options:
                yield path, 0, len(marks.parse(path).lines)


@pytest.mark.parametrize("chapter", marks.written())
def test_every_listing_is_found_and_every_emphasis(chapter):
    """The guide's build would say so too, a quarter of an hour later."""
    option = re.compile(r"^:([\w-]+):[ ]*(.*)$", re.M)
    for source, text in LISTING.findall(marks.PAGES[chapter].read_text()):
        options = dict(option.findall(text))
        cut = listing.listing(source, options, chapter)
        listing.emphasized(cut.text, options.get("emphasize"))


def test_every_region_is_shown():
    shown = list(shown_lines())
    dead = []
    for path in marks.sources():
        for key, (start, end) in marks.parse(path).spans.items():
            seen = any(
                p == path and a <= start and end <= b for p, a, b in shown
            )
            if key.split(":")[0] in marks.written() and not seen:
                dead.append(f"{marks.relative(path)}:{start}: [{key}]")
    assert not dead, "no page lists\n" + "\n".join(dead)


def test_every_file_is_shown_whole():
    """Each written page shows the files that its chapter adds or changes."""
    for chapter in marks.written():
        page = marks.PAGES[chapter]
        assert "```{files}" in page.read_text(), (
            f"{marks.relative(page)}: {{files}}"
        )
    for path in marks.sources():
        chapter = marks.CHAPTERS[marks.parse(path).first]
        if chapter in marks.written():
            assert listing.label(marks.relative(path), LAST), path


def test_marks_are_few():
    lines = found = 0
    for path in marks.sources():
        text = path.read_text().splitlines()
        lines += len(text)
        found += sum(bool(marks.MARK.fullmatch(line)) for line in text)
        found += sum(bool(marks.HEAD.fullmatch(line)) for line in text[:1])
    assert found < lines / 10, f"{found} of {lines} lines are marks"


# ------------------------------------------------------- 5: the notebooks


def test_the_notebooks_are_what_the_chapters_make():
    names = [marks.relative(p) for p in notebooks.stale(notebooks.generate())]
    assert not names, f"{', '.join(names)}: out of date; run make notebooks"


# ------------------------------------------- 6: the state and the package


def installed_modules():
    """The modules of the installed package: name and source."""
    package = importlib.import_module("openreg")
    for module in pkgutil.iter_modules(package.__path__):
        spec = importlib.util.find_spec(f"openreg.{module.name}")
        if spec.origin.endswith(".py"):
            yield spec.name, Path(spec.origin)


def test_the_last_state_is_the_installed_package():
    state = stages.texts(LAST)
    names = {"openreg/__init__.py"}
    for name, path in installed_modules():
        names.add(name.replace(".", "/") + ".py")
        text = [
            line
            for line in path.read_text().splitlines()
            if line.strip()
            and not marks.MARK.fullmatch(line)
            and not marks.HEAD.fullmatch(line)
            and not marks.STAND_IN.fullmatch(line)
        ]
        ours = state[name.replace(".", "/") + ".py"].splitlines()
        assert text == [line for line in ours if line.strip()], name
    assert names == {
        name for name in state if re.fullmatch(r"openreg/\w+\.py", name)
    }


def test_the_last_state_has_the_installed_libraries():
    installed = importlib.import_module("openreg._C")
    folder = stages.state(LAST) / "openreg"
    code = "import torch, openreg; print(sorted(dir(openreg._C)))"
    assert run(LAST, "-c", code).stdout.strip() == str(sorted(dir(installed)))

    def symbols(path):
        command = ["nm", "-D", "--defined-only", "--format=just-symbols", path]
        return set(
            re.findall(
                r"\bor[A-Z]\w+", subprocess.check_output(command, text=True)
            )
        )

    theirs = symbols(Path(installed.__file__).with_name("libopenreg.so"))
    assert theirs == symbols(folder / "libopenreg.so")
    assert theirs


@pytest.mark.parametrize("name", [name for name, _ in installed_modules()])
def test_the_examples_in_docstrings(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(
        module, extraglobs={"torch": sys.modules["torch"]}
    )
    assert not failed


# ---------------------------------------------------------------- and last


def test_an_exported_state_builds_by_itself(tmp_path):
    name = stages.built()[0]
    exported, target = tmp_path / "exported", tmp_path / "installed"
    stages.export(name, exported)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index"]
    pip += ["--no-deps", "--no-build-isolation", "--target", target, exported]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = stages.SITE.format(packages=marks.PACKAGES)
    (target / "sitecustomize.py").write_text(site)
    code = "import torch, openreg; print(openreg.__file__)"
    env = stages.environment(None) | {"PYTHONPATH": str(target)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(target / "openreg" / "__init__.py"), (
        done.stderr
    )


def code_lines(path):
    """Lines of a file that hold code: no blank, comment or docstring."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
    quiet |= {tokenize.DEDENT, tokenize.ENDMARKER}
    found, start = set(), True
    for token in tokenize.generate_tokens(
        io.StringIO(path.read_text()).readline
    ):
        if token.type in quiet:
            start = start or token.type == tokenize.NEWLINE
        elif not (start and token.type == tokenize.STRING):
            found |= set(range(token.start[0], token.end[0] + 1))
            start = False
    return len(found)


def test_the_machinery_stays_small():
    files = [*ROOT.glob("chapters/*.py"), *ROOT.glob("docs/_ext/*.py")]
    sizes = {p.name: code_lines(p) for p in files if p.name not in LISTS}
    assert sum(sizes.values()) < 900, sizes
