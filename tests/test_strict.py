"""A failing pass: strict raises and names it; else its graph is left to Inductor, and right."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from interpreted import PLACE, interpreted
from torch_evt import pipeline, recheck
from torch_evt.passes import State
from torch_evt.runtime import counters

PLACES = [
    (name, step.name)
    for name in ("JOINT", "BEFORE_CUT", "HALF", "INFERENCE", "PLACE_INFERENCE")
    for step in getattr(pipeline, name)
]


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(4, 8)


def plant(monkeypatch: pytest.MonkeyPatch, where: str, name: str, action: Any) -> None:
    planted = tuple(
        dataclasses.replace(step, run=action) if step.name == name else step
        for step in getattr(pipeline, where)
    )
    monkeypatch.setattr(pipeline, where, planted)


def step(where: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Results and gradients of one step, or the result of an inference."""
    torch._dynamo.reset()
    counters.reset()
    model, x = make()
    compiled = torch.compile(model, backend=interpreted, options=options)
    if "INFERENCE" in where:
        with torch.no_grad():
            return [compiled(x)]
    y = compiled(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("where", "name"), PLACES)
def test_an_exception_in_a_pass(
    where: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = step(where, {"evt.place": "never"})
    assert not counters.region_runs

    def fail(state: State) -> None:
        raise ValueError("planted")

    plant(monkeypatch, where, name, fail)
    with pytest.raises(Exception, match=rf"pass {name} failed on .*ValueError: planted"):
        step(where, PLACE)
    with caplog.at_level(logging.WARNING, logger="torch_evt"):
        found = step(where, {**PLACE, "evt.strict": False})
    assert not counters.region_runs
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    (record,) = [r for r in caplog.records if "Inductor alone" in r.getMessage()]
    assert f"pass {name} failed" in record.getMessage()
    written = record.getMessage().split("The graph is in ")[1].split(" ")[0].rstrip(".")
    assert "def forward" in Path(written).read_text()


@pytest.mark.parametrize(("where", "name"), PLACES)
def test_a_pass_that_breaks_the_graph_is_caught_behind_it(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_it(state: State) -> None:
        graph = state.module.graph
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        first = output.all_input_nodes[0]
        with graph.inserting_before(output):
            wrong = graph.call_function(torch.ops.aten.sum.default, (first,))
            wrong.meta["val"] = torch.ops.aten.sum.default(first.meta["val"])
        output.replace_input_with(first, wrong)

    plant(monkeypatch, where, name, break_it)
    with pytest.raises(Exception, match=rf"pass {name} failed .*{name} changed input or result"):
        step(where, PLACE)


def test_a_pass_can_be_left_out_by_name() -> None:
    step("JOINT", PLACE)
    trees = set(counters.region_runs)
    assert any("gelu_erf(" in tree for tree in trees)
    step("JOINT", {**PLACE, "evt.disable": ["recompose"]})
    assert counters.region_runs and not any("gelu" in tree for tree in counters.region_runs)
    step("JOINT", {**PLACE, "evt.disable": ["plan"]})
    assert not counters.region_runs
    step("JOINT", {**PLACE, "evt.disable": ["gelu_erf"]})
    assert not any("gelu_erf(" in tree for tree in counters.region_runs)


def test_a_half_that_min_cut_decided_otherwise_is_planned_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = step("JOINT", PLACE)
    runs = dict(counters.region_runs)
    monkeypatch.setattr(recheck, "_standing", lambda *_: None)
    plans: list[Any] = []
    with pipeline.observed(plans.append):
        found = step("JOINT", PLACE)
    assert counters.region_runs == runs
    assert len(plans[0].notes) == 2 and "planned anew" in plans[0].notes[0]
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
