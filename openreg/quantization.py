# Chapter: quantization
"""Quantization: what torchao has to know of this device.

torchao quantizes models, and its algorithms are made of ordinary operators. It
asks a device for two things: which layers it computes in integers, and what its
packed weights look like. The package ``torchao`` is needed; this module is
imported when it is first asked for.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

# [quantization: torchao]
try:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import MappingType
    from torchao.quantization.pt2e import (
        FakeQuantize,
        HistogramObserver,
        MovingAverageMinMaxObserver,
        ObserverBase,
        PerChannelMinMaxObserver,
        PlaceholderObserver,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
    )
    from torchao.quantization.pt2e.quantizer import Quantizer as _Quantizer
    from torchao.quantization.quant_primitives import (
        choose_qparams_affine,
        quantize_affine,
    )
    from torchao.quantization.transform_module import (
        register_quantize_module_handler,
    )
    from torchao.utils import TorchAOBaseTensor
except ImportError as error:
    raise ImportError(
        "openreg.quantization needs torchao: pip install 'torchao>=0.18'"
    ) from error
# [/quantization: torchao]

__all__ = ["Int4Tensor", "Int4WeightOnlyConfig", "Quantizer", "convert"]

aten = torch.ops.aten


# [quantization: quantizer]
class Quantizer(_Quantizer):
    """Says to PT2E what this device computes in integers: linear layers.

    Inputs get one scale for the tensor, weights one for each output. Both are
    symmetric, so zero is zero, and the product of the integers is all there is
    to compute.

    Args:
        dynamic: scales of inputs are found when the model runs, not by
            calibration.
        training: rounding is simulated, for ``prepare_qat_pt2e``.
    """

    def __init__(self, dynamic: bool = False, training: bool = False) -> None:
        super().__init__()
        if dynamic and training:
            raise ValueError(
                "openreg.quantization.Quantizer: training finds the scales of "
                "inputs, and dynamic=True has none to find. Leave one out"
            )
        self._input = _spec(
            torch.per_tensor_symmetric,
            PlaceholderObserver if dynamic else HistogramObserver,
            is_dynamic=dynamic,
        )
        self._weight = _spec(
            torch.per_channel_symmetric,
            PerChannelMinMaxObserver.with_args(eps=2**-20),
            ch_axis=0,
        )
        if training:
            self._input = _spec(
                torch.per_tensor_symmetric,
                FakeQuantize.with_args(observer=MovingAverageMinMaxObserver),
            )
            self._weight = _spec(
                torch.per_channel_symmetric,
                FakeQuantize.with_args(observer=PerChannelMinMaxObserver),
                ch_axis=0,
            )

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Mark the linear layers of an exported model."""
        for node in model.graph.find_nodes(
            op="call_function", target=aten.linear.default
        ):
            node.meta.setdefault(
                "quantization_annotation",
                QuantizationAnnotation(
                    input_qspec_map={
                        node.args[0]: self._input,
                        node.args[1]: self._weight,
                    },
                    _annotated=True,
                ),
            )
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Nothing can go wrong that `annotate` did not exclude."""


def _spec(scheme: torch.qscheme, observer: Any, **more: Any) -> Any:
    return QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=observer,
        quant_min=-127,
        quant_max=127,
        qscheme=scheme,
        **more,
    )


# [/quantization: quantizer]


# [quantization: convert]
def convert(model: fx.GraphModule) -> fx.GraphModule:
    """The integer program of a calibrated, or trained, model.

    ``convert_pt2e`` writes every quantized layer as the rounding of its inputs
    and a computation in floating point, for any device to read. Linear layers
    become products of integers here, and what goes from one such layer to the
    next stays in 8 bits.

    Args:
        model: from ``prepare_pt2e`` or ``prepare_qat_pt2e``, with `Quantizer`.

    Raises:
        ValueError: the model has seen no examples, or none that are finite.
    """
    blind = [
        node.args[0].name
        for node in model.graph.nodes
        if node.op == "call_module"
        and not _has_range(model.get_submodule(node.target))
    ]
    if blind:
        raise ValueError(
            f"openreg.quantization.convert: {', '.join(blind)}: no finite "
            "values were observed there, so there are no scales. Run the "
            "prepared model on examples of its inputs, then convert it"
        )
    model = convert_pt2e(model)
    for node in model.graph.find_nodes(
        op="call_function", target=aten.linear.default
    ):
        _lower(model, node)
    model.graph.eliminate_dead_code()
    _drop_unused(model)
    model.recompile()
    return model


def _has_range(observer: nn.Module) -> bool:
    observer = getattr(observer, "activation_post_process", observer)
    if not isinstance(observer, ObserverBase) or observer.is_dynamic:
        return True
    ends = (observer.min_val, observer.max_val)
    return all(x.numel() > 0 and bool(x.isfinite().all()) for x in ends)


# [/quantization: convert]


# [quantization: lower]
_qdq = torch.ops.quantized_decomposed


def _lower(model: fx.GraphModule, linear: Any) -> None:
    """One product of integers in place of dequantize, dequantize, linear."""
    x, w, bias = (*linear.args, None)[:3]
    fixed = _is_symmetric(x)
    if not (_is_rounded_by_row(model, w) and (fixed or _is_found(x))):
        return  # not quantized, or in another way
    graph, dtype = model.graph, linear.meta["val"].dtype
    scale = _value(model, w.args[1])
    shift: Any = None if bias is None else _value(model, bias).float()
    last = _rounding(linear) if fixed else None
    if last is not None:  # results in the steps of the next layer's inputs
        dtype, step = torch.int8, last.args[1]
        scale, shift = scale / step, None if shift is None else shift / step
    with graph.inserting_before(linear):
        name = f"_int8_{linear.name}"
        if fixed:
            factor = _constant(model, f"{name}_scale", scale * x.args[1])
        else:  # found when the model runs, in float64
            factor = _constant(model, f"{name}_scale", scale)
            found = graph.call_function(
                aten.to.dtype, (x.args[1], torch.float32)
            )
            factor = graph.call_function(aten.mul.Tensor, (factor, found))
        if shift is not None:
            shift = _constant(model, f"{name}_bias", shift)
        result = graph.call_function(
            torch.ops.openreg.int8_linear.default,
            (x.args[0], w.args[0], factor, shift),
            {"dtype": dtype},
        )
    linear.replace_all_uses_with(result)
    if last is not None:
        last.replace_all_uses_with(last.args[0])


def _rounding(linear: Any) -> Any:
    """What rounds the layer's results, if nothing else reads them.

    There may be a ReLU in between: it can as well come after the rounding.
    """
    node = linear
    while len(node.users) == 1:
        (node,) = node.users
        if node.target not in (aten.relu.default, aten.relu_.default):
            rounds = node.target == _qdq.quantize_per_tensor.default
            return node if rounds and node.args[2:] == _SYMMETRIC else None
    return None


_SYMMETRIC = (0, -127, 127, torch.int8)  # zero point, ends, dtype


def _is_symmetric(x: Any) -> bool:
    fixed = x.target == _qdq.dequantize_per_tensor.default
    return fixed and x.args[2:] == _SYMMETRIC


def _is_found(x: Any) -> bool:
    """Whether its scale is found when the model runs, and zero is zero."""
    if x.target != _qdq.dequantize_per_tensor.tensor:
        return False
    source = getattr(x.args[1], "args", (None,))[0]
    symmetric = _qdq.choose_qparams_symmetric.tensor
    return getattr(source, "target", None) == symmetric


def _is_rounded_by_row(model: fx.GraphModule, w: Any) -> bool:
    if w.target != _qdq.dequantize_per_channel.default:
        return False
    by_row = w.args[3] == 0 and w.args[6] == torch.int8
    return by_row and not bool(_value(model, w.args[2]).any())


def _value(model: fx.GraphModule, node: Any) -> Tensor:
    return operator.attrgetter(node.target)(model).detach()


def _constant(model: fx.GraphModule, name: str, value: Tensor) -> fx.Node:
    model.register_buffer(name, value)
    return model.graph.get_attr(name)


def _drop_unused(model: fx.GraphModule) -> None:
    """Scales and biases that are in others now need no memory."""
    used = {node.target for node in model.graph.nodes if node.op == "get_attr"}
    for name, _ in (*model.named_buffers(), *model.named_parameters()):
        owner, _, last = name.rpartition(".")
        if name not in used:
            delattr(model.get_submodule(owner), last)


# [/quantization: lower]


# [quantization: int4-tensor]
class Int4Tensor(TorchAOBaseTensor):
    """A weight of shape (out, in) whose numbers have 4 bits.

    Made by `from_hp`, by ``quantize_`` and by ``torch.load``. ``linear`` reads
    it; everything else that torchao's base class offers moves or copies it.
    """

    tensor_data_names = ["packed", "scale", "zero"]  # noqa: RUF012
    tensor_attribute_names = ["high"]  # noqa: RUF012

    # (out, in / 2), torch.uint8. The first half of a row is in the lower bits
    # of its bytes, the second in the upper.
    packed: Tensor
    scale: Tensor  # (out, groups), torch.float32
    zero: Tensor  # (out, groups), torch.float32: the number that means 0
    high: torch.dtype  # of the inputs and results

    def __new__(  # noqa: D102
        cls, packed: Tensor, scale: Tensor, zero: Tensor, high: torch.dtype
    ) -> Int4Tensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            (packed.shape[0], packed.shape[1] * 2),
            dtype=high,
            device=packed.device,
            requires_grad=False,
        )

    def __init__(
        self, packed: Tensor, scale: Tensor, zero: Tensor, high: torch.dtype
    ) -> None:
        super().__init__()
        self.packed, self.scale, self.zero = packed, scale, zero
        self.high = high

    @classmethod
    def from_hp(cls, weight: Tensor, group_size: int = 32) -> Int4Tensor:
        """Round a weight of shape (out, in), in groups along its inputs.

        Raises:
            ValueError: the inputs do not make whole groups, or their number
                is odd.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                "Int4Tensor.from_hp: expected a matrix of floating-point "
                f"numbers, but got {weight.dtype} of {tuple(weight.shape)}"
            )
        inputs = weight.shape[1]
        if group_size < 2 or inputs % group_size or inputs % 2:
            raise ValueError(
                f"Int4Tensor.from_hp: {inputs} inputs do not make groups of "
                f"{group_size}, or no pairs. Take a divisor as group_size, or "
                "leave the layer out with filter_fn"
            )
        block, ends = (1, group_size), (0, 15)
        scale, zero = choose_qparams_affine(
            weight.float(),
            MappingType.ASYMMETRIC,
            block,
            torch.int32,
            *ends,
            zero_point_dtype=torch.int32,
        )
        numbers = quantize_affine(
            weight.float(), block, scale, zero, torch.int32, *ends
        )
        low, high = numbers.to(torch.uint8).chunk(2, dim=1)
        shape = (weight.shape[0], -1)
        return cls(
            low | (high << 4),
            scale.reshape(shape).float(),
            zero.reshape(shape).float(),
            weight.dtype,
        )

    def dequantize(self) -> Tensor:
        """The weight that the numbers stand for."""
        numbers = torch.cat((self.packed & 15, self.packed >> 4), 1)
        numbers = numbers.view(*self.scale.shape, -1).float()
        values = (numbers - self.zero[..., None]) * self.scale[..., None]
        return values.view(self.shape).to(self.high)


def _linear(
    function: Any, types: Any, args: tuple, kwargs: dict | None
) -> Tensor:
    x, weight, bias = (*args, (kwargs or {}).get("bias"))[:3]
    return torch.ops.openreg.int4_linear(
        x, weight.packed, weight.scale, weight.zero, bias
    )


Int4Tensor.implements(aten.linear.default)(_linear)
Int4Tensor.implements_torch_function(nn.functional.linear)(_linear)

torch.serialization.add_safe_globals([Int4Tensor])
# [/quantization: int4-tensor]


# [quantization: int4-config]
@dataclass
class Int4WeightOnlyConfig(AOBaseConfig):
    """For ``torchao.quantization.quantize_``: weights of 4 bits.

    torchao's own config of this name packs for the devices that torchao knows.
    """

    group_size: int = 32


def _to_int4(module: Any, config: Int4WeightOnlyConfig) -> nn.Module:
    weight = Int4Tensor.from_hp(module.weight.detach(), config.group_size)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


register_quantize_module_handler(Int4WeightOnlyConfig)(_to_int4)

# [/quantization: int4-config]
