"""Files: every map_location, views, foreign and broken files, round trips."""

import copy
import io
import pickle
import random
import zipfile

import processes
import pytest
import torch
from needs import operators

pytestmark = operators
PLACES = {
    "nothing": (None, "openreg:1"),
    "a string": ("cpu", "cpu"),
    "a device's name": ("openreg", "openreg:0"),
    "a name with an index": ("openreg:0", "openreg:0"),
    "a device": (torch.device("openreg:0"), "openreg:0"),
    "a dictionary": ({"openreg:1": "openreg:0"}, "openreg:0"),
    "a dictionary for others": ({"cuda:0": "cpu"}, "openreg:1"),
    "a function": (lambda storage, location: storage, "cpu"),
    "a function that moves": (lambda s, location: s.openreg(0), "openreg:0"),
    "a function that declines": (lambda storage, location: None, "openreg:1"),
    "meta": ("meta", "meta"),
}


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


def relabeled(file, old, new):
    """Return the file as if its tensors had been saved on device `new`."""
    result = io.BytesIO()
    with (
        zipfile.ZipFile(file) as source,
        zipfile.ZipFile(result, "w", zipfile.ZIP_STORED) as target,
    ):
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl"):
                # A string in a pickle: its length before its bytes.
                before = len(old).to_bytes(4, "little") + old.encode()
                after = len(new).to_bytes(4, "little") + new.encode()
                assert before in data
                data = data.replace(before, after)
            target.writestr(name, data)
    result.seek(0)
    return result


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("how", PLACES)
def test_a_file_goes_where_map_location_says(how, weights_only):
    map_location, expected = PLACES[how]
    values = torch.arange(6.0).to("openreg:1")
    found = torch.load(
        saved({"values": values}),
        map_location=map_location,
        weights_only=weights_only,
    )["values"]
    assert found.device == torch.device(expected)
    if expected != "meta":
        assert found.tolist() == values.tolist()


@pytest.mark.parametrize("options", [{}, {"mmap": True}])
@pytest.mark.parametrize("place", [None, "cpu", "openreg:0"])
def test_views_of_one_storage_come_back_as_views_of_one(
    tmp_path, options, place
):
    base = torch.arange(12.0).reshape(3, 4).to("openreg:1")
    path = tmp_path / "views.pt"
    torch.save({"base": base, "row": base[1], "column": base[:, 2]}, path)
    found = torch.load(path, map_location=place, **options)
    storages = {t.untyped_storage().data_ptr() for t in found.values()}
    assert len(storages) == 1
    assert found["column"].tolist() == [2, 6, 10]
    assert found["row"].storage_offset() == 4
    found["base"].fill_(7)
    assert found["row"].tolist() == [7] * 4


def test_the_old_format_works_too():
    file = saved(
        torch.ones(3, device="openreg:1"), _use_new_zipfile_serialization=False
    )
    assert torch.load(file).device == torch.device("openreg:1")


@pytest.mark.parametrize(
    "make",
    [
        lambda t: torch.nn.Parameter(t),
        lambda t: t.to(torch.cfloat).conj(),
        lambda t: torch.view_as_real(t.to(torch.cfloat).conj().resolve_conj()),
        lambda t: t.to(torch.cfloat).conj().imag,  # the negative bit
        lambda t: t.to(torch.bfloat16),
        lambda t: t.to(torch.float8_e4m3fn),
        lambda t: t > 1,
        lambda t: t.to(torch.uint16),
        lambda t: t[:0],
        lambda t: t[1, 1],
        lambda t: t.expand(5, 2, 2),
        lambda t: t.untyped_storage(),
    ],
)
@pytest.mark.parametrize("way", ["save", "pickle", "deepcopy"])
def test_what_a_tensor_is_survives_as_on_the_cpu(make, way):
    def passed(device):
        value = make(torch.arange(4.0).reshape(2, 2).to(device))
        try:
            if way == "save":
                found = torch.load(saved(value))
            elif way == "pickle":
                found = pickle.loads(pickle.dumps(value))
            else:
                found = copy.deepcopy(value)
        except AttributeError as error:  # pickle has no word for every dtype
            return str(error)
        assert found.device == value.device
        what = [type(found)]
        if isinstance(found, torch.Tensor):
            what += [found.dtype, found.shape, found.stride()]
            what += [found.requires_grad, found.is_conj(), found.is_neg()]
        return [*what, found.tolist()]

    assert passed("openreg:1") == passed("cpu")


def test_no_numpy_is_in_the_file():
    file = saved(torch.ones(3, device="openreg"))
    with zipfile.ZipFile(file) as content:
        (name,) = [n for n in content.namelist() if n.endswith("data.pkl")]
        assert b"numpy" not in content.read(name)


