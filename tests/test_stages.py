"""The marks and the states, on small books of their own."""

import os
import subprocess
import sys

import marks
import pytest
import stages
from filelock import FileLock

GROWS = """\
// Chapter: one
#include "openreg/a.h"

struct Hooks {
  int first();

  // [two: second]
  int second();
  // [/two: second]
};

// [one: stub until two]
//| int later();
// [/one: stub]

// [one: whole]
int f() {
  // [three: inner]
  return __LINE__;
  // [/three: inner]
}
// [/one: whole]
"""


@pytest.fixture
def book(tmp_path, monkeypatch):
    """Returns a function that writes files below an empty root."""
    pages = {}
    for number, name in enumerate(("one", "two", "three"), 1):
        pages[name] = tmp_path / "chapters" / f"{number:02d}-{name}.md"
    monkeypatch.setattr(marks, "PAGES", pages)
    monkeypatch.setattr(marks, "written", lambda: ["one", "three"])
    for module in (marks, stages):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "CHAPTERS", list(pages))
    monkeypatch.setattr(stages, "STATES", tmp_path / "_build" / "states")
    monkeypatch.setattr(stages, "OBJECTS", tmp_path / "_build" / "objects")

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    write("pyproject.toml", '[project]\nname = "x"\nversion = "1.2"\n')
    return write


@pytest.fixture
def grows(book):
    return book("openreg/grows.cpp", GROWS)


def test_a_file_is_not_there_before_its_chapter(book):
    path = book("openreg/late.py", "# Chapter: two\nx = 1\n")
    assert marks.render(path, "one") is None
    assert marks.render(path, "two") == "x = 1\n"


def test_a_region_is_there_from_its_chapter_on(grows):
    assert "int second();" not in marks.render(grows, "one")
    assert "int second();" in marks.render(grows, "two")
    assert "int second();" in marks.render(grows, "three")


def test_a_stand_in_goes_when_its_time_comes(grows):
    assert "int later();" in marks.render(grows, "one")
    assert "int later();" not in marks.render(grows, "two")


def test_no_mark_and_no_double_blank_is_left(grows):
    for chapter in marks.CHAPTERS:
        text = marks.render(grows, chapter)
        assert "// [" not in text
        assert "Chapter:" not in text
        assert "\n\n\n" not in text
        assert "\n\n}" not in text


def test_every_line_keeps_its_number(grows):
    for chapter in marks.CHAPTERS:
        lines = marks.render(grows, chapter, padded=True).splitlines()
        assert lines[0] == '#line 2 "openreg/grows.cpp"'
        for line, source in zip(lines[1:], GROWS.splitlines()[1:], strict=True):
            assert line in ("", source.removeprefix("//| "))


