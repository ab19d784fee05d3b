"""Tensors on the device: made, copied, viewed, resized, printed."""

import ctypes
import itertools
import os
import threading
import warnings
from pathlib import Path

import processes
import pytest
import torch

import openreg

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128),
]
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "stepped": lambda t: t[::2, :, 1:],
    "expanded": lambda t: t[:1].expand(4, -1, -1, -1),
    "offset": lambda t: t[2, 1:],
    "scalar": lambda t: t[3, 1, 0, 1],
    "empty": lambda t: t[:, :0],
    "size-1": lambda t: t[::2][:1],
    "conj": lambda t: t.conj(),
    "neg": torch._neg_view,
    "conj-neg": lambda t: torch._neg_view(t.mT.conj()),
    "channels-last": lambda t: t.to(memory_format=torch.channels_last),
}


def filled(dtype, shape=(4, 3, 2, 5)):
    """Values that every type holds, no two neighbors alike."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 101
    if dtype.is_complex:
        return torch.complex(values.double(), values.double() - 7).to(dtype)
    return values % 3 == 1 if dtype == torch.bool else values.to(dtype)


def strided(like, device):
    """Room for `like`, every second element of a larger tensor."""
    room = torch.zeros(*like.shape, 2, dtype=like.dtype, device=device)
    return room[..., 1]


def same(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(got.cpu(), want)


COPIES = {
    "up": lambda t, view: view(t).to("openreg"),
    "up, no wait": lambda t, view: view(t.pin_memory()).to(
        "openreg", non_blocking=True
    ),
    "up, into strides": lambda t, view: strided(view(t), "openreg").copy_(
        view(t)
    ),
    "up, then view": lambda t, view: view(t.to("openreg")),
    "down": lambda t, view: view(t.to("openreg")).cpu(),
    "down, into strides": lambda t, view: strided(view(t), "cpu").copy_(
        view(t.to("openreg"))
    ),
    "within": lambda t, view: view(t.to("openreg")).clone(
        memory_format=torch.contiguous_format
    ),
    "within, into strides": lambda t, view: strided(view(t), "openreg").copy_(
        view(t.to("openreg"))
    ),
    "across": lambda t, view: view(t.to("openreg")).to("openreg:1"),
    "across, into strides": lambda t, view: strided(view(t), "openreg:0").copy_(
        view(t.to("openreg:1"))
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copy", COPIES)
def test_copies_are_the_cpus(copy, layout):
    for dtype in DTYPES:
        if dtype == torch.bool and "neg" in layout:
            continue  # there is no negative bool on the CPU either
        want = LAYOUTS[layout](filled(dtype))
        same(COPIES[copy](filled(dtype), LAYOUTS[layout]), want)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "conj"])
def test_copies_convert(layout):
    for source, target in itertools.product(DTYPES, DTYPES):
        if source.is_complex and not target.is_complex:
            continue
        want = LAYOUTS[layout](filled(source)).to(target)
        there = LAYOUTS[layout](filled(source).to("openreg"))
        for got in (
            LAYOUTS[layout](filled(source)).to("openreg", target),
            there.to(target),
            there.to("cpu", target),
            there.to("openreg:1", target),
        ):
            same(got, want)


def test_complex_to_real_warns_the_caller():
    code = """
import torch, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    there = torch.tensor([1 + 2j]).to("openreg")
    real = torch.empty(1, device="openreg").copy_(there)
    assert real.item() == 1
    assert torch.empty(1, dtype=torch.bool).copy_(there)
