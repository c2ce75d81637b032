"""BERT in pre-training: post-norm blocks, masked words and next sentence, decoder tied.

After Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018), with the tanh
gelu of its first implementation. Dropout 0.1 on the embedding, within attention, on the attention's
output projection and on the MLP's output.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_evt.workloads import text
from torch_evt.workloads.initial import materialise, transformer
from torch_evt.workloads.layers import IGNORED, LayerNorm, cross_entropy

MASKED_SHARE = 0.15
EPSILON = 1e-12


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    dropout: float = 0.1

    @property
    def words(self) -> int:
        """Tokens of text; those above are padding, [CLS], [SEP] and [MASK]."""
        return self.vocabulary - 4


SIZES: Mapping[str, Size] = {
    "tiny": Size(layers=2, width=64, heads=4, vocabulary=256, batch=4, length=32),
    "small": Size(layers=4, width=256, heads=8, vocabulary=1024, batch=8, length=64),
    "paper": Size(layers=24, width=1024, heads=16, vocabulary=30528, batch=32, length=512),
}


class Attention(nn.Module):
    """Self-attention over the positions that `mask`, bool [batch, length], keeps."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query = nn.Linear(size.width, size.width)
        self.key = nn.Linear(size.width, size.width)
        self.value = nn.Linear(size.width, size.width)
        self.out = nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            projection(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None, None, :], dropout_p=dropout
        )
        joined = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.dropout(self.out(joined))  # type: ignore[no-any-return]


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.attention_norm = LayerNorm(size.width, eps=EPSILON)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.mlp_norm = LayerNorm(size.width, eps=EPSILON)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        hidden = F.gelu(self.up(x), approximate="tanh")
        return self.mlp_norm(x + self.dropout(self.down(hidden)))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """norm(word + position + type), with dropout: int64 [batch, length] twice -> [..., width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.word = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.segment = nn.Embedding(2, size.width)
        self.norm = LayerNorm(size.width, eps=EPSILON)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        x = self.word(tokens) + self.position.weight[: tokens.shape[1]] + self.segment(types)
        return self.dropout(self.norm(x))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """(tokens, types, mask) -> (word logits [batch, length, vocabulary], pair logits [batch, 2]).

    tokens, types: int64 [batch, length], types 0 in the first sentence and 1 in the second. mask:
    bool [batch, length], False at padding.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = Embedding(size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.pooler = nn.Linear(size.width, size.width)
        self.pair = nn.Linear(size.width, 2)
        self.transform = nn.Linear(size.width, size.width)
        self.transform_norm = LayerNorm(size.width, eps=EPSILON)
        self.word_bias = nn.Parameter(torch.empty(size.vocabulary))

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens, types)
        for block in self.blocks:
            x = block(x, mask)
        pair = self.pair(torch.tanh(self.pooler(x[:, 0])))
        words = self.transform_norm(F.gelu(self.transform(x), approximate="tanh"))
        return F.linear(words, self.embedding.word.weight, self.word_bias), pair


def pretraining_loss(output: tuple[Tensor, Tensor], words: Tensor, pairs: Tensor) -> Tensor:
    """The masked words' cross-entropy plus that of the pairs, each a mean, in at least fp32.

    words: int64 [batch, length], IGNORED where no word was masked; pairs: int64 [batch].
    """
    word_logits, pair_logits = output
    return cross_entropy(word_logits, words) + cross_entropy(pair_logits, pairs)


def make(size: Size, seed: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
    """(model, (tokens, types, mask), loss), the loss being that of pre-training.

    Weights have BERT's deviation of 0.02 at 1024, and the same activations at other widths.
    """
    with torch.device("meta"):
        model = Bert(size)
    value = transformer(0.02 * (1024 / size.width) ** 0.5)
    materialise(model, value, seed=seed, dtype=dtype, device=device)
    *given, words, pairs = inputs(size, seed, dtype, device)

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        return pretraining_loss(output, words, pairs)

    return model, tuple(given), loss


def inputs(
    size: Size, seed: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """(tokens, types, mask, words, pairs): two pieces of real text in each row, `dtype` unused.

    A row is [CLS] first [SEP] second [SEP] padding. In half of them the second piece follows the
    first one in the text (pairs: 0), in the others it is from another place (1). 15 % of the words
    are to be told: 8 in 10 of these are replaced by [MASK], 1 by a random word, 1 is left.
    """
    source = random.Random(seed)
    rows = [_row(source, size) for _ in range(size.batch)]
    tokens, types, mask, words, pairs = (
        torch.tensor(column, dtype=torch.int64, device=device) for column in zip(*rows, strict=True)
    )
    return tokens, types, mask.bool(), words, pairs


def _row(source: random.Random, size: Size) -> tuple[list[int], list[int], list[int], Any, int]:
    padding, start, end, masked = range(size.words, size.vocabulary)
    count = source.randint(3 * size.length // 4, size.length) - 3
    cut = source.randint(count // 4, 3 * count // 4)
    both = text.window(source, count, size.words)
    unrelated = source.random() < 0.5
    second = text.window(source, count - cut, size.words) if unrelated else both[cut:]
    tokens = [start, *both[:cut], end, *second, end]
    types = [0] * (cut + 2) + [1] * (len(second) + 1)

    targets = [IGNORED] * size.length
    places = [place for place, token in enumerate(tokens) if token < size.words]
    for place in source.sample(places, max(1, round(MASKED_SHARE * len(places)))):
        targets[place] = tokens[place]
        kind = source.random()
        if kind < 0.8:
            tokens[place] = masked
        elif kind < 0.9:
            tokens[place] = source.randrange(size.words)
    missing = size.length - len(tokens)
    mask = [1] * len(tokens) + [0] * missing
    return tokens + [padding] * missing, types + [0] * missing, mask, targets, int(unrelated)


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """One forward pass and its loss."""
    *given, words, pairs = inputs
    return pretraining_loss(model(*given), words, pairs)
