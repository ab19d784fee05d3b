"""Kernels on streams: generated, boxed and written by hand, against the CPU."""

import copy
import importlib.util
import itertools
import warnings

import pytest
import torch
import yaml
from marks import ROOT
from needs import GRADIENTS, operators
from torch import nn
from torch.nn import functional

import openreg

pytestmark = operators


@pytest.fixture
def gate():
    """A stream that stands still until the gate is opened."""
    stream = torch.Stream("openreg")
    with stream:
        yield lambda: openreg._sleep(40_000_000)
    stream.synchronize()


def native(call):
    """Return what `call` returns, having made sure that nothing fell back."""
    counts = getattr(openreg, "fallbacks", dict)  # of the chapter `fallback`
    before = dict(counts())
    result = call()
    after = dict(counts())
    assert after == before, after.items() - before.items()
    return result


# ------------------------------------------------------------ the generator


def test_every_structured_operator_of_the_cpu_is_generated():
    path = ROOT / "openreg/csrc/structured.py"
    spec = importlib.util.spec_from_file_location("structured", path)
    structured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(structured)
    listed = structured.yaml.safe_load(structured.LISTED.read_text())
    assert set(structured.groups()) <= set(listed["structured"])
    names = list(itertools.chain.from_iterable(listed.values()))
    assert len(names) == len(set(names))
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", "PrivateUse1"
        ), name


def test_what_is_inferred_has_a_meta_kernel():
    text = (ROOT / "openreg/csrc/structured.yaml").read_text()
    for name in yaml.safe_load(text)["inferred"]:
        assert any(
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
            for key in (
                "Meta",
                "CompositeExplicitAutograd",
                "CompositeExplicitAutogradNonFunctional",
                "CompositeImplicitAutograd",
            )
        ), name


# -------------------------------------------------- host and device at once


def test_an_operator_returns_before_its_kernel_runs(gate):
    x = torch.ones(4, device="openreg")
    gate()
    event = torch.Event("openreg")
    y = x + x
    event.record()
    assert not event.query()
    assert y.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.resize_(0),
        lambda x: x.set_(),
        lambda x: setattr(x, "data", torch.zeros(4, device="openreg")),
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
    ],
)
def test_a_tensor_may_change_its_shape_while_its_kernel_waits(gate, change):
    x = torch.arange(4.0, device="openreg").reshape(2, 2)
    torch.accelerator.current_stream().synchronize()
    gate()
    y = x.exp()
    change(x)
    assert torch.equal(y.cpu(), torch.arange(4.0).reshape(2, 2).exp())


def test_a_number_on_the_cpu_is_taken_along(gate):
    x = torch.ones(3, device="openreg")
    number = torch.tensor(2.0)
    gate()
    y = x * number
    number.fill_(99)
    assert y.tolist() == [2, 2, 2]


def test_a_list_of_tensors_may_go_while_its_kernel_waits(gate):
    parts = [torch.full((2,), float(i), device="openreg") for i in range(3)]
    torch.accelerator.current_stream().synchronize()
    gate()
    whole = torch.cat(parts)
    del parts
    junk = torch.full((64,), -1.0, device="openreg")
    assert whole.tolist() == [0, 0, 1, 1, 2, 2]
    assert junk.numel() == 64


@pytest.mark.parametrize("index", [0, 1])
def test_results_lie_on_the_device_of_the_arguments(index):
    with torch.accelerator.device_index(1 - index):
        x = torch.ones(4, device=f"openreg:{index}")
        for y in (x + 1, x.sum(), torch.relu(x), x[x > 0], x.sort()[1]):
            assert y.device.index == index
        assert torch.accelerator.current_device_index() == 1 - index


# ----------------------------------------------------- forms of an operator


