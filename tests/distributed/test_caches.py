"""Two ranks that compile with Inductor at once, into one cache folder, and then load from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.ranks import check, run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "graphs", "loaded"),
    [
        ("fsdp-layers:inductor", 2, 2),
        # AOTAutograd caches no graph that Dynamo cut at DDP's buckets: each process plans anew.
        ("ddp:inductor", 4, 0),
    ],
)
def test_ranks_share_one_cache_and_see_the_same_plans_in_it(
    tmp_path: Path, way: str, graphs: int, loaded: int
) -> None:
    cache = tmp_path / "cache"
    regions = []
    for run, from_cache in (("first", 0), ("second", loaded)):
        (tmp_path / run).mkdir()
        found = run_ranks(tmp_path / run, way, cache=cache)
        first = check(found, way)
        assert len(first["plan"]["graphs"]) == graphs
        assert [rank[way]["from cache"] for rank in found] == [from_cache] * 2
        regions.append(first["regions"])
    assert regions[0] == regions[1]
    kept = [path for path in (cache / "torch_evt" / "plans").rglob("*") if path.is_file()]
    assert len(kept) == graphs  # both ranks wrote the same entries
