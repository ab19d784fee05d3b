"""Operators without a kernel: run on the CPU, by rules, and entered.

Operators of PyTorch may get a kernel at any time. So most of these are made
here, for the CPU alone, and stay without one.
"""

import contextlib
import ctypes
import dataclasses
import inspect
import json
import threading
import warnings
from pathlib import Path

import processes
import pytest
import torch
import torch.utils.checkpoint

import openreg

fallback = openreg.fallback
LIBRARY = torch.library.Library("openreg_test", "DEF")
ops = torch.ops.openreg_test


def for_the_cpu(schema, **options):
    """Define an operator of `openreg_test` and give it a kernel on the CPU."""

    def register(function):
        LIBRARY.define(schema, **options)
        LIBRARY.impl(schema.partition("(")[0], function, "CPU")
        return function

    return register


seen = []  # by `half` and others: their arguments


@for_the_cpu("half(Tensor x) -> Tensor")
def half(x):
    assert x.device.type == "cpu"
    return x * 0.5


@for_the_cpu("halve_(Tensor(a!) x) -> Tensor(a!)")
def halve_(x):
    return x.mul_(0.5)


@for_the_cpu("half.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
def half_out(x, out):
    return torch.mul(x, 0.5, out=out)


@for_the_cpu("plus(Tensor a, Tensor b) -> Tensor")
def plus(a, b):
    seen[:] = [a, b]
    return a + b


@for_the_cpu("total(Tensor[] xs, Tensor? bias, Tensor?[] more) -> Tensor")
def total(xs, bias, more):
    return sum(
        (x for x in [bias, *more] if x is not None), sum(x.sum() for x in xs)
    )


@for_the_cpu("halves(Tensor[] xs) -> Tensor[]")
def halves(xs):
    return [x * 0.5 for x in xs]


@for_the_cpu("halve_all_(Tensor(a!)[] xs) -> ()")
def halve_all_(xs):
    for x in xs:
        x.mul_(0.5)


@for_the_cpu("halve_each_(Tensor(a!)[] xs) -> Tensor(a!)[]")
def halve_each_(xs):
    halve_all_(xs)
    return xs


@for_the_cpu("add_to(Tensor x, *, Tensor(a!) sum) -> ()")
def add_to(x, sum):
    sum.add_(x)


@for_the_cpu("first(Tensor(a) x) -> Tensor(a)")
def first(x):
    return x[0]


@for_the_cpu("turn_(Tensor(a!) x) -> Tensor(a!)", tags=torch.Tag.inplace_view)
def turn_(x):
    return x.t_()


@for_the_cpu("lies(Tensor x, Tensor counter) -> Tensor")
def lies(x, counter):
    counter.add_(1)  # which the schema does not mark
    return x * 0.5


@for_the_cpu("kinds(Tensor x) -> (Tensor, int, float, Tensor, Tensor?)")
def kinds(x):
    return x * 0.5, 2, 0.5, x, None


@for_the_cpu("made_on(Tensor x, *, Device device) -> Tensor")
def made_on(x, *, device):
    return torch.ones(2, device=device)


@for_the_cpu("breaks_(Tensor(a!) x) -> ()")
def breaks_(x):
    x.zero_()
    raise ValueError("broken on purpose")


@for_the_cpu("draw(Tensor x, *, Generator? generator=None) -> Tensor")
def draw(x, generator=None):
    return torch.rand(x.shape, generator=generator)


@for_the_cpu("sparsely(Tensor x) -> Tensor")
def sparsely(x):
    return x.to_sparse()


LIBRARY.define("nowhere(Tensor x) -> Tensor")
LIBRARY.define("native_fails(Tensor x) -> Tensor")
LIBRARY.impl("native_fails", half, "CPU")


def _fails(x):
    raise NotImplementedError("the kernel of the device says no")


LIBRARY.impl("native_fails", _fails, "PrivateUse1")


@pytest.fixture(autouse=True)
def ledger():
    """An empty ledger, and no warnings, for each test."""
    fallback.reset()
    fallback.set_mode("off")
    yield
    fallback.set_mode("warn")
    fallback.record_sites(False)
    fallback.reset()


@pytest.fixture
def x():
    return torch.tensor([2.0, 4.0, 6.0], device="openreg")


def record(name="openreg_test::half"):
    (found,) = (r for r in fallback.records() if r.operator == name)
    return found


@contextlib.contextmanager
def heard():
    """The warnings of fallbacks, in a list, in the mode `warn`."""
    fallback.set_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", fallback.FallbackWarning)
        yield caught


def counts(name="openreg_test::half"):
    return openreg.fallbacks().get(name, 0)


# ------------------------------------------------------------ what it computes


def test_the_result_is_the_cpus_on_the_device_of_the_arguments():
    x = torch.arange(6.0).view(2, 3)
    for device in "openreg:0", "openreg:1":
        y = ops.half(x.to(device))
        assert y.device == torch.device(device)
        assert torch.equal(y.cpu(), x / 2)


def test_results_keep_their_strides(x):
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = ops.half(image.to("openreg"))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y.cpu(), image / 2)


