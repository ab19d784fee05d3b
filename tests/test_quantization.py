"""Integers of 8 and 4 bits: products, torchao's flows, what is refused."""

import copy
import gc
import io
import itertools
import logging
import subprocess
import sys
import warnings

import models
import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.nn import functional

import openreg

INT8 = torch.int8
pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(autouse=True)
def quiet():
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(before)


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    """Other tests of the process count memory, from none.

    Two functions keep the last models that they were asked about.
    """
    yield
    import torchao.utils
    from torch.ao.quantization.fx import utils

    torchao.utils._assert_and_get_unique_device.cache_clear()
    utils.assert_and_get_unique_device.cache_clear()
    gc.collect()


@pytest.fixture(autouse=True)
def natively(quiet):
    """Nothing in this file runs on the CPU for want of a kernel."""
    openreg.fallback.reset()
    yield
    assert openreg.fallbacks() == {}


@pytest.fixture
def ours():
    import openreg.quantization

    return openreg.quantization


def integers(*size, low=-128):
    return torch.randint(low, 128, size, dtype=INT8)


# --------------------------------------------------------------- products

# Around the edges of tiles (3), blocks of rows (96), of columns (48), and of
# the inner dimension (1024).
LENGTHS = [1, 2, 3, 4, 7, 47, 48, 49, 95, 97, 100]


@pytest.mark.parametrize("rows", LENGTHS)
def test_integers_are_multiplied_exactly(rows):
    for columns, inner in itertools.product(LENGTHS, [1, 5, 64, 1100]):
        a, b = integers(rows, inner), integers(inner, columns)
        expected = a.int() @ b.int()
        found = torch._int_mm(a.to("openreg"), b.to("openreg"))
        assert found.dtype == torch.int32
        assert torch.equal(found.cpu(), expected), (rows, columns, inner)


def test_the_largest_products_fit():
    a = torch.full((2, 4096), -128, dtype=INT8, device="openreg")
    assert torch._int_mm(a, a.t()).cpu().eq(128 * 128 * 4096).all()


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "rows apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "one row for all": lambda x: x[:1].expand_as(x),
    "offset": lambda x: torch.cat([x[:1], x])[1:],
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_any_layout_is_multiplied(left, right):
    a, b = integers(50, 70).to("openreg"), integers(70, 60).to("openreg")
    a, b = LAYOUTS[left](a), LAYOUTS[right](b)
    expected = a.cpu().int() @ b.cpu().int()
    assert torch.equal(torch._int_mm(a, b).cpu(), expected)


def test_products_are_written_where_one_says():
    a, b = integers(5, 8), integers(8, 7)
    expected = a.int() @ b.int()
    a, b = a.to("openreg"), b.to("openreg")
    for out in (
        torch.empty(5, 7, dtype=torch.int32, device="openreg"),
        torch.empty(7, 5, dtype=torch.int32, device="openreg").t(),
        torch.empty(5, 14, dtype=torch.int32, device="openreg")[:, ::2],
        torch.empty(0, dtype=torch.int32, device="openreg"),
    ):
        strides = out.stride()
        assert torch._int_mm(a, b, out=out) is out
        assert torch.equal(out.cpu(), expected)
        assert out.stride() == strides or strides == (1,)


@pytest.mark.parametrize("sizes", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty_matrices_are_multiplied(sizes):
    rows, inner, columns = sizes
    a, b = integers(rows, inner), integers(inner, columns)
    found = torch._int_mm(a.to("openreg"), b.to("openreg"))
    assert torch.equal(found.cpu(), a.int() @ b.int())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: torch._int_mm(x[0], x), "self to be a matrix"),
        (lambda x: torch._int_mm(x, x[0]), "mat2 to be a matrix"),
        (lambda x: torch._int_mm(x.int(), x), "self to have dtype torch.int8"),
        (
            lambda x: torch._int_mm(x, x.float()),
            "mat2 to have dtype torch.int8",
        ),
        (lambda x: torch._int_mm(x, x[1:]), r"\[4, 4\] and \[3, 4\] cannot"),
        (
            lambda x: torch._int_mm(x, x, out=torch.empty_like(x)),
            "out to have dtype torch.int32",
        ),
        (lambda x: torch._int_mm(x, x.cpu()), "same device|two devices|cpu"),
    ],
)
def test_what_is_no_product_of_integers_is_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(integers(4, 4).to("openreg"))


