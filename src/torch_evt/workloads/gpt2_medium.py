"""GPT-2: pre-norm blocks, learned positions, tanh gelu, causal SDPA, head tied to the embedding.

After Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Dropout 0.1 on
the embedding, on the attention's output projection and on the MLP's output. None inside attention:
SDPA draws its mask within one opaque kernel, and with a dropout probability it would leave the fast
kernels, so it would measure attention rather than what this project changes.
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
from torch_evt.workloads.layers import LayerNorm, cross_entropy, next_tokens


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    dropout: float = 0.1


SIZES: Mapping[str, Size] = {
    "tiny": Size(layers=2, width=64, heads=4, vocabulary=256, batch=4, length=32),
    "small": Size(layers=4, width=128, heads=4, vocabulary=256, batch=8, length=64),
    "paper": Size(layers=24, width=1024, heads=16, vocabulary=50304, batch=8, length=1024),
}


class Attention(nn.Module):
    """Causal self-attention: [batch, length, width] -> the same, dropout included."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.dropout(self.out(joined))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden = F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.dropout(self.down(hidden))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Token numbers, int64 [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = LayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def make(size: Size, seed: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
    """(model, (tokens,), loss), the loss being the next token's cross-entropy.

    Weights have GPT-2's deviation at its own width, 0.02 at 1024, and the same activations at other
    widths; projections into the residual stream are divided by sqrt(2 layers), as in GPT-2.
    """
    with torch.device("meta"):
        model = GPT(size)
    deviation = 0.02 * math.sqrt(1024 / size.width)

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