def test_in_place_writes_back(x):
    assert ops.halve_(x) is x
    assert x.tolist() == [1, 2, 3]
    base = torch.ones(2, 4, device="openreg")
    ops.halve_(base[:, 1::2])
    assert base.tolist() == [[1, 0.5, 1, 0.5]] * 2


def test_out_is_written_and_returned(x):
    out = torch.empty(3, device="openreg")
    assert ops.half.out(x, out=out) is out
    assert out.tolist() == [1, 2, 3]
    room = torch.zeros(3, 2, device="openreg")
    ops.half.out(x, out=room[:, 0])
    assert room.tolist() == [[1, 0], [2, 0], [3, 0]]


def test_a_custom_operator_may_read_what_it_writes(x):
    sum = torch.ones(3, device="openreg")
    ops.add_to(x, sum=sum)
    assert sum.tolist() == [3, 5, 7]


def test_an_out_of_pytorchs_is_not_read(x):
    with torch.library._scoped_library("aten", "FRAGMENT") as library:
        library.define("openreg_half.out(Tensor x, *, Tensor(a!) out) -> ()")
        library.impl("openreg_half.out", half_out_only, "CPU")
        out = torch.empty(3, device="openreg")
        torch.ops.aten.openreg_half.out(x, out=out)
    assert out.tolist() == [1, 2, 3]
    entry = record("aten::openreg_half.out")
    assert (entry.bytes_to_host, entry.bytes_to_device) == (12, 12)
    assert entry.category == "other"


def half_out_only(x, out):
    torch.mul(x, 0.5, out=out)


def test_out_of_the_wrong_size_is_resized_and_keeps_the_cpus_strides(x):
    out = torch.empty(0, device="openreg")
    ops.half.out(x, out=out)
    assert out.tolist() == [1, 2, 3]
    small = torch.empty(1, device="openreg")
    with pytest.warns(UserWarning, match="resized"):
        ops.half.out(x, out=small)
    assert small.tolist() == [1, 2, 3]
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    there, here = torch.empty(0, device="openreg"), torch.empty(0)
    ops.half.out(image.to("openreg"), out=there)
    torch.mul(image, 0.5, out=here)
    assert there.stride() == here.stride()
    assert torch.equal(there.cpu(), here)


def test_an_argument_given_twice_is_one_argument(x):
    ops.plus(x, x)
    assert seen[0] is seen[1]
    assert record("openreg_test::plus").bytes_to_host == 12
    ops.half.out(x, out=x)
    assert x.tolist() == [1, 2, 3]