@pytest.mark.parametrize("shape", [(5,), (0,), (3, 1), ()])
def test_out_is_resized_and_in_place_stays_in_place(shape):
    x = torch.rand(shape)
    d = x.to("openreg")
    out = torch.empty(0, device="openreg")
    assert torch.add(d, 1, out=out) is out
    assert torch.equal(out.cpu(), x + 1)
    address = d.data_ptr()
    assert native(lambda: d.mul_(3)) is d
    assert d.data_ptr() == address
    assert torch.equal(d.cpu(), x * 3)


def test_out_of_another_type_or_layout_is_written_as_it_is():
    x = torch.rand(4, 6)
    d = x.to("openreg")
    wide = torch.empty(6, 4, dtype=torch.float64, device="openreg").t()
    torch.add(d, d, out=wide)
    assert wide.stride() == (1, 4)
    assert torch.equal(wide.cpu(), (x + x).double())
    product = torch.empty(6, 6, device="openreg").t()
    torch.mm(d.t(), d, out=product)
    torch.testing.assert_close(product.cpu(), x.t() @ x)


def chosen(x, out):
    return torch.index_select(
        x, 0, torch.tensor([2, 0], device=x.device), out=out
    )


def masked(x, out):
    return out.resize_(x.shape).copy_(x).masked_fill_(x > 0, 7)


OUT = {
    "written": masked,
    "like": lambda x, out: torch.abs(x, out=out),
    "broadcast": lambda x, out: torch.where(x > 0, x, x[:1] * 2, out=out),
    "inferred": chosen,
    "dependent": lambda x, out: out.set_(torch.masked_select(x, x > 0)),
}


@pytest.mark.parametrize("size", [0, 3, 99])
@pytest.mark.parametrize("rule", OUT)
def test_boxed_kernels_find_the_size_of_their_result(rule, size):
    x = torch.randn(3, 4)
    results = []
    for device in ("cpu", "openreg"):
        out = torch.full((size,), 5.0, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it was resized
            OUT[rule](x.to(device), out)
        results.append(out.cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_results_of_one_kernel_share_no_storage(shape, mode):
    # The library writes one result through the other where they share one.
    x = torch.randn(shape)
    for ours, theirs in zip(
        torch.linalg.qr(x.to("openreg"), mode),
        torch.linalg.qr(x, mode),
        strict=True,
    ):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda a, b: a + b, "same device"),
        (lambda a, b: torch.where(a > 0, a, b), "same device"),
        (lambda a, b: torch.cat([a, b]), "same device"),
        (lambda a, b: nn.functional.linear(a, b), "same device"),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "openreg:1"])
def test_a_mix_of_devices_is_refused(make, message, other):
    a = torch.ones(2, 2, device="openreg:0")
    b = torch.ones(2, 2, device=other)
    with pytest.raises(RuntimeError, match=message):
        make(a, b)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + x[:2],
        lambda x: x @ x[:1],
        lambda x: x.sum(7),
        lambda x: x[:1].expand(3, 3).add_(1),
        lambda x: x.view(-1)[1:].copy_(x.view(-1)[:-1]),
        lambda x: torch.add(x[:2], x[:2], out=x.int()[:2]),
        lambda x: nn.functional.conv2d(x, x),
        lambda x: x.softmax(3),
    ],
)
def test_what_the_cpu_refuses_is_refused_with_the_same_error(wrong):
    def refusal(device):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            wrong(torch.ones(3, 3, device=device))
        return type(caught.value), str(caught.value).splitlines()[0]

    assert refusal("openreg") == refusal("cpu")


def test_complex_numbers_keep_their_lazy_bits():
    x = torch.randn(3, 4, dtype=torch.cfloat)
    d = x.to("openreg")
    assert torch.equal((d.conj() + 1).cpu(), x.conj() + 1)
    assert torch.equal((d.conj().imag * 2).cpu(), x.conj().imag * 2)
    product = (d.conj() @ d.t()).cpu()
    torch.testing.assert_close(product, x.conj() @ x.t())


# ---------------------------------------------------- families, by hand


CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 8)),
    "3d": (nn.Conv3d(2, 4, 2), (1, 2, 4, 5, 4)),
    "grouped": (nn.Conv2d(4, 8, 3, groups=2), (2, 4, 7, 7)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 7, 7)),
    "dilated": (nn.Conv2d(3, 5, 3, dilation=2), (2, 3, 9, 9)),
    "same": (nn.Conv2d(3, 5, 3, padding="same"), (2, 3, 9, 9)),
    "transposed": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
        (2, 4, 5, 5),
    ),
    "transposed, grouped": (
        nn.ConvTranspose1d(4, 6, 2, groups=2),
        (2, 4, 5),
    ),
    "one image": (nn.Conv2d(3, 5, 3), (3, 8, 8)),
    "no images": (nn.Conv2d(3, 5, 3), (0, 3, 8, 8)),
}


IMAGES = [name for name, (_, shape) in CONVOLUTIONS.items() if len(shape) == 4]


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *((name, torch.contiguous_format) for name in CONVOLUTIONS),
        *((name, torch.channels_last) for name in IMAGES),
    ],
)
def test_convolutions_and_their_gradients(name, memory):
    layer, shape = CONVOLUTIONS[name]
    results = []
    for device in ("cpu", "openreg"):
        torch.manual_seed(0)
        mine = copy.deepcopy(layer).to(device)
        x = torch.randn(shape).to(device).contiguous(memory_format=memory)
        x.requires_grad_()
        y = mine(x)
        parts = [y]
        if GRADIENTS:
            y.pow(2).sum().backward()
            parts += [x.grad, *(p.grad for p in mine.parameters())]
        results.append((y.stride(), [p.detach().cpu() for p in parts]))
    assert results[0][0] == results[1][0]
    for ours, theirs in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["float", "bfloat16", "mixed"])
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5, 5), (2, 3, 2, 2, 2)])
def test_batch_normalization_and_its_statistics(
    shape, training, statistics, kind
):
    found = []
    for device in ("cpu", "openreg"):
        torch.manual_seed(0)
        dims = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
        layer = dims[len(shape)](3, track_running_stats=statistics)
        if kind == "bfloat16":
            layer.bfloat16()
        layer.train(training).to(device)
        x = torch.randn(shape).to(
            device, torch.float32 if kind == "float" else torch.bfloat16
        )
        x.requires_grad_()
        for _ in range(2):
            y = native(lambda m=layer, v=x: m(v))
            native(lambda v=y: v.float().pow(2).sum().backward())
        parts = [y, x.grad, *layer.state_dict().values()]
        parts += [parameter.grad for parameter in layer.parameters()]
        found.append([part.detach().cpu() for part in parts])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_batch_normalization_refuses_what_does_not_fit():
    x = torch.ones(2, 3, device="openreg")
    with pytest.raises(RuntimeError, match="3 channels"):
        torch.native_batch_norm(
            x,
            torch.ones(4, device="openreg"),
            None,
            None,
            None,
            True,
            0.1,
            1e-5,
        )
    with pytest.raises(RuntimeError, match="same device"):
        torch.native_batch_norm(
            x, torch.ones(3), None, None, None, True, 0.1, 1e-5
        )


@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.cummax(x, 0),
        lambda x: torch.logcumsumexp(x, 1),
        lambda x: torch.histogram(x.detach(), 4),
        lambda x: torch.aminmax(x, dim=1),
        lambda x: (torch.logit(x.sigmoid()), torch.logit(x > 0)),
        lambda x: functional.embedding_bag(
            torch.tensor([0, 2, 1], device=x.device),
            x,
            torch.tensor([0, 2], device=x.device),
        ),
        lambda x: functional.multi_margin_loss(
            x, torch.tensor([0, 1, 2], device=x.device)
        ),
    ],
)
def test_operators_whose_sizes_no_rule_gives(use):
    x = torch.randn(3, 4)
    leaf = x.clone().requires_grad_(), x.to("openreg").requires_grad_()
    results = []
    for each in leaf:
        found = use(each)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        results.append([part.detach().cpu() for part in found])
        if found[0].requires_grad:
            found[0].sum().backward()
            results[-1].append(each.grad.cpu())
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_and_their_gradients(kind, bias, bidirectional):
    torch.manual_seed(0)
    layer = kind(3, 5, 2, bias=bias, bidirectional=bidirectional)
    x = torch.randn(4, 2, 3)
    found = []
    for device in ("cpu", "openreg"):
        mine = copy.deepcopy(layer).to(device)
        mine_x = x.to(device, copy=True).requires_grad_()
        y, state = native(lambda m=mine, v=mine_x: m(v))
        last = state if isinstance(state, torch.Tensor) else sum(state)
        parts = [y, last]
        if GRADIENTS:
            native(lambda a=y, b=last: (a.pow(2).sum() + b.sum()).backward())
            parts += [mine_x.grad, *(p.grad for p in mine.parameters())]
        found.append([part.detach().cpu() for part in parts])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_cell_of_the_wrong_size_is_refused():
    cell = nn.LSTMCell(3, 5).to("openreg")
    state = torch.zeros(2, 4, device="openreg")
    with pytest.raises(RuntimeError, match="hidden"):
        cell(torch.zeros(2, 3, device="openreg"), (state, state))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "float", "learned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients(dtype, mask, grouped):
    found = []
    for device in ("cpu", "openreg"):
        torch.manual_seed(0)
        q = torch.randn(2, 4, 6, 8, dtype=dtype)
        k, v = torch.randn(2, 2, 2 if grouped else 4, 6, 8, dtype=dtype)
        bias = torch.randn(6, 6, dtype=dtype)
        if mask == "bool":
            bias = bias > -1
        parts = [part.to(device).requires_grad_() for part in (q, k, v)]
        bias = bias.to(device)
        if mask == "learned":
            bias.requires_grad_()
        given = {"is_causal": True} if mask == "causal" else {}
        if mask in ("bool", "float", "learned"):
            given = {"attn_mask": bias}
        y = functional.scaled_dot_product_attention(
            *parts, **given, enable_gqa=grouped
        )
        results = [y]
        if GRADIENTS:
            y.float().pow(2).sum().backward()
            results += [part.grad for part in parts]
            results += [bias.grad] if mask == "learned" else []
        found.append([result.detach().cpu() for result in results])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)


# --------------------------------------------------------- whole programs


class Net(nn.Module):
    """Convolution, norms, attention, pooling, embedding: a bit of each."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True
        )
        self.place = nn.Embedding(64, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        x = functional.relu(self.norm(self.conv(x)))
        x = functional.max_pool2d(x, 2).flatten(2).transpose(1, 2)
        x = x + self.place(torch.arange(x.shape[1], device=x.device))
        return self.out(self.layer(x).mean(1))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def test_a_forward_pass_gives_the_results_of_the_cpu_without_waiting():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 8, 8)
    mine, there = copy.deepcopy(model).to("openreg"), x.to("openreg")
    mine(there)
    openreg.set_sync_debug_mode("error")
    try:
        found = native(lambda: mine(there))
    finally:
        openreg.set_sync_debug_mode("default")
    model(x)
    torch.testing.assert_close(found.cpu(), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    not GRADIENTS, reason="the chapter `autograd` adds the gradients"
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_the_losses_of_the_cpu_without_waiting(name):
    torch.manual_seed(0)
    model = Net()
    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    losses = []
    for device in ("cpu", "openreg"):
        mine = copy.deepcopy(model).to(device)
        optimizer = OPTIMIZERS[name](mine.parameters())
        inputs, labels = x.to(device), y.to(device)

        def step(mine=mine, optimizer=optimizer, x=inputs, y=labels):
            optimizer.zero_grad()
            loss = functional.cross_entropy(mine(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        found = [step()]
        openreg.set_sync_debug_mode("error")
        try:
            found += [native(step) for _ in range(19)]
        finally:
            openreg.set_sync_debug_mode("default")
        losses.append([loss.item() for loss in found])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
