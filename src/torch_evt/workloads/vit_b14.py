"""ViT-B/14: a pre-norm encoder over patches and class tokens, exact gelu, mean over all tokens.

After Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020), in the variant that the paper
(doi 10.1145/3620666.3651369) trains: 8 class tokens, so that the length of 264 is a multiple of 8,
and the mean over tokens in front of the last norm. Dropout 0.1 on the embedding, within attention,
on the attention's output projection and twice in the MLP.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_evt.workloads import digits
from torch_evt.workloads.initial import materialise, normal, transformer
from torch_evt.workloads.layers import LayerNorm, cross_entropy


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    picture: int
    patch: int
    channels: int
    class_tokens: int
    classes: int
    batch: int
    dropout: float = 0.1

    @property
    def length(self) -> int:
        """Class tokens and patches."""
        return self.class_tokens + (self.picture // self.patch) ** 2


SIZES: Mapping[str, Size] = {
    "tiny": Size(2, 48, 4, picture=8, patch=2, channels=1, class_tokens=1, classes=10, batch=16),
    "small": Size(4, 192, 6, picture=32, patch=4, channels=3, class_tokens=1, classes=10, batch=32),
    "paper": Size(
        12, 768, 12, picture=224, patch=14, channels=3, class_tokens=8, classes=1000, batch=128
    ),
}


class Attention(nn.Module):
    """Self-attention: [batch, length, width] -> the same, dropout included."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Dropout(size.dropout),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Pictures [batch, channels, height, width] -> logits [batch, classes]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patch = size.patch
        self.embedding = nn.Linear(size.channels * size.patch**2, size.width)
        self.class_tokens = nn.Parameter(torch.empty(1, size.class_tokens, size.width))
        self.position = nn.Parameter(torch.empty(1, size.length, size.width))
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.classes)

    def patches(self, pictures: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, patches, channels * patch * patch]."""
        batch, channels, height, width = pictures.shape
        rows, columns = height // self.patch, width // self.patch
        cut = pictures.reshape(batch, channels, rows, self.patch, columns, self.patch)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.embedding(self.patches(pictures))
        first = self.class_tokens.expand(len(x), -1, -1)
        x = self.dropout(torch.cat((first, x), dim=1) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))  # type: ignore[no-any-return]


def make(size: Size, seed: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
    """(model, (pictures,), loss), the loss being the mean cross-entropy of the classes.

    Weights have deviation 0.02 at a width of 768, and the same activations at other widths.
    """
    with torch.device("meta"):
        model = ViT(size)
    value = transformer(0.02 * (768 / size.width) ** 0.5)
    materialise(model, value, seed=seed, dtype=dtype, device=device)
    pictures, classes = inputs(size, seed, dtype, device)

    def loss(output: Tensor) -> Tensor:
        return cross_entropy(output, classes)

    return model, (pictures,), loss


def inputs(
    size: Size, seed: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """(pictures [batch, channels, height, width], classes int64 [batch]).

    Handwritten digits where they have the size, else normal numbers and random classes. Raises
    WorkloadError where the digits are not installed.
    """
    source = random.Random(seed)
    if (size.channels, size.picture, size.classes) == (1, digits.SIDE, digits.CLASSES):
        values, classes = digits.sample(source, size.batch)
        pictures = values.unsqueeze(1).to(device, dtype)
    else:
        classes = torch.tensor([source.randrange(size.classes) for _ in range(size.batch)])
        shape = (size.batch, size.channels, size.picture, size.picture)
        pictures = normal(*shape, seed=seed + 1, dtype=dtype, device=device)
    return pictures, classes.to(device)


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """One forward pass and its loss."""
    pictures, classes = inputs
    return cross_entropy(model(pictures), classes)
