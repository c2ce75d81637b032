"""Llama 3.2 1B: RMS norms, rotary positions, grouped-query attention, SwiGLU, no bias, no dropout.

After Grattafiori et al., "The Llama 3 Herd of Models" (2024). The head is tied to the embedding.
Positions turn by the plain rotary frequencies, without the rescaling for long contexts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_evt.workloads import text
from torch_evt.workloads.initial import materialise, transformer
from torch_evt.workloads.layers import RMSNorm, at_least_fp32, cross_entropy, next_tokens

EPSILON = 1e-5
ROTARY_BASE = 500_000.0


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    batch: int
    length: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(2, 64, heads=4, key_heads=2, hidden=192, vocabulary=256, batch=2, length=32),
    "small": Size(4, 256, heads=8, key_heads=2, hidden=768, vocabulary=1024, batch=4, length=64),
    "paper": Size(
        16, 2048, heads=32, key_heads=8, hidden=8192, vocabulary=128256, batch=4, length=2048
    ),
}


def rotation(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles: fp32 [length, width] each, width being a head's."""
    pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    frequencies = ROTARY_BASE ** (-pairs / width)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of x, [..., length, width], in at least fp32."""
    exact = at_least_fp32(x)
    first, second = exact.chunk(2, dim=-1)
    return (exact * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        shared = size.key_heads * self.head_width
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, shared, bias=False)
        self.value = nn.Linear(size.width, shared, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.width, eps=EPSILON)
        self.attention = Attention(size)
        self.mlp_norm = RMSNorm(size.width, eps=EPSILON)
        self.mlp = MLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Token numbers, int64 [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width, eps=EPSILON)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotation(tokens.shape[1], self.head_width, x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)


def make(size: Size, seed: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
    """(model, (tokens,), loss), the loss being the next token's cross-entropy.

    Weights have deviation 0.02 at a width of 2048, and the same activations at other widths;
    projections into the residual stream are divided by sqrt(2 layers).
    """
    with torch.device("meta"):
        model = Llama(size)
    deviation = 0.02 * math.sqrt(2048 / size.width)
    narrower = deviation / math.sqrt(2 * size.layers)
    value = transformer(deviation, {"out.weight": narrower, "down.weight": narrower})
    materialise(model, value, seed=seed, dtype=dtype, device=device)
    (tokens,) = inputs(size, seed, dtype, device)
    targets = next_tokens(tokens)

    def loss(output: Tensor) -> Tensor:
        return cross_entropy(output, targets)

    return model, (tokens,), loss


def inputs(
    size: Size, seed: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """(tokens,): int64 [batch, length], windows of real text; `dtype` has no part in it."""
    return (text.tokens(seed, size.batch, size.length, size.vocabulary).to(device),)


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """One forward pass and its loss, targets taken from the tokens themselves."""
    (tokens,) = inputs
    return cross_entropy(model(tokens), next_tokens(tokens))
