"""Automatic mixed precision: policies, regions, scaling, training."""

import math
import warnings

import models
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import openreg

HALVES = [torch.bfloat16, torch.float16]
pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture(params=HALVES, ids=str)
def half(request):
    return request.param


def on_device(*size, dtype=torch.float32, device="openreg"):
    return torch.randn(*size).to(device, dtype)


# --------------------------------------------------------------- policies


def registered(key):
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def test_the_operators_are_those_of_cuda():
    """The only ones missing are of cuDNN, which no other device can call."""
    ours, cudas = map(registered, ("AutocastPrivateUse1", "AutocastCUDA"))
    assert cudas - ours == {
        "aten::cudnn_convolution",
        "aten::cudnn_convolution_transpose",
    }
    assert ours - cudas == {"openreg::silu_mul"}


LOWERED = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: functional.linear(x, x, x[0]),
    "conv1d": lambda x: functional.conv1d(x[None], x[..., None]),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(
        x[None, None], x[None, None]
    ),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "prelu": lambda x: functional.prelu(x, x[0, :1]),
    "attention": lambda x: functional.scaled_dot_product_attention(
        *[x[None, None]] * 3
    ),
    "vecdot": lambda x: torch.linalg.vecdot(x, x),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowered(name, half):
    x = on_device(4, 4)
    with torch.autocast("openreg", dtype=half):
        result = LOWERED[name](x)
    assert result.dtype is half
    torch.testing.assert_close(
        result.cpu(), LOWERED[name](x.cpu().to(half)), rtol=0.02, atol=0.02
    )
    assert LOWERED[name](x).dtype is torch.float32


RAISED = {
    "exp": torch.exp,
    "log": lambda x: x.abs().add(1).log(),
    "pow": lambda x: x**2,
    "softplus": functional.softplus,
    "layer_norm": lambda x: functional.layer_norm(x, [4]),
    "rms_norm": lambda x: functional.rms_norm(x, [4]),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "mse_loss": lambda x: functional.mse_loss(x, x + 1),
    "logits": lambda x: functional.binary_cross_entropy_with_logits(
        x, x.sigmoid()
    ),
    "upsample": lambda x: functional.interpolate(x[None], scale_factor=2.0),
    "softmax": lambda x: functional.softmax(x, -1),  # sets the dtype
    "cumsum": lambda x: x.cumsum(0),
    "sum": torch.sum,
    "vector_norm": torch.linalg.vector_norm,
    "norm": lambda x: torch.norm(x, 2),  # appends the dtype
    "norm of rows": lambda x: torch.norm(x, 2, 1),
}


@pytest.mark.parametrize("name", RAISED)
def test_raised_to_float32(name, half):
    x = on_device(4, 4, dtype=half)
    with torch.autocast("openreg", dtype=half):
        result = RAISED[name](x)
    assert result.dtype is torch.float32
    torch.testing.assert_close(
        result.cpu(), RAISED[name](x.cpu().float()), rtol=0.01, atol=0.01
    )


def test_a_dtype_that_is_asked_for_is_kept():
    x = on_device(4, 4, dtype=torch.float16)
    with torch.autocast("openreg"):
        assert torch.sum(x, dtype=torch.float16).dtype is torch.float16
        assert x.softmax(0, dtype=torch.float64).dtype is torch.float64


WIDEST = {
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "cross": lambda x, y: torch.cross(x[:3, :3], y[:3, :3], 1),
    "atan2": torch.atan2,
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "scatter_add": lambda x, y: x.scatter_add(
        0, torch.zeros(4, 4, dtype=torch.int64, device=x.device), y
    ),
    "silu_mul": lambda x, y: torch.ops.openreg.silu_mul(x, y),
}


@pytest.mark.parametrize("name", WIDEST)
def test_promoted_to_the_widest(name, half):
    x, y = on_device(4, 4), on_device(4, 4, dtype=half)
    with torch.autocast("openreg", dtype=half):
        assert WIDEST[name](x, y).dtype is torch.float32
        assert WIDEST[name](y, x).dtype is torch.float32
        assert WIDEST[name](y, y).dtype is half
    wide = WIDEST[name](x.cpu(), y.cpu().float())
    with torch.autocast("openreg", dtype=half):
        torch.testing.assert_close(WIDEST[name](x, y).cpu(), wide)


def test_all_others_fall_through(half):
    x, y = on_device(4), on_device(4, dtype=half)
    with torch.autocast("openreg", dtype=half):
        assert (x + x).dtype is torch.float32
        assert (x + y).dtype is torch.float32
        assert (y + y).dtype is half
        assert functional.silu(y).dtype is half
        assert x.reshape(2, 2).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_other_dtypes_are_left_alone(dtype):
    x = on_device(3, 3).to(dtype)
    with torch.autocast("openreg"):
        assert (x @ x).dtype is dtype


def test_the_cpus_tensors_are_left_alone():
    x = torch.ones(3, 3)
    with torch.autocast("openreg"):
        assert (x @ x).dtype is torch.float32
    with torch.autocast("cpu"):
        assert (x.to("openreg") @ x.to("openreg")).dtype is torch.float32