assert ["discards" in str(w.message) for w in caught] == [True], caught
"""
    done = processes.run(code, dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")


def test_exact_and_of_rank_zero():
    for value, dtype in (
        (2**62 + 1, torch.int64),
        (1 + 2**-52, torch.float64),
        (-(2**63), torch.int64),
        (complex(1e300, -(2**-1074)), torch.complex128),
    ):
        there = torch.tensor(value, dtype=dtype).to("openreg")
        assert there.shape == there.cpu().shape == there.clone().shape == ()
        assert there.item() == value
        assert there.dtype == dtype
    conj = torch.tensor([1 + 2j]).to("openreg").conj()
    assert conj.is_conj()
    assert conj[0].item() == 1 - 2j
    assert conj.imag[0].item() == -2


@pytest.mark.parametrize("dtype", DTYPES)
def test_factories(dtype):
    with torch.openreg.device(0):
        for device in ("openreg", "openreg:1"):
            index = torch.device(device).index or 0
            for make in (
                lambda **to: torch.zeros(2, 3, **to),
                lambda **to: torch.ones((), **to),
                lambda **to: torch.full((0, 2), 1, **to),
                lambda **to: torch.zeros(0, **to),
                lambda **to: torch.tensor([[1, 0], [0, 1]], **to),
                lambda **to: torch.scalar_tensor(1, **to),
                lambda **to: torch.zeros(1, **to).new_full((3,), 1),
                lambda **to: torch.ones_like(torch.zeros(3, 2, **to).mT),
            ):
                got = make(dtype=dtype, device=device)
                assert got.device == torch.device("openreg", index)
                same(got, make(dtype=dtype))
                assert got.stride() == make(dtype=dtype).stride()
        assert torch.openreg.current_device() == 0


def test_factories_keep_their_layout():
    for make in (
        lambda to: torch.empty_strided((2, 3), (1, 4), device=to),
        lambda to: torch.empty(
            2, 3, 4, 5, device=to, memory_format=torch.channels_last
        ),
        lambda to: torch.empty_like(torch.empty(4, 3, device=to).mT),
        lambda to: torch.empty(2, 0, 3, device=to),
    ):
        assert make("openreg").stride() == make("cpu").stride()


def test_factories_refuse():
    with pytest.raises(RuntimeError, match="only CPU tensors can be pinned"):
        torch.empty(2, device="openreg", pin_memory=True)
    with pytest.raises(RuntimeError, match="negative"):
        torch.empty(-1, device="openreg")
    with pytest.raises(RuntimeError, match="99"):
        torch.empty(1, device="openreg:99")
    with pytest.raises(NotImplementedError):
        torch.empty(2, device="openreg", layout=torch.sparse_csr)


def test_fills():
    for name, view in LAYOUTS.items():
        for value in (3, torch.tensor(3), torch.tensor(3, device="openreg")):
            got = filled(torch.complex64).to("openreg")
            want = filled(torch.complex64)
            if name == "expanded" and isinstance(value, torch.Tensor):
                with pytest.raises(RuntimeError, match="unsupported operation"):
                    view(got).fill_(value)
                continue
            view(got).fill_(value)
            view(want).fill_(3)
            same(got, want)
        view(got).zero_()
        view(want).zero_()
        same(got, want)
    host = torch.zeros(2)
    assert host.fill_(torch.tensor(7.0, device="openreg")).tolist() == [7, 7]
    with pytest.raises(RuntimeError, match="no dimensions"):
        got.fill_(torch.ones(2))


def test_copies_broadcast():
    row, block = torch.arange(3.0), torch.empty(2, 3)
    for target, source in itertools.product(("cpu", "openreg"), repeat=2):
        got = block.to(target).copy_(row.to(source))
        same(got, row.expand(2, 3))
    got = torch.empty(2, 3, device="openreg:1").copy_(row.to("openreg:0"))
    same(got, row.expand(2, 3))
    with pytest.raises(RuntimeError, match="must match"):
        block.to("openreg").copy_(torch.ones(4))


def test_overlap_is_refused_and_nothing_written():
    there = torch.arange(6.0).to("openreg")
    with pytest.raises(RuntimeError, match="unsupported operation"):
        there[1:].copy_(there[:-1])
    for source in (torch.ones(4), torch.ones(4, device="openreg")):
        with pytest.raises(RuntimeError, match="unsupported operation"):
            there[:1].expand(4).copy_(source)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.zeros(1).expand(4).copy_(torch.ones(4, device="openreg"))
    same(there, torch.arange(6.0))
    same(there.copy_(there.view(2, 3).view(6)), torch.arange(6.0))


def test_mixed_devices_are_refused():
    zero, one = (torch.ones(2, device=f"openreg:{i}") for i in (0, 1))
    for left, right in ((zero, torch.ones(2)), (zero, one)):
        for call in (
            left.mul,
            lambda other: torch.cat([left, other]),  # noqa: B023
            lambda other: torch.cat([other, left]),  # noqa: B023
            lambda other: torch.masked_select(left, other > 0),  # noqa: B023
        ):
            with pytest.raises(RuntimeError, match="on the same device"):
                call(right)
    with pytest.raises(RuntimeError, match="storage"):
        torch.empty(0, device="openreg").set_(torch.ones(2))
    with pytest.raises(RuntimeError, match="storage"):
        zero.set_(one)
    with pytest.raises(NotImplementedError, match="meta"):
        zero.copy_(torch.ones(2, device="meta"))


VIEWS = {
    "t": lambda t: t.t(),
    "view": lambda t: t.view(3, 8),
    "view dtype": lambda t: t.view(torch.int32),
    "reshape": lambda t: t.reshape(-1),
    "select": lambda t: t[1],
    "slice": lambda t: t[1:3, ::2],
    "diagonal": lambda t: t.diagonal(),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t[:1].squeeze(0),
    "expand": lambda t: t[:, :1].expand(4, 6),
    "permute": lambda t: t.permute(1, 0),
    "movedim": lambda t: t.movedim(0, 1),
    "as_strided": lambda t: t.as_strided((2, 2), (7, 2), 3),
    "unfold": lambda t: t.unfold(1, 2, 3),
    "split": lambda t: t.split(2)[1],
    "chunk": lambda t: t.chunk(3, 1)[2],
    "unbind": lambda t: t.unbind(1)[4],
    "narrow": lambda t: t.narrow(1, 2, 3),
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "data": lambda t: t.data,
    "view_as_complex": lambda t: torch.view_as_complex(t.view(4, 3, 2)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_writes_through_a_view_reach_the_base(name):
    base, there = torch.zeros(4, 6), torch.zeros(4, 6, device="openreg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view = VIEWS[name](there)
    assert view._is_view() == VIEWS[name](base)._is_view()
    assert view.stride() == VIEWS[name](base).stride()
    view.fill_(5)
    VIEWS[name](base).fill_(5)
    same(there, base)
    assert there._version == base._version


def test_writes_through_the_parts_of_a_complex_tensor():
    there = torch.zeros(3, dtype=torch.complex64, device="openreg")
    there.imag.fill_(2)
    torch.view_as_real(there)[1, 0].fill_(4)
    there.conj()[2:].copy_(torch.tensor([1 + 1j]))
    assert there.tolist() == [2j, 4 + 2j, 1 - 1j]


def test_resize():
    for start in (0, 1, 3):
        there = torch.full((start,), 7.0, device="openreg").resize_(5)
        assert there.shape == (5,)
        assert there[:start].tolist() == [7.0] * start
        same(there.fill_(2), torch.full((5,), 2.0))
        assert there.resize_(2).untyped_storage().nbytes() == 20
    there = torch.arange(4.0).to("openreg")[2:]
    assert there.resize_(3)[:2].tolist() == [2, 3]
    there = torch.empty(0, device="openreg:1")
    there.resize_(2, 3, 4, 5, memory_format=torch.channels_last)
    assert there.stride() == (60, 1, 15, 3)
    assert there.device.index == 1
    assert torch.empty(0, device="openreg").resize_as_(there).shape == (
        2,
        3,
        4,
        5,
    )
    with pytest.raises(RuntimeError):
        there.resize_(-1)


def test_storage_resize():
    for device in ("openreg:0", "openreg:1"):
        there = torch.arange(4.0).to(device)
        storage = there.untyped_storage()
        storage.resize_(32)
        assert (storage.nbytes(), there.tolist()) == (32, [0, 1, 2, 3])
        storage.resize_(0)
        assert (storage.nbytes(), storage.data_ptr()) == (0, 0)
        storage.resize_(16)
        assert there.fill_(3).tolist() == [3] * 4
        assert storage.device == torch.device(device)


def test_set():
    there = torch.arange(6.0).to("openreg")
    other = torch.empty(0, device="openreg")
    other.set_(there.untyped_storage(), 1, (2,), (2,))
    assert other.tolist() == [1, 3]
    assert other.set_(there).is_set_to(there)
    assert other.set_(there.untyped_storage()).shape == (6,)
    assert other.set_().shape == (0,)
    assert other.untyped_storage().nbytes() == 0
    same(there, torch.arange(6.0))


def test_copy_from_and_resize():
    for start in (0, 2, 9):
        out = torch.empty(start, device="openreg")
        torch.ops.aten._copy_from_and_resize(torch.arange(7.0), out)
        same(out, torch.arange(7.0))
    out = torch.empty(7, device="openreg")
    torch.ops.aten._copy_from(torch.arange(7.0), out, False)
    same(out, torch.arange(7.0))


PRINTED = [
    *(filled(dtype, (4, 3)) for dtype in DTYPES),
    torch.linspace(-1, 1, 12).reshape(4, 3),
    torch.tensor([[float("nan"), float("inf"), 1e9, 0.5]]),
    torch.tensor([[1e-6, 1.0]], dtype=torch.float64),
    torch.full((2, 2), float("nan")),
    torch.arange(1200.0).reshape(30, 40) / 7,
    filled(torch.complex64, (1200, 2)),
]


@pytest.mark.parametrize("index", range(len(PRINTED)))
def test_prints_like_the_cpu(index):
    for view in (
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(3, -1),
        lambda t: t[0, 1],
        lambda t: t[:0],
        lambda t: t.reshape(-1),
        lambda t: t.conj(),
        lambda t: t if t.dtype == torch.bool else torch._neg_view(t),
    ):
        want = repr(view(PRINTED[index]))
        got = repr(view(PRINTED[index].to("openreg")))
        assert "device='openreg:0'" in got
        got = got.replace("device='openreg:0'", "")
        assert "".join(got.split()).replace(",,", ",").replace(
            ",)", ")"
        ) == "".join(want.split())


def test_type_names():
    there = torch.ones(2, device="openreg")
    assert there.type() == "torch.openreg.FloatTensor"
    assert there.is_openreg
    assert not there.cpu().is_openreg
    assert torch.ones(2).openreg().device.type == "openreg"
    assert torch.nn.Linear(2, 2).openreg().weight.is_openreg


# ------------------------------------------------------------- stream order

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
driver = ctypes.CDLL(str(Path(openreg._C.__file__).with_name("libopenreg.so")))
driver.orLaunchHostFunc.argtypes = [
    ctypes.c_void_p,
    HOST_FUNCTION,
    ctypes.c_void_p,
]
MINUTE, MOMENT = 60, 0.2


def returns_while_held(work, patience, device=0):
    """Whether `work` returns while a host function holds the default stream.

    The host function gives it some patience: all of it is spent only when
    `work` waits for the stream.
    """
    returned, answer = threading.Event(), []
    hold = HOST_FUNCTION(lambda _: answer.append(returned.wait(patience)))
    with torch.openreg.device(device):
        assert driver.orLaunchHostFunc(None, hold, None) == 0
    try:
        work()
        returned.set()
    finally:
        torch.openreg.synchronize(device)
    return answer[0]


def test_what_may_return_at_once_does():
    there, pinned = torch.zeros(8, device="openreg"), torch.ones(8).pin_memory()
    for work in (
        lambda: pinned.to("openreg", non_blocking=True),
        lambda: there.copy_(pinned, non_blocking=True),
        lambda: pinned.to("openreg", torch.float64, non_blocking=True),
        lambda: pinned.copy_(there, non_blocking=True),
        lambda: there.fill_(1).zero_(),
        lambda: there.view(2, 4).mT.contiguous(),
        lambda: there.to("openreg:1"),
        lambda: torch.empty(4, device="openreg").resize_(64),
        lambda: torch.empty(64, device="openreg"),
    ):
        assert returns_while_held(work, MINUTE)
    assert returns_while_held(lambda: there.to("openreg:1"), MINUTE, device=1)


def test_what_has_to_wait_does():
    there, pinned = torch.zeros(8, device="openreg"), torch.ones(8).pin_memory()
    for work in (
        lambda: pinned.to("openreg"),
        lambda: torch.ones(8).to("openreg", non_blocking=True),
        lambda: pinned.copy_(there),
        lambda: torch.ones(8).copy_(there, non_blocking=True),
        lambda: there[0].item(),
    ):
        assert not returns_while_held(work, MOMENT)


def test_a_pinned_source_lives_until_it_is_read():
    result, kept = torch.zeros(1024, device="openreg"), []

    def work():
        source = torch.full((1024,), 5.0).pin_memory()
        result.copy_(source, non_blocking=True)
        del source
        kept.append(torch.zeros(1024).pin_memory())  # would take its place

    assert returns_while_held(work, MINUTE)
    assert result.tolist() == [5.0] * 1024


def test_memory_given_back_is_not_used_before_its_readers_are_done():
    results = []

    def work():
        source = torch.full((32, 32), 5.0, device="openreg")
        results.append(source.t()[::2].contiguous())
        del source
        torch.zeros(32, 32, device="openreg")

    assert returns_while_held(work, MINUTE)
    same(results[0], torch.full((16, 32), 5.0))


def test_copies_between_devices_keep_both_orders():
    source = torch.ones(4, device="openreg:0")
    target = torch.zeros(4, device="openreg:1")
    before = []

    def write_behind():
        target.copy_(source)
        source.fill_(9)
        before.append(target.clone())

    assert returns_while_held(write_behind, MINUTE, device=0)
    assert before[0].tolist() == target.tolist() == [1, 1, 1, 1]

    def read_ahead():
        before.append(target.clone())
        target.copy_(source)

    assert returns_while_held(read_ahead, MINUTE, device=1)
    assert before[1].tolist() == [1, 1, 1, 1]
    assert target.tolist() == [9, 9, 9, 9]


def test_a_failed_kernel_is_reported_once_by_its_name():
    there = torch._neg_view(torch.ones(2, dtype=torch.uint16).to("openreg"))
    there.clone()
    with pytest.raises(torch.AcceleratorError, match=r"'copy'.*neg_cpu"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    assert torch.ones(2, device="openreg").tolist() == [1, 1]


def test_what_goes_to_the_cpu_by_name_refuses_overlap():
    """There the arguments are copies, which no longer overlap."""
    a = torch.tensor([0.0, 1, 2, 3, 4, 5]).to("openreg")
    with pytest.raises(RuntimeError, match="unsupported operation"):
        torch.cat([a[:3], a[3:]], out=a)
    assert a.tolist() == [0, 1, 2, 3, 4, 5]
