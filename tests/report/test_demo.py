"""The demo's verdicts: each of its three ways to fail must be able to fail."""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_evt import workloads
from torch_evt.partition.plan import Plan
from torch_evt.report import demo

Plans = Callable[..., Plan]


def _runs(plan: Plan, steps: int) -> dict[str, int]:
    regions = [region for graph in plan.graphs for region in graph.regions]
    trees = [region.tree for region in regions]
    return {tree: steps * trees.count(tree) for tree in trees}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EXPECTED_REGIONS", {"forward": 3, "backward": 3})


@pytest.mark.usefixtures("few")
def test_every_region_that_ran_in_every_step_is_not_missing(random_plan: Plans) -> None:
    plan = random_plan(0, layers=3)
    assert demo.missing_regions(plan, _runs(plan, 50), 50) == []


@pytest.mark.usefixtures("few")
def test_a_region_that_ran_too_rarely_or_never_is_named(random_plan: Plans) -> None:
    plan = random_plan(0, layers=3)
    tree = plan.graphs[0].regions[1].tree
    runs = _runs(plan, 50)
    (message,) = demo.missing_regions(plan, {**runs, tree: 149}, 50)
    assert message == f"ran 149 times instead of 150: {tree}"
    del runs[tree]
    (message,) = demo.missing_regions(plan, runs, 50)
    assert message == f"ran 0 times instead of 150: {tree}"


@pytest.mark.usefixtures("few")
def test_a_plan_with_fewer_regions_than_expected_is_named(random_plan: Plans) -> None:
    plan = random_plan(0, layers=3)
    graph = plan.graphs[0]
    regions = tuple(r for r in graph.regions if r.name != "backward_2")
    plan = dataclasses.replace(plan, graphs=(dataclasses.replace(graph, regions=regions),))
    (message,) = demo.missing_regions(plan, _runs(plan, 50), 50)
    assert message == "2 regions in backward, expected at least 3"


def test_the_curve_difference_is_the_largest_relative_one() -> None:
    eager = [random.uniform(2, 5) for _ in range(20)]
    ours = list(eager)
    assert demo.curve_difference(ours, eager) == 0
    ours[13] *= 1.002
    assert demo.curve_difference(ours, eager) == pytest.approx(0.002)
    ours[2] = math.nan
    assert demo.curve_difference(ours, eager) == math.inf


def test_two_trainings_from_one_seed_are_equal_and_learn() -> None:
    workload = workloads.get("gpt2-medium", "tiny")
    batches = [workload.inputs(seed=seed) for seed in range(8)]
    curves = []
    for _ in range(2):
        step = demo.Step(workload, workload.make(seed=0)[0])
        curves.append(demo.train(step, batches, step))
    assert curves[0].losses == curves[1].losses
    assert curves[0].losses[-1] < curves[0].losses[0]
    assert len(curves[0].seconds) == 8


def test_compile_time_is_the_first_step_beyond_a_warm_one() -> None:
    training = demo.Training((1.0,) * 5, (10.0, 5.0, 0.5, 0.25, 0.75))
    assert training.warm_s == 0.5 and training.compile_s == 9.5


def test_the_step_module_is_the_workloads_step() -> None:
    workload = workloads.get("mlp", "tiny")
    model, inputs, loss = workload.make(seed=3)
    assert loss is not None
    assert torch.equal(demo.Step(workload, model)(*inputs), loss(model(*inputs)))


@pytest.mark.parametrize("fault", ["none", "gradient", "regions", "curve"])
def test_the_demo_ends_with_1_exactly_when_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    random_plan: Plans,
    fault: str,
) -> None:
    plan = random_plan(1, layers=3)
    tensor = demo.testing.TensorError(1e-7, 1e-7)
    verdict = demo.testing.TensorComparison(
        "grad:w", fault != "gradient", "relative", tensor, tensor, tensor
    )
    losses = tuple(random.uniform(2, 5) for _ in range(demo.STEPS))

    def train(step: Any, batches: Any, call: Any, progress: Any) -> demo.Training:
        progress("training")
        evt = call is not step and len(batches) == demo.STEPS
        changed = tuple(1.01 * loss for loss in losses) if evt and fault == "curve" else losses
        demo.counters.region_runs.update(_runs(plan, demo.STEPS - (fault == "regions")))
        return demo.Training(changed, (1.0, 1.0, 0.5, 0.5))

    monkeypatch.setattr(demo, "EXPECTED_REGIONS", {"forward": 3, "backward": 3})
    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "_compile_something", lambda: None)
    monkeypatch.setattr(demo, "explain", lambda *args, **kwargs: plan)
    monkeypatch.setattr(demo.torch, "compile", lambda *args, **kwargs: object())
    monkeypatch.setattr(
        demo.testing,
        "check_model",
        lambda *args, **kwargs: demo.testing.Comparison(torch.float32, (verdict,)),
    )
    assert demo.run() == int(fault != "none")
    assert [line.partition(" s  ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "eager: training",
        "Inductor: loading the compiler",
        "Inductor: training",
        "evt: training",
        "planning",
        "comparing steps with eager and fp64 eager",
    ]
    demo.counters.reset()
