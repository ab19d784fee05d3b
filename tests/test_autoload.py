"""What `import torch` does when the backend is installed, sound or broken."""

import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import marks
import processes
import pytest
import stages

ROOT = Path(__file__).resolve().parent.parent
SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CPU_WORK = """
from torch.utils.checkpoint import checkpoint
x = torch.ones(2, requires_grad=True)
checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
assert not torch.accelerator.is_available()
assert torch.accelerator.current_accelerator() is None
print("cpu works")
"""


def run(code, path=None, new=False, **environment):
    """The finished process; `path` goes before everything else.

    With `new`, the interpreter starts and imports torch itself; else it was
    forked where torch is imported, and loads the backends on its own.
    """
    inherited = {k: v for k, v in os.environ.items() if k != SWITCH}
    if path is not None:
        inherited["PYTHONPATH"] = str(path)
    env = inherited | environment
    if not new:
        return processes.run(code, env)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def output(code, path=None, new=False, **environment):
    process = run(code, path, new, **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.fixture
def copy(tmp_path):
    """A copy of the package under test, that a process finds first."""
    library = Path(importlib.util.find_spec("openreg._C").origin)
    for package in marks.PACKAGES:
        source = Path(importlib.util.find_spec(package).origin).parent
        target = tmp_path / package
        shutil.copytree(
            source,
            target,
            ignore=lambda _, names: [
                n for n in names if n in ("csrc", "driver", "__pycache__")
            ],
        )
    for name in (library.name, "libopenreg.so", "torch_version.txt"):
        shutil.copy(library.with_name(name), tmp_path / "openreg" / name)
    site = stages.SITE.format(packages=marks.PACKAGES)
    (tmp_path / "sitecustomize.py").write_text(site)
    points = importlib.metadata.entry_points(group="torch.backends")
    install(tmp_path, "torch-openreg", points["openreg"].value, "openreg")
    return tmp_path


def install(folder, name, value, point=None):
    """Give a folder the look of an installed package with an entry point."""
    info = folder / f"{name.replace('-', '_')}-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n"
    )
    (info / "entry_points.txt").write_text(
        f"[torch.backends]\n{point or name} = {value}\n"
    )


@pytest.fixture
def plugin(tmp_path):
    """Returns a function that makes a foreign plug-in that runs some code."""

    def make(code):
        folder = tmp_path / "foreign"
        install(folder, "foreign", "foreign_start:load")
        body = "".join(f"    {line}\n" for line in code.splitlines())
        (folder / "foreign_start.py").write_text(f"def load():\n{body}")
        return folder

    return make


def beside(folder):
    """The search path with a folder after what the test itself runs on."""
    return os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(folder)])
    )


# --------------------------------------------------------------- loading


@pytest.mark.parametrize(
    "order",
    [
        "import torch",
        "import openreg",
        "import torch_openreg",
        "import torch, torch_openreg",
        "from torch_openreg import device_count",
        "import torch.nn",
        "import openreg.devices",
    ],
)
def test_every_order_of_import_ends_with_a_device(order):
    code = f"{order}\nimport torch\nprint(torch.device('openreg', 1))\n"
    code += "print(torch.openreg.device_count())"
    process = run(code, new=True)
    assert process.stdout.split() == ["openreg:1", "2"], process.stderr
    assert process.stderr == ""


def test_both_names_are_one_module():
    code = "import torch, openreg, torch_openreg\n"
    code += "print(openreg is torch_openreg is torch.openreg)"
    assert output(code) == "True"


def test_loading_starts_no_device():
    assert output("import torch; print(torch.openreg.is_initialized())") == (
        "False"
    )


def test_nothing_is_left_in_the_namespace_of_torch():
    code = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
before = set(vars(torch))
torch._import_device_backends()
print(sorted(set(vars(torch)) - before))
"""
    assert output(code, new=True) == "['openreg']"


def test_loading_brings_nothing_but_the_package():
    code = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
before = set(sys.modules)
torch._import_device_backends()
new = set(sys.modules) - before
print(sorted(n for n in new if "openreg" not in n), "openreg" in new)
"""
    assert output(code, new=True) == "[] True"


# ------------------------------------------------------------- the switch


@pytest.mark.parametrize("value", ["0", "no", ""])
def test_the_switch_turns_it_off_and_the_package_can_still_be_imported(value):
    code = """
import torch
print(hasattr(torch, "openreg"), torch._C._get_privateuse1_backend_name())
import openreg
print(torch.device("openreg"))
"""
    found = output(code, new=True, **{SWITCH: value}).splitlines()
    assert found == ["False privateuseone", "openreg"]


# ------------------------------------------------------------- failures


def lose_the_driver(copy):
    (copy / "openreg" / "libopenreg.so").unlink()
    return "libopenreg.so: cannot open shared object file"


def damage_the_library(copy):
    next((copy / "openreg").glob("_C*.so")).write_bytes(b"damaged")
    return "file too short"


def change_the_version(copy):
    (copy / "openreg" / "torch_version.txt").write_text("2.1.0\n")
    return "built for torch 2.1.0"


