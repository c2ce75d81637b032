"""Real text for the language models: the source of Python's own standard library.

It ships with every interpreter, so nothing is downloaded. Runs on different Python versions see
different bytes; within one version they are always the same.
"""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LIMIT = 2**20


@functools.cache
def corpus() -> bytes:
    """The first MiB of the standard library's top-level *.py files, joined in order of name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name)
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= LIMIT:
            break
    return bytes(text[:LIMIT])


def window(source: random.Random, length: int, vocabulary: int) -> list[int]:
    """`length` successive tokens from a random place of the text.

    A vocabulary of at most 256 takes bytes (modulo the vocabulary); a larger one takes pairs of
    bytes modulo the vocabulary, so that a wide embedding is not read in 256 rows only.
    """
    text = corpus()
    width = 1 if vocabulary <= 256 else 2
    start = source.randrange(len(text) - width * length)
    read = text[start : start + width * length]
    if width == 1:
        return [byte % vocabulary for byte in read]
    pairs = zip(read[::2], read[1::2], strict=True)
    return [(256 * high + low) % vocabulary for high, low in pairs]


def tokens(seed: int, batch: int, length: int, vocabulary: int) -> Tensor:
    """`batch` random windows of the text as token numbers: int64 [batch, length] on the CPU."""
    source = random.Random(seed)  # not torch: windows must be known under fake tensors too
    rows = [window(source, length, vocabulary) for _ in range(batch)]
    return torch.tensor(rows, dtype=torch.int64)
