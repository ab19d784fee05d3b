"""Small networks of the usual kinds, in plain PyTorch; see models.py.

None asks the device for a value, so no step of theirs has a reason to wait.
"""

import math

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

# ------------------------------------------------------------------- images


class BasicBlock(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.skip = nn.Identity()
        if stride != 1 or before != width:
            self.skip = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False),
                nn.BatchNorm2d(width),
            )

    def forward(self, x):
        y = functional.relu(self.first_norm(self.first(x)), inplace=True)
        y = self.second_norm(self.second(y))
        y += self.skip(x)
        return functional.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self, widths=(8, 16, 32), classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks, before = [], widths[0]
        for width in widths:
            blocks.append(BasicBlock(before, width, 1 + (width != before)))
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, images):
        y = self.blocks(self.stem(images))
        return self.head(functional.adaptive_avg_pool2d(y, 1).flatten(1))


class UNet(nn.Module):
    """Labels each pixel; skips join both halves of the U."""

    def __init__(self, widths=(8, 16, 32), classes=4, dropout=0.0):
        super().__init__()
        self.down = nn.ModuleList()
        before = 3
        for width in widths:
            self.down.append(self.convolutions(before, width, dropout))
            before = width
        self.grow, self.up = nn.ModuleList(), nn.ModuleList()
        for width in reversed(widths[:-1]):
            self.grow.append(nn.ConvTranspose2d(before, width, 2, stride=2))
            self.up.append(self.convolutions(2 * width, width, dropout))
            before = width
        self.head = nn.Conv2d(before, classes, 1)

    @staticmethod
    def convolutions(before, width, dropout):
        return nn.Sequential(
            nn.Conv2d(before, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.LeakyReLU(0.1),
            nn.Dropout2d(dropout),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.LeakyReLU(0.1),
        )

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x if not skips else functional.max_pool2d(x, 2))
            skips.append(x)
        for grow, up, skip in zip(
            self.grow, self.up, skips[-2::-1], strict=True
        ):
            x = up(torch.cat([grow(x), skip], 1))
        return self.head(x)


# ------------------------------------------------------------------ language


class Tagger(nn.Module):
    """A bidirectional LSTM over sentences of different lengths, longest first.

    With lengths in another order, packing has to send their permutation.
    """

    def __init__(self, words=50, width=16, hidden=24, tags=7, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.lstm = nn.LSTM(
            width,
            hidden,
            2,
            batch_first=True,
            bidirectional=True,
            dropout=dropout,
        )
        self.head = nn.Linear(2 * hidden, tags)

    def forward(self, words, lengths):
        packed = rnn.pack_padded_sequence(
            self.words(words), lengths, batch_first=True
        )
        y, _ = rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(y)


class Attention(nn.Module):
    """Of a sequence to itself or, given a context, to another one."""

    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, context=None, causal=False):
        def split(y):
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        both = self.key_value(x if context is None else context).chunk(2, -1)
        y = functional.scaled_dot_product_attention(
            split(self.query(x)),
            *map(split, both),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's layer; `cross` lets it look at a context as well."""

    def __init__(self, width, heads, dropout=0.0, cross=False, gelu="none"):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads, dropout) if cross else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(approximate=gelu),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x, context=None, causal=False):
        x = x + self.drop(self.attention(self.norm(x), causal=causal))
        if self.cross is not None:
            x = x + self.drop(self.cross(self.cross_norm(x), context))
        return x + self.drop(self.mlp(x))


class GPT(nn.Module):
    """Its output layer is its table of words: one parameter, two uses."""

    def __init__(self, words=64, length=16, width=32, layers=2, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, 4, dropout, gelu="tanh") for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, words):
        places = torch.arange(words.shape[1], device=words.device)
        x = self.drop(self.words(words) + self.places(places))
        for block in self.blocks:
            x = block(x, causal=True)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """Heads share keys and values in groups; the feed-forward is SwiGLU."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.size = width // heads
        self.norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.rise = nn.Linear(width, 3 * width, bias=False)
        self.fall = nn.Linear(3 * width, width, bias=False)

    def split(self, x):
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x, turns):
        def rotated(x):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * turns).flatten(-2)

        y = self.norm(x)
        y = functional.scaled_dot_product_attention(
            rotated(self.split(self.query(y))),
            rotated(self.split(self.key(y))),
            self.split(self.value(y)),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.fall(functional.silu(self.gate(y)) * self.rise(y))


class Llama(nn.Module):
    """Places are turns of complex numbers, as in the published model."""

    def __init__(self, words=64, length=16, width=32, heads=4, groups=2):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, groups) for _ in range(2)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        pairs = width // heads // 2
        speeds = 10000.0 ** (-torch.arange(pairs) / pairs)
        angles = torch.outer(torch.arange(length), speeds)
        turns = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x, self.turns[: words.shape[1]])
        return self.head(self.norm(x))


class BERT(nn.Module):
    """PyTorch's own encoder layers, which have a fused form for evaluation."""

    def __init__(self, words=64, length=16, width=32, layers=2, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        self.places = nn.Embedding(length, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout, "gelu", batch_first=True
        )
        # A nested tensor of the real positions is something the CPU alone has.
        self.encoder = nn.TransformerEncoder(
            layer, layers, enable_nested_tensor=False
        )
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)
        )
        self.bias = nn.Parameter(torch.zeros(words))
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words, types):
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.places(places) + self.types(types)
        x = self.drop(self.norm(x))
        x = self.encoder(x, src_key_padding_mask=words == 0)
        return functional.linear(self.head(x), self.words.weight, self.bias)


