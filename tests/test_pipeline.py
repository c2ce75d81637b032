"""The pipeline's order, its verifier, its fallbacks: whatever fails, the step stays right."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.steps import (
    EVERY_PASS,
    QUIET,
    TRAINING_PASSES,
    Layers,
    assert_close,
    assert_inductors,
    change,
    planned,
    planted,
    step,
)
from torch import fx

from interpreted import PLACE, interpreted
from torch_evt import backend, passes, pipeline
from torch_evt.partition.plan import GraphPlan
from torch_evt.runtime import counters


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.reset()


def test_the_model_has_regions_everywhere() -> None:
    """What the tests below switch off is there in the first place."""
    found, plan = planned(PLACE)
    assert {region.half for region in plan.regions} == {"forward", "backward"}
    assert sum(counters.region_runs.values()) == len(plan.regions)
    assert_close(found)
    counters.reset()
    _, plan = planned(PLACE, inference=True)
    assert {region.half for region in plan.regions} == {"inference"}
    assert sum(counters.region_runs.values()) == len(plan.regions)


@pytest.mark.parametrize("name", sorted({name for _, name in EVERY_PASS}))
def test_a_pass_is_left_out_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, step_name in EVERY_PASS:
        if step_name == name:
            change(monkeypatch, where, name, planted)
    assert name in pipeline.names()
    assert_close(step({**PLACE, "evt.disable": [name]}))
    step({**PLACE, "evt.disable": [name]}, inference=True)


def test_without_recompose_no_named_function_is_fused() -> None:
    _, plan = planned({**PLACE, "evt.disable": ["recompose"]})
    assert plan.regions
    assert not any("gelu" in region.tree for region in plan.regions)


def test_a_function_is_left_out_by_its_name() -> None:
    found, plan = planned({**PLACE, "evt.disable": ["gelu_erf", "gelu_erf_grad"]})
    trees = [region.tree for region in plan.regions]
    assert trees and not any("gelu_erf" in tree for tree in trees)
    assert any("tanh(" in tree for tree in trees)
    assert "disabled" in {unfused.code for unfused in plan.unfused}
    assert_close(found)


def test_a_half_that_lacks_what_was_planned_is_planned_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, usual = planned(PLACE)
    counters.reset()
    renamed = pipeline.describe.renamed

    def other(region: Any, names: Any) -> Any:
        moved = renamed(region, names)
        return replace(moved, tree="another tree") if region.half == "forward" else moved

    monkeypatch.setattr(pipeline.describe, "renamed", other)
    found, plan = planned(PLACE)
    anew = [note for note in plan.notes if "otherwise than planned" in note]
    assert len(anew) == 1 and anew[0].startswith("forward")
    assert [r.tree for r in plan.regions] == [r.tree for r in usual.regions]
    assert sum(counters.region_runs.values()) == len(plan.regions)
    monkeypatch.undo()
    assert_close(found)


def test_a_half_that_lacks_a_planned_node_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = pipeline.describe.renamed

    def other(region: Any, names: Any) -> Any:
        moved = renamed(region, names)
        return replace(moved, nodes=(*moved.nodes, "gone")) if region.half == "backward" else moved

    monkeypatch.setattr(pipeline.describe, "renamed", other)
    found, plan = planned(PLACE)
    assert [note[:8] for note in plan.notes if "otherwise than planned" in note] == ["backward"]
    assert plan.placed
    monkeypatch.undo()
    assert_close(found)


def test_a_region_that_cannot_be_placed_stays_with_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed = pipeline.place.place

    def sometimes(graph: Any, region: Any, *args: Any, **kwargs: Any) -> Any:
        if "tanh" in {n.target.__name__.split(".")[0] for n in region.nodes}:
            raise pipeline.place.CannotPlace("no node computes the size s7")
        return placed(graph, region, *args, **kwargs)

    _, usual = planned(PLACE)
    monkeypatch.setattr(pipeline.place, "place", sometimes)
    counters.reset()
    found, plan = planned(PLACE)
    assert 0 < len(plan.regions) < len(usual.regions)
    assert not any("= tanh(" in r.tree or ", tanh(" in r.tree for r in plan.regions)
    assert any("no node computes the size s7" in note for note in plan.notes)
    assert sum(counters.region_runs.values()) == len(plan.regions)
    monkeypatch.undo()
    assert_close(found)


def test_place_never_plans_and_places_nothing() -> None:
    found, plan = planned({"evt.place": "never", "evt.strict": True, "evt.target": "h200"})
    assert plan.regions and not plan.placed
    assert not counters.region_runs
    _, placed = planned(PLACE)
    assert placed.placed
    assert {r.half for r in plan.regions} == {r.half for r in placed.regions}
    counters.reset()
    assert_inductors(found)


def given_and_cut(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, fx.GraphModule, str]]:
    """Records each joint graph that comes in, and each that goes to the partitioner, as text."""
    seen: list[tuple[str, fx.GraphModule, str]] = []
    partition, run_partitioner = pipeline.partition, pipeline.run_partitioner

    def coming(joint: fx.GraphModule, *args: Any) -> Any:
        seen.append(("in", joint, str(joint.graph)))
        return partition(joint, *args)

    def going(joint: fx.GraphModule, *args: Any) -> Any:
        seen.append(("cut", joint, str(joint.graph)))
        return run_partitioner(joint, *args)

    monkeypatch.setattr(backend.pipeline, "partition", coming)
    monkeypatch.setattr(pipeline, "run_partitioner", going)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {"evt.place": "never"},
        {"evt.place": "auto"},
        {**PLACE, "evt.disable": ["plan"]},
        {**PLACE, "evt.disable": ["place"]},
    ],
    ids=["never", "auto", "not planned", "not placed"],
)
def test_where_nothing_is_placed_the_partitioner_gets_the_very_graph_that_came(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = given_and_cut(monkeypatch)
    plans: list[GraphPlan] = []
    with pipeline.observed(plans.append):
        step(options)
    (_, joint, before), *_, (kind, cut, text) = seen
    assert kind == "cut" and cut is joint and text == before
    assert not plans[0].placed


@pytest.mark.parametrize(("where", "name"), TRAINING_PASSES)
def test_after_a_failure_the_partitioner_gets_the_very_graph_that_came(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = given_and_cut(monkeypatch)
    change(monkeypatch, where, name, planted)
    step(QUIET)
    (_, joint, before), *_, (kind, cut, text) = seen
    assert kind == "cut" and cut is joint and text == before


def test_an_inference_graph_without_regions_is_left_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, str]] = []
    transform = pipeline.transform_inference

    def spied(graph: fx.Graph, options: Any) -> None:
        before = str(graph)
        transform(graph, options)
        seen.append((before, str(graph)))

    monkeypatch.setattr(backend.pipeline, "transform_inference", spied)
    step({**PLACE, "evt.disable": ["plan"]}, inference=True)
    step({"evt.place": "never"}, inference=True)
    step(PLACE, inference=True)
    assert [before == after for before, after in seen] == [True, True, False]


def test_nobody_who_watches_means_no_planning_where_nothing_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(passes, "run", lambda steps, state: ran.append(steps[0].name))
    step({"evt.place": "auto"})
    assert ran == []
    with pipeline.observed(lambda plan: None):
        step({"evt.place": "auto"})
    assert ran == ["canonicalise"]


def test_observers_nest_and_end() -> None:
    outer: list[GraphPlan] = []
    inner: list[GraphPlan] = []
    with pipeline.observed(outer.append):
        with pipeline.observed(inner.append):
            step(PLACE)
        step(PLACE, inference=True)
    step(PLACE)
    assert (len(outer), len(inner)) == (2, 1)
    assert outer[0] is inner[0]


def test_a_plan_that_cannot_be_described_stops_only_a_strict_compilation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("no words")

    monkeypatch.setattr(pipeline.summary, "training_plan", broken)
    with caplog.at_level(logging.WARNING, logger="torch_evt"):
        found = step(QUIET)
    assert "no words" in caplog.text
    assert counters.region_runs
    with pytest.raises(Exception, match="no words"):
        step(PLACE)
    monkeypatch.undo()
    assert_close(found)


def test_dynamic_sizes_compile_once_and_are_right_at_every_size() -> None:
    torch.manual_seed(7)
    model = Layers()
    plans: list[GraphPlan] = []
    compiled = torch.compile(model, backend=interpreted, options=PLACE, dynamic=True)
    with pipeline.observed(plans.append):
        for rows in (12, 7, 33):
            x = torch.randn(rows, 32, requires_grad=True)
            results = []
            for run in (compiled, model):
                model.zero_grad()
                x.grad = None
                run(x).square().sum().backward()
                gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                assert x.grad is not None
                results.append([x.grad, *gradients])
            for ours, theirs in zip(*results, strict=True):
                assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    (plan,) = plans  # planned once: no size was specialised, no guard was added
    assert plan.placed and {region.half for region in plan.regions} == {"forward", "backward"}
    assert any(size.startswith("s") for region in plan.regions for size in region.shape)
    assert sum(counters.region_runs.values()) == 3 * len(plan.regions)


def test_a_product_that_nobody_reads_any_more_is_not_described() -> None:
    """With beta=0 the second product does not read the first, which Inductor's graph still has."""
    first, second = torch.nn.Linear(8, 24), torch.nn.Parameter(torch.randn(8, 24))

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.addmm(first(x), x, second, beta=0.0)).square().mean()

    x = torch.randn(12, 8, requires_grad=True)
    plans: list[GraphPlan] = []
    counters.reset()
    with pipeline.observed(plans.append):
        loss = torch.compile(model, backend=interpreted, options=PLACE)(x)
        loss.backward()
    torch.testing.assert_close(loss, model(x))
    (plan,) = plans
    assert plan.placed and "addmm" not in {unfused.node for unfused in plan.unfused}
    assert {r.tree for r in plan.regions if plan.placed} == set(counters.region_runs)
