"""FSDP2 (`fully_shard`) on two ranks: equal plans, regions in both halves, right gradients."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.ranks import check, run_ranks

WAYS = ("fsdp-layers", "fsdp-whole", "fsdp-layers-bf16", "fsdp-whole-bf16")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(tmp_path_factory.mktemp("fsdp2"), *WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_layers_are_planned_alike_and_train_right(found: Any, way: str) -> None:
    rank = check(found, way)
    # Two graphs serve three layers: the first layer's input needs no gradient, the others' do.
    first, others = rank["regions"]
    assert sum(rank["ran"].values()) == len(first) + 2 * len(others)


@pytest.mark.parametrize("way", WAYS)
def test_products_are_in_the_dtype_of_the_gathered_weights(found: Any, way: str) -> None:
    for rank in found:
        dtype = "bf16" if way.endswith("bf16") else "f32"
        assert all(f"gemm(A: {dtype} " in tree for tree in rank[way]["trees"])
