"""A private layout, told by a BackendMeta: copies, files, refusals."""

import copy
import io

import pytest
import torch
from needs import operators

from openreg import is_tiled, to_strided, to_tiled

pytestmark = operators
SHAPES = [(16, 16), (32, 48), (2, 3, 16, 32), (0, 16, 16)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.cfloat]


def numbers(shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return torch.arange(count).reshape(shape).remainder(251).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tiled_tensor_equals_its_matrix(shape, dtype):
    matrix = numbers(shape, dtype)
    tiled = to_tiled(matrix.to("openreg:1"))
    assert is_tiled(tiled)
    assert (tiled.shape, tiled.dtype) == (matrix.shape, dtype)
    assert torch.equal(tiled.cpu(), matrix)
    assert torch.equal(tiled.to("openreg:0").cpu(), matrix)
    assert torch.equal(to_strided(tiled).cpu(), matrix)
    assert not is_tiled(to_strided(tiled))


def test_memory_holds_one_tile_after_the_other():
    tiled = to_tiled(numbers((16, 32)).to("openreg"))
    memory = torch.empty(512, device="openreg").set_(tiled.untyped_storage())
    first = memory.cpu()[:256].reshape(16, 16)
    assert torch.equal(first, numbers((16, 32))[:, :16])


@pytest.mark.parametrize("source", ["openreg:0", "openreg:1", "cpu", "tiles"])
def test_copying_into_tiles_keeps_them(source):
    target = to_tiled(torch.zeros(32, 32, device="openreg"))
    address = target.data_ptr()
    values = numbers((32, 32), torch.int32)
    if source == "tiles":
        target.copy_(to_tiled(values.to("openreg")))
    else:
        target.copy_(values.to(source))
    assert (is_tiled(target), target.data_ptr()) == (True, address)
    assert torch.equal(target.cpu(), values.float())


def test_a_transposed_or_conjugated_source_is_tiled_as_it_reads():
    matrix = torch.complex(numbers((16, 32)), numbers((16, 32)) + 1)
    there = matrix.to("openreg")
    assert torch.equal(to_tiled(there.t()).cpu(), matrix.t())
    assert torch.equal(to_tiled(there.conj()).cpu(), matrix.conj().clone())


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("where", [None, "openreg:1", "cpu"])
def test_files_keep_the_layout_or_undo_it(where, weights_only):
    matrix = numbers((2, 32, 16))
    tiled = to_tiled(matrix.to("openreg:0"))
    file = io.BytesIO()
    torch.save({"one": tiled, "two": tiled.detach()}, file)
    file.seek(0)
    found = torch.load(file, map_location=where, weights_only=weights_only)
    for tensor in found.values():
        assert torch.equal(tensor.cpu(), matrix)
        assert is_tiled(tensor) == (where != "cpu")


def test_a_mapped_file_is_not_written_to(tmp_path):
    matrix = numbers((32, 32))
    torch.save(to_tiled(matrix.to("openreg")), tmp_path / "tiled.pt")
    before = (tmp_path / "tiled.pt").read_bytes()
    read = torch.load(tmp_path / "tiled.pt", map_location="cpu", mmap=True)
    assert torch.equal(read, matrix)
    assert (tmp_path / "tiled.pt").read_bytes() == before


def test_what_shares_the_tensor_shares_the_layout():
    tiled = to_tiled(numbers((32, 48)).to("openreg"))
    for other in (tiled.detach(), tiled.data, torch.nn.Parameter(tiled)):
        assert is_tiled(other)
        assert other.data_ptr() == tiled.data_ptr()
        assert torch.equal(other.cpu(), numbers((32, 48)))


@pytest.mark.parametrize(
    "duplicate",
    [
        torch.clone,
        copy.deepcopy,
        lambda t: copy.deepcopy(torch.nn.Parameter(t)),
        lambda t: copy.deepcopy({"a": t, "b": t})["b"],
    ],
)
def test_a_duplicate_has_the_layout_and_memory_of_its_own(duplicate):
    matrix = numbers((32, 48))
    tiled = to_tiled(matrix.to("openreg:0"))
    other = duplicate(tiled)
    assert is_tiled(other)
    tiled.copy_(torch.zeros(32, 48))
    assert torch.equal(other.cpu(), matrix)


def test_a_clone_in_a_memory_format_is_strided():
    matrix = numbers((32, 48))
    tiled = to_tiled(matrix.to("openreg"))
    other = tiled.clone(memory_format=torch.contiguous_format)
    assert not is_tiled(other)
    assert torch.equal(other.cpu(), matrix)


def test_dlpack_refuses_an_order_that_it_cannot_say():
    tiled = to_tiled(numbers((32, 48)).to("openreg"))
    with pytest.raises(BufferError, match="to_strided"):
        torch.from_dlpack(tiled)


def test_two_names_of_one_tensor_stay_one():
    tiled = to_tiled(numbers((32, 48)).to("openreg"))
    twice = copy.deepcopy([tiled, tiled])
    assert twice[0] is twice[1]


def test_a_module_trains_no_tiles_but_loads_them():
    layer = torch.nn.Linear(16, 32).openreg()
    layer.weight = torch.nn.Parameter(to_tiled(layer.weight.detach()))
    values = {"weight": numbers((32, 16)), "bias": torch.zeros(32)}
    layer.load_state_dict(values)
    assert is_tiled(layer.weight)
    assert torch.equal(layer.state_dict()["weight"].cpu(), values["weight"])
    assert torch.equal(layer.cpu().weight, values["weight"])


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t[0],
        lambda t: t.view(-1),
        lambda t: t.t(),
        lambda t: t.reshape(16, 96),
        lambda t: t.unfold(0, 2, 1),
        lambda t: t.resize_(4),
        lambda t: t.fill_(1),
        lambda t: t.uniform_(),
    ],
)
def test_what_follows_strides_refuses_and_changes_nothing(use):
    tiled = to_tiled(numbers((32, 48)).to("openreg"))
    with pytest.raises(RuntimeError, match=r"in tiles.*to_strided"):
        use(tiled)
    torch.accelerator.synchronize()
    assert torch.equal(tiled.cpu(), numbers((32, 48)))


def test_another_storage_ends_the_layout():
    tiled = to_tiled(numbers((32, 48)).to("openreg"))
    plain = numbers((32, 48)).to("openreg")
    tiled.set_(plain)
    assert not is_tiled(tiled)
    assert torch.equal(tiled.cpu(), plain.cpu())


@pytest.mark.parametrize("shape", [(16,), (), (15, 16), (16, 17)])
def test_sizes_that_no_tile_fits_are_refused(shape):
    with pytest.raises(ValueError, match="16 rows and columns"):
        to_tiled(torch.zeros(shape, device="openreg"))


def test_a_host_tensor_is_refused():
    with pytest.raises(ValueError, match="this one is on cpu"):
        to_tiled(torch.zeros(16, 16))
