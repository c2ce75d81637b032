"""Handwritten digits: 1797 pictures of 8 x 8 pixels that ship with scikit-learn."""

from __future__ import annotations

import functools
import random

import torch
from torch import Tensor

from torch_evt.errors import WorkloadError

SIDE = 8
CLASSES = 10


@functools.cache
def _all() -> tuple[list[list[list[float]]], list[int]]:
    """Every picture, pixels from 0 to 16, and its digit; lists, since fake tensors read those."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise WorkloadError(
            "the pictures of this workload ship with scikit-learn, which is not installed: "
            "pip install scikit-learn, or choose another size"
        ) from error
    data = load_digits()
    return data.images.tolist(), data.target.tolist()


def sample(source: random.Random, count: int) -> tuple[Tensor, Tensor]:
    """`count` pictures, fp32 [count, 8, 8] from -1 to 1, and their digits, int64 [count]."""
    pictures, numbers = _all()
    chosen = source.sample(range(len(pictures)), count)
    pixels = torch.tensor([pictures[i] for i in chosen], dtype=torch.float32)
    return pixels / 8 - 1, torch.tensor([numbers[i] for i in chosen], dtype=torch.int64)
