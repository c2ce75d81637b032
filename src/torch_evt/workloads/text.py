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


def tokens(seed: int, batch: int, length: int, vocabulary: int) -> Tensor:
    """`batch` random windows of the text as token numbers: int64 [batch, length] on the CPU.

    A vocabulary of at most 256 takes bytes (modulo the vocabulary); a larger one takes pairs of
    bytes modulo the vocabulary, so that a wide embedding is not read in 256 rows only.
    """
    text = corpus()
    width = 1 if vocabulary <= 256 else 2
    source = random.Random(seed)  # not torch: windows must be known under fake tensors too
    starts = [source.randrange(len(text) - width * length) for _ in range(batch)]
    rows = []
    for start in starts:
        window = text[start : start + width * length]
        if width == 1:
            rows.append([byte % vocabulary for byte in window])
        else:
            pairs = zip(window[::2], window[1::2], strict=True)
            rows.append([(256 * high + low) % vocabulary for high, low in pairs])
    return torch.tensor(rows, dtype=torch.int64)
