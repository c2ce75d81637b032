"""DistributedDataParallel on two ranks: equal plans, regions in both halves, right gradients."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.ranks import check, run_ranks

WHOLE = ("ddp-whole", "ddp-python-reducer")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(tmp_path_factory.mktemp("ddp"), "ddp", *WHOLE)


def test_dynamos_cuts_at_buckets_leave_regions_in_both_halves(found: Any) -> None:
    rank = check(found, "ddp")
    assert len(rank["plan"]["graphs"]) == 4  # buckets
    assert rank["ran"] == rank["placed"]


@pytest.mark.parametrize("way", WHOLE)
def test_without_cuts_the_whole_model_is_one_plan(found: Any, way: str) -> None:
    rank = check(found, way)
    assert len(rank["plan"]["graphs"]) == 1
    assert rank["ran"] == rank["placed"]
    # Across a cut, a data gradient cannot hold what comes before it in the backward pass.
    assert rank["placed"]["backward"] > found[0]["ddp"]["placed"]["backward"]
