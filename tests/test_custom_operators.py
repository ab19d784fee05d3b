"""Operators of one's own: in C++, by the stable ABI, in Python."""

import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gradients import Log, double
from marks import ROOT
from torch import func, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional

import openreg

pytestmark = pytest.mark.usefixtures("seeded")

TRACED = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
SITE = Path(torch.__file__).parent


# ------------------------------------------- an operator of one's own, in C++


def composed(gate, up):
    return functional.silu(gate) * up


def silu_mul(gate, up):
    return torch.ops.openreg.silu_mul(gate, up)


DEVICES = ["cpu", "openreg:0", "openreg:1"]
FLOATS = [torch.float, torch.double, torch.half, torch.bfloat16]
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "stepped": lambda t: t[::2, 1:, ::3],
    "expanded": lambda t: t[:1].expand(3, -1, -1, -1),
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "negative": torch._neg_view,
    "no dimensions": lambda t: t[1, 1, 1, 1],
    "empty": lambda t: t[:0],
    "large": lambda t: t.repeat(9, 9, 9, 9),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", DEVICES)
def test_silu_mul_is_what_it_is_made_of(device, layout, dtype):
    gate, up = torch.randn(2, 4, 3, 2, 6).to(dtype)
    gate, up = (LAYOUTS[layout](part.to(device)) for part in (gate, up))
    results = []
    for function in (silu_mul, composed):
        parts = [gate.detach(), up.detach()]
        for part in parts:
            part.requires_grad_()
        y = function(*parts)
        grads = torch.autograd.grad(y.double().pow(2).sum(), parts)
        results.append([part.detach().cpu() for part in (y, *grads)])
        assert y.device == gate.device
        assert y.stride() == function(gate, up).stride()
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    torch.testing.assert_close(*results, **loose)


# Beside a vector's length, for each dtype; and rows that make several threads.
LENGTHS = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 100_003]


def exact(grad, gate, up):
    """The result and both gradients, in float64."""
    grad, gate, up = (x.double() for x in (grad, gate, up))
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return gate * sigmoid * up, grad * up * slope, grad * gate * sigmoid


def both_ways(grad, gate, up):
    gradients = torch.ops.openreg.silu_mul_backward(grad, gate, up)
    return silu_mul(gate, up), *gradients


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("device", ["openreg", "cpu"])
def test_silu_mul_of_all_lengths_is_rounded_once(device, dtype):
    # A step of the dtype, and what float32 loses on the way.
    step = torch.finfo(dtype).eps * (8 if dtype.itemsize >= 4 else 0.51)
    for length in LENGTHS:
        inputs = [torch.randn(length).mul(3).to(dtype) for _ in range(3)]
        expected = exact(*inputs)
        there = [x.to(device) for x in inputs]
        gaps = [x.repeat_interleave(2)[::2] for x in there]
        shifted = [torch.cat([x[:1], x])[1:] for x in there]
        for arguments in (there, gaps, shifted, [*there[:2], gaps[2]]):
            for found, right in zip(
                both_ways(*arguments), expected, strict=True
            ):
                torch.testing.assert_close(
                    found.cpu().double(),
                    right,
                    rtol=step,
                    atol=max(step, 1e-6) if dtype.itemsize >= 4 else 1e-6,
                )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_silu_mul_of_odd_numbers_is_that_of_its_parts(dtype):
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor(
        [0.0, -0.0, inf, -inf, nan, -200, 200, 1e-7, -90, 5], dtype=dtype
    )
    up = torch.tensor([1, 1, 1, 2, 1, 3, 3, 1, 1, inf], dtype=dtype)
    found = silu_mul(gate.to("openreg"), up.to("openreg")).cpu()
    torch.testing.assert_close(found, composed(gate, up), equal_nan=True)


def test_silu_mul_is_the_same_for_every_processor():
    code = (
        "import torch; torch.manual_seed(0)\n"
        "print(torch.backends.cpu.get_cpu_capability())\n"
        f"for dtype in {FLOATS}:\n"
        "    x = [torch.randn(1003).to('openreg', dtype) for _ in range(3)]\n"
        "    ops = torch.ops.openreg\n"
        "    for y in (ops.silu_mul(*x[1:]), *ops.silu_mul_backward(*x)):\n"
        "        print(f'{y.double().abs().sum().item():.5g}')\n"
    )
    printed = []
    for capability in ("default", "avx2"):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split("\n"))
    assert printed[0][0] == "DEFAULT"
    assert printed[0][1:] == printed[1][1:]


