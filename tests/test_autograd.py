"""Gradients: backward kernels, the engine, and what users do with them."""

import copy
import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
from gradients import Log, double
from marks import ROOT
from torch import func, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import openreg

pytestmark = pytest.mark.usefixtures("seeded")


def script(text, **environment):
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


# --------------------------------------------------- operators with a kernel


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(6, 6, **options)

    def forward(self, x):
        return self.layer(x[0])[0]


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attend = functools.partial(
            functional.scaled_dot_product_attention, **options
        )

    def forward(self, x):
        return self.attend(x, x * 2, x + 1)


# All take (1, 2, 4, 6): an image, heads of queries, or a sequence.
LAYERS = {
    "convolution": nn.Conv2d(2, 3, 3, padding=1),
    "grouped": nn.Conv2d(2, 4, 3, groups=2, bias=False),
    "strided": nn.Conv2d(2, 3, 2, stride=2, dilation=2),
    "transposed": nn.ConvTranspose2d(2, 3, 2, stride=2),
    "attention": Attention(),
    "causal": Attention(is_causal=True),
    "scaled": Attention(scale=0.3),
    "LSTM": Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "LSTM without bias": Recurrent(nn.LSTM, bias=False),
    "GRU": Recurrent(nn.GRU, num_layers=2),
    "GRU without bias": Recurrent(nn.GRU, bias=False),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_cpus(name, frozen):
    """Also where the input, or the parameters, ask for none."""
    found = []
    for device in ("cpu", "openreg"):
        torch.manual_seed(0)
        layer = copy.deepcopy(LAYERS[name]).to(device)
        x = torch.randn(1, 2, 4, 6).to(device)
        parameters = list(layer.parameters())
        if frozen and parameters:
            parameters = parameters[:1]
            for each in layer.parameters():
                each.requires_grad_(each is parameters[0])
        else:
            x.requires_grad_()
        layer(x).pow(2).sum().backward()
        assert frozen == (x.grad is None) or not parameters
        found.append([p.grad.cpu() for p in parameters])
        found[-1] += [] if x.grad is None else [x.grad.cpu()]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_formula_agrees_with_difference_quotients(name):
    """Undefined gradients, which gradcheck tries too, included."""
    layer = copy.deepcopy(LAYERS[name]).double().to("openreg")
    x = double(1, 2, 4, 6)
    assert gradcheck(layer, x)
    if not isinstance(layer, Attention):  # no device has that
        small = double(1, 2, 3, 6)
        assert gradgradcheck(layer, small)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_any_output_of_a_cell_may_go_unused(kind, used):
    cell = kind(3, 4).double()
    found = []
    for device in ("cpu", "openreg"):
        mine = copy.deepcopy(cell).to(device)
        torch.manual_seed(0)
        x = double(2, 3, device=device)
        out = mine(x)
        out = out if isinstance(out, tuple) else (out, out * 2)
        sum(out[i].sum() for i in used).backward()
        parts = [x.grad, *(p.grad for p in mine.parameters())]
        found.append([part.cpu() for part in parts])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "wanted",
    [(True, True, True), (True, False, False), (False, True, True)],
)
def test_a_convolution_computes_the_gradients_that_are_wanted(wanted):
    x, w = double(1, 2, 5, 5), double(3, 2, 3, 3)
    dy = double(1, 3, 3, 3)
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted)
    ours = torch.ops.aten.convolution_backward_overrideable(dy, x, w, *rest)
    theirs = torch.ops.aten.convolution_backward(
        *(t.cpu() for t in (dy, x, w)), [3], *rest
    )
    for i in range(3):
        if wanted[i]:
            torch.testing.assert_close(ours[i].cpu(), theirs[i])
        else:
            assert ours[i] is None or not ours[i].numel()