def test_diagnostics_name_the_source(grows, tmp_path):
    text = marks.render(grows, "three", padded=True).replace("return", "oops")
    (tmp_path / "copy.cpp").write_text(text.replace("#include", "// "))
    command = ["g++", "-fsyntax-only", "copy.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "openreg/grows.cpp:19:" in done.stderr


def test_a_region_as_it_stands_at_a_chapter(grows):
    assert marks.region(grows, "whole", "one") == "int f() {\n}\n"
    inner = "  return __LINE__;\n"
    assert marks.region(grows, "inner", "three") == inner
    assert marks.region(grows, "whole", "three") == f"int f() {{\n{inner}}}\n"
    assert marks.scope(grows, "inner") == "f"
    assert marks.scope(grows, "second") == "Hooks"
    assert marks.scope(grows, "whole") == ""


def test_a_region_that_is_not_there_is_an_error(grows):
    with pytest.raises(marks.MarkError, match=r"grows\.cpp: no regions .*'no'"):
        marks.region(grows, "no", "one")
    with pytest.raises(marks.MarkError, match=r"grows\.cpp:7: region 'second'"):
        marks.region(grows, "second", "one")


def test_a_name_that_two_chapters_use_needs_the_chapter(book):
    twice = "".join(
        f"# [{chapter}: x]\n{chapter} = 1\n# [/{chapter}: x]\n"
        for chapter in ("one", "two")
    )
    path = book("openreg/twice.py", f"# Chapter: one\n{twice}")
    assert marks.region(path, "two/x", "two") == "two = 1\n"
    with pytest.raises(marks.MarkError, match="2 regions called 'x'"):
        marks.region(path, "x", "two")


def test_the_diff_between_two_chapters(grows):
    lines = marks.diff(grows, "one", "two").splitlines()
    assert "+  int second();" in lines
    assert "-int later();" in lines
    assert not marks.diff(grows, "one", "one")
    assert marks.diff(grows, None, "one").count("\n+") == 10


def test_a_chapter_changes_files_since_the_last_written_one(grows, book):
    book("openreg/new.py", "# Chapter: two\nx = 1\n")
    changed = {path.name: old for path, old, _ in marks.changed("three")}
    assert changed["new.py"] is None
    assert "int later();" in changed["grows.cpp"]
    assert "pyproject.toml" not in changed


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("x = 1\n", 1, "first line"),
        ("", 1, "first line"),
        ("# Chapter: ten\n", 1, "no chapter is called 'ten'"),
        ("# Chapter: one\n# [ten: a]\n# [/ten: a]\n", 2, "'ten'"),
        ("# Chapter: one\n# [two: a until ten]\n", 2, "'ten'"),
        ("# Chapter: one\n\n# [two: a]\n", 3, "never closed"),
        ("# Chapter: one\n# [/two: a]\n", 2, "inside 'openreg/bad.py'"),
        (
            "# Chapter: one\n# [one: a]\n# [one: b]\n# [/one: a]\n",
            4,
            "inside 'one: b'",
        ),
        ("# Chapter: one\n# [one: a]\n# [one: a]\n", 3, "opened twice"),
        ("# Chapter: two\n# [one: a]\n", 2, "before it begins"),
        ("# Chapter: one\n# [two: a until one]\n", 2, "before it begins"),
        ("# Chapter: one\n# [one: a until two]\nx\n", 3, "are comments"),
        ("# Chapter: one\n#[two: a]\n", 2, "not a mark"),
        ("# Chapter: one\n# [two:a]\n", 2, "not a mark"),
        ("# Chapter: one\n# [two: a b]\n", 2, "not a mark"),
    ],
)
def test_a_bad_mark_is_named_with_its_place(book, text, line, message):
    path = book("openreg/bad.py", text)
    with pytest.raises(marks.MarkError) as error:
        marks.parse(path)
    assert str(error.value).startswith(f"openreg/bad.py:{line}: ")
    assert message in str(error.value)


def test_an_object_depends_on_headers_of_headers(book):
    book("openreg/driver/a.cpp", '// Chapter: one\n#include "b.h"\n')
    book(
        "openreg/driver/b.h", '// Chapter: one\n#include "openreg/driver/c.h"\n'
    )
    book("openreg/driver/c.h", "// Chapter: one\nint c;\n")
    book("openreg/driver/d.h", "// Chapter: one\nint d;\n")
    name = "openreg/driver/a.cpp"

    def key():
        return stages.object_path(name, stages.texts("one", padded=True))

    first = key()
    book("openreg/driver/d.h", "// Chapter: one\nint other;\n")
    assert key() == first
    book("openreg/driver/c.h", "// Chapter: one\nint other;\n")
    assert key() != first


def test_states_share_what_they_agree_on(book, capsys):
    book("openreg/driver/a.cpp", "// Chapter: one\nint a() { return 1; }\n")
    book("openreg/driver/b.cpp", "// Chapter: two\nint b() { return 2; }\n")
    stages.build("one", "three")
    said = capsys.readouterr().err
    assert said.count("openreg/driver/a.cpp") == 1
    assert said.count("openreg/driver/b.cpp") == 1
    stages.build("three")
    assert capsys.readouterr().err == ""