def test_silu_mul_is_one_operator_in_each_direction():
    gate, up = double(3), double(3)
    with Log() as log:
        y = silu_mul(gate, up)
        y.backward(torch.ones_like(y))
    ours = [name for name in log.names if name.startswith("openreg.")]
    assert ours == [
        "openreg.silu_mul.default",
        "openreg.silu_mul_backward.default",
    ]
    assert not {name.split(".")[1] for name in log.names} & {"mul", "sigmoid"}


def test_silu_mul_keeps_the_memory_format():
    gate, up = torch.randn(2, 2, 3, 4, 5, device="openreg")
    gate = gate.to(memory_format=torch.channels_last)
    assert silu_mul(gate, up).stride() == gate.stride()


def test_silu_mul_runs_on_the_current_stream_and_does_not_wait():
    gate, up = torch.randn(2, 1000, device="openreg")
    silu_mul(gate, up)
    side, event = torch.Stream("openreg"), torch.Event("openreg")
    openreg.synchronize()
    with side:
        openreg._sleep(100_000_000)
        y = silu_mul(gate, up)
        event.record()
        assert not event.query()
    side.synchronize()
    torch.testing.assert_close(y, composed(gate, up))


def test_silu_mul_is_queued_where_its_arguments_are_made():
    with openreg.device(1):
        openreg._sleep(30_000_000)
        gate = torch.ones(1000, device="openreg:1") * 3
    y = silu_mul(gate, gate)
    torch.testing.assert_close(y, composed(gate, gate))
    assert openreg.current_device() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1], "same sizes"),
        (lambda t: t[0], "same sizes"),
        (lambda t: t.float(), "one floating-point dtype"),
        (lambda t: t.to("openreg:1"), "same device"),
        (lambda t: t.cpu(), "same device"),
    ],
)
def test_silu_mul_refuses_pairs_that_do_not_fit(change, message):
    gate = double(2, 3)
    for pair in ((gate, change(gate)), (change(gate), gate)):
        with pytest.raises(RuntimeError, match=message):
            silu_mul(*pair)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.openreg.silu_mul_backward(gate, *pair)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.cfloat])
@pytest.mark.parametrize("device", ["cpu", "openreg", "meta"])
def test_silu_mul_refuses_types_without_a_meaning(device, dtype):
    x = torch.ones(2, dtype=dtype, device=device)
    with pytest.raises(RuntimeError, match="floating-point"):
        silu_mul(x, x)


def test_a_number_of_the_cpu_is_no_partner():
    x = torch.tensor(1.0)
    for pair in ((x, x.to("openreg")), (x.to("openreg"), x)):
        with pytest.raises(RuntimeError, match="same device"):
            silu_mul(*pair)


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_the_operator_passes_pytorchs_own_check(device):
    gate, up = double(3, 4, device=device), double(3, 4, device=device)
    grad = torch.ones_like(gate)
    tests = TRACED
    if device == "cpu":  # 2.13 knows three devices by name, and not this one
        tests = (*tests, "test_autograd_registration")
    check = functools.partial(torch.library.opcheck, test_utils=tests)
    operator = torch.ops.openreg.silu_mul.default
    check(operator, (gate, up))
    check(operator, (gate.detach().t(), up.detach().t()))
    check(torch.ops.openreg.silu_mul_backward.default, (grad, gate, up))


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_the_operators_formulas_are_right_in_every_mode(device):
    gate, up = double(2, 3, device=device), double(2, 3, device=device)
    modes = {"check_forward_ad": True, "check_batched_grad": True}
    assert gradcheck(silu_mul, (gate, up), **modes)
    assert gradgradcheck(
        silu_mul, (gate, up), check_fwd_over_rev=True, check_batched_grad=True
    )