def test_gradients_keep_the_memory_format():
    layer = nn.Conv2d(4, 8, 3).to("openreg", memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6, device="openreg")
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    layer(x).sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, far: torch.ops.aten.convolution_backward_overrideable(
            x, x, far, [1] * 2, [0] * 2, [1] * 2, False, [0] * 2, 1, [True] * 3
        ),
        lambda x, far: torch.ops.aten._thnn_fused_lstm_cell_backward_impl(
            x[0, 0], None, x[0, 0], far[0, 0], x[0, 0].repeat(1, 4), True
        ),
        lambda x, far: torch.ops.aten._thnn_fused_gru_cell_backward(
            far[0, 0], x[0, 0].repeat(1, 5), True
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "openreg:1"])
def test_backward_kernels_refuse_a_mix_of_devices(make, device):
    x = torch.ones(1, 1, 2, 2, device="openreg:0")
    with pytest.raises(RuntimeError, match="same device"):
        make(x, x.to(device))


def test_no_formula_calls_an_operator_that_is_missing():
    path = ROOT / "chapters/scripts/derivatives.py"
    spec = importlib.util.spec_from_file_location("derivatives", path)
    derivatives = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(derivatives)
    assert len(dict(derivatives.formulas())) > 300
    assert not derivatives.missing()


def test_attention_keeps_its_gradient_under_a_dispatch_mode():
    q, k, v = (double(1, 2, 4, 8) for _ in range(3))
    with Log() as log:
        y = functional.scaled_dot_product_attention(q, k, v)
    assert any("fused_attention_overrideable" in name for name in log.names)
    y.sum().backward()
    assert q.grad.abs().sum() > 0


def test_attention_drops_the_same_weights_in_both_directions():
    q, k, v = (double(1, 1, 4, 4) for _ in range(3))

    def attend(*parts):
        torch.manual_seed(3)
        return functional.scaled_dot_product_attention(*parts, dropout_p=0.3)

    assert gradcheck(attend, (q, k, v))


# ----------------------------------------------------------------- training


class Reader(nn.Module):
    """Looks at an image, then reads it row by row."""

    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(1, 4, 3, padding=1)
        self.mix = nn.MultiheadAttention(32, 4, batch_first=True)
        self.read = nn.LSTM(32, 16, batch_first=True)
        self.tell = nn.Linear(16, 4)

    def forward(self, x):
        rows = functional.relu(self.look(x)).transpose(1, 2).flatten(2)
        rows = rows + self.mix(rows, rows, rows, need_weights=False)[0]
        return self.tell(self.read(rows)[0][:, -1])


def test_a_model_of_all_the_parts_trains_as_on_the_cpu():
    model = Reader()
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 4, (16,))
    losses = []
    for device in ("cpu", "openreg"):
        mine = copy.deepcopy(model).to(device)
        optimizer = torch.optim.Adam(mine.parameters(), lr=0.01)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = functional.cross_entropy(mine(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found).cpu())
    assert losses[1][-1] < losses[1][0] / 2
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)


def test_an_optimizer_made_before_the_move_trains_the_moved_model():
    model = nn.Conv2d(1, 1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.to("openreg").weight.detach().clone()
    model(torch.ones(1, 1, 3, 3, device="openreg")).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)


# --------------------------------------------------------------- the engine


def test_each_device_has_a_thread_and_the_cpu_uses_the_callers():
    caller, seen = threading.get_native_id(), {}

    def look(name):
        def hook(grad):
            me = threading.get_native_id()
            comm = Path(f"/proc/self/task/{me}/comm").read_text().strip()
            where = "caller" if me == caller else comm
            seen[name] = where, grad.device.index, openreg.current_device()

        return hook

    openreg.set_device(1)
    x = torch.ones(2, requires_grad=True)
    a = (x * 2).to("openreg:0")
    b = (a * 3).to("openreg:1")
    c = b.to("openreg:0") * 5
    for name, tensor in {"x": x, "a": a, "b": b, "c": c}.items():
        tensor.register_hook(look(name))
    c.sum().backward()
    assert x.grad.tolist() == [30, 30]
    assert seen["a"] == seen["c"] == ("pt_autograd_0", 0, 0)
    assert seen["b"] == ("pt_autograd_1", 1, 1)
    assert seen["x"][:2] == ("caller", None)
    assert openreg.current_device() == 1


