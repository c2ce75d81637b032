"""The bytes that a plan says it moves are those that the kernels of both halves touch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

import torch_evt
from torch_evt import summary, workloads
from torch_evt.partition.halves import label_all
from torch_evt.partition.price import InductorModel, works
from torch_evt.partition.recompute import root
from torch_evt.passes import State

PLACE = {"evt.place": "always", "evt.strict": True, "evt.target": "h200"}


def touched(state: State) -> int:
    """Bytes that a half's kernels read and write, from its graph alone."""
    graph = state.module.graph
    assert state.half is not None
    model = InductorModel(graph, state.device, label_all(graph, state.half))
    total = 0
    for nodes in {id(g): g.nodes for g in model.groups.values()}.values():
        if any(works(node) for node in nodes):
            total += sum(model.reads_of(nodes).values())
            total += sum(model.size(n) for n in nodes if model.leaves(n, nodes))
    for node in graph.nodes:
        if node.op == "call_function" and node not in model.groups and works(node):
            total += model.size(node)  # one part of several, or all of one
            if not _is_part(node):
                total += sum(model.size(n) for n in {*map(_seen, node.all_input_nodes)})
    return total


def _is_part(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _seen(node: fx.Node) -> fx.Node:
    return root(node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "gpt2-medium", "bert-large"])
def test_a_plan_moves_what_it_says(name: str, dtype: torch.dtype) -> None:
    found: list[tuple[State, tuple[State, ...]]] = []
    original = summary.training_plan

    def record(joint: State, halves: tuple[State, ...], *rest: Any) -> Any:
        found.append((joint, halves))
        return original(joint, halves, *rest)

    model, inputs, loss = workloads.get(name, "tiny").make(0, dtype)
    with mock.patch.object(summary, "training_plan", record):
        torch_evt.explain(model, *inputs, loss=loss, options=PLACE)
    ((joint, halves),) = found
    assert joint.optimum is not None and joint.optimum.bytes_moved
    assert all(half.expected is not None and half.expected.as_planned for half in halves)
    moved = sum(touched(half) for half in halves)
    assert moved == pytest.approx(joint.optimum.bytes_moved, rel=0.02)
