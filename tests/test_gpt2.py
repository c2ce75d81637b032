"""GPT-2 at tiny size, compiled by Inductor for real: right, and with exactly these regions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from interpreted import PLACE
from torch_evt import pipeline, workloads
from torch_evt.partition.plan import GraphPlan
from torch_evt.runtime import counters
from torch_evt.testing import check_model, compare, fp64_copy

PINNED = {torch.float32: (2, 4), torch.bfloat16: (2, 8)}
"""Regions per half: the same with eager's and with Inductor's random numbers."""

PINNED_INFERENCE = {torch.float32: 2, torch.bfloat16: 2}

FP32 = pytest.param(torch.float32, id="fp32")
BF16 = pytest.param(torch.bfloat16, id="bf16")
SLOW_BF16 = pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.slow)
"""test_workloads_standard.py trains it in fp16 and under autocast."""


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    counters.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def halves(plan: GraphPlan) -> tuple[int, int]:
    assert plan.placed
    found = [region.half for region in plan.regions]
    return found.count("forward"), found.count("backward")


@pytest.mark.parametrize("dtype", [FP32, SLOW_BF16])
def test_training_is_right_and_every_planned_region_runs(dtype: torch.dtype) -> None:
    workload = workloads.get("gpt2-medium", "tiny")
    plans: list[GraphPlan] = []
    with pipeline.observed(plans.append):
        verdict = check_model(
            lambda seed: workload.make(seed, dtype=dtype), dtype=dtype, options=PLACE
        )
    verdict.raise_if_failed()
    (plan,) = plans
    assert halves(plan) == PINNED[dtype]
    planned = Counter(region.tree for region in plan.regions)
    assert counters.region_runs == Counter({tree: 3 * n for tree, n in planned.items()})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_with_its_own_dropout_it_trains_as_inductor_does(dtype: torch.dtype) -> None:
    """Inductor draws the same numbers for the same seed, so its step is a reference for ours.

    training/test_dropout.py compares the masks of smaller models.
    """
    workload = workloads.get("gpt2-medium", "tiny")
    plans: list[GraphPlan] = []
    steps: dict[str, dict[str, torch.Tensor]] = {}
    for backend, options in (("inductor", None), ("evt", dict(PLACE))):
        torch._dynamo.reset()
        model, inputs, loss = workload.make(0, dtype=dtype)
        compiled = torch.compile(model, backend=backend, options=options)
        torch.manual_seed(3)
        with pipeline.observed(plans.append):
            scalar = loss(compiled(*inputs))
            scalar.backward()
        steps[backend] = {"loss": scalar.detach()} | {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }
    assert halves(plans[-1]) == PINNED[dtype]
    limit = 2e-5 if dtype == torch.float32 else 3e-2  # another mask would differ by about 0.5
    for name, theirs in steps["inductor"].items():
        ours = steps["evt"][name]
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert difference < limit, name


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_inference_is_right(dtype: torch.dtype) -> None:
    model, inputs, _ = workloads.get("gpt2-medium", "tiny").make(0, dtype=dtype)
    model.eval()
    plans: list[GraphPlan] = []
    with torch.no_grad(), pipeline.observed(plans.append):
        ours = torch.compile(model, backend="evt", options=PLACE)(*inputs)
        eager = model(*inputs)
        exact = fp64_copy(model)(*inputs)
    compare({"y": ours}, {"y": eager}, {"y": exact}, dtype).raise_if_failed()
    (plan,) = plans
    assert plan.placed
    assert len(plan.regions) == PINNED_INFERENCE[dtype]
    assert sum(counters.region_runs.values()) == PINNED_INFERENCE[dtype]