def test_backward_runs_on_the_callers_thread_on_demand():
    x = torch.ones(2, device="openreg:1", requires_grad=True)
    y = nn.Conv1d(1, 1, 1, device="openreg:1")(x.view(1, 1, 2)).sum()
    with Log() as log, torch.autograd.set_multithreading_enabled(False):
        y.backward()
    assert log.threads == {threading.get_native_id()}
    assert any("convolution_backward" in name for name in log.names)
    assert openreg.current_device() == 0
    assert x.grad is not None


def test_a_gradient_is_computed_on_the_stream_of_its_forward():
    side = torch.Stream("openreg")
    layer = nn.Conv1d(1, 1, 1).to("openreg")
    x = torch.ones(1, 1, 8, device="openreg", requires_grad=True)
    openreg.synchronize()
    streams = []
    with side:
        y = layer(x)
        y.register_hook(
            lambda _: streams.append(torch.accelerator.current_stream())
        )
        openreg._sleep(30_000_000)
    torch.accelerator.current_stream().wait_stream(side)
    y.sum().backward()
    assert streams == [side]
    weight = layer.weight.detach().cpu().item()
    assert x.grad.unique().tolist() == [weight]  # the read waits for the side


def test_backward_returns_before_the_device_has_begun():
    layer = nn.Conv2d(2, 4, 3).to("openreg")
    x = torch.randn(1, 2, 6, 6, device="openreg", requires_grad=True)
    layer(x).sum().backward()  # threads are there, kernels have been tried
    openreg.synchronize()
    openreg._sleep(200_000_000)
    event = torch.Event("openreg")
    openreg.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        openreg.set_sync_debug_mode("default")
    event.record()
    assert not event.query()


def test_threads_that_go_backwards_at_once_get_their_own_sums():
    layers = [nn.Conv1d(1, 1, 1, device=f"openreg:{i}") for i in (0, 1)]
    sums, errors = {}, []

    def work(number):
        try:
            layer = layers[number % 2]
            x = torch.full(
                (1, 1, 64), float(number), device=layer.weight.device
            )
            total = 0
            for _ in range(10):
                leaf = x.clone().requires_grad_()
                (grad,) = torch.autograd.grad((leaf**3).sum(), leaf)
                y = layer(leaf).sum()
                (weight,) = torch.autograd.grad(y, layer.weight)
                total += grad.sum().item() + weight.item()
            sums[number] = total
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    expected = {i: 10 * 64 * (3 * i * i + i) for i in range(8)}
    assert sums == pytest.approx(expected)


def test_a_thread_starts_on_device_0_and_its_backward_stays_there():
    openreg.set_device(1)
    seen = []

    def work():
        x = torch.ones(1, 1, 3, device="openreg", requires_grad=True)
        nn.Conv1d(1, 1, 1, device="openreg")(x).sum().backward()
        seen.extend([openreg.current_device(), x.grad.device.index])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 0]
    assert openreg.current_device() == 1


def test_a_backward_inside_of_a_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                (inner,) = torch.autograd.grad((x**3).sum(), x)
            return grad * inner

    x = torch.full((3,), 2.0, device="openreg", requires_grad=True)
    for _ in range(5):
        Twice.apply(x).sum().backward()
    assert x.grad.tolist() == [60.0] * 3


# One core, on which the engine's threads run when nothing else does: the last
# backward returns before they have dropped its state.
LATE_THREADS = """
import os
from pathlib import Path

def delay_the_engine():
    core = {min(os.sched_getaffinity(0))}
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), core)
        if (task / "comm").read_text().startswith("pt_autograd"):
            os.sched_setscheduler(
                int(task.name), os.SCHED_IDLE, os.sched_param(0)
            )
"""


