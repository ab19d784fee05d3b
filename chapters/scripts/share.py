"""A process trains a model that lies in another process's device memory.

    python share.py openreg

The worker is spawned: a new interpreter, with a driver of its own.
"""

import sys

import torch
import torch.multiprocessing as mp
from torch import nn


def loss(model, inputs):
    return (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()


def train(rank, model, inputs):
    parameters = list(model.parameters())
    for _ in range(20):
        gradients = torch.autograd.grad(loss(model, inputs), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.1 * gradient
    if inputs.device.type != "cpu":
        torch.accelerator.synchronize(inputs.device)


def main():
    torch.manual_seed(0)
    device = torch.device(sys.argv[1])
    model = nn.Linear(4, 1).to(device).share_memory()
    inputs = torch.randn(64, 4).to(device)
    before = loss(model, inputs).item()
    mp.spawn(train, args=(model, inputs))
    print("trained by the worker:", loss(model, inputs).item() < before / 4)


if __name__ == "__main__":
    main()
