"""Ten kinds of models learn on the device what they learn on the CPU.

Each of models.py is trained with three optimizers, 20 steps each, with the
weights and batches of a run on the CPU. While it trains, no operator may wait
for the device and none may run on the CPU; losses are read after the last step.
"""

import contextlib

import pytest
import torch
from models import MODELS, placed

import openreg

STEPS = 20

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 3e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {"lr": 3e-3}),
    "NAdam": (torch.optim.NAdam, {"lr": 3e-3}),
    "RAdam": (torch.optim.RAdam, {"lr": 3e-3}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}

# PyTorch's ASGD, Adafactor and LBFGS read values from any device and so wait.
PAIRS = [
    (model, optimizer)
    for model, optimizers in {
        "resnet": ("SGD", "Adam", "RMSprop"),
        "unet": ("SGD", "AdamW", "Adagrad"),
        "tagger": ("SGD", "Adam", "Adamax"),
        "gpt": ("SGD", "AdamW", "NAdam"),
        "llama": ("SGD", "AdamW", "RAdam"),
        "bert": ("SGD", "AdamW", "Adadelta"),
        "vit": ("SGD", "AdamW", "Rprop"),
        "whisper": ("SGD", "AdamW", "RMSprop"),
        "diffusion": ("SGD", "Adam", "NAdam"),
        "graph": ("SGD", "Adam", "Adadelta"),
    }.items()
    for optimizer in optimizers
]

# All kernels of the other models are the CPU's, and so is every bit.
#
# An LSTM's cell is one fused operator on the device and several on the CPU: the
# biases are added in another order, so the first step's gradients, of which the
# largest is 0.2, differ by 1e-8. Adam divides them by their own size, and in 20
# steps the weights come to differ by 1e-6.
CLOSE = {
    "tagger": {
        "gradients": 1e-7,
        "losses": 5e-6,
        "state": 5e-6,
        "results": 1e-6,
    }
}

DROPOUT = ["unet", "tagger", "gpt", "bert", "vit", "whisper", "diffusion"]


@contextlib.contextmanager
def undisturbed():
    """No operator may wait for the device, or run on the CPU for want of one.

    The operator that does raises an error, with the line that called it.
    """
    openreg.set_sync_debug_mode("error")
    try:
        with openreg.fallback.mode("error"):
            yield
    finally:
        openreg.set_sync_debug_mode("default")


class Training:
    """A model on a device, its optimizer, and two batches that take turns."""

    def __init__(self, name, optimizer, device, **config):
        torch.manual_seed(0)
        self.model, batch, self.loss = MODELS[name](**config)
        self.model.to(device)
        self.batches = [placed(batch(seed), device) for seed in range(2)]
        kind, options = OPTIMIZERS[optimizer]
        # On a device, loops over lists are PyTorch's default. The loops over
        # single parameters, the CPU's, round elsewhere.
        form = {"foreach": True} if device == "cpu" else {}
        parameters = self.model.parameters()
        self.optimizer = kind(parameters, **options, **form)

    def run(self, steps):
        """Return each step's loss and the first step's gradients."""
        losses, gradients = [], {}
        with undisturbed():
            for i in range(steps):
                self.optimizer.zero_grad()
                inputs, target = self.batches[i % 2]
                loss = self.loss(self.model(*inputs), target)
                loss.backward()
                if i == 0:
                    gradients = {
                        name: parameter.grad.clone()
                        for name, parameter in self.model.named_parameters()
                    }
                self.optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses).cpu(), on_cpu(gradients)

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            return [self.model(*inputs).cpu() for inputs, _ in self.batches]


def on_cpu(tensors):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def check(name, cpus, devices):
    """Compare what two trainings have left, part by part."""
    for part in cpus:
        near = CLOSE.get(name, {}).get(part, 0)
        torch.testing.assert_close(
            devices[part], cpus[part], rtol=near, atol=near
        )


def learned(losses):
    return losses.isfinite().all() and losses[-2:].mean() < losses[:2].mean()


@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_a_model_trains_as_on_the_cpu(name, optimizer, capfd):
    found = []
    for device in ("cpu", "openreg"):
        training = Training(name, optimizer, device)
        losses, gradients = training.run(STEPS)
        state = on_cpu(training.model.state_dict())
        found.append({"losses": losses, "gradients": gradients, "state": state})
    assert learned(found[0]["losses"])
    check(name, *found)
    # Kernels warn on an engine's thread, where no filter of Python's holds.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_evaluates_as_on_the_cpu(name):
    found = []
    for device in ("cpu", "openreg"):
        training = Training(name, "SGD", device)
        training.run(3)  # running averages move, and the weights
        found.append({"results": training.evaluate()})
    check(name, *found)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_may_lie_on_a_device_that_is_not_current(name):
    there, here = (Training(name, "SGD", f"openreg:{i}") for i in (1, 0))
    torch.testing.assert_close(there.run(2), here.run(2), rtol=0, atol=0)


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_follows_the_seed_and_lets_the_model_learn(name):
    def run(seed, steps):
        training = Training(name, "AdamW", "openreg", dropout=0.1)
        torch.manual_seed(seed)
        return training.run(steps)[0]

    losses = run(1, 12)
    assert learned(losses)
    assert torch.equal(run(1, 4), losses[:4])
    assert (run(2, 2) != losses[:2]).all()
