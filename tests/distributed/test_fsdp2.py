"""FSDP2 (`fully_shard`) on two ranks: equal plans, regions in both halves, right gradients."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.ranks import check, run_ranks

WAYS = {"f32": ("fsdp-layers", "fsdp-whole"), "bf16": ("fsdp-layers-bf16", "fsdp-whole-bf16")}


@pytest.fixture(scope="module", params=WAYS)
def gathered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(the dtype in which weights are gathered, what the ranks found)"""
    return request.param, run_ranks(tmp_path_factory.mktemp("fsdp2"), *WAYS[request.param])


@pytest.mark.parametrize("compiled", [0, 1], ids=["each layer", "whole model"])
def test_layers_are_planned_alike_and_train_right(gathered: Any, compiled: int) -> None:
    dtype, found = gathered
    rank = check(found, WAYS[dtype][compiled])
    # Two graphs serve three layers: the first layer's input needs no gradient, the others' do.
    first, others = rank["regions"]
    assert sum(rank["ran"].values()) == len(first) + 2 * len(others)
    assert all(f"gemm(A: {dtype} " in tree for tree in rank["trees"])
