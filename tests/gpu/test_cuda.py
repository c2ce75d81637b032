"""On a GPU: the pipeline with the reference as every region's body, until there is an emitter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interpreted import PLACE, interpreted
from test_models import CASES, Case, make
from torch_evt import pipeline, workloads
from torch_evt.partition.plan import GraphPlan
from torch_evt.runtime import counters
from torch_evt.testing import check_model, run_step

pytestmark = pytest.mark.gpu

dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    counters.reset()
    # Inductor pads products where it measures that to be faster, which is not the same every time.
    with torch._inductor.config.patch(force_disable_caches=True, shape_padding=False):
        yield


def on_gpu(made: tuple[Any, ...]) -> tuple[Any, ...]:
    model, inputs, loss = made
    moved = tuple(x.detach().cuda().requires_grad_(x.requires_grad) for x in inputs)
    return model.cuda(), moved, loss


@dtypes
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "dropout"], ids=lambda c: c.name)
def test_every_case_is_right(case: Case, dtype: torch.dtype) -> None:
    verdict = check_model(
        lambda seed: on_gpu(make(case, dtype, seed)),
        dtype=dtype,
        backend=interpreted,  # type: ignore[arg-type]
        options=PLACE,
        seeds=(0, 1),
    )
    verdict.raise_if_failed()
    assert bool(counters.region_runs) == (case.regions != (0, 0))


@dtypes
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_mlp_compiled_by_inductor(dtype: torch.dtype, mode: str | None) -> None:
    workload = workloads.get("mlp", "tiny")
    cudagraphs = {"triton.cudagraphs": True} if mode else {}
    plans: list[GraphPlan] = []
    with pipeline.observed(plans.append):
        verdict = check_model(
            lambda seed: workload.make(seed, dtype=dtype, device="cuda"),
            dtype=dtype,
            options={**PLACE, **cudagraphs},
        )
    verdict.raise_if_failed()
    assert [len(p.regions) for p in plans if p.placed] == [3]
    assert counters.region_runs


@dtypes
def test_gpt2_without_dropout(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *_, **__: x)
    workload = workloads.get("gpt2-medium", "tiny")
    plans: list[GraphPlan] = []
    with pipeline.observed(plans.append):
        verdict = check_model(
            lambda seed: workload.make(seed, dtype=dtype, device="cuda"), dtype=dtype, options=PLACE
        )
    verdict.raise_if_failed()
    assert sum(len(plan.regions) for plan in plans if plan.placed) >= 5


def test_eagers_masks_are_drawn_on_a_gpu_too() -> None:
    workload = workloads.get("gpt2-medium", "tiny")
    model, inputs, loss = workload.make(0, dtype=torch.float32, device="cuda")
    options = {**PLACE, "evt.rng": "eager"}
    compiled = torch.compile(model, backend="evt", options=options)
    eager = run_step(model, inputs, loss, seed=3)
    ours = run_step(model, inputs, loss, compiled=compiled, seed=3)
    assert counters.region_runs
    for name, tensor in eager.items():
        torch.testing.assert_close(ours[name], tensor, rtol=2e-3, atol=2e-4)


def test_the_default_places_nothing_without_an_emitter() -> None:
    workload = workloads.get("mlp", "tiny")
    steps = []
    for backend in ("inductor", "evt"):
        torch._dynamo.reset()
        model, inputs, loss = workload.make(0, dtype=torch.float32, device="cuda")
        compiled = torch.compile(model, backend=backend)
        steps.append(run_step(model, inputs, loss, compiled=compiled, seed=1))
    assert not counters.region_runs
    for name, tensor in steps[0].items():
        assert torch.equal(tensor, steps[1][name]), name