TRANSFORMS = {
    "vmap": lambda f, g, u: func.vmap(f)(g, u),
    "vmap of one": lambda f, g, u: func.vmap(f, (0, None))(g, u[0]),
    "vmap, inner": lambda f, g, u: func.vmap(f, 1, 1)(g, u),
    "grad": lambda f, g, u: func.grad(lambda g: f(g, u).sum())(g),
    "grad of both": lambda f, g, u: func.grad(
        lambda g, u: f(g, u).sum(), argnums=(0, 1)
    )(g, u),
    "vjp": lambda f, g, u: func.vjp(f, g, u)[1](g),
    "jvp": lambda f, g, u: func.jvp(f, (g, u), (u, g)),
    "jvp of one": lambda f, g, u: func.jvp(lambda g: f(g, u), (g,), (u,)),
    "jacrev": lambda f, g, u: func.jacrev(f)(g, u),
    "jacfwd": lambda f, g, u: func.jacfwd(f)(g, u),
    "hessian": lambda f, g, u: func.hessian(lambda g: f(g, u).sum())(g),
    "per sample": lambda f, g, u: func.vmap(
        func.grad(lambda g, u: f(g, u).sum())
    )(g, u),
    "functionalize": lambda f, g, u: func.functionalize(f)(g, u),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_the_operator_under_the_transforms(device, name):
    gate, up = (double(3, 4, device=device).detach() for _ in range(2))
    transform = TRANSFORMS[name]
    torch.testing.assert_close(
        transform(silu_mul, gate, up), transform(composed, gate, up)
    )


@pytest.mark.parametrize(
    "operator",
    [
        silu_mul,
        lambda g, u: torch.ops.openreg.silu_mul_backward(g, g, u),
    ],
)
def test_a_batch_is_not_a_loop(operator):
    calls = []
    for samples in (2, 9):
        gate, up = torch.randn(2, samples, 3, device="openreg")
        with Log() as log:
            func.vmap(operator)(gate, up)
        calls.append(len(log.names))
    assert calls[0] == calls[1]


def test_a_tangent_of_the_gradient_alone_is_not_lost():
    """A gradient is linear in the one that comes in."""
    gate, up, grad, tangent = (double(3).detach() for _ in range(4))
    gate.requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad, tangent)
        (found,) = torch.autograd.grad(silu_mul(gate, up), gate, dual)
        found = forward_ad.unpack_dual(found).tangent
    (wanted,) = torch.autograd.grad(composed(gate, up), gate, tangent)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_sizes_stay_free_in_a_compiled_program(device):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda g, u: silu_mul(g * 2, u).sin(), backend=backend, fullgraph=True
    )
    for batch in (3, 5, 8):
        pair = double(batch, 4, device=device), double(batch, 4, device=device)
        for part in pair:
            torch._dynamo.mark_dynamic(part, 0)
        found = torch.autograd.grad(compiled(*pair).sum(), pair)
        wanted = composed(pair[0] * 2, pair[1]).sin().sum()
        wanted = torch.autograd.grad(wanted, pair)
        torch.testing.assert_close(found, wanted)
    assert len(graphs) == 1


def test_an_exported_program_takes_other_batches():
    class Layer(nn.Module):
        def forward(self, gate, up):
            return silu_mul(gate, up)

    pair = [double(4, 3).detach() for _ in range(2)]
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        Layer(), tuple(pair), dynamic_shapes=({0: batch}, {0: batch})
    )
    others = [double(7, 3).detach() for _ in range(2)]
    torch.testing.assert_close(program.module()(*others), composed(*others))


