"""The same inputs once more, on the device or on the CPU.

Nothing of a tensor's form may be lost on the way: strides, offset, what shares
memory with what, the conjugate and negative bits.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree


class Mover:
    """Copies trees of tensors to a device; tensors of one storage stay so."""

    def __init__(self, device: str, grad: bool = False) -> None:
        self.device = torch.device(device)
        self.grad = grad  # leaves that require a gradient keep doing so
        self.storages: dict = {}
        self.tensors: dict = {}

    def tree(self, tree):
        return pytree.tree_map(self.leaf, tree)

    def leaf(self, value):
        if isinstance(value, torch.Tensor):
            if id(value) not in self.tensors:
                self.tensors[id(value)] = self.tensor(value), value
            return self.tensors[id(value)][0]
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, str) and value in ("cpu", "cpu:0"):
            return str(self.device)
        return value

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self.plain(tensor.detach())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(moved, tensor.requires_grad)
        return moved.requires_grad_(self.grad and tensor.requires_grad)

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if (
            not ordinary
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.device.type != "cpu"
        ):
            return tensor.to(self.device, copy=True)
        form = tensor.storage_offset(), tensor.size(), tensor.stride()
        new = torch.empty(0, dtype=tensor.dtype, device=self.device)
        moved = new.set_(self.storage(tensor), *form)
        moved = torch.conj(moved) if tensor.is_conj() else moved
        return torch._neg_view(moved) if tensor.is_neg() else moved

    def storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            # The values first, so that it is the tensor's own memory.
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            flat = flat.to(self.device, copy=True)
            self.storages[key] = flat.untyped_storage(), storage
        return self.storages[key][0]


def tensors(tree) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
