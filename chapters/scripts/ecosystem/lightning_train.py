"""Train with Lightning's trainer.

    python lightning_train.py openreg

Lightning runs on an `Accelerator`, a class that counts and names the devices
of a kind. One of your own is allowed (Lightning calls it experimental) and is
found by name when it is registered. It is written here, and not a part of the
backend, because a backend must not depend on a trainer.

The strategy must be named, too. Without one, Lightning takes the CPU for every
accelerator that is not one of its own. `set_device` below refuses that.
"""

import sys
import tempfile
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


@AcceleratorRegistry.register("openreg", description="Simulated accelerator")
class OpenRegAccelerator(Accelerator):
    """What Lightning asks about the devices."""

    def setup_device(self, device: torch.device) -> None:
        torch.openreg.set_device(device)

    def teardown(self) -> None:
        torch.openreg.empty_cache()

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return torch.openreg.memory_stats(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        if isinstance(devices, str):
            devices = [int(index) for index in devices.split(",")]
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("openreg", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.openreg.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.openreg.is_available()

    @staticmethod
    def name() -> str:
        return "openreg"


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)
        self.layers = nn.Sequential(*layers)

    def training_step(self, batch, index):
        x, labels = batch
        loss = functional.cross_entropy(self.layers(x), labels)
        self.log("loss", loss)
        print("loss", loss.item())
        return loss

    def validation_step(self, batch, index):
        x, labels = batch
        accuracy = (self.layers(x).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Report(Callback):
    """Where the model is: when `fit` has ended, it is on the CPU again."""

    def on_train_end(self, trainer, model):
        print("device", model.device)


def trainer(device: torch.device, folder: str, epochs: int) -> Trainer:
    return Trainer(
        accelerator=device.type,
        devices=1,
        strategy=SingleDeviceStrategy(device),
        max_epochs=epochs,
        gradient_clip_val=1.0,
        callbacks=[Report()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


if __name__ == "__main__":
    device = torch.device(sys.argv[1])
    if device.index is None and device.type != "cpu":
        device = torch.device(device.type, 0)
    seed_everything(0, verbose=False)
    x = torch.randn(32, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        first = trainer(device, folder, epochs=1)
        first.fit(Classifier(), loader, loader)
        print("accuracy", first.callback_metrics["accuracy"].item())
        # A checkpoint holds the optimizer's state, too.
        checkpoint = first.checkpoint_callback.best_model_path
        second = trainer(device, folder, epochs=2)
        second.fit(Classifier(), loader, loader, ckpt_path=checkpoint)
