"""The whole pipeline on the mlp, compiled by Inductor for real: the first test to run."""

from __future__ import annotations

import pytest
import torch

from interpreted import PLACE
from torch_evt import pipeline, workloads
from torch_evt.partition.plan import GraphPlan
from torch_evt.runtime import counters
from torch_evt.testing import check_model, compare, fp64_copy

FORWARD = [
    # both products with the ReLU behind them
    "gemm(A: {t} k 16, B: {t} k 16) -> store(0: {t} n 16, relu(acc0))",
    "gemm(A: {t} k 16, B: {t} k 16) -> store(0: {t} n 16, relu(acc0))",
]
BACKWARD = [
    # the data gradient of the second product with the first ReLU's mask
    "gemm(A: {t} k 16, B: {t} n 16) -> store(0: {t} n 16, relu_backward(acc0, tile(0: {t} n 16)))",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_mlp_trains_right_with_three_regions(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    counters.reset()
    workload = workloads.get("mlp", "tiny")
    plans: list[GraphPlan] = []
    with torch._inductor.config.patch(force_disable_caches=True), pipeline.observed(plans.append):
        verdict = check_model(
            lambda seed: workload.make(seed, dtype=dtype), dtype=dtype, options=PLACE
        )
    verdict.raise_if_failed()
    (plan,) = plans
    text = "f32" if dtype == torch.float32 else "bf16"
    trees = {
        half: [r.tree for r in plan.regions if r.half == half] for half in ("forward", "backward")
    }
    assert trees["forward"] == [tree.format(t=text) for tree in FORWARD]
    assert trees["backward"] == [tree.format(t=text) for tree in BACKWARD]
    steps = 3  # one for each seed
    assert counters.region_runs == {
        FORWARD[0].format(t=text): 2 * steps,
        BACKWARD[0].format(t=text): steps,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_mlp_infers_right_with_two_regions(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    counters.reset()
    model, inputs, _ = workloads.get("mlp", "tiny").make(1, dtype=dtype)
    plans: list[GraphPlan] = []
    with (
        torch.no_grad(),
        torch._inductor.config.patch(force_disable_caches=True),
        pipeline.observed(plans.append),
    ):
        ours = torch.compile(model, backend="evt", options=PLACE)(*inputs)
        exact = fp64_copy(model)(*(x.double() for x in inputs))
        compare({"y": ours}, {"y": model(*inputs)}, {"y": exact}, dtype).raise_if_failed()
    (plan,) = plans
    text = "f32" if dtype == torch.float32 else "bf16"
    assert [r.tree for r in plan.regions] == [tree.format(t=text) for tree in FORWARD]
    assert counters.region_runs == {FORWARD[0].format(t=text): 2}