def test_what_is_unsafe_is_refused_with_the_cure():
    x = on_device(3).sigmoid()
    with (
        torch.autocast("openreg"),
        pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"),
    ):
        functional.binary_cross_entropy(x, x)
    with (
        torch.autocast("openreg"),
        torch.autocast("openreg", enabled=False),
    ):
        functional.binary_cross_entropy(x, x)


# ---------------------------------------------------------------- regions


def test_regions_nest():
    x = on_device(3, 3)
    with torch.autocast("openreg", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with torch.autocast("openreg", dtype=torch.float16):
            assert (x @ x).dtype is torch.float16
            with torch.autocast("openreg", enabled=False):
                assert (x @ x).dtype is torch.float32
            assert (x @ x).dtype is torch.float16
        assert (x @ x).dtype is torch.bfloat16
    assert (x @ x).dtype is torch.float32
    assert not torch.is_autocast_enabled("openreg")


def test_an_exception_ends_a_region():
    with pytest.raises(ValueError, match="within"), torch.autocast("openreg"):
        raise ValueError("within")
    assert not torch.is_autocast_enabled("openreg")


def test_a_function_can_be_a_region():
    @torch.autocast("openreg", dtype=torch.bfloat16)
    def product(x):
        return x @ x

    assert product(on_device(2, 2)).dtype is torch.bfloat16


def test_the_default_dtype_can_be_set():
    x = on_device(2, 2)
    before = torch.get_autocast_dtype("openreg")
    try:
        for dtype in HALVES:
            torch.set_autocast_dtype("openreg", dtype)
            with torch.autocast("openreg"):
                assert (x @ x).dtype is dtype
    finally:
        torch.set_autocast_dtype("openreg", before)


def test_an_unsupported_dtype_disables_the_region_and_says_so():
    x = on_device(2, 2)
    with pytest.warns(UserWarning, match="openreg Autocast only supports"):
        region = torch.autocast("openreg", dtype=torch.float64)
    with region:
        assert (x @ x).dtype is torch.float32


class Casts(TorchDispatchMode):
    """Counts conversions."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("enabled", "casts"), [(True, 3 + 5), (False, 15)])
def test_weights_are_cast_once_in_a_region(enabled, casts):
    layer, x = nn.Linear(2, 2).to("openreg"), on_device(2, 2)
    with Casts() as seen, torch.autocast("openreg", cache_enabled=enabled):
        for _ in range(5):
            layer(x + 0)  # three tensors to cast: input, weight, bias
    # The inputs are new each time, and not leaves: they are cast each time.
    assert seen.count == (casts - 1 if enabled else casts)


def test_a_weight_that_was_changed_is_cast_anew_in_the_next_region():
    layer, x = nn.Linear(1, 1, bias=False).to("openreg"), on_device(1, 1)
    for value in (1.0, 2.0):
        with torch.no_grad():
            layer.weight.fill_(value)
        with torch.autocast("openreg"):
            torch.testing.assert_close(
                layer(x).float(), value * x, rtol=0.01, atol=0.01
            )


# --------------------------------------------------------------- gradients


def test_gradients_have_the_dtype_of_their_tensors(half):
    layer, x = nn.Linear(3, 3).to("openreg"), on_device(2, 3).requires_grad_()
    with torch.autocast("openreg", dtype=half):
        loss = layer(x).square().mean()
    loss.backward()
    assert loss.dtype is torch.float32
    for tensor in (x, layer.weight, layer.bias):
        assert tensor.grad.dtype is torch.float32
    saved = x.detach().cpu().requires_grad_()
    layer.cpu()(saved).square().mean().backward()
    torch.testing.assert_close(x.grad.cpu(), saved.grad, rtol=0.05, atol=0.01)


def test_functions_of_ones_own():
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="openreg", cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            seen.append((x.dtype, torch.is_autocast_enabled("openreg")))
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="openreg")
        def backward(ctx, grad):
            seen.append((grad.dtype, torch.is_autocast_enabled("openreg")))
            return 2 * ctx.saved_tensors[0] * grad

    x = on_device(2, 2).requires_grad_()
    with torch.autocast("openreg"):
        result = Square.apply(x @ x)
        assert result.dtype is torch.float32
        result.sum().backward()
    assert seen == [(torch.float32, False)] * 2


def test_an_operator_of_ones_own_from_python():
    @torch.library.custom_op("amp_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    torch.library.register_autocast(
        "amp_test::twice", "openreg", torch.bfloat16
    )
    x = on_device(2)
    assert twice(x).dtype is torch.float32
    with torch.autocast("openreg"):
        assert twice(x).dtype is torch.bfloat16


# ----------------------------------------------------------------- scaling


class Plain(nn.Module):
    """One weight on each device: w0 * w1 * x."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.ones(4, device=f"openreg:{i}")) for i in (0, 1)
        )

    def forward(self, x):
        first, second = self.weights
        return ((x * first).to(second.device) * second).sum().to(x.device)


