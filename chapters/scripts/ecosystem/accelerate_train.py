"""Train with accelerate, keep the state, and go on from it.

    python accelerate_train.py openreg

accelerate looks for the accelerators that it knows by name, and for no other.
What it is told in `ACCELERATE_TORCH_DEVICE` comes first, when it is there
before the first `Accelerator` or `PartialState` of the process.

A checkpoint holds the random states of the accelerators that accelerate knows.
Those of any other go in as an object of your own, below.
"""

import os
import sys
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

os.environ["ACCELERATE_TORCH_DEVICE"] = sys.argv[1]


class RandomState:
    """The random state of a device, as a part of a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.module.get_rng_state(self.device)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.module.set_rng_state(state["state"], self.device)


def build():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(32, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, loader, scheduler


def train(accelerator, model, optimizer, loader, scheduler):
    for x, labels in loader:  # accelerate has put them on the device
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(x), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses = accelerator.gather_for_metrics(loss.detach())
        print("loss", losses.mean().item())


accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
model, optimizer, loader, scheduler = accelerator.prepare(*build())
train(accelerator, model, optimizer, loader, scheduler)
print("device", next(model.parameters()).device)

if accelerator.device.type != "cpu":
    accelerator.register_for_checkpointing(RandomState(accelerator.device))
runs = []
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    for _ in range(2):
        accelerator.load_state(folder)
        train(accelerator, model, optimizer, loader, scheduler)
        runs.append(torch.rand(4, device=accelerator.device).cpu())
    accelerator.save_model(model, folder)
assert torch.equal(*runs), "the random state of the device was not kept"