def test_an_optimizer_and_its_model_go_on_where_they_stopped():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).openreg()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(4, 3).openreg()).pow(2).sum().backward()
        optimizer.step()

    step(model, optimizer)
    file = saved([model.state_dict(), optimizer.state_dict()])
    again = torch.nn.Linear(3, 2).openreg()
    resumed = torch.optim.Adam(again.parameters(), lr=0.1)
    weights, state = torch.load(file)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    step(model, optimizer)
    step(again, resumed)
    assert torch.equal(model.weight.cpu(), again.weight.cpu())
    assert resumed.state[again.weight]["exp_avg"].device.type == "openreg"


@pytest.mark.parametrize("place", ["openreg:0", "cpu"])
@pytest.mark.parametrize("origin", ["cuda:0", "openreg:7", "cpu"])
def test_a_file_of_another_machine_needs_a_map(origin, place):
    here = torch.device("cpu" if origin == "cpu" else "openreg:1")
    file = saved(torch.arange(3.0).to(here))
    if origin != "cpu":
        file = relabeled(file, "openreg:1", origin)
    found = torch.load(file, map_location=place)
    assert found.device == torch.device(place)
    assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("origin", ["cuda:0", "openreg:7"])
def test_without_a_map_the_error_names_it(origin):
    file = relabeled(
        saved(torch.ones(3, device="openreg:1")), "openreg:1", origin
    )
    with pytest.raises(RuntimeError, match="map_location"):
        torch.load(file)


def test_a_machine_without_devices_is_told_of_map_location(tmp_path):
    path = tmp_path / "ones.pt"
    torch.save(torch.ones(3, device="openreg"), path)
    code = f"""
import torch
try:
    torch.load({str(path)!r})
except RuntimeError as error:
    print("map_location" in str(error))
print(torch.load({str(path)!r}, map_location="cpu").tolist())
"""
    done = processes.run(code, {"OPENREG_DEVICE_COUNT": "0"}, timeout=120)
    assert done.stdout.splitlines() == ["True", "[1.0, 1.0, 1.0]"], done


@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_a_truncated_file_fails_as_on_the_cpu(keep):
    def failure(device):
        data = saved(torch.ones(999, device=device)).getvalue()
        with pytest.raises(Exception) as caught:  # noqa: PT011
            torch.load(io.BytesIO(data[: int(len(data) * keep)]))
        return type(caught.value), str(caught.value)

    assert failure("openreg") == failure("cpu")


def test_only_weights_means_only_weights():
    class Code:
        def __reduce__(self):
            return print, ("run",)

    file = saved({"x": torch.ones(1, device="openreg"), "y": Code()})
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        torch.load(file, weights_only=True)


def random_tensors(count, seed):
    """Return random views of shared storages on the CPU, and their keys."""
    rng = random.Random(seed)
    dtypes = [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
        torch.complex64,
    ]
    tensors, base = [], None
    while len(tensors) < count:
        if base is None or rng.random() < 0.6:
            dtype = rng.choice(dtypes)
            size = rng.randrange(0, 400)
            base = torch.randint(0, 2, (size,)).to(dtype)
        sizes = [rng.randrange(0, 5) for _ in range(rng.randrange(0, 4))]
        strides = [rng.randrange(0, 9) for _ in sizes]
        offset = rng.randrange(0, 20)
        extent = offset + 1
        for size, stride in zip(sizes, strides, strict=True):
            extent += max(size - 1, 0) * stride
        if extent <= len(base):
            tensors.append((base, sizes, strides, offset))
    return tensors


@pytest.mark.parametrize("way", ["save", "pickle", "dlpack"])
def test_200_random_tensors_make_the_round_trip(way):
    bases, sent, expected = {}, [], []
    for base, sizes, strides, offset in random_tensors(200, seed=7):
        there = bases.setdefault(id(base), (base, base.to("openreg:1")))[1]
        sent.append(there.as_strided(sizes, strides, offset))
        expected.append(base.as_strided(sizes, strides, offset))
    if way == "save":
        found = torch.load(saved(sent))
    elif way == "pickle":
        found = [pickle.loads(pickle.dumps(tensor)) for tensor in sent]
    else:
        found = [torch.from_dlpack(tensor) for tensor in sent]
    groups = {}
    for got, want, source in zip(found, expected, sent, strict=True):
        assert got.device == torch.device("openreg:1")
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got.cpu(), want)
        if way != "dlpack":  # which may normalize strides of no meaning
            assert got.stride() == want.stride()
            assert got.storage_offset() == want.storage_offset()
        if way == "save":
            key = source.untyped_storage().data_ptr()
            groups.setdefault(key, set()).add(got.untyped_storage().data_ptr())
    assert all(len(storages) == 1 for storages in groups.values())
