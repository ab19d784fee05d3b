"""The build's promises: one torch release a wheel, and errors that help."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH = importlib.metadata.version("torch")

sys.path.insert(0, str(ROOT / "cmake"))

import torch_pin  # noqa: E402


def torch_requirement() -> str:
    required = importlib.metadata.requires("torch_openreg")
    [found] = [text for text in required if re.match(r"torch\W", text)]
    return found


def test_the_installed_package_depends_on_the_release_it_was_built_for():
    major, minor = TORCH.split(".")[:2]
    assert f"=={major}.{minor}.*" in torch_requirement().split("torch")[1]


@pytest.mark.parametrize(
    ("torch", "pin"),
    [
        ("2.13.0+cpu", "==2.13.*"),
        ("2.14.1", "==2.14.*"),
        ("2.15.0.dev20260901+cu130", "==2.15.*"),
    ],
)
def test_the_pin_is_the_release_line_of_the_torch_in_use(
    monkeypatch, torch, pin
):
    monkeypatch.setattr(torch_pin, "version", lambda name: torch)
    [required] = torch_pin.dynamic_metadata({}, {})["dependencies"]
    assert required == f"torch{torch_pin.RANGE},{pin}"


@pytest.mark.parametrize("torch", ["2.12.1", "2.16.0"])
def test_a_torch_that_the_sources_do_not_support_is_refused(monkeypatch, torch):
    monkeypatch.setattr(torch_pin, "version", lambda name: torch)
    with pytest.raises(RuntimeError, match=re.escape(f"torch {torch} is")):
        torch_pin.dynamic_metadata({}, {"name": "torch-openreg"})


def test_the_build_asks_for_the_range_that_the_metadata_names():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"torch{torch_pin.RANGE}"' in text.partition("[project]")[0]


def import_built_for(torch: str, folder: Path) -> subprocess.CompletedProcess:
    """Import a copy of the package whose library was built for `torch`.

    The library is not one that could be opened: the import has to end before.
    """
    package = folder / "openreg"
    shutil.copytree(
        ROOT / "openreg", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (package / f"_C{suffix}").write_text("not a library")
    (package / "torch_version.txt").write_text(f"{torch}\n")
    code = f"""
import sys
from importlib.machinery import PathFinder
sys.meta_path.insert(0, PathFinder)  # ahead of an editable install's finder
sys.path.insert(0, {str(folder)!r})
import openreg
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("built_for", ["2.12.0", "2.99.1"])
def test_another_torch_than_the_one_built_for_is_named(tmp_path, built_for):
    process = import_built_for(built_for, tmp_path)
    last = process.stderr.strip().splitlines()[-1]
    assert process.returncode == 1
    assert last.startswith("ImportError: openreg was built for"), last
    assert f"torch {built_for} " in last
    assert f"torch {TORCH.split('+')[0]}" in last


def test_a_patch_release_of_the_same_line_passes_the_check(tmp_path):
    line = ".".join(TORCH.split(".")[:2])
    process = import_built_for(f"{line}.99", tmp_path)
    assert "built for" not in process.stderr
    assert "invalid ELF header" in process.stderr or (
        "file too short" in process.stderr
    )


def fake_python(folder: Path, refuses: str) -> Path:
    """An interpreter that fails when its arguments contain a text.

    It never makes an environment, so a check that lets it pass ends there.
    """
    script = folder / "python3"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *"{refuses}"* | *-m*) exit 3;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("refuses", "compiler", "advice"),
    [
        ("version_info", "g++", "Python 3.10 or newer: apt install python3"),
        ("ensurepip", "g++", "apt install python3-venv"),
        ("get_path", "g++", "apt install python3-dev"),
        ("nothing", "/no/such/g++", "apt install g++"),
        ("nothing", "false", "apt install g++"),
    ],
)
@pytest.mark.parametrize("target", ["guide", "test"])
def test_what_the_machine_lacks_is_said_in_one_line(
    tmp_path, refuses, compiler, advice, target
):
    settings = [
        f"PYTHON={fake_python(tmp_path, refuses)}",
        f"CXX={compiler}",
        f"VENV={tmp_path / 'venv'}",
    ]
    process = subprocess.run(
        ["make", "-C", str(ROOT), target, *settings],
        capture_output=True,
        text=True,
    )
    said = [
        line
        for line in process.stderr.splitlines()
        if not line.startswith("make")
    ]
    assert process.returncode != 0
    assert len(said) == 1, said
    assert said[0].startswith("OpenReg needs ")
    assert advice in said[0]
    assert "Creating" not in process.stdout


def test_make_alone_lists_every_target():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", text, re.M)[1].split())
    shown = subprocess.check_output(["make", "-C", str(ROOT)], text=True)
    listed = set(re.findall(r"^make (\w+)  ", shown, re.M))
    assert targets - {"help"} == listed
