"""A pass that fails or breaks the graph is named; the step stays right, or strict raises."""

from __future__ import annotations

import logging
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.steps import (
    EVERY_PASS,
    QUIET,
    assert_inductors,
    change,
    original,
    planned,
    planted,
    step,
)
from torch import fx

from interpreted import PLACE
from torch_evt.errors import PassError
from torch_evt.graphs import output_node
from torch_evt.passes import State
from torch_evt.runtime import counters


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.reset()


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