@pytest.mark.parametrize(
    "after",
    [
        "",
        "torch.set_default_device('openreg')",
        "torch.set_grad_enabled(False)",
    ],
    ids=["plain", "default-device", "no-grad"],
)
def test_processes_end_well_after_a_backward(after):
    text = LATE_THREADS + textwrap.dedent(f"""
    import torch, openreg
    layer = torch.nn.Conv2d(1, 1, 2).to("openreg:1")
    x = torch.ones(1, 1, 4, 4, device="openreg:1")
    layer(x).sum().backward()
    delay_the_engine()
    layer(x).sum().backward()
    {after}
    """)
    for _ in range(3):
        done = script(text)
        assert done.returncode == 0, done.stderr
        assert not done.stderr


def test_a_process_with_a_broken_device_ends_well_after_a_backward():
    done = script("""
    import torch, openreg
    x = torch.ones(3, device="openreg:1", requires_grad=True)
    x.sum().backward()
    try:
        x.detach()[torch.full((3,), 7, device="openreg:1")].tolist()
    except torch.AcceleratorError as error:
        print("refused:", error)
    """)
    assert done.returncode == 0, done.stderr
    assert "out of bounds" in done.stdout
    assert not done.stderr


def test_no_engine_is_started_to_end_a_process():
    done = script("""
    import atexit, os
    from pathlib import Path
    import torch, openreg
    finish = openreg._engine_threads.finish
    assert not openreg._engine_threads._have_started()
    finish()
    tasks = Path("/proc/self/task").iterdir()
    names = [(task / "comm").read_text() for task in tasks]
    assert not any(name.startswith("pt_autograd") for name in names), names
    """)
    assert done.returncode == 0, done.stderr


def test_a_backward_kernel_that_fails_is_reported_once():
    x = torch.ones(3, device="openreg", requires_grad=True)
    index = torch.zeros(3, dtype=torch.int64, device="openreg")
    y = x.gather(0, index).sum()
    index.data.fill_(7)  # behind autograd's back
    y.backward()
    with pytest.raises(torch.AcceleratorError, match="index 7"):
        openreg.synchronize()
    openreg.synchronize()
    nn.Conv1d(1, 1, 1, device="openreg")(x.view(1, 1, 3)).sum().backward()


# ------------------------------------------------- what users do with gradients

