"""The capability record of a main loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_evt.tree.ir import Over, ReduceOp


@dataclass(frozen=True)
class MainLoop:
    """What a main loop anchors and what its epilogue can hold.

    anchors: operations whose result is its accumulator.
    operand_dtypes: of A and B, by kind of device ("cuda", "cpu").
    store_dtypes, load_dtypes: of tiles and vectors.
    max_tile_loads, max_stores, max_reductions: per region; more would leave too little shared
    memory or too few registers for the main loop (three loads and three stores beside a
    128 x 192 tile compile for sm_90a; knowledge of quack 0.6.5).
    reductions: (over, op) pairs.
    load_us_factor: time of an epilogue's extra traffic relative to plain streaming of its bytes.
    """

    name: str
    anchors: frozenset[Any]
    operand_dtypes: Mapping[str, frozenset[torch.dtype]]
    store_dtypes: frozenset[torch.dtype]
    load_dtypes: frozenset[torch.dtype]
    max_tile_loads: int
    max_stores: int
    max_reductions: int
    reductions: frozenset[tuple[Over, ReduceOp]]
    transposed_store: bool
    load_us_factor: float
