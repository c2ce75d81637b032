"""The pipeline's order, its verifier, its fallbacks: whatever fails, the step stays right."""

from __future__ import annotations

import functools
import logging
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from interpreted import PLACE, interpreted
from torch_evt import backend, passes, pipeline
from torch_evt.errors import PassError
from torch_evt.graphs import output_node
from torch_evt.partition.plan import GraphPlan
from torch_evt.passes import Pass, State
from torch_evt.runtime import counters

LISTS = ("JOINT", "BEFORE_CUT", "HALF", "INFERENCE", "PLACE_INFERENCE")
EVERY_PASS = [(name, step.name) for name in LISTS for step in getattr(pipeline, name)]
TRAINING_PASSES = [pair for pair in EVERY_PASS if "INFERENCE" not in pair[0]]
QUIET = {**PLACE, "evt.strict": False}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.reset()


class Layers(nn.Module):
    """Two products with something to fuse in both halves and in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 24)
        self.second = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(x))
        return torch.tanh(self.second(hidden))


def step(options: dict[str, Any], *, inference: bool = False) -> dict[str, Tensor]:
    """One step of the model: its result, and its gradients when training."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    model, x = Layers(), torch.randn(12, 32)
    compiled = torch.compile(model, backend=interpreted, options=options)
    if inference:
        with torch.no_grad():
            return {"y": compiled(x)}
    x.requires_grad_()
    result = compiled(x)
    (result * torch.cos(torch.arange(result.numel())).view_as(result)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 4 and x.grad is not None
    return {"y": result.detach(), "x": x.grad, **gradients}


def planned(options: dict[str, Any], **kwargs: Any) -> tuple[dict[str, Tensor], GraphPlan]:
    plans: list[GraphPlan] = []
    with pipeline.observed(plans.append):
        found = step(options, **kwargs)
    (plan,) = plans
    return found, plan


@functools.cache
def inductors(inference: bool) -> dict[str, Tensor]:
    """The step without any region."""
    return step({"evt.place": "never"}, inference=inference)


def assert_inductors(found: dict[str, Tensor], *, inference: bool = False) -> None:
    """The step is bit for bit what it is without any region, and no region ran."""
    assert not counters.region_runs
    wanted = inductors(inference)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_close(found: dict[str, Tensor]) -> None:
    for name, tensor in inductors(False).items():
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def change(
    monkeypatch: pytest.MonkeyPatch, where: str, name: str, run: Callable[[State], None]
) -> None:
    """Let the pass `name` of one list run something else."""
    before: tuple[Pass, ...] = getattr(pipeline, where)
    assert any(step_.name == name for step_ in before)
    after = tuple(replace(s, run=run) if s.name == name else s for s in before)
    monkeypatch.setattr(pipeline, where, after)


def original(where: str, name: str) -> Callable[[State], None]:
    return next(s.run for s in getattr(pipeline, where) if s.name == name)


def planted(state: State) -> None:
    raise ZeroDivisionError("planted on purpose")


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


@pytest.mark.parametrize(("where", "name"), EVERY_PASS)
def test_under_strict_a_failing_pass_raises_and_is_named(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, where, name, planted)
    with pytest.raises(Exception, match="planted on purpose") as caught:
        step(PLACE, inference="INFERENCE" in where)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, PassError)
    assert f"pass {name} failed" in str(error) and "ZeroDivisionError" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("where", "name"), EVERY_PASS)
def test_a_failing_pass_is_logged_its_graph_dumped_and_the_step_is_inductors(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(monkeypatch, where, name, planted)
    inference = "INFERENCE" in where
    with caplog.at_level(logging.WARNING, logger="torch_evt"):
        found, plan = planned(QUIET, inference=inference)
    monkeypatch.undo()
    assert_inductors(found, inference=inference)
    assert not plan.placed and not plan.regions
    assert any(name in note and "planted on purpose" in note for note in plan.notes)
    (record,) = [r for r in caplog.records if r.name == "torch_evt"]
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert f"pass {name} failed" in message and "planted on purpose" in message
    found_path = re.search(r"The graph is in (\S+\.py)\.", message)
    assert found_path is not None
    dumped = runpy.run_path(found_path[1])
    assert dumped["Graph"]()(*dumped["inputs"]())
    Path(found_path[1]).unlink()


def other_dtype(state: State) -> None:
    """Return the first result in half precision."""
    output = output_node(state.module.graph)
    results = list(output.args[0])
    with state.module.graph.inserting_before(output):
        cast = state.module.graph.call_function(
            torch.ops.prims.convert_element_type.default, (results[0], torch.float16)
        )
    cast.meta["val"] = results[0].meta["val"].half()
    output.args = ((cast, *results[1:]),)


def wrong_order(state: State) -> None:
    """Move a node behind what reads it."""
    graph = state.module.graph
    first = next(n for n in graph.nodes if n.op == "call_function" and n.users)
    output_node(graph).prepend(first)


def fewer_results(state: State) -> None:
    output = output_node(state.module.graph)
    output.args = (output.args[0][:-1],)


def other_input(state: State) -> None:
    first = next(n for n in state.module.graph.nodes if n.op == "placeholder")
    first.name = "renamed"


def undone(state: State) -> None:
    """Leave a node that reads one of another graph."""
    stranger = fx.Graph().placeholder("stranger")
    output = output_node(state.module.graph)
    output.args = ((stranger, *output.args[0][1:]),)


CORRUPTIONS = {
    other_dtype: "from .*torch.float32.* to .*torch.float16",
    wrong_order: "malformed",
    fewer_results: "number of inputs or results",
    other_input: "renamed",
    undone: "malformed|changed",
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("where", "name"),
    [("JOINT", "canonicalise"), ("HALF", "place"), ("BEFORE_CUT", "expand"),
     ("INFERENCE", "recompose")],
)  # fmt: skip
def test_the_verifier_catches_a_corrupted_graph_and_names_the_pass(
    where: str, name: str, corrupt: Callable[[State], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = original(where, name)

    def run(state: State) -> None:
        before(state)
        corrupt(state)

    change(monkeypatch, where, name, run)
    inference = "INFERENCE" in where
    with pytest.raises(Exception, match=CORRUPTIONS[corrupt]) as caught:
        step(PLACE, inference=inference)
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, PassError)
    assert f"pass {name} failed" in str(error)
    found = step(QUIET, inference=inference)
    monkeypatch.undo()
    assert_inductors(found, inference=inference)


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
    anew = [note for note in plan.notes if "min-cut decided otherwise" in note]
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
    assert [note[:8] for note in plan.notes if "decided otherwise" in note] == ["backward"]
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

    monkeypatch.setattr(pipeline, "_training_plan", broken)
    with caplog.at_level(logging.WARNING, logger="torch_evt"):
        found = step(QUIET)
    assert "no words" in caplog.text
    assert counters.region_runs
    with pytest.raises(Exception, match="no words"):
        step(PLACE)
    monkeypatch.undo()
    assert_close(found)
