"""What `torch.openreg` offers is what others look up, and does what it says."""

import ast
import inspect
import operator
import os
import re
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path

import driver
import marks
import needs
import processes
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import openreg
from openreg import _C

sys.path.insert(0, str(marks.ROOT / "chapters" / "scripts"))
import contract
import lookups

operators = needs.operators
PACKAGE = Path(openreg.__file__).parent
INSTALLED = PACKAGE == marks.ROOT / "openreg"  # else a chapter's state


def run(code, **environment):
    """What a process of its own prints; it must end well."""
    code = f"import torch, openreg\n{textwrap.dedent(code)}"
    process = processes.run(code, os.environ | environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.fixture(scope="module")
def table():
    return {row.name: row for row in contract.rows()}


# ------------------------------------------------------------------ the table


def test_every_name_is_there_or_decided_about(table):
    gaps = [row for row in table.values() if not row.ours]
    assert not gaps, contract.markdown(gaps)


def test_what_torch_cannot_do_without_is_there(table):
    needed = {name: row for name, row in table.items() if row.required}
    assert len(needed) > 20
    left_out = {
        name
        for name, row in needed.items()
        if row.ours != "yes" and not row.ours.startswith("chapter ")
    }
    assert left_out == {"set_rng_ctx", "unset_rng_ctx"}  # of another device


def test_signatures_are_those_of_cuda_or_the_listed_ones(table):
    listed = {
        name: entry["ours"]
        for name, entry in contract.reviewed()["differs"].items()
    }
    differing = {}
    for name in table:
        get = operator.attrgetter(name)
        try:
            ours, theirs = get(torch.openreg), get(torch.cuda)
        except AttributeError:
            continue
        wanted = contract.signature(theirs) if callable(theirs) else None
        if wanted is not None and contract.signature(ours) != wanted:
            differing[name] = contract.signature(ours)
    assert differing == listed


def test_decisions_are_up_to_date(table):
    decided = contract.reviewed()
    here = {name for name, row in table.items() if row.ours == "yes"}
    assert not here & {n for n in decided["left-out"] if "*" not in n}
    for kind in ("left-out", "later", "without"):
        for pattern in decided[kind]:
            assert contract.fnmatch.filter(table, pattern), (kind, pattern)
    assert set(decided["later"].values()) <= set(marks.CHAPTERS)
    assert all(entry["why"] for entry in decided["differs"].values())


def test_a_missing_name_shows(table):
    absent = {"can_device_access_peer", "device_count", "memory._snapshot"}

    class Less:
        def __init__(self, module, path=""):
            self.module, self.path = module, path

        def __getattr__(self, name):
            if self.path + name in absent:
                raise AttributeError(name)
            found = getattr(self.module, name)
            if inspect.ismodule(found):
                return Less(found, f"{self.path}{name}.")
            return found

    gaps = {row.name for row in contract.rows(Less(openreg)) if not row.ours}
    assert gaps == absent


def test_a_name_that_is_new_in_torch_shows(monkeypatch):
    new = lookups.Lookup("never_heard_of", "torch/x.py", 1, False, True)
    scan = (*contract.torch_lookups(), new)
    monkeypatch.setattr(contract, "torch_lookups", lambda root=None: scan)
    gap, *others = [row for row in contract.rows() if not row.ours]
    assert (gap.name, gap.askers, gap.required) == (
        new.name,
        ("torch.x",),
        True,
    )
    assert not others


def test_the_table_prints_one_line_a_name(table):
    lines = contract.markdown(table.values()).splitlines()
    assert len(lines) == len(table) + 2
    assert {line.count(" | ") for line in lines[2:]} == {4}
    assert "**missing**" not in "".join(lines)


# ---------------------------------------------------------------- the scanner

FORMS = {
    "a call": "torch.get_device_module('x').NAME()",
    "a variable": "m = torch.get_device_module()\nm.NAME",
    "a computed attribute": "getattr(torch, device.type).NAME()",
    "an attribute": "self.device_module.NAME",
    "a handle of FSDP": "def f(self):\n  return self._device_handle.NAME()",
    "an attribute of another name": """
class A:
    def __init__(self): self.kept = torch.get_device_module()
    def f(self): return self.kept.NAME
""",
    "a function": "def f():\n  return _get_device_attr(lambda m: m.NAME())",
    "a cast": "m = cast(Any, _get_device_handle(x))\nm.NAME",
    "either of two": "m = torch if cpu else getattr(torch, device)\nm.NAME",
    "a string": "_get_custom_mod_func('NAME')",
    "a getattr": "def f():\n  n = 'NAME'\n  getattr(device_mod, n)()",
    "a list": """
def f():
    for n in ['NAME']:
        if not hasattr(device_mod, n): raise AssertionError
""",
}


def scan(tmp_path, source, **options):
    (tmp_path / "m.py").write_text(source)
    return lookups.lookups(tmp_path, re.compile("^$"), **options)


@pytest.mark.parametrize("form", FORMS)
def test_a_lookup_is_found(tmp_path, form):
    (found,) = scan(tmp_path, FORMS[form])
    assert (found.name, found.file) == ("NAME", "m.py")
    assert not found.optional
    assert found.any_device


@pytest.mark.parametrize(
    "source",
    [
        "getattr(device_mod, 'NAME', None)",
        "def f():\n  if hasattr(device_mod, 'NAME'):\n    device_mod.NAME()",
        "try:\n  device_mod.NAME()\nexcept AttributeError:\n  pass",
    ],
)
def test_a_lookup_with_a_way_out_is_optional(tmp_path, source):
    found = scan(tmp_path, source)
    assert found
    assert {(each.name, each.optional) for each in found} == {("NAME", True)}


def test_submodules_are_part_of_the_name(tmp_path):
    (found,) = scan(tmp_path, "device_mod.memory._snapshot()['segments']")
    assert found.name == "memory._snapshot"


@pytest.mark.parametrize(
    "source",
    ["getattr(torch, dtype_of_device).x", "getattr(torch, 'relu').x", "a.b"],
)
def test_other_attributes_are_not_taken(tmp_path, source):
    assert not scan(tmp_path, source)


def test_branches_for_one_device_count_where_asked(tmp_path):
    source = "getattr(torch, device_type)\ntorch.npu.NAME()"
    assert not scan(tmp_path, source)
    (found,) = scan(tmp_path, source, branches=True)
    assert (found.name, found.any_device) == ("NAME", False)


def test_libraries_are_read_from_wheels(tmp_path):
    files = {
        "some-1.2-py3-none-any.whl": (
            "some/a.py",
            "device_mod.NAME\ntorch.xpu.B",
        ),
        "torch-9.0-py3-none-any.whl": ("torch/a.py", "device_mod.brand_new"),
    }
    for name, file in files.items():
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(*file)
            wheel.writestr(file[0].replace("/", "/tests/"), "device_mod.no")
    made = contract.tomllib.loads(contract.make_libraries(tmp_path))
    assert made["versions"] == {"some": "1.2"}
    assert made["names"] == {"B": {"one": ["some"]}, "NAME": {"any": ["some"]}}
    assert "brand_new" in made["torch"]["9.0"]


# ------------------------------------------------------------------ behaviour


def test_calls_wait_for_the_device_and_keep_their_order():
    lines = run("""
        openreg._lazy_call(lambda: print("first"))
        openreg._lazy_call(lambda: print("second"), seed=True)
        print("not yet", openreg.is_initialized())
        torch.UntypedStorage(8, device="openreg")
        print("started")
        openreg._lazy_call(lambda: print("at once"))
    """)
    assert lines[0] == "not yet False"
    assert lines[1:] == ["first", "second", "started", "at once"]


def test_a_call_that_fails_late_says_who_asked():
    lines = run("""
        def asks():
            openreg._lazy_call(lambda: 1 / 0)
        asks()
        try:
            openreg.init()
        except RuntimeError as error:
            print(type(error.__cause__).__name__, "in asks" in str(error))
        openreg.init()  # asked once, failed once
        print(openreg.current_device())
    """)
    assert lines == ["ZeroDivisionError True", "0"]


def test_initialized_follows_the_device():
    assert run("""
        print(openreg._initialized)
        openreg.init()
        print(openreg._initialized)
    """) == ["False", "True"]


@operators
def test_checkpoint_repeats_random_numbers():
    drawn = []

    def draw(x):
        drawn.append(torch.rand(8, device=x.device))
        return (x * drawn[-1]).sum()

    x = torch.ones(8, device="openreg", requires_grad=True)
    openreg.init()
    checkpoint(draw, x, use_reentrant=False).backward()
    first, again = (each.cpu() for each in drawn)
    assert torch.equal(first, again)


def test_autocast_accepts_the_formats_and_no_other():
    assert {torch.bfloat16, torch.float16} == set(
        openreg.get_amp_supported_dtype()
    )
    for dtype in openreg.get_amp_supported_dtype():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.autocast("openreg", dtype=dtype)
    with pytest.warns(UserWarning, match="only supports dtypes of"):
        torch.autocast("openreg", dtype=torch.float64)


def test_bfloat16_without_instructions_is_emulated(monkeypatch):
    for native in (False, True):
        monkeypatch.setattr(
            torch.cpu, "_is_avx512_bf16_supported", lambda value=native: value
        )
        assert openreg.is_bf16_supported()
        assert openreg.is_bf16_supported(including_emulation=False) is native


def test_without_a_device_there_is_no_bfloat16():
    code = "print(openreg.is_bf16_supported(), openreg.is_tf32_supported())"
    assert run(code, OPENREG_DEVICE_COUNT="0") == ["False False"]


def test_device_of_follows_its_object():
    for index in (0, 1):
        storage = torch.UntypedStorage(8, device=f"openreg:{index}")
        for before in (0, 1):
            with openreg.device(before):
                with openreg.device_of(storage):
                    assert openreg.current_device() == index
                assert openreg.current_device() == before
    with openreg.device(1), openreg.device_of(torch.ones(1)):
        assert openreg.current_device() == 1


def test_exchanging_devices_gives_the_one_before():
    for exchange in (openreg._exchange_device, openreg._maybe_exchange_device):
        assert exchange(1) == 0
        assert exchange(-1) == -1
        assert openreg.current_device() == 1
        assert exchange(0) == 1
    with pytest.raises(RuntimeError, match="openreg:7"):
        openreg._exchange_device(7)


def test_a_guard_puts_the_device_back_after_an_error():
    def fail():
        with openreg._DeviceGuard(1):
            raise KeyError(openreg.current_device())

    with pytest.raises(KeyError, match="1"):
        fail()
    assert openreg.current_device() == 0


@pytest.mark.parametrize(
    ("device", "index"),
    [("openreg:1", 1), (torch.device("openreg", 0), 0), (1, 1)],
)
def test_an_index_is_read_from_a_device(device, index):
    assert openreg._utils._get_device_index(device) == index


def test_an_index_that_is_not_named_is_the_current_one():
    ask = openreg._utils._get_device_index
    with openreg.device(1):
        assert ask("openreg", optional=True) == ask(None, True) == 1
    for device in ("openreg", None, "cuda:0", "cpu"):
        with pytest.raises(ValueError, match="expected an"):
            ask(device)
    assert ask("cpu", allow_cpu=True) == -1


@operators
def test_load_puts_tensors_on_the_current_device(tmp_path):
    torch.save(torch.arange(3), tmp_path / "file")
    with openreg.device(1):
        loaded = torch.load(tmp_path / "file", map_location="openreg")
    assert loaded.device == torch.device("openreg", 1)


def test_a_kernel_cannot_use_memory_of_its_peer():
    own, block = (
        torch.UntypedStorage(8, device=f"openreg:{i}") for i in (0, 1)
    )
    pointers, seen = [own.data_ptr(), block.data_ptr()], []

    def look(kernel):  # lives on, so it must not hold the storages
        seen.extend(kernel.address(p) != p for p in pointers)

    driver.set_device(0)
    stream = driver.Stream()
    stream.launch(look)
    stream.synchronize()
    stream.destroy()
    assert seen == [True, openreg.can_device_access_peer(0, 1)]
    assert not openreg.can_device_access_peer("openreg:1", "openreg:0")
    with pytest.raises(RuntimeError, match="openreg:2"):
        openreg.can_device_access_peer(0, 2)


def test_generators_are_the_default_ones():
    for index, generator in enumerate(openreg.default_generators):
        found = openreg._get_generator(torch.device("openreg", index))
        found.manual_seed(40 + index)
        assert generator.initial_seed() == 40 + index


def test_raw_memory_is_counted_until_it_is_given_back():
    before = [openreg.memory_allocated(index) for index in (0, 1)]
    address = openreg.caching_allocator_alloc(4096, "openreg:1")
    assert [openreg.memory_allocated(i) for i in (0, 1)] == [
        before[0],
        before[1] + 4096,
    ]
    attributes = driver.attributes(address)
    assert (attributes.type, attributes.device) == (driver.DEVICE, 1)
    openreg.caching_allocator_delete(address)
    assert openreg.memory_allocated(1) == before[1]
    with pytest.raises(ValueError, match="given back before"):
        openreg.caching_allocator_delete(address)
    assert openreg.caching_allocator_alloc(0) == 0
    openreg.caching_allocator_delete(0)


def test_raw_memory_belongs_to_its_stream():
    side = openreg.Stream()
    for stream in (side, _C.stream_handle(side.stream_id, 0)):
        address = openreg.caching_allocator_alloc(1 << 20, stream=stream)
        (segment,) = (
            segment
            for segment in openreg.memory_snapshot()
            if segment["address"]
            <= address
            < segment["address"] + segment["total_size"]
        )
        handle = _C.stream_handle(side.stream_id, 0)
        assert segment["stream"] == driver.Stream(handle=handle).id
        openreg.caching_allocator_delete(address)
    with pytest.raises(ValueError, match="openreg:0"):
        openreg.caching_allocator_alloc(8, 1, side)
    assert openreg.current_stream() == openreg.default_stream()


def test_an_external_stream_is_wrapped():
    side = openreg.Stream(1)
    handle = _C.stream_handle(side.stream_id, 1)
    assert openreg.get_stream_from_external(handle, 1) == side
    with pytest.raises(ValueError, match="openreg:1"):
        openreg.get_stream_from_external(handle, 0)


def test_nothing_captures_a_stream():
    assert openreg.is_current_stream_capturing() is False


def test_statistics_nest_by_the_parts_of_their_names():
    storage = torch.UntypedStorage(1 << 20, device="openreg:1")
    for flat, nested in (
        (openreg.memory_stats(1), openreg.memory_stats_as_nested_dict(1)),
        (
            openreg.host_memory_stats(),
            openreg.host_memory_stats_as_nested_dict(),
        ),
    ):
        assert flat
        for name, value in flat.items():
            place = nested
            for part in name.split("."):
                place = place[part]
            assert place == value
    del storage


def test_memory_used_is_what_the_driver_says():
    before = openreg.device_memory_used(1)
    with driver.on_device(1):
        block = driver.upload(b"1" * 4096)
    assert openreg.device_memory_used(1) >= before + 4096
    free, total = openreg.mem_get_info(1)
    assert openreg.device_memory_used(1) == total - free
    driver.free(block)


# ------------------------------------------------------------- finding waits


@pytest.fixture
def mode():
    yield openreg.set_sync_debug_mode
    openreg.set_sync_debug_mode("default")


def test_the_mode_is_set_by_name_and_number(mode):
    for number, name in enumerate(("default", "warn", "error")):
        mode(name)
        assert openreg.get_sync_debug_mode() == number
        mode(0)
        mode(number)
        assert openreg.get_sync_debug_mode() == number
    for wrong in ("loud", 3, -1):
        with pytest.raises(ValueError, match="'error'"):
            mode(wrong)


def test_waiting_for_a_stream_is_reported(mode):
    side = openreg.Stream()
    mode("warn")
    with pytest.warns(UserWarning, match="waits for the device"):
        side.synchronize()
    mode("error")
    with pytest.raises(RuntimeError, match="waits for the device"):
        side.synchronize()
    mode("default")
    side.synchronize()


def test_waiting_in_so_many_words_is_not_reported(mode):
    event = openreg.Event()
    event.record()
    mode("error")
    event.synchronize()
    openreg.synchronize()


WAITS = {
    "item": lambda x: x.sum().item(),
    "cpu": lambda x: x.cpu(),
    "converting": lambda x: torch.empty(4, dtype=torch.int8).copy_(x),
    "strided": lambda x: torch.empty(2).copy_(x[::2]),
    "from pageable": lambda x: x.copy_(torch.ones(4), non_blocking=True),
    "from pinned": lambda x: x.copy_(torch.ones(4).pin_memory("openreg")),
    "pageable, not waiting": lambda x: torch.ones(4).copy_(
        x, non_blocking=True
    ),
}


@operators
@pytest.mark.parametrize("operation", WAITS)
def test_an_operator_that_waits_is_refused(mode, operation):
    x = torch.zeros(4, device="openreg")
    WAITS[operation](x)
    mode("error")
    with pytest.raises(RuntimeError, match="waits for the device"):
        WAITS[operation](x)
    mode("default")
    assert x.tolist() in ([0] * 4, [1] * 4)


@operators
def test_operators_that_do_not_wait_are_left_alone(mode):
    pinned = torch.ones(4).pin_memory("openreg")
    mode("error")
    x = torch.zeros(4, device="openreg")
    x.copy_(pinned, non_blocking=True)
    y = x.to("openreg:1")
    pinned.copy_(y, non_blocking=True)
    x.clone().view(2, 2)
    mode("default")
    openreg.synchronize(1)
    assert pinned.tolist() == [1] * 4


# ---------------------------------------------------------------------- types


def stub(name):
    tree = ast.parse((PACKAGE / name).read_text())
    return {n.name: n for n in tree.body if hasattr(n, "name")} | {
        n.target.id: n for n in tree.body if isinstance(n, ast.AnnAssign)
    }


def test_the_stub_of_the_library_tells_the_truth():
    declared = stub("_C.pyi")
    public = {n for n in dir(_C) if not n.startswith("__")}
    assert public <= declared.keys()
    if INSTALLED:
        assert declared.keys() == public
    for name in public:
        value, node = getattr(_C, name), declared[name]
        if isinstance(node, ast.FunctionDef):
            given = re.match(r"\w+\((.*)\) -> ", value.__doc__)[1]
            count = len(re.findall(r"\barg\d+:|\w+: ", given))
            assert len(node.args.args) == count, name
    members = {n.name for n in declared["_DeviceProperties"].body}
    assert members == {
        n for n in dir(_C._DeviceProperties) if not n.startswith("_")
    }


def test_type_checkers_see_the_public_names():
    assert (PACKAGE / "py.typed").exists()
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    seen = set(stub("__init__.pyi"))
    for node in tree.body:
        if isinstance(node, ast.Assign):
            seen |= {target.id for target in node.targets}
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            seen |= defined(node.module)
        elif isinstance(node, ast.ImportFrom):
            seen |= {name.asname or name.name for name in node.names}
    public = {
        name
        for name, value in vars(openreg).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("openreg")
    }
    assert public
    assert public <= seen


def defined(module):
    """The names that `from module import *` takes from the module itself."""
    members = vars(sys.modules[module]) if module in sys.modules else {}
    return {
        name
        for name, value in members.items()
        if getattr(value, "__module__", None) == module
    }


def test_public_functions_are_annotated():
    for name, value in vars(openreg).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            parameters = inspect.signature(value)
            for each in parameters.parameters.values():
                assert each.annotation is not each.empty, (name, each)
            assert parameters.return_annotation is not parameters.empty, name