# Functions of a (4, 3) tensor of doubles and a second one.
FUNCTIONS = {
    "mul": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "div": lambda x, y: y / (x * x + 1),
    "mm": lambda x, y: x @ y.t(),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "softmax": lambda x, y: x.softmax(1),
    "layer_norm": lambda x, y: functional.layer_norm(x, (3,)),
    "batch_norm": lambda x, y: functional.batch_norm(
        x, None, None, training=True
    ),
    "cat": lambda x, y: torch.cat([x, y]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "max": lambda x, y: x.max(1).values,
    "index": lambda x, y: x[[0, 2]],
    "cumsum": lambda x, y: x.cumsum(0),
    "std": lambda x, y: x.std(),
    "prod": lambda x, y: x.prod(),
    "gelu": lambda x, y: functional.gelu(x),
    "conv": lambda x, y: functional.conv1d(x[None], y[None, :, :2]),
    "inverse": lambda x, y: torch.linalg.inv(x[:3]),
    "complex": lambda x, y: torch.complex(x, y).abs(),
    "attention": lambda x, y: functional.scaled_dot_product_attention(
        x[None], y[None], y[None]
    ),
}
MODES = {
    "jvp": lambda f, x: func.jvp(f, (x,), (x.cos(),)),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "hessian": lambda f, x: func.hessian(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: func.vmap(f)(torch.stack([x, x.sin()])),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_give_what_they_give_on_the_cpu(name, mode):
    x, y = torch.randn(2, 4, 3, dtype=torch.double)
    found = []
    for device in ("openreg", "cpu"):
        a, b = x.to(device), y.to(device)
        result = MODES[mode](lambda x, b=b: FUNCTIONS[name](x, b), a)
        parts = result if isinstance(result, tuple) else (result,)
        assert all(part.device.type == device for part in parts)
        found.append([part.cpu() for part in parts])
    torch.testing.assert_close(*found)


def test_dual_tensors_carry_a_tangent_through_a_layer():
    layer = nn.Conv2d(2, 3, 2).double()
    x, direction = torch.randn(2, 1, 2, 4, 4, dtype=torch.double)
    tangents = []
    for device in ("openreg", "cpu"):
        mine = copy.deepcopy(layer).to(device)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.to(device), direction.to(device))
            y = functional.silu(mine(dual)).sum((2, 3))
            tangents.append(forward_ad.unpack_dual(y).tangent.detach().cpu())
    torch.testing.assert_close(*tangents)


def test_functional_call_gives_the_gradient_of_each_sample():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net = net.double().to("openreg")
    names = {n: p.detach() for n, p in net.named_parameters()}
    x = double(5, 3).detach()

    def loss(parameters, x):
        return func.functional_call(net, parameters, (x,)).pow(2).sum()

    each = func.vmap(func.grad(loss), in_dims=(None, 0))(names, x)
    net(x).pow(2).sum().backward()
    for name, parameter in net.named_parameters():
        assert each[name].shape == (5, *parameter.shape)
        torch.testing.assert_close(each[name].sum(0), parameter.grad)


def test_a_function_of_several_results():
    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x > 0)
            above, below = x.clamp(min=0), x.clamp(max=0)
            sign = x.sign()
            ctx.mark_non_differentiable(sign)
            return above, below, sign

        @staticmethod
        def backward(ctx, above, below, _):
            (positive,) = ctx.saved_tensors
            assert above.device.type == "openreg"
            return torch.where(positive, above, below)

    x = torch.tensor([-2.0, 3.0], device="openreg", requires_grad=True)
    above, below, sign = Split.apply(x)
    assert not sign.requires_grad
    above.mul(10).sum().backward(retain_graph=True)
    assert x.grad.tolist() == [0, 10]  # nothing came for `below`
    below.sum().backward()
    assert x.grad.tolist() == [1, 10]


def test_a_function_that_writes_its_argument():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    leaf = torch.ones(2, device="openreg", requires_grad=True)
    x = leaf * 1
    version = x._version
    y = Double.apply(x)
    assert y is x
    assert x._version > version
    y.sum().backward()
    assert leaf.grad.tolist() == [2, 2]


def test_hooks_are_called_in_order_and_may_change_a_gradient():
    seen = []
    layer = nn.Linear(2, 2).to("openreg")
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.weight.register_hook(lambda grad: grad * 2)
    layer.weight.register_post_accumulate_grad_hook(
        lambda weight: seen.append(weight.grad.sum().item())
    )
    x = torch.ones(1, 2, device="openreg", requires_grad=True)
    y = layer(x)
    y.grad_fn.register_prehook(lambda grads: seen.append("node"))
    y.sum().backward()
    assert seen[:2] == ["pre", "forward"]
    assert sorted(map(str, seen[2:])) == ["8.0", "backward", "node"]
    assert layer.weight.grad.tolist() == [[2, 2], [2, 2]]


def test_an_optimizer_step_in_a_hook_frees_the_gradient():
    layer = nn.Conv1d(1, 1, 2).to("openreg")
    before = layer.weight.detach().clone()

    def step(parameter):
        with torch.no_grad():
            parameter -= parameter.grad
        parameter.grad = None

    for each in layer.parameters():
        each.register_post_accumulate_grad_hook(step)
    layer(torch.ones(1, 1, 3, device="openreg")).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(
        before - layer.weight, 2 * torch.ones_like(before)
    )


@pytest.mark.parametrize("device", ["openreg:0", "openreg:1"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_numbers_again(reentrant, device):
    masks = []

    def part(x):
        y = functional.dropout(x, 0.5)
        masks.append((y != 0).cpu())
        return y * x

    x = torch.rand(1000, device=device, requires_grad=True)
    y = checkpoint(part, x, use_reentrant=reentrant)
    torch.rand(7, device=device)
    state = openreg.get_rng_state(device)
    y.sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)
    torch.testing.assert_close(x.grad.cpu(), 4 * x.detach().cpu() * masks[0])
    assert torch.equal(openreg.get_rng_state(device), state)


def test_a_checkpoint_saves_memory():
    deep = nn.Sequential(*[nn.Linear(64, 64), nn.Tanh()] * 8).to("openreg")
    x = torch.rand(256, 64, device="openreg", requires_grad=True)

    def kept(forward):
        before = openreg.memory_allocated()
        y = forward(x)
        return openreg.memory_allocated() - before, y

    plain, y = kept(deep)
    less, z = kept(lambda x: checkpoint(deep, x, use_reentrant=False))
    assert less < plain / 4
    for ours, theirs in zip(
        torch.autograd.grad(z.sum(), [x, *deep.parameters()]),
        torch.autograd.grad(y.sum(), [x, *deep.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("pinned", [True, False])
def test_saved_tensors_wait_on_the_host(pinned):
    x = torch.rand(1000, device="openreg", requires_grad=True)
    (wanted,) = torch.autograd.grad(x.exp().sin().sum(), x)
    before = openreg.memory_allocated()
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        y = x.exp().sin().sum()
    assert openreg.memory_allocated() - before < 4000
    (found,) = torch.autograd.grad(y, x)
    assert torch.equal(found, wanted)


def test_saved_tensors_go_where_the_hooks_send_them():
    sent = []

    def pack(tensor):
        sent.append(tensor.device.index)
        return tensor.to("openreg:1")

    x = torch.rand(10, device="openreg:0", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        pack, lambda tensor: tensor.to("openreg:0")
    ):
        y = x.exp().sin().sum()
    y.backward()
    assert sent == [0, 0]
    torch.testing.assert_close(x.grad, x.exp().cos() * x.exp())


def test_anomaly_mode_finds_the_node_and_its_line():
    def root(x):
        return (x * float("inf")).sqrt()

    x = torch.zeros(1, device="openreg", requires_grad=True)
    with (
        warnings.catch_warnings(record=True) as said,
        torch.autograd.detect_anomaly(),
    ):
        warnings.simplefilter("always")
        y = root(x)
        with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"):
            y.backward()
    assert any("in root" in str(each.message) for each in said)


def test_a_write_after_a_save_is_noticed():
    x = torch.ones(2, device="openreg", requires_grad=True)
    for write in (
        lambda y: y.add_(1),
        lambda y: y.view(-1).zero_(),
        lambda y: y.copy_(x.detach()),
        lambda y: torch.add(x.detach(), 1, out=y.detach()),
        lambda y: y.detach().fill_(3),
    ):
        y = x.exp()
        write(y)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            y.sum().backward()


def test_a_record_is_used_once_unless_it_is_kept():
    x = torch.ones(1, 1, 3, device="openreg", requires_grad=True)
    layer = nn.Conv1d(1, 1, 1).to("openreg")
    y = layer(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()
    assert layer.bias.grad.tolist() == [6]
    assert torch.equal(x.grad, 2 * layer.weight.detach().expand(1, 1, 3))


def test_gradients_are_of_the_type_of_their_tensor():
    x = torch.ones(3, dtype=torch.bfloat16, device="openreg").requires_grad_()
    y = torch.ones(3, dtype=torch.double, device="openreg").requires_grad_()
    (x * y).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert y.grad.dtype == torch.double
    third = torch.full((1,), 1 / 3, dtype=torch.double, device="openreg")
    third.requires_grad_()
    third.pow(2).sum().backward()
    assert third.grad.item() == 2 / 3  # to the last bit


def test_a_default_device_is_not_known_to_the_engine():
    """So the guide says; when it changes, the guide must."""
    seen = []

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.extend([torch.empty(1).device.type, grad.new_empty(1).device])
            return grad

    x = torch.ones(1, 1, 2, device="openreg:1", requires_grad=True)
    with torch.device("openreg:1"):
        Bare.apply(nn.Conv1d(1, 1, 1)(x)).sum().backward()
    assert seen == ["cpu", torch.device("openreg", 1)]