def break_the_python_code(copy):
    (copy / "openreg" / "devices.py").write_text("import no_such_module\n")
    return "no_such_module"


BREAKAGES = [
    lose_the_driver,
    damage_the_library,
    change_the_version,
    break_the_python_code,
]


@pytest.fixture(params=BREAKAGES, ids=lambda f: f.__name__)
def broken(request, copy):
    return copy, request.param(copy)


def test_the_copy_is_sound_until_it_is_broken(copy):
    code = "import torch; print(torch.openreg.__file__)"
    assert output(code, copy) == str(copy / "openreg" / "__init__.py")


def test_a_broken_backend_is_a_warning_that_names_the_cause(broken):
    copy, cause = broken
    code = "import torch; print(torch.ones(2).sum().item())"
    process = run(code, copy, new=True)
    assert process.stdout == "2.0\n", process.stderr
    assert "RuntimeWarning: openreg could not be loaded" in process.stderr
    assert cause in process.stderr
    assert f"{SWITCH}=0" in process.stderr


@pytest.mark.parametrize(
    "damage", [lose_the_driver, damage_the_library, change_the_version]
)
def test_a_broken_backend_leaves_torch_as_it_was(damage, copy):
    damage(copy)
    assert output(f"import torch{CPU_WORK}", copy) == "cpu works"


def test_who_asks_for_a_broken_backend_gets_the_cause(broken):
    copy, cause = broken
    process = run("import openreg", copy, **{SWITCH: "0"})
    assert process.returncode == 1
    assert "Error: " in process.stderr.splitlines()[-1]
    assert cause in process.stderr.splitlines()[-1]


def test_it_can_be_asked_twice(copy):
    cause = lose_the_driver(copy)
    code = """
import torch
for _ in range(2):
    try:
        import openreg
    except ImportError as error:
        print(error)
"""
    assert output(code, copy).count(cause) == 2


def test_a_driver_that_cannot_be_used_does_not_disturb_the_import():
    code = f"import torch{CPU_WORK.split('assert')[0]}print('fine')"
    process = run(code, OPENREG_DEVICE_COUNT="many")
    assert process.stdout == "fine\n", process.stderr
    code = "import torch; torch.openreg.device_count()"
    assert (
        "OPENREG_DEVICE_COUNT" in run(code, OPENREG_DEVICE_COUNT="many").stderr
    )


def test_no_device_is_no_failure():
    code = "import torch; print(torch.openreg.is_available(), torch.ones(1))"
    process = run(code, OPENREG_DEVICE_COUNT="0")
    assert process.stdout == "False tensor([1.])\n"
    assert process.stderr == ""


# ----------------------------------------------------- other plug-ins


def test_a_failing_plug_in_is_named_with_cause_and_switch(plugin):
    folder = plugin("raise ImportError('libvendor.so: no vendor_init')")
    process = run("import torch", beside(folder))
    assert process.returncode == 1
    assert "libvendor.so: no vendor_init" in process.stderr
    assert f"{SWITCH}=0" in process.stderr


def test_a_plug_in_can_use_torch_and_the_device(plugin):
    # It imports the backend itself: torch calls the plug-ins in the order of
    # sys.path, so this one may come first.
    folder = plugin(
        "import torch, openreg\n"
        "with torch.autocast('cpu'): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "torch.compiler.disable(lambda: 0)\n"
        "torch.library.define('foreign::op', '(Tensor x) -> Tensor')\n"
        "print(torch.openreg.device_count())"
    )
    assert output("import torch", beside(folder)) == "2"


def test_a_second_backend_is_told_apart(plugin):
    folder = plugin("import torch\ntorch.utils.rename_privateuse1_backend('o')")
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\nimport torch\n"
    code += "print(torch.device('o'), hasattr(torch, 'openreg'))"
    process = run(code, new=True)
    assert process.stdout == "o False\n", process.stderr
    assert "'o' has taken it" in process.stderr


# ------------------------------------------------------------ packaging


def test_torch_can_be_found_without_loading_a_broken_backend(copy):
    lose_the_driver(copy)
    code = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
print(os.path.isdir(torch.utils.cmake_prefix_path))
"""
    process = run(code, copy, new=True)
    assert (process.stdout, process.stderr) == ("True\n", "")


def test_the_build_itself_imports_no_torch():
    for name in ("CMakeLists.txt", "cmake/torch_pin.py"):
        text = (ROOT / name).read_text()
        assert "import torch" not in text.replace("import torch_pin", ""), name


def test_the_metadata_name_one_release_line_of_torch():
    line = ".".join(stages.PUBLIC.split(".")[:2])
    pin = runpy.run_path(str(ROOT / "cmake" / "torch_pin.py"))
    made = pin["dynamic_metadata"]({}, {"name": "torch-openreg"})
    (requirement,) = made["dependencies"]
    assert f"=={line}.*" in requirement
    installed = importlib.metadata.requires("torch-openreg")
    if installed is not None:  # a state's folder has no dependencies
        needs = [n for n in installed if n.startswith("torch")]
        assert any(f"=={line}.*" in need for need in needs), installed