def test_a_state_borrows_what_the_package_has_compiled(book, monkeypatch):
    """Where the text is the package's and the object is the newer of both."""
    source = book("openreg/driver/a.cpp", "// Chapter: one\nint a;\n")
    monkeypatch.setattr(stages, "INSTALLED", stages.STATES.parent / "cmake")
    theirs = stages.INSTALLED / "CMakeFiles/driver.dir/openreg/driver/a.cpp.o"
    stages.write(stages.INSTALLED / "torch_version.txt", stages.PUBLIC)

    def borrowed(text):
        found = stages.texts("one", padded=True)
        target = stages.STATES.parent / text
        stages.borrow({"openreg/driver/a.cpp": target}, found)
        return target.exists() and target.read_text()

    assert not borrowed("none")
    stages.write(theirs, "object")
    assert borrowed("newer") == "object"
    later = theirs.stat().st_mtime + 1
    os.utime(source, (later, later))
    assert not borrowed("older")
    os.utime(theirs, (later + 1, later + 1))
    assert borrowed("again") == "object"
    book(
        "openreg/driver/a.cpp",
        "// Chapter: one\nint a;\n// [three: b]\nint b;\n// [/three: b]\n",
    )
    os.utime(source, (later + 0.5, later + 0.5))
    assert not borrowed("other")
    stages.write(stages.INSTALLED / "torch_version.txt", "2.0")
    assert not borrowed("torch")


def test_a_file_that_is_gone_leaves_the_state(book):
    path = book("openreg/gone.py", "# Chapter: one\n")
    state = stages.state("one")
    assert (state / "openreg" / "gone.py").exists()
    path.unlink()
    stages.build("one")
    assert not (state / "openreg" / "gone.py").exists()


def test_a_failing_compile_shows_the_compilers_message(book):
    book("openreg/driver/a.cpp", "// Chapter: one\nint a = nonsense;\n")
    with pytest.raises(stages.BuildError) as error:
        stages.build("one")
    assert "openreg/driver/a.cpp:2:" in str(error.value)
    assert "nonsense" in str(error.value)


def test_a_warning_fails_the_compile(book):
    book(
        "openreg/driver/a.cpp",
        "// Chapter: one\nstatic int a() { return 1; }\n",
    )
    with pytest.raises(stages.BuildError, match="unused"):
        stages.build("one")


def test_a_build_waits_for_another(book, tmp_path):
    book("openreg/x.py", "# Chapter: one\n")
    stages.build("one")
    code = "import sys, filelock; filelock.FileLock(sys.argv[1], 0).acquire()"
    with FileLock(stages.STATES / ".lock"):
        lock = str(stages.STATES / ".lock")
        done = subprocess.run([sys.executable, "-c", code, lock], check=False)
    assert done.returncode != 0


def test_a_fingerprint_follows_only_its_own_chapter(book):
    book("openreg/x.py", "# Chapter: one\nx = 1\n")
    first, second = map(stages.fingerprint, ("one", "two"))
    text = "# Chapter: one\nx = 1\n# [two: more]\ny = 2\n# [/two: more]\n"
    book("openreg/x.py", text)
    assert stages.fingerprint("one") == first
    assert stages.fingerprint("two") != second


def test_a_state_hides_every_other_openreg(book, tmp_path, monkeypatch):
    book("openreg/__init__.py", "# Chapter: two\nwho = 'state'\n")
    book("openreg/late.py", "# Chapter: three\n")
    book("elsewhere/openreg/__init__.py", "who = 'other'\n")
    monkeypatch.chdir(tmp_path / "elsewhere")

    def run(chapter, code):
        command = [sys.executable, "-c", code]
        env = stages.environment(chapter)
        return subprocess.run(command, env=env, capture_output=True, text=True)

    assert run("two", "import openreg; print(openreg.who)").stdout == "state\n"
    for code in ("import openreg", "import torch_openreg"):
        assert "ModuleNotFoundError: No module" in run("one", code).stderr
    assert (
        "No module named 'openreg.late'"
        in run("two", "import openreg.late").stderr
    )