OPTIMIZERS = {
    "sgd": lambda p, **how: torch.optim.SGD(p, 0.1, momentum=0.9, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, 0.1, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, 0.1, **how),
    "adagrad": lambda p, **how: torch.optim.Adagrad(p, 0.1, **how),
}
HOW = [{"foreach": False}, {"foreach": True}, {"fused": True}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_with_an_infinity_is_skipped_on_both_devices(name, how, bad):
    model = Plain()
    optimizer = OPTIMIZERS[name](model.parameters(), **how)
    reference = Plain().cpu()
    theirs = OPTIMIZERS[name](reference.parameters(), foreach=False)
    scaler = torch.amp.GradScaler("openreg", init_scale=1024.0)
    x = torch.arange(1.0, 5, device="openreg")
    for number in range(4):
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        if number == 1:
            model.weights[1].grad[2] = bad
        scaler.step(optimizer)
        scaler.update()
        if number != 1:
            theirs.zero_grad()
            reference(x.cpu()).backward()
            theirs.step()
        for one, other in zip(
            model.parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(one.cpu(), other)
    assert scaler.get_scale() == 512.0


def test_the_scale_grows_and_backs_off():
    weight = nn.Parameter(torch.ones(1, device="openreg"))
    optimizer = torch.optim.SGD([weight], 0.0)
    scaler = torch.amp.GradScaler(
        "openreg",
        8.0,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=2,
    )
    scales = []
    for bad in (False, False, True, False, False):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if bad:
            weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 32.0, 8.0, 8.0, 32.0]


def test_gradients_are_clipped_after_they_are_unscaled():
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("openreg", init_scale=4096.0)
    scaler.scale(model(torch.ones(4, device="openreg"))).backward()
    assert model.weights[0].grad.tolist() == [4096.0] * 4
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(math.sqrt(8))
    scaler.step(optimizer)
    scaler.update()
    for weight in model.weights:
        expected = torch.full((4,), 1 - 1 / math.sqrt(8))
        torch.testing.assert_close(weight.detach().cpu(), expected)


def test_unscaling_twice_is_refused():
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("openreg")
    scaler.scale(model(torch.ones(4, device="openreg"))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_the_scaler_survives_a_checkpoint():
    scaler = torch.amp.GradScaler("openreg", init_scale=64.0)
    scaler.scale(torch.ones((), device="openreg"))
    other = torch.amp.GradScaler("openreg")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 64.0


def test_a_scaler_for_another_device_is_off_and_says_so():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not torch.amp.GradScaler("cuda").is_enabled()


def test_small_gradients_need_the_scaler_in_float16():
    weight = nn.Parameter(torch.ones(8, 8, device="openreg"))
    x = torch.full((1, 8), 1e-4, device="openreg")

    def gradient(scaler):
        weight.grad = None
        with torch.autocast("openreg", dtype=torch.float16):
            loss = (x @ weight).mean().float() * 1e-4
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD([weight], 0.0))
        return weight.grad.cpu()

    plain = gradient(
        torch.amp.GradScaler("openreg", enabled=False, init_scale=1)
    )
    assert not plain.any()
    scaled = gradient(torch.amp.GradScaler("openreg", init_scale=2.0**20))
    torch.testing.assert_close(
        scaled, torch.full((8, 8), 1e-4 * 1e-4 / 8), rtol=0.01, atol=0
    )


# ---------------------------------------------------------------- training


def losses(name, device, dtype, steps=8):
    torch.manual_seed(0)
    model, batch, loss = models.MODELS[name]()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    history = []
    for number in range(steps):
        inputs, target = models.placed(batch(number % 2), device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            value = loss(model(*inputs), target)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(value.detach())
    return torch.stack(history).float().cpu()


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_a_model_learns_what_it_learns_in_float32(name, half):
    expected = losses(name, "cpu", None)
    before = openreg.fallback_count()
    found = losses(name, "openreg", half)
    assert openreg.fallback_count() == before
    assert found[-1] < found[0]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    assert not torch.equal(found, expected)  # it was not float32


def test_a_training_step_does_not_wait_for_the_device(half):
    losses("gpt", "openreg", half, steps=2)  # what is learned is learned
    torch.manual_seed(0)
    model, batch, loss = models.MODELS["gpt"]()
    model.to("openreg")
    inputs, target = models.placed(batch(0), "openreg")
    torch.openreg.set_sync_debug_mode("error")
    try:
        with torch.autocast("openreg", dtype=half):
            loss(model(*inputs), target).backward()
    finally:
        torch.openreg.set_sync_debug_mode("default")


def test_every_offered_dtype_has_kernels_for_a_models_operators():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in openreg.get_amp_supported_dtype():
            with torch.autocast("openreg", dtype=dtype):
                x = functional.linear(on_device(2, 4), on_device(4, 4))
                x = functional.layer_norm(x, [4])
                functional.cross_entropy(
                    x, torch.zeros(2, dtype=torch.int64, device="openreg")
                )
