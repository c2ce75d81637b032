"""XML-CNN: convolutions over embedded words, a bottleneck, and one logit for each of many labels.

After Liu et al., "Deep Learning for Extreme Multi-label Text Classification" (2017), at the size of
Amazon-670K. The words come embedded. Dropout 0.1 on them and in the bottleneck.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_evt.workloads.initial import SPREAD, materialise, normal
from torch_evt.workloads.layers import at_least_fp32

FILTERS = (2, 4, 8)
"""How many words each convolution looks at."""
STRIDE = 2
LABELS_PER_TEXT = 5


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    width: int
    channels: int
    hidden: int
    labels: int
    dropout: float = 0.1


SIZES: Mapping[str, Size] = {
    "tiny": Size(batch=8, length=16, width=32, channels=8, hidden=64, labels=1000),
    "small": Size(batch=64, length=64, width=64, channels=16, hidden=128, labels=10_000),
    "paper": Size(batch=1024, length=512, width=304, channels=32, hidden=512, labels=670_208),
}


class XmlCnn(nn.Module):
    """Embedded words [batch, length, width] -> logits [batch, labels]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedded_dropout = nn.Dropout(size.dropout)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(size.width, size.channels, words, stride=STRIDE, padding=words // 2 - 1)
            for words in FILTERS
        )
        self.pool = nn.MaxPool1d(3, stride=1, padding=1)
        features = len(FILTERS) * size.channels * (size.length // STRIDE)
        self.bottleneck = nn.Linear(features, size.hidden)
        self.dropout = nn.Dropout(size.dropout)
        self.labels = nn.Linear(size.hidden, size.labels)

    def forward(self, embedded: Tensor) -> Tensor:
        x = self.embedded_dropout(embedded).transpose(1, 2)
        pooled = [F.relu(self.pool(convolve(x).flatten(1))) for convolve in self.convolutions]
        hidden = F.relu(self.bottleneck(torch.cat(pooled, dim=1)))
        return self.labels(self.dropout(hidden))  # type: ignore[no-any-return]


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over labels, the mean over the batch, in at least fp32; both [batch, labels]."""
    exact = at_least_fp32(logits)
    total = F.binary_cross_entropy_with_logits(exact, targets.to(exact.dtype), reduction="sum")
    return total / len(logits)


def make(size: Size, seed: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
    """(model, (embedded,), loss), weights scaled to keep the variance, biases around 0."""
    with torch.device("meta"):
        model = XmlCnn(size)

    def value(name: str, parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
        deviation = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else SPREAD
        return torch.randn(parameter.shape, generator=generator).mul_(deviation)

    materialise(model, value, seed=seed, dtype=dtype, device=device)
    embedded, targets = inputs(size, seed, dtype, device)

    def loss(output: Tensor) -> Tensor:
        return binary_cross_entropy(output, targets)

    return model, (embedded,), loss


def inputs(
    size: Size, seed: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """(embedded [batch, length, width], targets [batch, labels]): normal; 1 at five labels of each
    text and 0 at the others, in `dtype`."""
    source = random.Random(seed)
    chosen = [source.sample(range(size.labels), LABELS_PER_TEXT) for _ in range(size.batch)]
    targets = torch.zeros(size.batch, size.labels, dtype=dtype, device=device)
    targets.scatter_(1, torch.tensor(chosen, device=device), 1.0)
    shape = (size.batch, size.length, size.width)
    return normal(*shape, seed=seed + 1, dtype=dtype, device=device), targets


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """One forward pass and its loss."""
    embedded, targets = inputs
    return binary_cross_entropy(model(embedded), targets)