def test_autoload_finds_the_state_and_nothing_installed(book):
    points = (
        '[project.entry-points."torch.backends"]\nopenreg = "openreg:load"\n'
    )
    project = '[project]\nname = "x"\nversion = "1.2"\n\n'
    book(
        "pyproject.toml",
        f"{project}# [two: points]\n{points}# [/two: points]\n",
    )
    book("openreg/__init__.py", "# Chapter: one\n")
    code = (
        "from importlib.metadata import entry_points, version\n"
        "found = entry_points(group='torch.backends')\n"
        "print([p.value for p in found if p.name == 'openreg'])\n"
        "print(version('torch-openreg'))"
    )

    def run(chapter):
        command = [sys.executable, "-c", code]
        env = stages.environment(chapter)
        return subprocess.check_output(command, env=env, text=True).split("\n")

    assert run("one")[:2] == ["[]", "1.2"]
    assert run("two")[:2] == ["['openreg:load']", "1.2"]


def test_raises_prints_the_first_sentence(capsys):
    with stages.raises(ValueError):
        raise ValueError("Bad x at 0x7f0011223344, e.g. /a/b/c.py. Long story.")
    said = capsys.readouterr().out
    assert said == "ValueError: Bad x at 0x…, e.g. …/c.py.\n"


def test_raises_wants_the_error_it_names():
    nothing = pytest.raises(AssertionError, match="ValueError was expected")
    with nothing, stages.raises(ValueError):
        pass
    with pytest.raises(KeyError), stages.raises(ValueError):
        raise KeyError("x")


@pytest.mark.parametrize(
    ("line", "cell", "said"),
    [
        ("", "print(1)\n2", "1\n2\n"),
        ("", "x = 3", ""),
        ("A=b", "import os\nos.environ['A']", "'b'\n"),
        ("ValueError", "raise ValueError('Bad. Long.')", "ValueError: Bad.\n"),
        ("KeyError", "print(1)\n{}[2]\nprint(3)", "1\nKeyError: 2.\n"),
        (
            "UserWarning",
            "import warnings\nwarnings.warn('Old. Long.')",
            "UserWarning: Old.\n",
        ),
        (
            "SIGSEGV",
            "import ctypes, os\nos.write(2, b'Fault at 0x12345.')\n"
            "ctypes.string_at(0)",
            "SIGSEGV: Fault at 0x….\n",
        ),
    ],
)
def test_a_cell_in_a_new_process(capsys, line, cell, said):
    stages.run_cell(None, line, cell)
    captured = capsys.readouterr()
    assert captured.out == said
    assert captured.err == ""


@pytest.mark.parametrize(
    ("line", "cell"),
    [
        ("", "raise ValueError('x')"),
        ("", "import sys\nsys.exit(3)"),
        ("", "import warnings\nwarnings.warn('x')"),
        ("ValueError", "print(1)"),
        ("ValueError", "raise KeyError('ValueError: x')"),
        ("ValueError", "try: 1/0\nexcept Exception: raise KeyError('x')"),
        ("UserWarning", "raise UserWarning('x') if 0 else KeyError('x')"),
        ("SIGABRT", "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)"),
    ],
)
def test_a_cell_that_ends_another_way_fails(line, cell):
    with pytest.raises(AssertionError, match="the process ended with"):
        stages.run_cell(None, line, cell)


def test_a_process_opens_one_state(book, tmp_path):
    book("openreg/__init__.py", "# Chapter: one\n")
    stages.build("one")
    code = "import stages, sys; sys.modules['torch'] = 1; stages.use('devices')"
    chapters = os.path.dirname(stages.__file__)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=chapters, capture_output=True, text=True)
    assert "This process has torch imported already" in done.stderr


def test_export_refuses_a_folder_in_use(book, tmp_path):
    book("full/x", "")
    with pytest.raises(SystemExit, match="full is not empty"):
        stages.export("one", tmp_path / "full")


def test_export_leaves_no_mark(book, grows, tmp_path):
    for name in ("README.md", "LICENSE"):
        book(name, "")
    stages.export("two", tmp_path / "new")
    text = (tmp_path / "new" / "openreg" / "grows.cpp").read_text()
    assert text == marks.render(grows, "two")