def double_operator(library, name, key):
    """An operator that doubles, with a gradient at this key."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C._AutoDispatchBelowAutograd():
                return getattr(torch.ops.testkeys, name)(x)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x.detach() * 2, "CompositeExplicitAutograd")
    library.impl(name, Double.apply, key)


@pytest.mark.parametrize(
    ("key", "devices"),
    [
        ("Autograd", {"cpu", "openreg", "meta"}),
        ("AutogradPrivateUse1", {"openreg"}),
    ],
)
def test_the_key_of_a_formula_decides_for_whom_it_is(key, devices):
    name, learning = key.lower(), set()
    with torch.library._scoped_library("testkeys", "FRAGMENT") as library:
        double_operator(library, name, key)
        for device in ("cpu", "openreg", "meta"):
            x = torch.ones(2, device=device, requires_grad=True)
            y = getattr(torch.ops.testkeys, name)(x)
            if type(y.grad_fn).__name__ == "DoubleBackward":
                learning.add(device)
    assert learning == devices


# ------------------------------------------------------------ the stable ABI


@pytest.fixture(scope="module")
def stable(tmp_path_factory):
    """The library of the page, compiled with a C++ compiler and no more."""
    library = tmp_path_factory.mktemp("stable") / "silu_mul.so"
    driver = Path(openreg._C.__file__).with_name("libopenreg.so")
    subprocess.run(
        [
            *shlex.split(os.environ.get("CXX", "g++")),
            *("-std=c++20", "-O1", "-Wall", "-shared", "-fPIC"),
            ROOT / "chapters/scripts/stable/silu_mul.cpp",
            "-DTORCH_TARGET_VERSION=0x020d000000000000",
            *(f"-isystem{SITE}/include", f"-I{ROOT}", f"-L{SITE}/lib"),
            *("-ltorch_cpu", driver, "-o", library),
        ],
        check=True,
    )
    torch.ops.load_library(library)
    return library


@pytest.mark.parametrize("index", [0, 1])
def test_the_stable_operator_computes_where_its_arguments_are(stable, index):
    gate, up = torch.randn(2, 5, 7, device=f"openreg:{index}")
    openreg.set_device(1 - index)
    for pair in ((gate, up), (gate.t(), up.t()), (gate[:0], up[:0])):
        y = torch.ops.stable.silu_mul(*pair)
        assert y.device.index == index
        torch.testing.assert_close(y, composed(*pair))
    assert openreg.current_device() == 1 - index


def test_the_stable_operator_runs_on_the_current_stream(stable):
    gate, up = torch.randn(2, 100, device="openreg")
    side, event = torch.Stream("openreg"), torch.Event("openreg")
    openreg.synchronize()
    with side:
        openreg._sleep(50_000_000)
        y = torch.ops.stable.silu_mul(gate, up)
        event.record()
        assert not event.query()
    side.synchronize()
    torch.testing.assert_close(y, composed(gate, up))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1], "same sizes"),
        (lambda t: t.double(), "float32"),
        (lambda t: t.to("openreg:1"), "same device"),
        (lambda t: t.cpu(), "same device"),
    ],
)
def test_the_stable_operator_refuses(stable, change, message):
    gate = torch.ones(2, 3, device="openreg")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.stable.silu_mul(gate, change(gate))


def test_the_stable_library_needs_no_cpp_of_pytorchs(stable):
    symbols = subprocess.check_output(
        ["nm", "-D", "--undefined-only", stable], text=True
    ).split()
    assert any(name.startswith("aoti_torch_") for name in symbols)
    foreign = ("c10", "2at", "5torch", "caffe2")
    assert not [name for name in symbols if any(f in name for f in foreign)]


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def formula(ctx, grad):
    gate, up = ctx.saved_tensors
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return grad * up * slope, grad * gate * sigmoid


def test_python_completes_the_stable_operator(stable):
    @torch.library.register_fake("stable::silu_mul")
    def _(gate, up):
        return torch.empty_like(gate)

    torch.library.register_autograd(
        "stable::silu_mul", formula, setup_context=save
    )
    pair = [torch.randn(3, 4).to("openreg").requires_grad_() for _ in "gu"]
    operator = torch.ops.stable.silu_mul.default
    torch.library.opcheck(operator, pair, test_utils=TRACED)
    found = torch.autograd.grad(operator(*pair).sum(), pair)
    wanted = torch.autograd.grad(composed(*pair).sum(), pair)
    torch.testing.assert_close(found, wanted)


# ------------------------------------------------------- operators in Python


@pytest.fixture(scope="module")
def in_python():
    @torch.library.custom_op(
        "testautograd::silu_mul", mutates_args=(), device_types="openreg"
    )
    def operator(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(gate).mul_(gate).mul_(up)

    @operator.register_fake
    def _(gate, up):
        return torch.empty_like(gate)

    @operator.register_vmap
    def _(info, in_dims, gate, up):
        front = [
            part if dim is None else part.movedim(dim, 0)
            for part, dim in zip((gate, up), in_dims, strict=True)
        ]
        return operator(*torch.broadcast_tensors(*front)), 0

    operator.register_autograd(formula, setup_context=save)
    return operator


def test_a_python_operator_passes_the_checks(in_python):
    gate, up = double(3, 4), double(3, 4)
    torch.library.opcheck(in_python, (gate, up), test_utils=TRACED)
    assert gradcheck(in_python, (gate, up), check_batched_grad=True)
    assert gradgradcheck(in_python, (gate, up))
    torch.testing.assert_close(in_python(gate, up), composed(gate, up))
    with pytest.raises(NotImplementedError, match="CPU"):
        in_python(gate.cpu(), up.cpu())


@pytest.mark.parametrize("name", ["vmap", "vmap of one", "vmap, inner"])
def test_a_python_operator_is_batched_by_its_rule(in_python, name):
    gate, up = double(3, 4).detach(), double(3, 4).detach()
    transform = TRANSFORMS[name]
    torch.testing.assert_close(
        transform(in_python, gate, up), transform(composed, gate, up)
    )


def test_a_python_operator_is_one_node_of_a_compiled_program(in_python):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(
        lambda g, u: in_python(g, u) + 1, backend=backend, fullgraph=True
    )
    pair = double(3), double(3)
    found = torch.autograd.grad(compiled(*pair).sum(), pair)
    torch.testing.assert_close(
        found, torch.autograd.grad(composed(*pair).sum(), pair)
    )
    assert sum("silu_mul" in target for target in graphs[0]) == 1


def test_a_python_operator_may_write_its_argument():
    @torch.library.custom_op(
        "testautograd::scale_", mutates_args=("x",), device_types="openreg"
    )
    def scale(x: torch.Tensor, by: float) -> None:
        x.mul_(by)

    x = torch.ones(3, device="openreg")
    version = x._version
    scale(x, 3.0)
    assert x.tolist() == [3, 3, 3]
    assert x._version > version
    torch.library.opcheck(scale, (x, 2.0))


def standard_gamma(shape, generator=None):
    """By Marsaglia and Tsang: a guess, until it is accepted."""
    d = shape - 1 / 3
    found = torch.zeros_like(shape)
    missing = torch.ones_like(shape, dtype=torch.bool)
    while missing.any():
        x = torch.empty_like(shape).normal_(generator=generator)
        v = (1 + x / (9 * d).sqrt()) ** 3
        u = torch.empty_like(shape).uniform_(generator=generator)
        good = (v > 0) & (u.log() < x * x / 2 + d - d * v + d * v.log())
        found = torch.where(missing & good, d * v, found)
        missing &= ~good
    return found


def test_an_aten_operator_registered_from_python_has_atens_gradient():
    shape = torch.full((50_000,), 3.0, device="openreg", requires_grad=True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_standard_gamma", standard_gamma, "PrivateUse1")
        y = torch.distributions.Gamma(shape, torch.ones_like(shape)).rsample()
        y.sum().backward()
        torch.library.opcheck(
            torch.ops.aten._standard_gamma.default,
            (shape.detach()[:4],),
            test_utils=("test_schema", "test_faketensor"),
        )
    assert abs(y.mean().item() - 3) < 0.1
    assert abs(y.var().item() - 3) < 0.3
    wanted = torch._standard_gamma_grad(shape.detach().cpu(), y.detach().cpu())
    assert torch.equal(shape.grad.cpu(), wanted)


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normal, inner = x * scale, grad * weight
        mean = (inner * normal).mean(-1, keepdim=True)
        return scale * (inner - normal * mean), (grad * normal).sum(0), None


def test_a_formula_for_this_device_replaces_that_of_a_composite():
    def rms_norm(x, shape, weight=None, eps=None):
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return RmsNorm.apply(x, weight, eps)

    pairs = [
        (double(5, 4, device=device), double(4, device=device))
        for device in ("openreg", "cpu")
    ]
    with torch.no_grad():
        for ours, theirs in zip(*pairs, strict=True):
            ours.copy_(theirs)
    names, grads = [], []
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("rms_norm", rms_norm, "AutogradPrivateUse1")
        for x, weight in pairs:
            y = functional.rms_norm(x, (4,), weight)
            names.append(type(y.grad_fn).__name__)
            found = torch.autograd.grad(y.pow(3).sum(), (x, weight))
            grads.append([part.cpu() for part in found])
    assert names == ["RmsNormBackward", "MulBackward0"]
    torch.testing.assert_close(*grads)
    y = functional.rms_norm(pairs[0][0], (4,), pairs[0][1])
    assert type(y.grad_fn).__name__ == "MulBackward0"  # as before


def test_an_operator_without_a_formula_warns_and_gives_no_gradient():
    x = torch.ones(2, device="openreg", requires_grad=True)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        torch.ops.openreg.row_sum(x.view(1, 2)).sum().backward()
    assert x.grad is None
