"""Inductor's uniform random numbers, in plain torch: Philox-4x32-10 of a seed and an offset.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Inductor takes the first of
the four words that a counter gives, by `normalized_rand_cpu` in C++ and by `tl.rand` in Triton.
The two part in two points: C++ reads the low 32 bits of the seed and drops the word's sign bit;
Triton reads all 64 bits of the seed and folds negative words onto positive ones. Both read the low
32 bits of the offset. (In one-dimensional CUDA kernels Inductor may use all four words of a
counter instead, `rand4x`; those numbers are not these.)
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_SCALE = 4.6566127342e-10


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """The first word of Philox-4x32-10.

    key, counter: int64 tensors that hold 32-bit words and broadcast. Result: int64, 0 to 2^32 - 1.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        # int64 products wrap, which leaves both 32-bit halves right
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0


def uniform(seed: Tensor, offset: Tensor, as_cpp: bool | None = None) -> Tensor:
    """The numbers in [0, 1) that Inductor draws.

    seed, offset: int64 tensors that broadcast. as_cpp: as its C++ code draws them, else as its
    Triton code does; by default what runs on the tensors' device. Result: float32, of their common
    shape.
    """
    if as_cpp is None:
        as_cpp = offset.device.type == "cpu"
    high = torch.zeros_like(seed) if as_cpp else (seed >> 32) & _WORD
    zero = torch.zeros_like(offset)
    word = philox((seed & _WORD, high), (offset & _WORD, zero, zero, zero))
    folded = word & 0x7FFFFFFF if as_cpp else torch.minimum(word, _WORD - word)
    return folded.to(torch.float32) * _SCALE
