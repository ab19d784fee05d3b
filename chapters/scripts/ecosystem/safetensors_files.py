"""Keep a training in safetensors files and go on from them.

    python safetensors_files.py openreg

Saving takes tensors of any device. Loading does not: safetensors compares the
name of the device with a list of its own, and `device="openreg"` is an error.
An integer passes, and PyTorch reads it as that index of the accelerator. The
other way is to load to the CPU and to copy, as `load_model` does.

Values only are kept: strides, views and memory that two tensors share are not.
`save_model` and `load_model` know the parameters that are one tensor.
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.nn import functional

device = torch.device(sys.argv[1])
# What safetensors is told: an index means the accelerator's.
place = "cpu" if device.type == "cpu" else device.index or 0


class Classifier(nn.Module):
    """Two layers that share one weight, as language models often do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator).to(device)
        labels = torch.randint(16, (8,), generator=generator).to(device)
        loss = functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())


def momenta(model, optimizer):
    """The optimizer's state by the names of the parameters."""
    return {
        name: optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in model.named_parameters()
    }


torch.manual_seed(0)
model = Classifier().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train(model, optimizer, 4)

with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    save_model(model, folder / "model.safetensors")  # knows shared weights
    save_file(momenta(model, optimizer), folder / "momenta.safetensors")
    # Into a model that is on the device: read on the CPU, then copied.
    again = Classifier().to(device)
    load_model(again, folder / "model.safetensors")
    # Straight to the device.
    states = load_file(folder / "momenta.safetensors", device=place)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    for name, parameter in again.named_parameters():
        optimizer.state[parameter]["momentum_buffer"] = states[name]
    # One tensor, or a part of one, without reading the rest.
    with safe_open(folder / "model.safetensors", "pt", device=place) as file:
        rows = file.get_slice("first.weight")[2:4]

assert torch.equal(rows.cpu(), model.first.weight[2:4].detach().cpu())
print("device", *sorted({str(t.device) for t in [rows, *states.values()]}))
train(again, optimizer, 4)