def test_results_of_all_kinds(x):
    got, number, real, same, nothing = ops.kinds(x)
    assert got.tolist() == [1, 2, 3]
    assert got.device == x.device
    assert (number, real, nothing) == (2, 0.5, None)
    assert same is x


def test_results_go_where_the_call_says(x):
    for device in "openreg:0", "openreg:1", "cpu":
        got = ops.made_on(x, device=torch.device(device))
        assert got.device == torch.device(device)
        assert got.tolist() == [1, 1]


def test_what_is_written_against_the_schema_is_brought_back(x):
    counter = torch.zeros(2, device="openreg")
    version = counter._version
    for _ in range(2):
        ops.lies(x, counter)
    assert counter.tolist() == [2, 2]
    assert counter._version > version  # or a backward pass uses it unnoticed
    assert x._version == 0


def test_the_running_statistics_of_batch_norm_are_brought_back():
    def run(device):
        x = torch.arange(8.0).view(4, 2).to(device)
        mean, variance = torch.zeros(2).to(device), torch.ones(2).to(device)
        out = [torch.empty(0, device=device) for _ in range(3)]
        torch.ops.aten.native_batch_norm.out(
            *(x, None, None, mean, variance, True, 0.5, 1e-5),
            out=out[0], save_mean=out[1], save_invstd=out[2],
        )  # fmt: skip
        return [t.cpu() for t in (mean, variance, *out)]

    torch.testing.assert_close(run("openreg"), run("cpu"))


def test_in_inference_mode(x):
    with torch.inference_mode():
        y = torch.ones(2, device="openreg")
        assert ops.halve_(y) is y
        assert ops.half(y).tolist() == [0.25, 0.25]
        assert ops.half(x).is_inference()


def test_numbers_of_the_cpu_stay_numbers(x):
    # First, where the reference's fallback would return a CPU tensor.
    y = ops.plus(torch.tensor(1.0), x)
    assert y.device == x.device
    assert y.tolist() == [3, 5, 7]
    half_precision = x.half()
    number = torch.tensor(1.0, dtype=torch.float64, device="openreg")
    assert ops.plus(half_precision, number).dtype == torch.float16


def test_lists_and_optional_tensors(x):
    y = torch.ones((), device="openreg")
    assert ops.total([x, x], None, []).item() == 24
    assert ops.total([x], y, [None, y]).item() == 14
    assert ops.total([x], None, [None]).device == x.device
    assert [t.tolist() for t in ops.halves([x, y])] == [[1, 2, 3], 0.5]
    ops.halve_all_([x, y])
    assert (x.tolist(), y.item()) == ([1, 2, 3], 0.5)


def test_a_list_that_is_returned_holds_the_arguments(x):
    y = torch.ones((), device="openreg")
    first, second = ops.halve_each_([x, y])
    assert first is x
    assert second is y
    assert y.item() == 0.5


def test_a_list_is_one_call(x):
    ops.halve_all_([x, x.clone(), x.clone()])
    assert openreg.fallbacks() == {"openreg_test::halve_all_": 1}


