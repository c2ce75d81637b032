"""The error standard for every workload at tiny size, compiled by Inductor for real.

Model and loss are compiled as one function, every region is placed and its outputs are poisoned,
and every region that was planned ran. What is pinned is the number of regions in each half.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpreted import PLACE
from over_seeds import failures
from torch_evt import pipeline, workloads
from torch_evt.partition.plan import GraphPlan
from torch_evt.report.demo import Step
from torch_evt.runtime import counters
from torch_evt.testing import (
    Comparison,
    check_model,
    compare,
    run_step,
)

WEIGHTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "autocast": torch.float32,
}
"""The dtype of a model's weights in each column of the table; autocast is to bf16."""

REGIONS = {
    # (forward, backward)  fp32    bf16     fp16     autocast
    "mlp":                ((1, 1), (1, 1), (1, 1), (1, 1)),
    "gpt2-medium":        ((2, 3), (2, 8), (2, 8), (2, 8)),
    "bert-large":         ((3, 8), (3, 9), (3, 9), (3, 9)),
    "llama-1b":           ((2, 3), (2, 3), (2, 3), (2, 3)),
    "vit-b14":            ((5, 3), (2, 7), (2, 7), (2, 7)),
    "xmlcnn":             ((1, 1), (1, 1), (1, 1), (1, 1)),
}  # fmt: skip

SLOW = {(name, "bf16") for name in REGIONS if name != "mlp"}
SLOW |= {("gpt2-medium", "fp32")}
"""What takes long and stands nearest to another test: autocast, or those of test_gpt2.py."""

SEEDS = (0, 1, 2)
LARGEST_SCALE = 2.0**16
"""GradScaler's first factor."""

YARDSTICK = 0.2
"""Where eager's own relative error is larger than this, as where fp16 has lost a gradient, being as
exact as eager means little. The largest is XML-CNN's in bf16, 0.11, from maxima taken elsewhere."""

OVER_SEEDS = {("bert-large", "autocast"): 3, ("bert-large", "bf16"): 8, ("xmlcnn", "bf16"): 3}
"""Judged over so many seeds together: docs/decisions.md says why, with what was measured."""


class Autocast(nn.Module):
    """A step under autocast to bf16."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.step(*inputs)


def make(name: str, mode: str, seed: int, scale: float) -> tuple[nn.Module, Any, Any]:
    """(step, batch, loss): the loss is the step's result, scaled outside as GradScaler does."""
    workload = workloads.get(name)
    dtype = WEIGHTS[mode]
    model, _, _ = workload.make(seed, dtype=dtype)
    if name == "xmlcnn" and mode != "fp32":
        # Its rounding decides which of two near values a maximum takes, in eager as in ours, and
        # the whole gradient goes to another place then.
        model.embedded_dropout.p = 0.0
    step: nn.Module = Step(workload, model)
    if mode == "autocast":
        step = Autocast(step)
    return step, workload.inputs(seed, dtype=dtype), lambda result: scale * result


def settled_scale(name: str, mode: str) -> float:
    """The loss scale that GradScaler settles at: halved until eager's gradients are finite."""
    scale = LARGEST_SCALE
    for seed in SEEDS:
        while not _finite(run_step(*make(name, mode, seed, scale), seed=seed)):
            scale /= 2
    return scale


def _finite(step: dict[str, Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in step.values())


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    counters.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


CASES = [
    pytest.param(
        name,
        mode,
        regions,
        id=f"{name}-{mode}",
        marks=[pytest.mark.slow] if (name, mode) in SLOW else [],
    )
    for name, row in REGIONS.items()
    for mode, regions in zip(WEIGHTS, row, strict=True)
]


@pytest.mark.parametrize(("name", "mode", "regions"), CASES)
def test_training_is_right_with_these_regions(
    name: str, mode: str, regions: tuple[int, int]
) -> None:
    scale = settled_scale(name, mode) if mode == "fp16" else 1.0
    dtype = torch.bfloat16 if mode == "autocast" else WEIGHTS[mode]
    seeds = range(OVER_SEEDS.get((name, mode), len(SEEDS)))
    plans: list[GraphPlan] = []
    with pipeline.observed(plans.append):
        verdict = check_model(
            lambda seed: make(name, mode, seed, scale), dtype=dtype, seeds=seeds, options=PLACE
        )
    if (name, mode) in OVER_SEEDS:
        assert not failures(verdict)
    else:
        verdict.raise_if_failed()
    gradients = [t for t in verdict.tensors if t.name.startswith("grad:") and t.rule == "relative"]
    assert max(t.eager.l2 for t in gradients) < YARDSTICK
    (plan,) = plans
    assert plan.placed
    halves = [region.half for region in plan.regions]
    assert (halves.count("forward"), halves.count("backward")) == regions
    planned = Counter(region.tree for region in plan.regions)
    assert counters.region_runs == Counter({tree: len(seeds) * n for tree, n in planned.items()})


def test_every_workload_stands_in_the_table() -> None:
    assert set(REGIONS) == set(workloads.names())


def compared(*ratios: float) -> Comparison:
    """A comparison over seeds of a tensor whose error is so many times eager's on each."""
    dtype, found = torch.bfloat16, []
    for seed, ratio in enumerate(ratios):
        exact = torch.rand(1000, dtype=torch.float64) + 1
        error = torch.rand(1000, dtype=torch.float64) / 100
        steps = ({"grad:x": exact + factor * error} for factor in (ratio, 1.0, 0.0))
        found += compare(*steps, dtype, seed=seed).tensors
    return Comparison(dtype, tuple(found))


def test_over_seeds_one_miss_passes_and_a_steady_error_fails() -> None:
    once = compared(1.0, 1.6, 1.0)
    assert not once.passed
    assert not failures(once)
    assert failures(compared(1.6, 1.5, 1.6)).keys() == {"grad:x"}
    assert failures(compared(1.0, math.inf, 1.0)).keys() == {"grad:x"}
