"""The library's operators by their schema: what they refuse and remember."""

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch
from needs import operators
from torch.nn import functional

import openreg

pytestmark = operators

# ------------------------------------------------- what the library lacks

COMPLEX = torch.ones(2, 3, dtype=torch.complex64)
WHOLE = torch.ones(2, 3, dtype=torch.int64)
IMAGE = torch.ones(1, 2, 4, 4, dtype=torch.int64)
REFUSED = {
    "structured sort": lambda d: torch.sort(COMPLEX.to(d)),
    "structured out": lambda d: torch.maximum(COMPLEX.to(d), COMPLEX.to(d)),
    "structured in-place": lambda d: COMPLEX.to(d).erf_(),
    "precomputed": lambda d: functional.avg_pool2d(IMAGE.bool().to(d), 2),
    "inferred": lambda d: torch.kthvalue(COMPLEX.to(d), 1),
    "inferred list": lambda d: torch.histc(WHOLE.bool().to(d), 4),
    "learned": lambda d: torch._masked_softmax(
        WHOLE.to(d), WHOLE.bool().to(d), 1, 2
    ),
    "dependent": lambda d: torch.unique(COMPLEX.to(d), dim=0),
    "convolution": lambda d: functional.conv2d(
        IMAGE.bool().to(d), IMAGE.bool().to(d)
    ),
    "batch norm": lambda d: functional.batch_norm(
        IMAGE.to(d), None, None, training=True
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_the_library_lacks_is_refused_at_the_call(name):
    errors = []
    for device in ("cpu", "openreg"):
        with pytest.raises(RuntimeError) as caught:
            REFUSED[name](device)
        errors.append((caught.type, str(caught.value)))
    assert errors[1] == errors[0]
    torch.openreg.synchronize()  # nothing of it was queued


def test_an_empty_tensor_proves_nothing_about_its_type():
    empty = torch.ones(0, dtype=torch.complex64, device="openreg")
    for _ in range(2):
        with contextlib.suppress(RuntimeError):
            torch.lgamma(empty)
        with pytest.raises(NotImplementedError):
            torch.lgamma(COMPLEX.to("openreg"))


def test_a_trial_is_silent_and_leaves_no_mark():
    x = torch.arange(6.0, device="openreg").view(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = x.to(torch.float64).cumprod(1)
        torch.cat([x, x], out=torch.empty(4, 3, device="openreg"))
        x.index_add_(0, torch.tensor([1], device="openreg"), x[:1].clone())
    assert y.tolist() == [[0, 0, 0], [3, 12, 60]]
    assert x.tolist() == [[0, 1, 2], [3, 5, 7]]


def test_threads_try_one_operator_at_once():
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    failed = []

    def use(dtype):
        try:
            for _ in range(50):
                x = torch.ones(4, dtype=dtype, device="openreg")
                assert torch.lgamma(x).tolist() == [0] * 4
                with pytest.raises(NotImplementedError):
                    torch.lgamma(COMPLEX.to("openreg"))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("name", ["unique", "bincount", "repeat"])
def test_an_error_that_the_host_waits_for_keeps_its_class(name):
    calls = {
        "unique": lambda d: torch.unique(torch.ones(2, 0, device=d), dim=0),
        "bincount": lambda d: torch.bincount(torch.tensor([-1], device=d)),
        "repeat": lambda d: torch.repeat_interleave(
            torch.tensor([-1], device=d)
        ),
    }
    errors = []
    for device in ("cpu", "openreg"):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - compared
            calls[name](device)
        errors.append((caught.type, str(caught.value)))
    assert errors[1] == errors[0]
    torch.openreg.synchronize()


# -------------------------------------------------------- what is remembered


def python_calls(call):
    """How many of PyTorch's Python functions a call runs."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        own = frame.f_code.co_filename.startswith(torch.__path__[0])
        count += event == "call" and own

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_a_form_is_asked_once():
    x = torch.randn(3, 7, device="openreg")
    index = torch.tensor([0, 2], device="openreg")
    assert python_calls(lambda: x.index_select(0, index)) > 0
    for _ in range(3):
        assert python_calls(lambda: x.index_select(0, index)) == 0
    assert python_calls(lambda: x.index_select(1, index)) > 0
    assert python_calls(lambda: x.t().index_select(0, index)) > 0
    assert python_calls(lambda: x.double().index_select(0, index)) > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: torch.std(x, n % 2, correction=n % 3),
        lambda x, n: functional.pad(x[None], (n % 3, 1), mode="reflect"),
        lambda x, n: torch.searchsorted(x.sort()[0], x, right=bool(n % 2)),
        lambda x, n: functional.pixel_shuffle(
            torch.ones(n * 4 + 4, 2, 2, device=x.device), 2
        ),
        lambda x, n: torch.tensordot(x, x.t(), 1) + torch.trace(x[:3, :3]) * n,
        lambda x, n: torch.where(x > n / 9, x, n),
        lambda x, n: torch.roll(x, n, n % 2),
        lambda x, n: torch.linspace(0, n, n + 1, device=x.device),
        lambda x, n: torch.nansum(x.to(torch.float64), n % 2, n % 3 == 0),
        lambda x, n: torch.count_nonzero(x > n / 9, n % 2),
    ],
)
def test_what_is_remembered_is_of_this_very_call(call):
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for n in range(6):
            ours, theirs = call(x.to("openreg"), n), call(x, n)
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours.cpu(), theirs)


def test_the_default_dtype_is_part_of_the_call():
    x = torch.arange(4, device="openreg")
    for dtype in (torch.float32, torch.float64, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            assert torch.logit(x).dtype is dtype
        finally:
            torch.set_default_dtype(before)


def test_more_calls_than_are_remembered():
    x = torch.rand(5000, device="openreg")
    for n in range(1, 4200):
        assert torch.roll(x[:n], 1).shape == (n,)
    assert torch.roll(x[:3], 1).tolist() == [x[2], x[0], x[1]]


def test_a_refused_call_is_not_remembered():
    x = torch.rand(3, 4, device="openreg")
    for _ in range(2):
        with pytest.raises(IndexError):
            x.index_select(2, torch.tensor([0], device="openreg"))
        with pytest.raises(RuntimeError, match="inconsistent tensor size"):
            torch.dot(x[0], x[:, 0])


def test_what_is_learned_waits_at_the_first_call_only():
    labels = torch.tensor([0, 1, 2], device="openreg")

    def loss(columns):
        x = torch.rand(3, columns, device="openreg", requires_grad=True)
        functional.multi_margin_loss(x, labels).backward()
        return x.grad.cpu()

    first = loss(5)
    assert first.shape == (3, 5)
    x = torch.rand(3, 5, device="openreg", requires_grad=True)
    openreg.set_sync_debug_mode("error")
    try:
        functional.multi_margin_loss(x, labels).backward()
        with pytest.raises(RuntimeError, match="arguments of this form"):
            loss(6)
    finally:
        openreg.set_sync_debug_mode("default")
    torch.openreg.synchronize()


# ------------------------------------------------------------------ layouts

LAST = torch.rand(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
LAST_3D = torch.rand(1, 2, 4, 4, 4).contiguous(
    memory_format=torch.channels_last_3d
)
HEADS = torch.rand(2, 4, 3, 8)
LAID_OUT = {
    "replicate": lambda d: functional.pad(
        LAST.to(d), (1, 2, 0, 1), mode="replicate"
    ),
    "replicate 3d": lambda d: functional.pad(
        LAST_3D.to(d), (1, 2, 0, 1, 1, 0), mode="replicate"
    ),
    "reflect": lambda d: functional.pad(
        LAST.to(d), (1, 2, 0, 1), mode="reflect"
    ),
    "shuffle": lambda d: functional.pixel_shuffle(LAST.to(d), 2),
    "channels": lambda d: functional.channel_shuffle(LAST.to(d), 2),
    "unpool": lambda d: functional.max_unpool2d(
        *functional.max_pool2d(LAST.to(d), 2, return_indices=True), 2
    ),
    "attention": lambda d: functional.scaled_dot_product_attention(
        *[HEADS.to(d)] * 3
    ),
    "heads last": lambda d: functional.scaled_dot_product_attention(
        *[HEADS.transpose(1, 2).contiguous().to(d).transpose(1, 2)] * 3
    ),
    "eigenvalues": lambda d: torch.linalg.eig(
        torch.diag(torch.arange(3.0)).to(d)
    )[1].abs(),
    "nonzero": lambda d: torch.nonzero_static(LAST[0, 0].to(d), size=50),
    **{
        f"transposed {dtype} {groups}": lambda d, t=dtype, g=groups: (
            functional.conv_transpose3d(
                LAST_3D.to(d, t), torch.ones(2, 2, 2, 2, 2).to(d, t), groups=g
            )
        )
        for dtype in (torch.float32, torch.int64)
        for groups in (1, 2)
    },
    "integers": lambda d: functional.conv2d(
        LAST.to(d, torch.int64), torch.ones(2, 4, 3, 3).to(d, torch.int64)
    ),
    "reflect 3d": lambda d: functional.pad(
        LAST_3D.to(d), (1, 1, 1, 1, 1, 1), mode="reflect"
    ),
    "not": lambda d: LAST[:, :, :1].to(d).logical_not(),
    **{
        f"backward of {name}": lambda d, loss=loss: gradient_of(loss, d)
        for name, loss in {
            "hardswish": functional.hardswish,
            "relu6": functional.relu6,
            "mse": lambda x: functional.mse_loss(x, x.detach() + 1),
            "batch norm": lambda x: functional.batch_norm(
                x, None, None, training=True
            ),
            "nansum": lambda x: torch.nansum(x[:, :, :1]),
        }.items()
    },
}


def gradient_of(loss, device):
    x = LAST.clone().to(device).requires_grad_()
    loss(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_result_is_laid_out_as_the_cpus(name):
    theirs = LAID_OUT[name]("cpu")
    for _ in range(2):  # asked or learned, then remembered
        ours = LAID_OUT[name]("openreg")
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.cpu(), theirs)


def test_a_result_that_the_library_lays_out_anew_is_right():
    out = torch.empty(2, 4, 7, 9, device="openreg")
    torch.ops.aten.replication_pad2d.out(
        LAST.to("openreg"), (1, 2, 0, 1), out=out
    )
    torch.testing.assert_close(
        out.cpu(), functional.pad(LAST, (1, 2, 0, 1), mode="replicate")
    )


# --------------------------------------- what the meta kernel does not know

SQUARE = torch.eye(3) + torch.arange(9.0).reshape(3, 3) / 9
MATRICES = SQUARE.to(torch.complex128) * (1 + 0.5j)


def into(operator, *out):
    """The operator with these `out=` arguments, and what became of them."""

    def call(device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that `out` is resized
            outs = [x.clone().to(device) for x in out]
            operator(device, outs)
        return outs

    return call


def lu_solve(device, **options):
    factors, pivots = torch.linalg.lu_factor(MATRICES)
    given = factors.to(device), pivots.to(device), MATRICES.to(device)
    return torch.linalg.lu_solve(*given, **options)


AS_THE_CPU = {
    "cholesky of a number": lambda d: torch.cholesky(torch.ones((), device=d)),
    "exponential of a number": lambda d: torch.matrix_exp(
        torch.ones((), device=d)
    ),
    "a grid of numbers": lambda d: torch.grid_sampler_2d(
        torch.ones((), device=d), torch.ones((), device=d), 0, 0, False
    ),
    "sum into booleans": into(
        lambda d, out: torch.nansum(torch.ones(2, 3).bool().to(d), out=out[0]),
        torch.empty((), dtype=torch.bool),
    ),
    "loss of nothing": lambda d: gradient_of(
        lambda x: functional.mse_loss(x[:0], x[:0].detach()), d
    ),
    "half layer norm": lambda d: torch.native_layer_norm(
        SQUARE.to(d, torch.bfloat16), [3], None, None, 1e-5
    ),
    "in place, smaller": lambda d: torch.ones(1, device=d).logical_and_(
        torch.ones(3, device=d)
    ),
    "in place, a number": lambda d: torch.ones((), device=d).addr_(
        torch.ones(3, device=d), torch.ones(2, device=d)
    ),
    "in place, triangle": lambda d: LAST.clone().to(d).tril_(),
    "in place, other triangle": lambda d: LAST.clone().to(d).triu_(1),
    "in place, conjugate": lambda d: MATRICES.clone().to(d).conj_physical_(),
    "mode": into(
        lambda d, out: torch.mode(SQUARE.to(d), out=out),
        torch.empty(2),
        torch.empty(0, dtype=torch.int64),
    ),
    "complex singular values": into(
        lambda d, out: torch.svd(MATRICES.to(d), out=out),
        torch.empty(0, dtype=torch.complex128),
        torch.empty(0, dtype=torch.float64),
        torch.empty(0, dtype=torch.complex128),
    ),
    **{
        f"householder into {size}": into(
            lambda d, out: torch.linalg.householder_product(
                SQUARE.to(d), torch.ones(3, device=d), out=out[0]
            ),
            torch.empty(size),
        )
        for size in (0, 5)
    },
    **{
        f"batch norm into {size}, {training}": into(
            lambda d, out, training=training: torch.native_batch_norm(
                LAST.to(d), *[None] * 2, *ones(d), training, 0.1, 1e-5, out=out
            ),
            *[torch.empty(size)] * 3,
        )
        for size in (0, 5)
        for training in (True, False)
    },
    **{
        f"factors {left} {adjoint}": lambda d, left=left, adjoint=adjoint: (
            lu_solve(d, left=left, adjoint=adjoint)
        )
        for left in (True, False)
        for adjoint in (True, False)
    },
}


def ones(device):
    return torch.ones(4, device=device), torch.ones(4, device=device)


@pytest.mark.parametrize("name", AS_THE_CPU)
def test_the_library_has_the_last_word(name):
    def outcome(device):
        try:
            return AS_THE_CPU[name](device)
        except Exception as error:
            return error

    theirs = outcome("cpu")
    for _ in range(2):
        ours = outcome("openreg")
        if isinstance(theirs, Exception):
            assert type(ours) is type(theirs), ours
            continue
        pairs = zip(
            *[
                x if isinstance(x, (list, tuple)) else [x]
                for x in (ours, theirs)
            ],
            strict=True,
        )
        for one, other in pairs:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.stride() == other.stride() or one.numel() == 0
            torch.testing.assert_close(one.cpu(), other.resolve_conj())


def test_what_is_refused_is_refused_in_the_cpus_words():
    number = torch.ones((), device="openreg")
    with pytest.raises(RuntimeError, match="input tensor A must have at least"):
        torch.cholesky(number)
    openreg.set_sync_debug_mode("error")  # the error is not hidden by the wait
    try:
        with pytest.raises(RuntimeError, match="input tensor A must have"):
            torch.cholesky(number)
    finally:
        openreg.set_sync_debug_mode("default")
    x = torch.arange(4.0, device="openreg")
    with pytest.raises(RuntimeError, match="memory location"):
        torch.take(x, torch.tensor([1, 0, 3, 2], device="openreg"), out=x)
    assert x.tolist() == [0, 1, 2, 3]


# ------------------------------------------------------- indices of the CPU


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
def test_indices_of_the_cpu_are_taken_along(device):
    x = torch.arange(12.0).reshape(3, 4)
    d, i = x.to(device), torch.tensor([2, 0])
    uses = {
        "rows": lambda t, _: t[i],
        "columns": lambda t, _: t[:, i],
        "mixed": lambda t, where: t[i, i.to(where)],
        "mask": lambda t, _: t[x > 5],
        "out": lambda t, where: torch.ops.aten.index.Tensor_out(
            t, [i], out=torch.empty(0, device=where)
        ),
        "put": lambda t, _: t.clone().index_put_((i,), torch.tensor(7.0)),
        "accumulate": lambda t, _: t.clone().index_put_(
            (i,), t[:2], accumulate=True
        ),
    }
    for name, use in uses.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that `out` is resized
            ours, theirs = use(d, device), use(x, "cpu")
        assert ours.device == torch.device(device), name
        assert torch.equal(ours.cpu(), theirs), name
    with pytest.raises(RuntimeError, match="same device"):
        x[i.to(device)]


# ------------------------------------------------- the short way of plain calls

FLOATS, INTEGERS = (
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6).reshape(2, 3),
)
PLAIN = {
    "one dtype": lambda x, i: [
        x + x,
        i + i,
        x == x,
        i / i.add(1),
        torch.sin(i),
    ],
    "two dtypes": lambda x, i: [
        x + i,
        i + x,
        x * x.half(),
        i < x,
        i.bool() & i,
    ],
    "numbers": lambda x, i: [
        torch.add(i, i, alpha=2),
        torch.add(x, i, alpha=0.5),
        torch.clamp_min(i, 2),
        torch.clamp_min(i, 2.5),
        torch.clamp_min(i, True),
        i == 2.5,
        torch.lerp(x, x + 1, 0.25),
    ],
    "other forms": lambda x, i: [
        x + x[:1],
        x.T + x.T,
        x[:, 1:] * x[:, 1:],
        x[:, ::2] - i[:, ::2],
        x[:0] + x[:0],
        x.sum() + x.sum(),
        x + x.sum(),
    ],
    "layouts": lambda x, i: [
        torch.exp(
            x.expand(4, 5, 2, 3).contiguous(memory_format=torch.channels_last)
        ),
        x.expand(4, 1, 2, 3).clone(memory_format=torch.channels_last) + 1,
    ],
}


@pytest.mark.parametrize("calls", PLAIN.values(), ids=PLAIN.keys())
@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
def test_a_call_is_the_same_the_second_time(device, calls):
    theirs = calls(FLOATS, INTEGERS)
    for current in (0, 1, 0):
        with torch.openreg.device(current):
            ours = calls(FLOATS.to(device), INTEGERS.to(device))
        for a, b in zip(ours, theirs, strict=True):
            assert (a.dtype, a.device) == (b.dtype, torch.device(device))
            assert a.stride() == b.stride()
            assert torch.equal(a.cpu(), b)


def test_a_plain_call_is_checked_each_time():
    i = INTEGERS.to("openreg")
    mask = i > 2
    for _ in range(2):
        torch.add(i, i, alpha=2)
        with pytest.raises(RuntimeError, match="alpha"):
            torch.add(i, i, alpha=0.5)
        with pytest.raises(RuntimeError, match="bool"):
            mask - mask
        with pytest.raises(RuntimeError, match="must match"):
            i + i.T
        with pytest.raises(RuntimeError, match="same device"):
            i + i.to("openreg:1")


# ---------------------------------------------------------------- wrong dtypes

INDEX = torch.tensor([0.0, 1.0])
WRONG = {
    "two dtypes": lambda d: torch.mm(FLOATS.to(d), FLOATS.T.double().to(d)),
    "index": lambda d: FLOATS.to(d).index_select(0, INDEX.to(d)),
    "class": lambda d: FLOATS.to(d).index_fill_(0, INDEX.to(d), 1.0),
    "mask": lambda d: FLOATS.to(d).masked_fill_(FLOATS.to(d), 1.0),
    "parameter": lambda d: functional.layer_norm(
        FLOATS.to(d), (3,), torch.ones(3, device=d).double()
    ),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_wrong_dtypes_are_refused_at_the_call(call):
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        call("cpu")
    for _ in range(2):
        with pytest.raises(theirs.type) as ours:
            call("openreg")
        assert (
            str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
        )
        assert ours.type is theirs.type
        torch.openreg.synchronize()


# ------------------------------------------------------- numbers of the CPU

NUMBER = torch.tensor(0.5)
TAKES_A_NUMBER = {
    "masked_fill_": lambda x: x.clone().masked_fill_(x > 1, NUMBER),
    "masked_fill": lambda x: x.masked_fill(x > 1, NUMBER),
    "where": lambda x: torch.where(x > 1, x, NUMBER),
    "where, both": lambda x: torch.where(x > 1, NUMBER.double(), NUMBER),
    "index_fill": lambda x: x.index_fill(0, (x[:, 0] > 1).long(), NUMBER),
    "copysign": lambda x: torch.copysign(x, NUMBER),
    "bucketize": lambda x: torch.bucketize(x.flatten(), x[0]),
    "types": lambda x: (x > 1).long() * NUMBER,
}


@pytest.mark.parametrize("call", TAKES_A_NUMBER.values(), ids=TAKES_A_NUMBER)
def test_a_number_of_the_cpu_is_taken_along(call):
    theirs = call(FLOATS)
    for _ in range(2):
        ours = call(FLOATS.to("openreg"))
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


# ------------------------------------------------------- made of other kernels


def test_rrelu_draws_the_slopes():
    x = torch.tensor([-1.0, 2.0] * 500, device="openreg", requires_grad=True)
    torch.manual_seed(3)
    y = functional.rrelu(x, 0.1, 0.3, training=True)
    torch.manual_seed(3)
    assert torch.equal(y, functional.rrelu(x, 0.1, 0.3, training=True))
    low, high = y[::2].min().item(), y[::2].max().item()
    assert -0.3 <= low < -0.28
    assert -0.12 < high <= -0.1
    assert y[1::2].eq(2).all()
    y.sum().backward()
    assert torch.equal(x.grad * x, y)
    z = functional.rrelu(x, 0.1, 0.3)
    torch.testing.assert_close(z[::2], torch.full_like(z[::2], -0.2))
    z = x.detach().clone()
    functional.rrelu_(z, 0.1, 0.3, training=True)
    assert z[1] == 2
    assert -0.3 <= z[0] <= -0.1


def test_an_assertion_is_told_by_the_next_wait():
    torch._assert_async(torch.tensor(1, device="openreg"))
    torch.openreg.synchronize()
    torch._assert_async(torch.tensor(0, device="openreg"), "all is lost")
    with pytest.raises(torch.AcceleratorError, match="all is lost"):
        torch.openreg.synchronize()
    torch.openreg.synchronize()


# ------------------------------------------------------------- mixed devices


@pytest.mark.parametrize("other", ["cpu", "openreg:1"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: functional.conv2d(x, y),
        lambda x, y: functional.conv_transpose2d(x, y),
        lambda x, y: functional.scaled_dot_product_attention(x, y, x),
        lambda x, y: functional.batch_norm(x, y[0, 0, 0], y[0, 0, 0]),
        lambda x, y: torch.ops.aten.native_dropout_backward(x, y > 0, 1.0),
        lambda x, y: torch.ops.openreg.axpy(x, y, 1.0),
        lambda x, y: torch.ops.openreg.silu_mul(x, y),
    ],
)
def test_kernels_by_hand_refuse_a_mix_of_devices(call, other):
    x = torch.ones(1, 1, 1, 1, device="openreg")
    with pytest.raises(RuntimeError, match=r"same device|Input type"):
        call(x, torch.ones(1, 1, 1, 1, device=other))
    torch.openreg.synchronize()


# ------------------------------------------------------- who launched it


def script(text, **environment):
    """What a failing program says on its way out."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    return done.stderr.strip().splitlines()


LATE = """
    import torch
    x = torch.ones(3, device="openreg")
    y = x[torch.tensor([5], device="openreg")]
    z = x + 1
    torch.openreg.synchronize()
"""


def test_a_failed_kernel_names_the_operator_and_on_request_the_line():
    quiet = script(LATE)
    assert "index" in quiet[-1]
    assert "launched at" not in quiet[-1]
    told = script(LATE, OPENREG_TRACE_LAUNCHES="1")
    assert "launched at <string>:4 (<module>)" in told[-1]


def test_a_failed_kernel_of_a_backward_pass_names_the_node():
    text = """
    import torch
    x = torch.ones(3, device="openreg", requires_grad=True)
    index = torch.zeros(3, dtype=torch.int64, device="openreg")
    y = x.gather(0, index).sum()
    index.data.fill_(7)  # behind autograd's back
    y.backward()
    torch.openreg.synchronize()
    """
    told = script(text, OPENREG_TRACE_LAUNCHES="1")
    assert "launched at autograd engine (GatherBackward0)" in told[-1]