@pytest.fixture
def products(monkeypatch):
    """Counts the products of integers."""
    calls = []
    original = torch._int_mm
    monkeypatch.setattr(
        torch, "_int_mm", lambda *args: calls.append(1) or original(*args)
    )
    return calls


def test_sums_of_another_dtype_are_products_of_integers(products):
    """PyTorch does so on CUDA and XPU, and widens the matrices elsewhere."""
    from torch._higher_order_ops.out_dtype import out_dtype

    mm = torch.ops.aten.mm.default
    a, b = integers(16, 8).to("openreg"), integers(8, 24).to("openreg")
    found = out_dtype(mm, torch.int32, a, b)
    assert len(products) == 1
    assert torch.equal(found.cpu(), a.cpu().int() @ b.cpu().int())
    # All else stays as it was.
    for dtype, left, right in (
        (torch.int64, a, b),
        (torch.int32, a.short(), b.short()),
        (torch.float32, a.bfloat16(), b.bfloat16()),
    ):
        found = out_dtype(mm, dtype, left, right)
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.cpu(), (a.cpu().long() @ b.cpu().long()).to(dtype)
        )
    assert len(products) == 1


# ------------------------------------------------------ the integer layer


def reference(x, weight, scale, bias, dtype):
    sums = x.reshape(-1, x.shape[-1]).int() @ weight.t().int()
    found = sums.float() * scale
    found = found if bias is None else found + bias
    if dtype == INT8:
        found = found.round().clamp(-127, 127)
    return found.to(dtype).view(*x.shape[:-1], weight.shape[0])


def layer(outputs=50, inner=70, bias=True):
    scale = torch.rand(outputs) * 1e-2
    bias = torch.randn(outputs) if bias else None
    return integers(outputs, inner), scale, bias


def on(device, values):
    return [None if each is None else each.to(device) for each in values]


@pytest.mark.parametrize("device", ["openreg", "cpu", "openreg:1"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, INT8], ids=str
)
def test_the_layer_is_a_product_a_scale_and_a_bias(dtype, bias, device):
    for sizes in [(70,), (1, 70), (100, 70), (2, 3, 70), (0, 70), (2, 0, 70)]:
        x, parts = integers(*sizes), layer(bias=bias)
        expected = reference(x, *parts, dtype)
        found = torch.ops.openreg.int8_linear(
            x.to(device), *on(device, parts), dtype=dtype
        )
        assert found.device.type == torch.device(device).type
        torch.testing.assert_close(found.cpu(), expected)
        assert found.is_contiguous()


