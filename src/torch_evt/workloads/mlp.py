"""The two-layer ReLU MLP without biases: relu(relu(x W1') W2'), loss = sum of row logsumexps.

The gradient of that loss by the output is a softmax, which is the upstream gradient of figure 14 of
the paper (doi 10.1145/3620666.3651369); here the loss itself is computed too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_evt.workloads.initial import materialise, normal
from torch_evt.workloads.layers import at_least_fp32


@dataclass(frozen=True)
class Size:
    batch: int
    width: int
    hidden: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(batch=32, width=64, hidden=128),
    "small": Size(batch=512, width=256, hidden=2048),
    "paper": Size(batch=4096, width=256, hidden=2048),
}


class MLP(nn.Module):
    """[batch, width] -> [batch, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.down(F.relu(self.up(x))))


def loss(output: Tensor) -> Tensor:
    """The sum over rows of log(sum(exp(row))): a scalar in at least fp32."""
    return torch.logsumexp(at_least_fp32(output), 1).sum()


def make(size: Size, seed: int, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, ...]:
    """(model, (x,), loss), with x normal and the weights scaled to keep its variance."""
    with torch.device("meta"):
        model = MLP(size)

    def value(name: str, parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
        deviation = math.sqrt(2 / parameter.shape[1])
        return deviation * torch.randn(parameter.shape, generator=generator)

    materialise(model, value, seed=seed, dtype=dtype, device=device)
    return model, inputs(size, seed, dtype, device), loss


def inputs(
    size: Size, seed: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """(x,): normal, [batch, width]."""
    return (normal(size.batch, size.width, seed=seed + 1, dtype=dtype, device=device),)


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """One forward pass and its loss."""
    return loss(model(*inputs))