# ------------------------------------------------------- images and sound


class ViT(nn.Module):
    def __init__(self, size=16, patch=4, width=32, classes=10, dropout=0.0):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        length = (size // patch) ** 2 + 1
        self.places = nn.Parameter(torch.randn(1, length, width) * 0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            Block(width, 4, dropout), Block(width, 4, dropout)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.blocks(self.drop(x + self.places))
        return self.head(self.norm(x)[:, 0])


def waves(steps, width):
    """Sines and cosines of falling frequency for times of shape (N,)."""
    speeds = torch.arange(width // 2, device=steps.device) / (width // 2)
    angles = steps[:, None] * torch.exp(-math.log(10000.0) * speeds)
    return torch.cat([angles.sin(), angles.cos()], 1)


class Whisper(nn.Module):
    """The published tiny model's width, heads and bands, but fewer layers."""

    def __init__(self, words=256, bands=80, width=384, layers=1, dropout=0.0):
        super().__init__()
        self.first = nn.Conv1d(bands, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.encoder = nn.ModuleList(
            Block(width, 6, dropout) for _ in range(layers)
        )
        self.encoder_norm = nn.LayerNorm(width)
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        self.decoder = nn.ModuleList(
            Block(width, 6, dropout, cross=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, sound, words):
        x = functional.gelu(self.first(sound))
        x = functional.gelu(self.second(x)).transpose(1, 2)
        steps = torch.arange(x.shape[1], device=x.device)
        x = x + waves(steps, x.shape[2])
        for block in self.encoder:
            x = block(x)
        x = self.encoder_norm(x)
        y = self.words(words) + self.places[: words.shape[1]]
        for block in self.decoder:
            y = block(y, x, causal=True)
        return self.norm(y) @ self.words.weight.t()


class TimedBlock(nn.Module):
    """A residual block of a diffusion model, which is told the time."""

    def __init__(self, before, width, times, dropout):
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(4, before),
            nn.SiLU(),
            nn.Conv2d(before, width, 3, padding=1),
        )
        self.time = nn.Linear(times, 2 * width)
        self.norm = nn.GroupNorm(4, width)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.skip = nn.Conv2d(before, width, 1)

    def forward(self, x, time):
        y = self.first(x)
        told = self.time(functional.silu(time))[..., None, None]
        scale, shift = told.chunk(2, 1)
        y = self.norm(y) * (1 + scale) + shift
        return self.skip(x) + self.second(self.drop(functional.silu(y)))


class Diffusion(nn.Module):
    """A U-Net of one step down, with attention at its bottom."""

    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 64)
        )
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.upper = TimedBlock(width, width, 64, dropout)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.lower = TimedBlock(width, 2 * width, 64, dropout)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.attention = Attention(2 * width, 4)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = TimedBlock(2 * width, width, 64, dropout)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, steps):
        time = self.time(waves(steps, self.width))
        skip = self.upper(self.stem(x), time)
        y = self.lower(self.down(skip), time)
        pixels = self.norm(y).flatten(2).transpose(1, 2)
        y = y + self.attention(pixels).transpose(1, 2).unflatten(2, y.shape[2:])
        y = self.up(functional.interpolate(y, scale_factor=2, mode="nearest"))
        return self.head(self.last(torch.cat([y, skip], 1), time))


# -------------------------------------------------------------------- graphs


class GraphLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.update = nn.Linear(3 * width, width)

    def forward(self, x, edges):
        start, end = edges
        both = torch.cat([x[start], x[end]], 1)
        messages = functional.relu(self.message(both))
        none = torch.zeros_like(x)
        total = none.index_add(0, end, messages)
        place = end[:, None].expand_as(messages)
        largest = none.scatter_reduce(0, place, messages, "amax")
        return x + torch.tanh(self.update(torch.cat([x, total, largest], 1)))


class GraphNetwork(nn.Module):
    """Several graphs at once: `graph` says which one a node belongs to."""

    def __init__(self, features=8, width=24, outputs=2):
        super().__init__()
        self.inputs = nn.Linear(features, width)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(2))
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, x, edges, graph, graphs):
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x, edges)
        place = graph[:, None].expand_as(x)
        none = x.new_zeros(graphs, x.shape[1])
        total = none.scatter_add(0, place, x)
        mean = none.scatter_reduce(0, place, x, "mean", include_self=False)
        return self.head(torch.cat([total, mean], 1))
