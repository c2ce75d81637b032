"""Without the program (`evt.solver_nodes=0`) the plan is greedy, and training is as right."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from interpreted import PLACE
from torch_evt import pipeline, workloads
from torch_evt.partition.plan import GraphPlan
from torch_evt.runtime import counters
from torch_evt.testing import check_model

CASES = [
    pytest.param("mlp", torch.float32, (2, 1), id="mlp-fp32"),
    pytest.param("mlp", torch.bfloat16, (2, 1), id="mlp-bf16"),
    pytest.param("gpt2-medium", torch.float32, (5, 3), id="gpt2-medium-fp32"),
    pytest.param(
        "gpt2-medium", torch.bfloat16, (6, 8), id="gpt2-medium-bf16", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("name", "dtype", "regions"), CASES)
def test_training_is_right_by_the_greedy_plan(
    name: str, dtype: torch.dtype, regions: tuple[int, int]
) -> None:
    torch._dynamo.reset()
    counters.reset()
    workload = workloads.get(name, "tiny")
    plans: list[GraphPlan] = []
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pipeline.observed(plans.append),
    ):
        check_model(
            lambda seed: workload.make(seed, dtype=dtype),
            dtype=dtype,
            options={**PLACE, "evt.solver_nodes": 0},
        ).raise_if_failed()
    (plan,) = plans
    halves = Counter(region.half for region in plan.regions)
    assert plan.solver == "greedy" and not plan.optimal and plan.placed
    assert (halves["forward"], halves["backward"]) == regions
    planned = Counter(region.tree for region in plan.regions)
    assert counters.region_runs == Counter({tree: 3 * n for tree, n in planned.items()})