def test_gradients_flow():
    class Halve(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return ops.half(x)

        @staticmethod
        def backward(ctx, gradient):
            return ops.half(gradient)

    x = torch.ones(3, device="openreg", requires_grad=True)
    Halve.apply(x).backward(torch.full((3,), 4.0, device="openreg"))
    assert x.grad.tolist() == [2, 2, 2]
    assert counts() == 2


def _has_kernel(name):
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")


def _empty(x, count=1):
    return [torch.empty(0, device=x.device) for _ in range(count)]


PYTORCHS = {
    "aten::poisson": torch.poisson,
    "aten::binomial": lambda x: torch.binomial(x + 8, x / 9),
    "aten::_standard_gamma": torch._standard_gamma,
    "aten::_sample_dirichlet": torch._sample_dirichlet,
    "aten::rrelu_with_noise": lambda x: torch.rrelu(-x, training=True),
    "aten::masked_select.out": lambda x: torch.masked_select(
        x, x > 1, out=_empty(x)[0]
    ),
    "aten::histogram.bin_ct_out": lambda x: torch.histogram(
        x, 4, out=_empty(x, 2)
    ),
    "aten::native_batch_norm.out": lambda x: torch.native_batch_norm(
        x.view(-1, 1), None, None, None, None, True, 0, 0, out=_empty(x, 3)
    ),
}


@pytest.mark.parametrize("name", [n for n in PYTORCHS if not _has_kernel(n)])
def test_operators_of_pytorch(name):
    def run(device):
        torch.manual_seed(5)  # without a kernel, the CPU's generator draws
        return PYTORCHS[name](torch.tensor([0.5, 2.0, 8.0]).to(device))

    torch.testing.assert_close(
        run("openreg"), run("cpu"), rtol=0, atol=0, check_device=False
    )
    assert openreg.fallbacks() == {name: 1}


def test_conjugate_and_negative_views():
    z = torch.tensor([1 + 2j, 3 - 1j])
    there = z.to("openreg")
    assert torch.equal(ops.half(there.conj()).cpu(), z.conj() / 2)
    assert torch.equal(ops.half(there.conj().imag).cpu(), z.conj().imag / 2)
    ops.halve_(there.conj())
    assert torch.equal(there.cpu(), z / 2)


# ----------------------------------------------------------------- the streams

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
driver = ctypes.CDLL(str(Path(openreg._C.__file__).with_name("libopenreg.so")))
driver.orLaunchHostFunc.argtypes = [
    ctypes.c_void_p,
    HOST_FUNCTION,
    ctypes.c_void_p,
]


@contextlib.contextmanager
def default_stream_held():
    """Hold the default stream until the block ends; yields what tells."""
    released = threading.Event()
    hold = HOST_FUNCTION(lambda _: released.wait(60) and None)
    assert driver.orLaunchHostFunc(None, hold, None) == 0
    try:
        yield released
    finally:
        released.set()
        openreg.synchronize()


def test_it_runs_on_the_current_stream(x):
    side = openreg.Stream()
    side.wait_stream(openreg.current_stream())
    openreg.synchronize()
    with default_stream_held(), openreg.stream(side):
        openreg._sleep(20_000_000)
        x.fill_(8)  # queued on the side stream: must be read after it
        y = ops.half(x)
        assert y.tolist() == [4, 4, 4]
        # All that while the default stream's work has not ended.
        assert not openreg.default_stream().query()


# ---------------------------------------------------------------- what refuses


def unchanged(x, error, match, call):
    before = x.tolist()
    with pytest.raises(error, match=match):
        call()
    assert x.tolist() == before


def test_views_never_fall_back(x):
    unchanged(x, NotImplementedError, "a view never", lambda: ops.first(x))
    assert openreg.fallback_count() == 0


def test_what_changes_the_form_of_its_argument_never_falls_back():
    x = torch.zeros(2, 3, device="openreg")
    with pytest.raises(NotImplementedError, match=r"turn_.*a view never"):
        ops.turn_(x)
    assert x.shape == (2, 3)
    assert openreg.fallback_count() == 0


def test_mixed_devices_never_fall_back(x):
    for other in torch.ones(3), torch.ones(3, device="openreg:1"):
        with pytest.raises(RuntimeError, match="same device"):
            ops.plus(x, other)
        with pytest.raises(RuntimeError, match="same device"):
            ops.halves([x, other])
        with pytest.raises(RuntimeError, match="same device"):
            ops.total([x], None, [None, other])
    assert openreg.fallback_count() == 0


def test_a_result_is_not_written_into_another_device(x):
    with pytest.raises(RuntimeError, match="same device"):
        ops.half.out(x[0], out=torch.empty(()))


def test_a_failed_kernel_never_falls_back(x):
    with pytest.raises(NotImplementedError, match="says no"):
        ops.native_fails(x)
    assert openreg.fallback_count() == 0


def test_what_fails_on_the_cpu_writes_nothing(x):
    unchanged(x, ValueError, "on purpose", lambda: ops.breaks_(x))
    assert counts("openreg_test::breaks_") == 1


def test_without_a_kernel_on_the_cpu_either(x):
    with pytest.raises(NotImplementedError, match="none for the CPU"):
        ops.nowhere(x)
    assert openreg.fallback_count() == 0


def test_a_dtype_that_the_cpu_does_not_know_is_put_in_context():
    x = torch.ones(2, dtype=torch.int64, device="openreg")
    with pytest.raises(NotImplementedError) as caught:
        torch.poisson(x)
    if not _has_kernel("aten::poisson"):
        assert "aten::poisson has no kernel for openreg" in str(caught.value)
        assert "not implemented for 'Long'" in str(caught.value)
        assert "'CPU' backend" not in str(caught.value)


def test_generators_of_the_device_are_refused(x):
    mine = torch.Generator("openreg")
    with pytest.raises(RuntimeError, match=r"draw.*generator of openreg"):
        ops.draw(x, generator=mine)
    torch.manual_seed(3)
    want = torch.rand(3)
    here = torch.Generator().manual_seed(3)
    assert torch.equal(ops.draw(x, generator=here).cpu(), want)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per")
def test_sparse_and_quantized_are_refused(x):
    with pytest.raises(NotImplementedError, match=r"sparse.*on the CPU") as e:
        ops.sparsely(x)
    assert str(e.value).count("openreg_test::sparsely") == 1
    for make in (
        lambda: torch.sparse_csr_tensor([0, 1], [0], x[:1], (1, 3)).to_dense(),
        lambda: torch.quantize_per_channel(
            x, torch.ones_like(x), torch.zeros_like(x).long(), 0, torch.quint8
        ),
        lambda: x[None].to_sparse_csr(),
    ):
        with pytest.raises(NotImplementedError, match=r"sparse|quantized"):
            make()


def test_a_sparse_argument_is_refused(x):
    with pytest.raises(RuntimeError, match="sparse"):
        ops.plus(x, torch.ones(3).to_sparse())


def test_overlap_is_refused():
    wide = torch.zeros(1, device="openreg").expand(3)
    with pytest.raises(RuntimeError, match="single memory location"):
        ops.halve_(wide)


# ------------------------------------------------------------------- the rules


def test_error_raises_and_changes_nothing(x):
    with fallback.mode("error"):
        unchanged(
            x,
            NotImplementedError,
            r'halve_ \(custom\).*mode\("openreg_test::halve_=warn"\)',
            lambda: ops.halve_(x),
        )
    assert openreg.fallback_count() == 0


def test_a_category_is_obeyed(x):
    with fallback.mode("custom=error"):
        unchanged(x, NotImplementedError, r"\(custom\)", lambda: ops.halve_(x))
    with fallback.mode("error,custom=off"):
        ops.halve_(x)
    assert counts("openreg_test::halve_") == 1


@pytest.mark.parametrize(
    ("rules", "name", "want"),
    [
        ("", "aten::frexp.Tensor", "warn"),
        ("error", "aten::frexp.Tensor", "error"),
        ("error,aten::frexp=off", "aten::frexp.Tensor", "off"),
        ("error, aten::fr*=off", "aten::frexp.Tensor", "off"),
        ("aten::fr*=off,error", "aten::frexp.Tensor", "error"),
        ("aten::half.out=error", "openreg_test::half.out", "warn"),
        ("openreg_test::half.out=error", "openreg_test::half.out", "error"),
        ("openreg_test::half.out=error", "openreg_test::half", "warn"),
        ("openreg_test::half=error", "openreg_test::half.out", "error"),
        ("openreg_test::half.default=error", "openreg_test::half", "error"),
        ("openreg_test::half.default=error", "openreg_test::half.out", "warn"),
        ("*::half=error", "openreg_test::half.default", "error"),
        ("custom=off", "openreg_test::half", "off"),
        ("random=error", "aten::poisson", "error"),
        ("linalg=error", "aten::linalg_qr", "error"),
        ("foreach=error", "aten::_foreach_lgamma", "error"),
        ("backward=error", "aten::_cdist_backward", "error"),
        ("reduction=error", "aten::sum.dim_IntList", "error"),
        ("pointwise=error", "aten::lgamma", "error"),
        ("dynamic=error", "aten::nonzero", "error"),
        ("factory=error", "aten::tril_indices", "error"),
        ("other=error", "aten::cdist", "error"),
    ],
)
def test_rules(rules, name, want):
    fallback.set_mode(rules)
    assert fallback.get_mode(name) == want


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ("loud", "'loud' is not a mode"),
        ("aten::add=loud", "'loud' is not a mode"),
        ("pointless=error", "neither an operator.*pointwise"),
        ("error,,off", "'' is not a mode"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules, match):
    with pytest.raises(ValueError, match=match):
        fallback.set_mode(rules)
    with pytest.raises(ValueError, match=match), fallback.mode(rules):
        pass
    assert fallback.get_mode("openreg_test::half") == "off"


def test_blocks_nest_and_end(x):
    name = "openreg_test::half"
    with fallback.mode("error"):
        with fallback.mode("openreg_test::ha*=off"):
            assert ops.half(x).tolist() == [1, 2, 3]
            with pytest.raises(NotImplementedError):
                ops.plus(x, x)
        with pytest.raises(NotImplementedError):
            ops.half(x)
        with contextlib.suppress(KeyError), fallback.mode("off"):
            raise KeyError
        assert fallback.get_mode(name) == "error"
    assert fallback.get_mode(name) == "off"


def test_a_function_can_be_put_under_rules(x):
    @fallback.mode("error")
    def work():
        return ops.half(x)

    for _ in range(2):
        with pytest.raises(NotImplementedError):
            work()
    ops.half(x)


def test_a_block_is_for_its_thread(x):
    found = []

    def look():
        found.append(fallback.get_mode("openreg_test::half"))

    with fallback.mode("error"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == ["off"]
    fallback.set_mode("error")
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == ["off", "error"]


class HalveBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ops.half(gradient)


def test_a_block_reaches_the_threads_of_its_backward():
    x = torch.ones(3, device="openreg", requires_grad=True)
    y, one = HalveBackward.apply(x), torch.ones(3, device="openreg")
    with (
        fallback.mode("error"),
        pytest.raises(NotImplementedError, match="half"),
    ):
        y.backward(one)
    assert x.grad is None
    HalveBackward.apply(x).backward(one)
    assert x.grad.tolist() == [0.5] * 3


def run(code, rules):
    program = (
        "import torch\n"
        "L = torch.library.Library('t', 'DEF')\n"
        "L.define('f(Tensor x) -> Tensor')\n"
        "L.impl('f', lambda x: x + 1, 'CPU')\n"
        "x = torch.empty(1, device='openreg')\n" + code
    )
    return processes.run(program, {"OPENREG_FALLBACK": rules})


def test_the_environment_gives_rules():
    done = run("torch.ops.t.f(x)", "error")
    assert "t::f (custom) has no kernel" in done.stderr
    done = run("torch.ops.t.f(x)", "error,t::*=warn")
    assert (done.returncode, done.stderr.count("t::f has no kernel")) == (0, 1)
    done = run("torch.ops.t.f(x); torch.ops.t.f(x)", "")
    assert done.stderr.count("t::f has no kernel") == 1
    done = run("torch.ops.t.f(x)", "off")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_environment_is_named():
    done = run("torch.ops.t.f(x)", "quiet")
    assert "OPENREG_FALLBACK='quiet': 'quiet' is not a mode" in done.stderr
    assert "ValueError" in done.stderr


# ---------------------------------------------------------------- the warnings


def test_each_operator_is_named_once_at_the_users_line(x):
    with heard() as warned:
        for _ in range(2):
            ops.half(x)
        line = inspect.currentframe().f_lineno - 1
        ops.plus(x, x)
        assert len(warned) == 2
        fallback.reset()
        ops.half(x)
    assert len(warned) == 3
    assert str(warned[0].message).startswith("openreg_test::half has no kernel")
    assert (warned[0].filename, warned[0].lineno) == (__file__, line)


def test_the_line_is_not_torchs(x):
    with heard() as warned:
        Half()(x)
        line = inspect.currentframe().f_lineno + 1
        torch.utils.checkpoint.checkpoint(ops.plus, x, x, use_reentrant=False)
    assert [w.filename for w in warned] == [__file__] * 2
    assert warned[1].lineno == line


class Half(torch.nn.Module):
    def forward(self, x):
        return ops.half(x)


def test_a_warning_made_an_error_leaves_all_as_it_was(x):
    fallback.set_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error", fallback.FallbackWarning)
        for _ in range(2):  # nobody has been warned, so it comes again
            unchanged(
                x,
                fallback.FallbackWarning,
                "halve_",
                lambda: ops.halve_(x),
            )
    assert openreg.fallback_count() == 0
    with pytest.warns(fallback.FallbackWarning):
        ops.halve_(x)


def test_warnings_can_be_filtered(x):
    fallback.set_mode("warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fallback.FallbackWarning)
        ops.half(x)
    assert counts() == 1


# ------------------------------------------------------------------ the ledger


def test_calls_and_bytes_are_entered():
    x = torch.ones(8, 128, device="openreg")
    ops.half(x)
    ops.half(x[:2])
    ops.halve_(x)
    entry = record()
    assert (entry.calls, entry.category) == (2, "custom")
    assert entry.bytes_to_host == entry.bytes_to_device == 4096 + 1024
    assert 0 < entry.seconds < 60
    assert record("openreg_test::halve_").bytes_to_device == 4096
    assert openreg.fallbacks() == {
        "openreg_test::half": 2,
        "openreg_test::halve_": 1,
    }
    assert openreg.fallback_count() == 3
    json.dumps([dataclasses.asdict(r) for r in fallback.records()])
    fallback.reset()
    assert fallback.records() == []


def test_what_does_not_fall_back_is_not_entered(x):
    x.clone().fill_(1).cpu()
    assert openreg.fallback_count() == 0


def test_the_place_of_the_first_call_is_kept(x):
    ops.half(x)
    line = inspect.currentframe().f_lineno - 1
    ops.half(x)
    name = inspect.currentframe().f_code.co_name
    assert record().sites == {f"{__file__}:{line} ({name})": 1}


def test_every_place_is_kept_when_asked(x):
    assert fallback.record_sites() is False
    for _ in range(3):
        ops.half(x)
    ops.half(x)
    assert sorted(record().sites.values()) == [1, 3]
    assert fallback.record_sites(False) is True


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_the_autograd_engine_is_a_place():
    # `cos` is what the backward pass of `sin` calls. Without the name of a
    # file, as generated code is, the function is no place of the user's.
    code = "def cos(x): return torch.ops.openreg_test.half(x)"
    scope = {"torch": torch}
    exec(compile(code, "<eval_with_key>.0", "exec"), scope)
    x = torch.ones(3, device="openreg", requires_grad=True)
    fallback.set_mode("warn")
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cos", scope["cos"], "PrivateUse1", allow_override=True)
        with pytest.warns(fallback.FallbackWarning, match="half") as caught:
            x.sin().sum().backward()
    (warning,) = (w for w in caught if w.category is fallback.FallbackWarning)
    assert warning.filename == "<autograd engine>"
    assert record().sites == {"autograd engine (SinBackward0)": 1}


def test_a_thread_of_the_users_is_a_place(x):
    def work():
        ops.half(x)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (site,) = record().sites
    assert site.startswith(__file__)
    assert site.endswith("(work)")


def test_entries_of_many_threads_add_up(x):
    threads = [
        threading.Thread(target=lambda: [ops.half(x) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert record().calls == 200
    assert record().bytes_to_host == 200 * 12


# ------------------------------------------------- by name, and fallthrough


def test_lists_go_as_wholes_where_the_elements_operator_has_no_kernel():
    by_name = set(openreg._C.fallback_foreach())
    stems = {
        name.partition(".")[0].removesuffix("_")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(
            "PrivateUse1"
        )
        if name not in by_name
    }
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_") and not name.endswith("out"):
            stem = name.partition(".")[0].removesuffix("_")
            alone = stem.replace("_foreach_", "")
            special = ("copy", "norm", "powsum")
            assert (
                name in by_name
                or {stem, alone} & stems
                or alone.removeprefix("aten::") in special
            ), name


def test_a_list_goes_once_where_its_elements_have_no_kernel():
    # Known before the backend is loaded, as PyTorch's own operators are.
    program = """
import torch
aten = torch.library.Library("aten", "FRAGMENT")
for name, key in ("known", "PrivateUse1"), ("unknown", "CPU"):
    aten.define(f"{name}(Tensor x) -> Tensor")
    aten.impl(name, lambda x: x.clone(), key)
    one = getattr(torch.ops.aten, name)
    for form in (f"_foreach_{name}", f"_foreach_{name}_"):
        aten.define(f"{form}(Tensor[] xs) -> Tensor[]")
        each = lambda xs, one=one: [one(x) for x in xs]
        aten.impl(form, each, "CompositeExplicitAutograd")
import openreg
xs = [torch.full((2,), n, device="openreg") for n in (1.0, 2.0, 3.0)]
for form in "_foreach_unknown", "_foreach_unknown_", "_foreach_known":
    ys = getattr(torch.ops.aten, form)(xs)
    assert [y.tolist() for y in ys] == [x.tolist() for x in xs]
print(openreg.fallbacks())
"""
    done = processes.run(
        program,
        {"OPENREG_FALLBACK": "off", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert (done.stderr, done.returncode) == ("", 0)
    want = {"aten::_foreach_unknown": 1, "aten::_foreach_unknown_": 1}
    assert eval(done.stdout) == want


def test_fallthrough_lets_copies_read_lazy_bits():
    for key in "Conjugate", "Negative":
        assert torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(
            "aten::_copy_from", key
        )


# ------------------------------------------------------------------ the report


def test_the_report_names_costs_places_and_remedies(x):
    ops.half(x)
    ops.plus(x, x)
    ops.plus(x, x)
    text = fallback.report()
    assert text.startswith("3 calls of 2 operators ran on the CPU.")
    assert "openreg_test::half (custom): 1 call, " in text
    assert "12 B to the host, 12 B to the device" in text
    assert f"1 x {__file__}:" in text
    assert '-> write a kernel: torch.library.impl("openreg_test::plus"' in text


def test_the_remedy_fits_the_operator():
    assert "aten::fill_.Scalar" in fallback.remedy("aten::fill.Scalar")
    assert "make it on the CPU" in fallback.remedy("aten::tril_indices")
    assert "write a kernel" in fallback.remedy("openreg_test::half")


def test_the_remedy_for_a_custom_operator_works(x):
    LIBRARY.define("late(Tensor x) -> Tensor")
    LIBRARY.impl("late", half, "CPU")
    ops.late(x)
    assert counts("openreg_test::late") == 1

    @torch.library.impl("openreg_test::late", "openreg")
    def late(x):
        return x.clone()

    fallback.set_mode("error")
    assert ops.late(x).tolist() == [2, 4, 6]
