"""Ten small models to train, from their configurations alone.

Each entry of `MODELS` makes what a training step needs:

    model, batch, loss = MODELS["gpt"]()
    inputs, target = batch(0)
    loss(model(*inputs), target).backward()

Weights follow torch's global seed. `batch(seed)` is on the CPU, with lists and
numbers where PyTorch wants them there; `placed` takes it to a device. Models
with dropout are made without it, unless `MODELS["gpt"](dropout=0.1)` asks.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import networks
import torch
from torch import nn
from torch.nn import functional


class Example(NamedTuple):
    model: nn.Module
    batch: Callable  # seed -> (the model's arguments, target)
    loss: Callable  # (the model's result, target) -> a tensor of no dimensions


def placed(batch, device):
    inputs, target = batch
    return [
        part.to(device) if isinstance(part, torch.Tensor) else part
        for part in inputs
    ], target.to(device)


def source(seed):
    return torch.Generator().manual_seed(seed)


IGNORED = -100  # the target of a place that does not count


def word_loss(scores, words):
    """Of scores (B, T, words) and the right words (B, T)."""
    return functional.cross_entropy(
        scores.flatten(0, 1), words.flatten(), ignore_index=IGNORED
    )


def resnet():
    def batch(seed):
        images = torch.randn(4, 3, 32, 32, generator=source(seed))
        return [images], torch.randint(10, (4,), generator=source(seed))

    loss = partial(functional.cross_entropy, label_smoothing=0.1)
    return Example(networks.ResNet(), batch, loss)


def unet(dropout=0.0):
    def batch(seed):
        images = torch.randn(2, 3, 16, 16, generator=source(seed))
        return [images], images.sum(1).clamp(-1, 2).round().long() + 1

    model = networks.UNet(dropout=dropout)
    return Example(model, batch, functional.cross_entropy)


def tagger(dropout=0.0):
    lengths = [12, 9, 9, 5]

    def batch(seed):
        words = torch.randint(1, 50, (4, 12), generator=source(seed))
        tags = words % 7
        for row, length in enumerate(lengths):
            words[row, length:], tags[row, length:] = 0, IGNORED
        return [words, lengths], tags

    return Example(networks.Tagger(dropout=dropout), batch, word_loss)


def next_words(seed):
    words = torch.randint(64, (4, 17), generator=source(seed))
    return [words[:, :-1]], words[:, 1:]


def gpt(dropout=0.0):
    return Example(networks.GPT(dropout=dropout), next_words, word_loss)


def llama():
    return Example(networks.Llama(), next_words, word_loss)


def bert(dropout=0.0):
    padding, hidden = 0, 1

    def batch(seed):
        words = torch.randint(2, 64, (4, 16), generator=source(seed))
        guessed = torch.rand(4, 16, generator=source(seed)) < 0.3
        target = torch.where(guessed, words, IGNORED)
        words = torch.where(guessed, hidden, words)
        words[1, 12:], target[1, 12:] = padding, IGNORED
        types = (torch.arange(16) >= 8).long().repeat(4, 1)
        return [words, types], target

    return Example(networks.BERT(dropout=dropout), batch, word_loss)


def vit(dropout=0.0):
    def batch(seed):
        images = torch.randn(4, 3, 16, 16, generator=source(seed))
        return [images], torch.randint(10, (4,), generator=source(seed))

    model = networks.ViT(dropout=dropout)
    return Example(model, batch, functional.cross_entropy)


def whisper(dropout=0.0):
    def batch(seed):
        sound = torch.randn(2, 80, 48, generator=source(seed))
        words = torch.randint(256, (2, 9), generator=source(seed))
        return [sound, words[:, :-1]], words[:, 1:]

    return Example(networks.Whisper(dropout=dropout), batch, word_loss)


def diffusion(dropout=0.0):
    def batch(seed):
        images = torch.randn(2, 3, 16, 16, generator=source(seed))
        noise = torch.randn(2, 3, 16, 16, generator=source(seed + 1))
        steps = torch.randint(1000, (2,), generator=source(seed))
        keep = torch.cos(steps / 1000 * math.pi / 2)[:, None, None, None]
        noisy = keep * images + (1 - keep * keep).sqrt() * noise
        return [noisy, steps], noise

    model = networks.Diffusion(dropout=dropout)
    return Example(model, batch, functional.mse_loss)


def graph():
    graphs, nodes, edges = 4, 10, 24

    def batch(seed):
        x = torch.randn(graphs * nodes, 8, generator=source(seed))
        of = torch.arange(graphs).repeat_interleave(nodes)
        ends = torch.randint(nodes, (2, graphs, edges), generator=source(seed))
        ends += nodes * torch.arange(graphs)[:, None]
        target = torch.stack([x.view(graphs, -1).mean(1), x[::nodes, 0]], 1)
        return [x, ends.flatten(1), of, graphs], target

    model = networks.GraphNetwork()
    return Example(model, batch, functional.smooth_l1_loss)


MODELS = {
    "resnet": resnet,
    "unet": unet,
    "tagger": tagger,
    "gpt": gpt,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "whisper": whisper,
    "diffusion": diffusion,
    "graph": graph,
}