def test_results_of_8_bits_round_to_even_and_do_not_wrap():
    x = torch.tensor([[1], [2], [3], [100], [-100]], dtype=INT8)
    weight = torch.tensor([[1], [4]], dtype=INT8)
    found = torch.ops.openreg.int8_linear(
        *on("openreg", [x, weight, torch.full((2,), 0.5), None]), dtype=INT8
    )
    assert found.tolist() == [[0, 2], [1, 4], [2, 6], [50, 127], [-50, -127]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layer_reads_any_layout(name):
    x, (weight, scale, bias) = integers(50, 70), layer(60)
    x, weight = LAYOUTS[name](x), LAYOUTS[name](weight)
    scale, bias = (each.repeat_interleave(2)[::2] for each in (scale, bias))
    expected = reference(x, weight, scale, bias, torch.float32)
    found = torch.ops.openreg.int8_linear(
        LAYOUTS[name](x.to("openreg")),
        LAYOUTS[name](weight.to("openreg")),
        *(each.to("openreg") for each in (scale, bias)),
    )
    torch.testing.assert_close(found.cpu(), expected)


def test_layers_follow_their_stream():
    """The caller goes on, and what it does later comes later."""
    x, parts = integers(600, 600).to("openreg"), on("openreg", layer(600, 600))
    expected = reference(x.cpu(), *on("cpu", parts), torch.float32)
    side = openreg.Stream()
    side.wait_stream(openreg.current_stream())
    with openreg.stream(side):
        found = torch.ops.openreg.int8_linear(x, *parts)
        x.zero_()
    assert side.query() in (True, False)
    side.synchronize()
    torch.testing.assert_close(found.cpu(), expected)


INT8_CALLS = {
    "input and weight of dtype": lambda x, w, s, b: (x.float(), w, s, b),
    "weight of dtype": lambda x, w, s, b: (x, w.short(), s, b),
    r"\(\.\.\., in\)": lambda x, w, s, b: (x[:, 1:], w, s, b),
    r"weight of sizes \(out, in\)": lambda x, w, s, b: (x, w[0], s, b),
    "scale of dtype": lambda x, w, s, b: (x, w, s.double(), b),
    r"sizes \(out\)": lambda x, w, s, b: (x, w, s[1:], b),
    "bias of dtype": lambda x, w, s, b: (x, w, s, b.half()),
    "two|same device": lambda x, w, s, b: (x, w.cpu(), s, b),
}


@pytest.mark.parametrize("device", ["openreg", "meta"])
@pytest.mark.parametrize("message", INT8_CALLS)
def test_what_is_no_integer_layer_is_refused(message, device):
    if device == "meta" and "device" in message:
        pytest.skip("devices are looked at by the kernel")
    parts = on("openreg", [integers(3, 70), *layer()])
    arguments = on(device, INT8_CALLS[message](*parts))
    if "device" in message:
        arguments = INT8_CALLS[message](*parts)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.openreg.int8_linear(*arguments)


def test_more_of_the_layer_is_refused():
    parts = on("openreg", [integers(3, 70), *layer()])
    with pytest.raises(RuntimeError, match=r"torch.float32, .* not Long"):
        torch.ops.openreg.int8_linear(*parts, dtype=torch.long)
    long = torch.zeros(1, 2**17, dtype=INT8, device="openreg")
    one = torch.ones(1, device="openreg")
    with pytest.raises(RuntimeError, match="131072 products may not fit"):
        torch.ops.openreg.int8_linear(long, long, one)
    shifted = [*parts[:3], parts[3].requires_grad_()]
    out = torch.ops.openreg.int8_linear(*shifted)
    with pytest.raises(RuntimeError, match="int8_linear is not implemented"):
        out.sum().backward()


@pytest.mark.parametrize("device", ["openreg", "cpu"])
def test_the_layers_are_operators_in_every_respect(device, ours):
    parts = on(device, [integers(3, 70), *layer()])
    for dtype in (torch.float32, INT8):
        torch.library.opcheck(
            torch.ops.openreg.int8_linear.default, parts, {"dtype": dtype}
        )
    weight = ours.Int4Tensor.from_hp(torch.randn(6, 64, device=device))
    torch.library.opcheck(
        torch.ops.openreg.int4_linear.default,
        (
            torch.randn(3, 64, device=device),
            *(weight.packed, weight.scale, weight.zero),
            torch.randn(6, device=device),
        ),
    )


# -------------------------------------------------------- weights of 4 bits


@pytest.mark.parametrize("group", [2, 3, 32, 96])
@pytest.mark.parametrize("device", ["openreg", "cpu"])
def test_four_bits_are_what_they_stand_for(group, device, ours):
    weight = torch.randn(10, 96)
    packed = ours.Int4Tensor.from_hp(weight.to(device), group)
    assert packed.shape == weight.shape
    assert packed.device.type == device
    assert packed.packed.shape == (10, 48)
    assert packed.packed.dtype == torch.uint8
    found = packed.dequantize().cpu()
    groups = weight.view(10, -1, group)
    # Zero is among the numbers that a scale is made for.
    steps = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    wrong = (found - weight).abs().view_as(groups).amax(-1)
    assert (wrong <= steps * 0.5001).all() or (wrong <= steps).all()
    assert wrong.max() > 0


def test_each_number_has_its_place(ours):
    """By hand: 16 numbers in 8 bytes, the halves of the row side by side."""
    weight = torch.arange(16.0).view(1, 16)
    found = ours.Int4Tensor.from_hp(weight.to("openreg"), 16)
    assert found.scale.item() == 1
    assert found.zero.item() == 0
    assert found.packed.tolist() == [[i + 16 * (i + 8) for i in range(8)]]
    assert torch.equal(found.dequantize().cpu(), weight)


@pytest.mark.parametrize("device", ["openreg", "cpu"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_layer_of_four_bits_computes(dtype, device, ours):
    for sizes, outputs in [((64,), 5), ((3, 64), 33), ((2, 40, 64), 100)]:
        x = torch.randn(*sizes).to(dtype)
        weight = torch.randn(outputs, 64).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        packed = ours.Int4Tensor.from_hp(weight.to(device))
        exact = packed.to("cpu").dequantize().float()
        if dtype == torch.float32:
            assert torch.equal(exact, packed.dequantize().cpu())
        pairs = packed.packed.cpu()
        numbers = torch.cat((pairs & 15, pairs >> 4), 1)
        numbers = numbers.view(*packed.scale.shape, -1)
        zero, scale = (
            each.cpu()[..., None] for each in (packed.zero, packed.scale)
        )
        exact = ((numbers - zero) * scale).view(outputs, 64)
        for shift in (None, bias):
            expected = x.float() @ exact.t()
            expected = expected if shift is None else expected + shift.float()
            found = functional.linear(
                x.to(device), packed, *on(device, [shift])
            )
            torch.testing.assert_close(found.cpu(), expected.to(dtype))


INT4_CALLS = {
    "input of dtype": lambda x, p, s, z, b: (x.double(), p, s, z, b),
    r"packed of dtype torch.uint8": lambda x, p, s, z, b: (x, p.int(), s, z, b),
    r"\(\.\.\., in\)": lambda x, p, s, z, b: (x[:, 1:], p, s, z, b),
    "scale of dtype": lambda x, p, s, z, b: (x, p, s.half(), z, b),
    "as many inputs": lambda x, p, s, z, b: (x, p, s.repeat(1, 3), z, b),
    "zero of the dtype and sizes": lambda x, p, s, z, b: (x, p, s, z[1:], b),
    "bias of dtype": lambda x, p, s, z, b: (x, p, s, z, b.half()),
    "two|same device": lambda x, p, s, z, b: (x, p.cpu(), s, z, b),
}


@pytest.mark.parametrize("message", INT4_CALLS)
def test_what_is_no_layer_of_four_bits_is_refused(message, ours):
    weight = ours.Int4Tensor.from_hp(torch.randn(6, 64, device="openreg"))
    x, bias = torch.randn(3, 64), torch.randn(6)
    arguments = INT4_CALLS[message](
        *(x.to("openreg"), weight.packed, weight.scale, weight.zero),
        bias.to("openreg"),
    )
    with pytest.raises(RuntimeError, match=message):
        torch.ops.openreg.int4_linear(*arguments)


@pytest.mark.parametrize(
    ("weight", "group", "message"),
    [
        (torch.randn(4, 60), 32, "60 inputs do not make groups of 32"),
        (torch.randn(4, 45), 15, "or no pairs. Take a divisor"),
        (torch.randn(4, 60), 1, "Take a divisor"),
        (torch.randn(4), 2, "expected a matrix"),
        (torch.ones(4, 4, dtype=torch.int32), 2, "floating-point"),
    ],
)
def test_weights_that_make_no_groups_are_refused(weight, group, message, ours):
    with pytest.raises(ValueError, match=message):
        ours.Int4Tensor.from_hp(weight.to("openreg"), group)


def test_a_layer_of_four_bits_has_no_gradient_and_says_so(ours):
    weight = ours.Int4Tensor.from_hp(torch.randn(6, 64, device="openreg"))
    x = torch.randn(3, 64, device="openreg", requires_grad=True)
    with pytest.raises(RuntimeError, match="int4_linear is not implemented"):
        functional.linear(x, weight).sum().backward()


def test_four_bits_are_moved_copied_and_saved(ours):
    weight = ours.Int4Tensor.from_hp(torch.randn(6, 64, device="openreg"))
    values = weight.dequantize()
    for other in (weight.cpu(), weight.to("openreg:1"), copy.deepcopy(weight)):
        assert isinstance(other, ours.Int4Tensor)
        assert torch.equal(other.dequantize().cpu(), values.cpu())
    assert weight.to("openreg:1").packed.device == torch.device("openreg", 1)
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    assert file.tell() < 6 * 64 * 4 + 1500  # the archive's own part is large
    for where in (None, "cpu", "openreg:1"):
        file.seek(0)
        again = torch.load(file, map_location=where, weights_only=True)
        assert torch.equal(again["weight"].dequantize().cpu(), values.cpu())


# ------------------------------------------------------------------- PT2E


class Layers(nn.Module):
    """Rounds once between layers, or not: `inner` is read twice."""

    def __init__(self, bias=True):
        super().__init__()
        self.first = nn.Linear(16, 32, bias=bias)
        self.second = nn.Linear(32, 32, bias=bias)
        self.third = nn.Linear(32, 8, bias=bias)

    def forward(self, x):
        inner = functional.relu(self.first(x))
        x = self.second(inner) + inner
        return self.third(functional.gelu(x))


def prepared(model, x, quantizer, training=False, **options):
    from torchao.quantization.pt2e.quantize_pt2e import (
        prepare_pt2e,
        prepare_qat_pt2e,
    )

    program = export(model, (x,), **options).module()
    return (prepare_qat_pt2e if training else prepare_pt2e)(program, quantizer)


def targets(model):
    return [str(n.target) for n in model.graph.nodes if n.op != "get_attr"]


def count(model, name):
    return sum(name in target for target in targets(model))


MODES = {"static": {}, "dynamic": {"dynamic": True}, "qat": {"training": True}}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_layers_become_products_of_integers(mode, bias, ours):
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    options = MODES[mode]
    model = Layers(bias).to("openreg").eval()
    x = torch.randn(64, 16, device="openreg")
    one, two = (
        prepared(
            model, x, ours.Quantizer(**options), options.get("training", False)
        )
        for _ in range(2)
    )
    one(x), two(x)
    # What PT2E says the program means, computed in floating point.
    meant, found = convert_pt2e(one), ours.convert(two)
    assert count(found, "int8_linear") == 3
    assert count(found, "aten.linear") == 0
    assert count(found, "dequantize") == 0
    assert count(meant, "int8_linear") == 0
    steps = meant(x).abs().max() / 127
    assert (found(x) - meant(x)).abs().max() <= steps * 1.5
    exact = model(x)
    assert (found(x) - exact).abs().max() < 0.1 * exact.abs().max()
    assert (found(x) - exact).abs().max() > 0


def test_what_goes_from_layer_to_layer_stays_integer(ours):
    model = nn.Sequential(
        *(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 8))
    )
    model.to("openreg").eval()
    x = torch.randn(64, 16, device="openreg")
    program = prepared(model, x, ours.Quantizer())
    program(x)
    found = ours.convert(program)
    assert count(found, "quantize_per_tensor") == 1  # the model's own input
    dtypes = [
        node.kwargs["dtype"]
        for node in found.graph.find_nodes(
            op="call_function", target=torch.ops.openreg.int8_linear.default
        )
    ]
    assert dtypes == [INT8, INT8, torch.float32]
    assert (found(x) - model(x)).abs().max() < 0.1 * model(x).abs().max()


def test_nothing_is_left_of_what_was_rounded(ours):
    model = Layers().to("openreg").eval()
    x = torch.randn(64, 16, device="openreg")
    program = prepared(model, x, ours.Quantizer())
    program(x)
    found = ours.convert(program)
    assert not list(found.parameters())
    size = sum(b.nbytes for b in found.buffers())
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    others = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert size == weights + 2 * others * 4  # a scale and a bias each


def test_half_precision_around_the_integers(ours):
    model = Layers().to("openreg", torch.bfloat16).eval()
    x = torch.randn(64, 16, device="openreg", dtype=torch.bfloat16)
    program = prepared(model, x, ours.Quantizer())
    program(x)
    found = ours.convert(program)
    assert count(found, "int8_linear") == 3
    out = found(x)
    assert out.dtype == torch.bfloat16
    assert (out - model(x)).abs().max() < 0.1 * model(x).abs().max()


def test_sizes_may_vary(ours):
    model, x = Layers().to("openreg").eval(), torch.randn(64, 16)
    x = x.to("openreg")
    shapes = ({0: Dim("rows", min=1, max=1024)},)
    program = prepared(model, x, ours.Quantizer(), dynamic_shapes=shapes)
    program(x)
    found = ours.convert(program)
    torch.testing.assert_close(found(x)[:5], found(x[:5]))


def test_the_integer_program_leaves_the_device(ours):
    model, x = Layers().to("openreg").eval(), torch.randn(64, 16)
    program = prepared(model, x.to("openreg"), ours.Quantizer())
    program(x.to("openreg"))
    found = ours.convert(program)
    exported = export(found, (x.to("openreg"),))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    exported = torch.export.load(file)
    expected = found(x.to("openreg")).cpu()
    torch.testing.assert_close(
        exported.module()(x.to("openreg")).cpu(), expected
    )


def test_another_quantizers_program_is_left_alone(ours):
    from torchao.quantization.pt2e.quantizer import (
        x86_inductor_quantizer as x86,
    )

    quantizer = x86.X86InductorQuantizer().set_global(
        x86.get_default_x86_inductor_quantization_config()
    )
    model, x = Layers().to("openreg").eval(), torch.randn(64, 16)
    x = x.to("openreg")
    program = prepared(model, x, quantizer)
    program(x)
    found = ours.convert(program)
    # Its inputs are not symmetric, and a product of integers is not all.
    assert count(found, "int8_linear") == 0
    assert (found(x) - model(x)).abs().max() < 0.1 * model(x).abs().max()


@pytest.mark.parametrize("mode", ["static", "qat"])
def test_a_program_that_saw_nothing_is_not_converted(mode, ours):
    model, x = Layers().to("openreg").eval(), torch.randn(4, 16)
    options = MODES[mode]
    x = x.to("openreg")
    program = prepared(model, x, ours.Quantizer(**options), mode == "qat")
    with pytest.raises(ValueError, match=r"x, .*Run the prepared model on"):
        ours.convert(program)
    program(x)  # nothing was lost
    assert count(ours.convert(program), "int8_linear") == 3


def test_training_has_no_scales_to_find_later(ours):
    with pytest.raises(ValueError, match="Leave one out"):
        ours.Quantizer(dynamic=True, training=True)


def test_training_with_simulated_rounding(ours):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    model.to("openreg")
    x = torch.randn(256, 8, device="openreg")
    y = (x[:, 0] * x[:, 1] > 0).long()
    program = prepared(model, x, ours.Quantizer(training=True), True)
    optimizer = torch.optim.Adam(program.parameters(), 0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = functional.cross_entropy(program(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    found = ours.convert(program)
    loss = functional.cross_entropy(found(x), y).item()
    assert abs(loss - losses[-1]) < 0.05


# ---------------------------------------------------------------- torchao


def configs():
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
    )

    import openreg.quantization

    return {
        "int8 weights": (Int8WeightOnlyConfig(), 0.02, 0.3),
        "int8": (Int8DynamicActivationInt8WeightConfig(), 0.05, 0.3),
        "int4 weights": (
            openreg.quantization.Int4WeightOnlyConfig(),
            0.3,
            0.25,
        ),
    }


@pytest.mark.parametrize("name", ["int8 weights", "int8", "int4 weights"])
def test_quantized_models_compute_here_as_on_the_cpu(name, products):
    from torchao.quantization import quantize_

    config, tolerance, size = configs()[name]
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    x = torch.randn(20, 64)
    exact = model(x).detach()
    there = copy.deepcopy(model).to("openreg")
    quantize_(model, config)
    quantize_(there, config)
    with torch.no_grad():
        expected = model(x)
        products.clear()
        found = there(x.to("openreg"))
        assert len(products) == (2 if name == "int8" else 0)
        torch.testing.assert_close(
            found.cpu(), expected, rtol=1e-4, atol=1e-3 * exact.abs().max()
        )
        wrong = (found.cpu() - exact).abs().max() / exact.abs().max()
        assert 0 < wrong < tolerance
        moved = there.to("cpu")(x)
        torch.testing.assert_close(moved, found.cpu(), rtol=1e-4, atol=1e-4)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < size * 4 * (64 * 128 + 128 * 32) + 8000


def test_a_language_model_of_four_bits(ours):
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model, batch, _ = models.MODELS["gpt"]()
    model.eval().to("openreg")
    inputs, _ = models.placed(batch(0), "openreg")
    with torch.no_grad():
        exact = model(*inputs)
        quantize_(model, ours.Int4WeightOnlyConfig(group_size=16))
        found = model(*inputs)
    wrong = (found - exact).abs().mean() / exact.abs().mean()
    assert 0 < wrong < 0.2
    assert any(isinstance(p, ours.Int4Tensor) for p in model.parameters())


# ------------------------------------------------------------- rounding

ROUNDINGS = {
    "per tensor": lambda x: torch.fake_quantize_per_tensor_affine(
        x, 0.1, 3, -128, 127
    ),
    "per tensor, scale on the device": (
        lambda x: torch.fake_quantize_per_tensor_affine(
            x,
            torch.tensor(0.1, device=x.device),
            torch.tensor(3, dtype=torch.int32, device=x.device),
            *(-128, 127),
        )
    ),
    "per channel": lambda x: torch.fake_quantize_per_channel_affine(
        x,
        torch.linspace(0.05, 0.2, x.shape[0], device=x.device),
        torch.arange(x.shape[0], dtype=torch.int32, device=x.device),
        *(0, -128, 127),
    ),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding_is_simulated_with_its_gradient(name):
    x = torch.randn(6, 50) * 10  # some are out of range: no gradient there
    sides = []
    for device in ("cpu", "openreg"):
        there = x.clone().to(device).requires_grad_()
        out = ROUNDINGS[name](there)
        out.square().sum().backward()
        sides.append((out.cpu(), there.grad.cpu()))
    torch.testing.assert_close(sides[1], sides[0], rtol=0, atol=0)
    assert sides[0][1].eq(0).any()


# ------------------------------------------- tensors of quantized dtypes

QUANTIZED = [torch.qint8, torch.quint8, torch.qint32]


def quantized(dtype=torch.qint8, sizes=(4, 6), device="cpu"):
    x = torch.randn(*sizes) * 10
    return torch.quantize_per_tensor(x.to(device), 0.1, 3, dtype)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("device", ["openreg", "openreg:1"])
def test_a_quantized_tensor_holds_what_the_cpus_holds(dtype, device):
    x = torch.randn(4, 6) * 100
    expected = torch.quantize_per_tensor(x, 0.1, 3, dtype)
    for made in (
        torch.quantize_per_tensor(x.to(device), 0.1, 3, dtype),
        torch.quantize_per_tensor(
            *on(device, [x, torch.tensor(0.1), torch.tensor(3)]), dtype
        ),
        torch._make_per_tensor_quantized_tensor(
            expected.int_repr().to(device), 0.1, 3
        ),
        expected.to(device),
        torch._empty_affine_quantized(
            (4, 6), scale=0.1, zero_point=3, dtype=dtype, device=device
        ).copy_(expected),
    ):
        where = torch.device("openreg", torch.device(device).index or 0)
        assert made.device == where
        assert made.int_repr().device == made.dequantize().device == where
        assert torch.equal(made.int_repr().cpu(), expected.int_repr())
        assert made.q_scale() == pytest.approx(0.1)
        assert made.q_zero_point() == 3
        assert made.qscheme() == torch.per_tensor_affine
        torch.testing.assert_close(
            made.dequantize().cpu(), expected.dequantize()
        )


VIEWS = {
    "rows with gaps": lambda q: q[1:, ::2],
    "transposed": lambda q: q.t(),
    "made contiguous": lambda q: q.t().contiguous(),
    "reshaped": lambda q: q.reshape(2, 12),
    "viewed": lambda q: q.view(24),
    "expanded": lambda q: q.expand(2, 4, 6),
    "unsqueezed": lambda q: q.unsqueeze(1),
    "one row": lambda q: q[2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_quantized_tensors_are_viewed_and_brought_back(name):
    whole = quantized()
    expected, found = VIEWS[name](whole), VIEWS[name](whole.to("openreg"))
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    back = found.cpu()
    assert back.device.type == "cpu"
    assert torch.equal(back.int_repr(), expected.int_repr())
    assert torch.equal(found.dequantize().cpu(), expected.dequantize())
    # From a tensor with gaps on the CPU, too, which PyTorch leaves there.
    there = expected.to("openreg:1")
    assert there.device == torch.device("openreg", 1)
    assert torch.equal(there.int_repr().cpu(), expected.int_repr())


def test_quantized_tensors_are_copied_compared_printed_and_saved():
    expected = quantized()
    found = expected.to("openreg")
    assert torch.equal(found, found.clone())
    assert torch.equal(found, copy.deepcopy(found))
    assert not torch.equal(found, quantized(device="openreg"))
    other = torch._make_per_tensor_quantized_tensor(found.int_repr(), 0.2, 3)
    assert not torch.equal(found, other)  # the same integers
    other.copy_(found)
    assert other.q_scale() == found.q_scale()
    assert torch.equal(other, found)
    assert "scale=0.1" in repr(found)
    assert repr(found).splitlines()[0] == repr(expected).splitlines()[0]
    file = io.BytesIO()
    torch.save(found, file)
    for where in (None, "cpu", "openreg:1"):
        file.seek(0)
        again = torch.load(file, map_location=where)
        assert torch.equal(again.int_repr().cpu(), expected.int_repr())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: q + q, "cannot do this with .*quantized"),
        (lambda q: torch.relu(q), "cannot do this with .*quantized"),
        (lambda q: q.fill_(1), "cannot do this with .*quantized"),
        (
            lambda q: torch.empty(4, 6, device=q.device).copy_(q),
            r"call dequantize\(\) first",
        ),
        (
            lambda q: q.copy_(torch.ones(4, 6, device=q.device)),
            "but got float and c10::qint8",
        ),
        (
            lambda q: torch.quantize_per_channel(
                torch.ones(4, 6, device=q.device),
                torch.ones(4, device=q.device),
                torch.zeros(4, dtype=torch.long, device=q.device),
                *(0, torch.qint8),
            ),
            "Call it on the CPU",
        ),
        (
            lambda q: torch.quantize_per_channel(
                torch.ones(4, 6),
                torch.ones(4),
                torch.zeros(4, dtype=torch.long),
                *(0, torch.qint8),
            ).to(q.device),
            r"int_repr\(\) and q_per_channel_scales\(\)",
        ),
    ],
)
def test_what_quantized_tensors_cannot_do_is_refused_with_the_route(
    call, message
):
    with pytest.raises(NotImplementedError, match=message):
        call(quantized(device="openreg"))
    openreg.fallback.reset()  # one of them was tried on the CPU


def test_only_float32_becomes_quantized():
    for device in ("cpu", "openreg"):
        x = torch.ones(2, dtype=torch.double, device=device)
        with pytest.raises(RuntimeError, match="Float Tensor, got Double"):
            torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


# -------------------------------------------------- torchao, or none of it


def test_without_torchao_one_is_told_to_install_it():
    code = (
        "import sys; sys.modules['torchao'] = None\n"
        "import torch\n"
        "try: torch.openreg.quantization\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert "pip install 'torchao>=" in done.stdout, done.stderr


def test_torchao_is_not_imported_with_the_backend():
    code = "import sys, torch; print('torchao' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr
