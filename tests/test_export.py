"""Programs that leave the device: other devices, ONNX, and back."""

import gc
import io
import logging
import warnings

import models
import numpy
import onnx
import onnxruntime
import pytest
import torch
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch import nn
from torch.export import Dim, export
from torch.nn import functional

import openreg

pytestmark = pytest.mark.usefixtures("seeded")
NOT_OURS = ["tagger"]  # packed sequences hold lengths on the CPU


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(before)


@pytest.fixture(autouse=True, scope="module")
def forgotten():
    """Other tests of the process count memory, from none.

    onnxscript's rules remember the nodes they looked at last, and with them
    the parameters of a model.
    """
    yield
    for each in gc.get_objects():
        if type(each) is SimplePatternMatcher:
            each._current_node = each._match = None
    gc.collect()


def own(program):
    """The device's own operators in a program."""
    names = [
        str(n.target) for n in program.graph.nodes if n.op != "placeholder"
    ]
    return [n for n in names if "overrideable" in n or n.startswith("openreg")]


class Attention(nn.Module):
    def __init__(self, mask=None, **options):
        super().__init__()
        self.options = options
        self.mask = mask

    def forward(self, q, k, v):
        mask = None
        if self.mask is not None:
            ones = torch.ones(q.shape[2], k.shape[2], device=q.device)
            mask = ones.tril().bool() if self.mask == "bool" else ones.tril()
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, **self.options
        )


ATTENTIONS = {
    "plain": Attention(),
    "causal": Attention(is_causal=True),
    "scaled": Attention(scale=0.5),
    "boolean mask": Attention("bool"),
    "mask of numbers": Attention("float"),
}


def heads(key_heads=4, length=6):
    return (
        torch.randn(2, 4, 6, 8),
        torch.randn(2, key_heads, length, 8),
        torch.randn(2, key_heads, length, 8),
    )


def on(device, values):
    return tuple(each.to(device) for each in values)


def through_onnx(model, inputs, path, **options):
    written = torch.onnx.export(
        model, inputs, dynamo=True, verbose=False, **options
    )
    written.save(path)
    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    given = {
        name: value.detach().cpu().numpy()
        for name, value in zip(names, inputs, strict=True)
    }
    return torch.from_numpy(session.run(None, given)[0])


# ----------------------------------------------------------- decompositions


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_in_operators_that_everyone_has(name, tmp_path):
    model, inputs = ATTENTIONS[name], heads()
    program = export(model, on("openreg", inputs))
    assert own(program.run_decompositions()), "nothing to replace"
    plain = program.run_decompositions(openreg.export.decompositions())
    assert not own(plain)
    expected = model(*inputs)
    torch.testing.assert_close(
        plain.module()(*on("openreg", inputs)).cpu(), expected
    )
    moved = openreg.export.to(program, "cpu")
    torch.testing.assert_close(moved.module()(*inputs), expected)
    found = through_onnx(plain, on("openreg", inputs), tmp_path / "a.onnx")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_grouped_queries_and_longer_keys():
    model, inputs = Attention(enable_gqa=True), heads(key_heads=2, length=9)
    program = export(model, on("openreg", inputs))
    moved = openreg.export.to(program, "cpu")
    torch.testing.assert_close(moved.module()(*inputs), model(*inputs))


def test_the_decomposition_has_all_results_of_the_kernel():
    inputs = on("openreg", heads())
    fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    table = openreg.export.decompositions()
    for options in ({}, {"is_causal": True}, {"scale": 0.1}):
        ours = table[fused.default](*inputs, **options)
        theirs = fused(*inputs, **options)
        assert len(ours) == len(theirs)
        for index in (0, 1):  # the output, the logarithm of the sums
            torch.testing.assert_close(ours[index], theirs[index])
        assert ours[4:6] == theirs[4:6]


def test_dropout_is_refused():
    inputs = on("openreg", heads())
    table = openreg.export.decompositions()
    fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    with pytest.raises(NotImplementedError, match=r"model\.eval"):
        table[fused.default](*inputs, dropout_p=0.5)


def test_the_custom_operator():
    class Gate(nn.Module):
        def forward(self, gate, up):
            return torch.ops.openreg.silu_mul(gate, up)

    pair = torch.randn(2, 3), torch.randn(2, 3)
    program = export(Gate(), on("openreg", pair))
    assert own(program) == ["openreg.silu_mul.default"]
    moved = openreg.export.to(program, "cpu")
    assert not own(moved)
    torch.testing.assert_close(moved.module()(*pair), Gate()(*pair))


# ------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "name", [n for n in models.MODELS if n not in NOT_OURS]
)
def test_a_model_runs_elsewhere(name):
    model, batch, _ = models.MODELS[name]()
    model.eval()
    inputs, _ = batch(0)
    expected = model(*inputs)
    model.to("openreg")
    placed, _ = models.placed(batch(0), "openreg")
    program = export(model, tuple(placed))
    torch.testing.assert_close(
        program.module()(*placed).cpu(), expected, rtol=1e-4, atol=1e-4
    )
    for device in ("cpu", "openreg:1"):
        moved = openreg.export.to(program, device)
        there, _ = models.placed(batch(0), device)
        found = moved.module()(*there)
        assert found.device == torch.device(device)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet", "gpt", "llama"])
@pytest.mark.parametrize("device", ["cpu", "openreg"])
def test_onnx_runtime_agrees(name, device, tmp_path):
    model, batch, _ = models.MODELS[name]()
    model.eval().to(device)
    inputs, _ = models.placed(batch(0), device)
    found = through_onnx(model, tuple(inputs), tmp_path / "model.onnx")
    torch.testing.assert_close(
        found, model(*inputs).detach().cpu(), rtol=1e-3, atol=1e-4
    )


def test_both_devices_write_the_same_operators():
    model, batch, _ = models.MODELS["gpt"]()
    model.eval()
    kinds = []
    for device in ("cpu", "openreg"):
        inputs, _ = models.placed(batch(0), device)
        written = torch.onnx.export(
            model.to(device), tuple(inputs), dynamo=True, verbose=False
        )
        kinds.append([node.op_type for node in written.model.graph])
    assert kinds[0] == kinds[1]


# ------------------------------------------------------- sizes, files, weights


def linear():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()


def test_sizes_that_vary(tmp_path):
    model, rows = linear().to("openreg"), torch.randn(2, 4, device="openreg")
    sizes = ({0: Dim("rows", min=1, max=64)},)
    program = export(model, (rows,), dynamic_shapes=sizes)
    moved = openreg.export.to(program, "cpu").module()
    assert moved(torch.ones(9, 4)).shape == (9, 3)
    with pytest.raises(AssertionError, match="Guard failed"):
        moved(torch.ones(65, 4))
    path = tmp_path / "m.onnx"
    through_onnx(model, (rows,), path, dynamic_shapes=sizes)
    session = onnxruntime.InferenceSession(path)
    (given,) = session.get_inputs()
    many = torch.randn(9, 4)
    found = session.run(None, {given.name: many.numpy()})[0]
    torch.testing.assert_close(
        torch.from_numpy(found), model(many.to("openreg")).detach().cpu()
    )


def test_a_size_from_the_data():
    class Positive(nn.Module):
        def forward(self, x):
            return x[x > 0]

    x = torch.tensor([1.0, -2, 3], device="openreg")
    program = export(Positive(), (x,))
    assert program.module()(x).tolist() == [1, 3]
    assert openreg.export.to(program, "cpu").module()(-x.cpu()).tolist() == [2]


def test_a_choice_from_the_data_is_refused_and_cond_is_the_cure():
    class Sign(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    class Cond(nn.Module):
        def forward(self, x):
            return torch.cond(
                x.sum() > 0, lambda x: x.clone(), lambda x: -x, (x,)
            )

    x = torch.ones(2, device="openreg")
    with pytest.raises(Exception, match="data-dependent"):
        export(Sign(), (x,))
    program = export(Cond(), (x,)).module()
    assert program(x).tolist() == program(-x).tolist() == [1, 1]


def test_a_saved_program_comes_back_on_its_device():
    model, rows = linear().to("openreg:1"), torch.ones(2, 4, device="openreg:1")
    file = io.BytesIO()
    torch.export.save(export(model, (rows,)), file)
    file.seek(0)
    found = torch.export.load(file).module()(rows)
    assert found.device == rows.device
    torch.testing.assert_close(found, model(rows))


def test_inputs_of_another_device_are_refused():
    program = export(linear().to("openreg"), (torch.ones(2, 4).to("openreg"),))
    with pytest.raises(RuntimeError, match="same device"):
        program.module()(torch.ones(2, 4))


def test_weights_of_an_onnx_file(tmp_path):
    model, rows = linear(), torch.randn(2, 4)
    path = tmp_path / "m.onnx"
    through_onnx(model, (rows,), path)
    found = {
        each.name: torch.from_numpy(
            numpy.array(onnx.numpy_helper.to_array(each))
        )
        for each in onnx.load(path).graph.initializer
    }
    fresh = linear().to("openreg")
    fresh.load_state_dict(found)
    assert fresh[0].weight.device.type == "openreg"
    torch.testing.assert_close(fresh(rows.to("openreg")).cpu(), model(rows))


def test_an_opset_that_cannot_be_written_is_not_claimed():
    model, x = Attention(is_causal=True), on("openreg", heads())
    written = torch.onnx.export(
        model, x, dynamo=True, verbose=False, opset_version=9
    )
    assert written.model.opset_imports[""] >= 18
