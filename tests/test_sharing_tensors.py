"""Tensors of a device that several processes use."""

import io
import pickle
import random
from multiprocessing import reduction

import needs
import peers
import pytest
import torch
from peers import forget, hold, on_held

import openreg

balanced, peer = peers.balanced, peers.peer
pytestmark = [needs.operators, pytest.mark.usefixtures("balanced")]


def describe(tensors):
    """Values and form, and which of them lie in one storage."""
    places = [t.untyped_storage()._cdata for t in tensors]
    return [
        (
            t.detach().resolve_conj().resolve_neg().cpu(),
            t.dtype,
            t.stride(),
            t.storage_offset(),
            t.requires_grad,
            t.is_conj(),
            t.is_neg(),
            places.index(t.untyped_storage()._cdata),
        )
        for t in tensors
    ]


def equal(left, right):
    for (one, *form), (other, *same) in zip(left, right, strict=True):
        assert form == same
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128),
]


def random_tensors(count, seed=0):
    """Pairs on the CPU and on a device, some with a storage in common."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    pairs = []
    while len(pairs) < count:
        dtype = draw.choice(DTYPES)
        base = torch.randint(0, 2, (draw.randint(0, 400),)).to(dtype)
        if dtype.is_floating_point or dtype.is_complex:
            base = torch.randn(base.shape, dtype=torch.float64).to(dtype)
        there = base.to(f"openreg:{draw.randint(0, 1)}")
        for _ in range(draw.randint(1, 3)):
            offset = draw.randint(0, base.numel())
            room, sizes, strides = base.numel() - offset, [], []
            for _ in range(draw.randint(0, 3)):
                strides.append(draw.randint(0, 3))
                size = draw.randint(0, 4)
                used = sum(
                    (n - 1) * s
                    for n, s in zip(sizes, strides[:-1], strict=True)
                )
                most = (room - 1 - used) // max(strides[-1], 1) + 1
                sizes.append(max(0, min(size, most)))
            if room == 0 or 0 in sizes:
                sizes, strides = [0, *sizes], [1, *strides]
            view = [t.as_strided(sizes, strides, offset) for t in (base, there)]
            if dtype.is_floating_point and draw.random() < 0.2:
                view = [t.detach().requires_grad_() for t in view]
            pairs.append(view)
    return pairs[:count]


def test_random_tensors_arrive_as_they_are_on_the_cpu(peer):
    pairs = random_tensors(200)
    cpu, device = zip(*pairs, strict=True)
    peer(hold, "all", list(device))
    equal(peer(on_held, "all", describe), describe(cpu))
    peer(forget, "all")


@pytest.mark.filterwarnings("ignore:aten")
def test_views_conjugates_and_parameters_keep_what_they_are(peer):
    base = torch.randn(4, 6, dtype=torch.complex64)
    cpu = [base, base[1:, ::2], base.t(), base.conj(), base.conj().imag]
    cpu += [torch.tensor(3.5), torch.empty(0, 3), torch.empty(2, 0, 5)]
    cpu += [torch.nn.Parameter(torch.ones(3)), torch.ones(2).requires_grad_()]
    cpu += [torch.nn.Parameter(torch.ones(2, dtype=torch.int8), False)]
    there = base.to("openreg")
    device = [there, there[1:, ::2], there.t(), there.conj()]
    device += [there.conj().imag]
    device += [type_preserving(t) for t in cpu[5:]]
    peer(hold, "all", device)
    equal(peer(on_held, "all", describe), describe(cpu))
    assert peer(on_held, "all", types) == types(cpu)
    peer(forget, "all")


def type_preserving(tensor):
    moved = tensor.detach().to("openreg")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)


def types(tensors):
    return [type(t) for t in tensors]


class Named(torch.Tensor):
    """A subclass with an attribute."""


def test_subclass_shares_its_memory_and_keeps_its_attributes(peer):
    tensor = torch.zeros(5, device="openreg").as_subclass(Named)
    tensor.label = "five"
    peer(hold, "it", tensor)
    assert peer(on_held, "it", label_and_fill) == ("Named", "five")
    assert tensor.cpu().tolist() == [7.0] * 5
    peer(forget, "it")


def label_and_fill(tensor):
    tensor.fill_(7)
    openreg.synchronize()
    return type(tensor).__name__, tensor.label


def test_tensor_with_history_is_refused():
    tensor = torch.ones(2, device="openreg", requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="Cowardly refusing"):
        reduction.ForkingPickler.dumps(tensor)
    with pytest.raises(RuntimeError, match="Cowardly refusing"):
        reduction.ForkingPickler.dumps(tensor.cpu())


@pytest.mark.filterwarnings("ignore:aten")
def test_module_trained_there_is_trained_here(peer):
    module = torch.nn.Linear(3, 2).openreg().share_memory()
    assert all(p.is_shared() for p in module.parameters())
    before = [p.detach().cpu() for p in module.parameters()]
    peer(hold, "model", module)
    peer(on_held, "model", add_one)
    for parameter, old in zip(module.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), old + 1)
    peer(forget, "model")


def add_one(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    openreg.synchronize()


def test_plain_pickle_copies_as_before():
    tensor = torch.arange(5.0).to("openreg")
    copy = pickle.loads(pickle.dumps(tensor))
    torch.testing.assert_close(copy.cpu(), tensor.cpu())
    assert copy.data_ptr() != tensor.data_ptr()
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.load(file).device == tensor.device
