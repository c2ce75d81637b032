"""Shared growth is what grows afresh, and nothing that differs is shared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.partition.alike import (
    CHANGES,
    Change,
    Planned,
    Twins,
    compared,
    content,
    further_user,
    other_constant,
    other_dtype,
    other_input,
    other_label,
    other_operation,
    other_strides,
    planned,
    taken,
    twins,
)
from tests.partition.planning import joint, prepared, rules_of
from tests.tracing import trace
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from interpreted import PLACE, interpreted
from random_graphs.strategies import generate
from torch_evt import explain, workloads
from torch_evt.mainloops import MainLoop
from torch_evt.partition import candidates
from torch_evt.partition.candidates import Order, Rules
from torch_evt.partition.growths import Growths
from torch_evt.testing import run_step
from torch_evt.workloads import bert_large, gpt2_medium, llama_1b, vit_b14

aten = torch.ops.aten
Anchors = Sequence[tuple[fx.Node, MainLoop]]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def assert_as_grown(shared: Growths, anchors: Anchors, order: Order, rules: Rules) -> None:
    for anchor, loop in anchors:
        expected = candidates.grow(anchor, loop, order, rules)
        assert content(shared.of(anchor, loop)) == content(expected)


@pytest.mark.parametrize(
    "module, name",
    [
        (bert_large, "bert-large"),
        (llama_1b, "llama-1b"),
        pytest.param(gpt2_medium, "gpt2-medium", marks=pytest.mark.slow),
        pytest.param(vit_b14, "vit-b14", marks=pytest.mark.slow),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_layers_share_and_nothing_changes(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = replace(module.SIZES["tiny"], layers=3)
    monkeypatch.setattr(module, "SIZES", MappingProxyType({"tiny": size}))
    with FakeTensorMode():
        model, inputs, loss = workloads.get(name, "tiny").make(0, dtype=torch.bfloat16)
    with planned() as found:
        explain(model, *inputs, loss=loss, options=PLACE)
    ((graph, rules),) = found
    order, anchors = candidates.order_of(graph), candidates.anchors(graph)
    shared = Growths(order, rules)
    assert_as_grown(shared, anchors, order, rules)
    assert shared.grown < 0.8 * len(anchors)  # the first and the last layer are like no other

    source = random.Random(5)
    arithmetic = [node for node in graph.nodes if node.op == "call_function"]
    for _ in range(3):
        rules.taken.update(source.sample(arithmetic, len(arithmetic) // 50))
        assert_as_grown(shared, anchors, order, rules)


def random_graphs(numbers: Sequence[int]) -> list[Planned]:
    """What there is to plan in the training graphs of random programs."""
    found: list[Planned] = []
    for number in numbers:
        torch._dynamo.reset()
        program = generate(number)
        model, inputs, loss = program.load()["make"](0)
        options = {**PLACE, **dict(program.options)}
        compiled = torch.compile(
            model, backend=interpreted, options=options, dynamic=program.dynamic or None
        )
        with planned() as graphs:
            run_step(model, inputs, loss, compiled=compiled, seed=0)
        found += graphs
    return found


def changed(graph: fx.Graph, rules: Rules, change: Change, source: random.Random) -> Twins | None:
    """A graph and its copy, in which one thing of one node was changed."""
    made = twins(graph, rules)
    for node in source.sample(made.second, len(made.second)):
        if change(made, node, source):
            return made
    return None


@pytest.mark.parametrize(
    "programs", [range(2, 5), pytest.param(range(100, 130), marks=pytest.mark.slow)]
)
def test_a_changed_copy_shares_nothing_that_the_change_reaches(programs: Sequence[int]) -> None:
    source = random.Random(5)
    mattered: Counter[str] = Counter()
    shared_before = 0
    for graph, rules in random_graphs(programs):
        same = twins(graph, rules)
        order = candidates.order_of(same.graph)
        shared = Growths(order, same.rules)
        assert_as_grown(shared, same.anchors(same.first), order, same.rules)
        grown = shared.grown
        assert_as_grown(shared, same.anchors(same.second), order, same.rules)
        assert shared.grown == grown  # an equal copy shares everything
        shared_before += len(same.anchors(same.second))
        for change in CHANGES * 2:
            made = changed(graph, rules, change, source)
            if made is None:
                continue
            order = candidates.order_of(made.graph)
            shared = Growths(order, made.rules)
            first, second = made.anchors(made.first), made.anchors(made.second)
            for anchor, loop in first:
                shared.of(anchor, loop)
            grown = shared.grown
            assert_as_grown(shared, second, order, made.rules)
            mattered[change.__name__] += shared.grown > grown
    assert shared_before > 5
    assert set(mattered) == {change.__name__ for change in CHANGES}
    assert all(count > 0 for count in mattered.values()), mattered


def layer(x: Tensor, w: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    y = x @ w
    return (F.gelu(y * 0.5 + c, approximate="tanh") * y.sigmoid()), (y + 1).abs().sum(0)


def find(found: Twins, target: Any) -> fx.Node:
    return next(node for node in found.second if node.target is target)


@pytest.mark.parametrize(
    "change, target",
    [
        (other_dtype, aten.mul.Tensor),
        (other_strides, aten.mul.Tensor),
        (other_constant, aten.mul.Tensor),
        (other_operation, aten.mul.Tensor),
        (further_user, aten.mul.Tensor),
        (further_user, aten.mm.default),
        (other_label, aten.sum.dim_IntList),
        (taken, aten.abs.default),
        (compared, aten.abs.default),
        (other_input, aten.abs.default),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_one_small_difference_and_nothing_is_shared(change: Change, target: Any) -> None:
    inputs = [torch.randn(s) for s in ((32, 48), (48, 64), (64,))]
    module, _, outputs = joint(layer, inputs)
    graph = prepared(module).graph
    rules = rules_of(graph, forward_outputs=outputs)
    for is_changed in (False, True):
        made = twins(graph, rules)
        if is_changed:
            assert change(made, find(made, target), random.Random(0))
        order = candidates.order_of(made.graph)
        shared = Growths(order, made.rules)
        (first, loop), (second, _) = (made.anchors(c)[0] for c in (made.first, made.second))
        shared.of(first, loop)
        assert_as_grown(shared, [(second, loop)], order, made.rules)
        assert shared.grown == 1 + is_changed


def test_symbolic_sizes_are_shared_where_they_are_equal_expressions() -> None:
    inputs = [torch.randn(s) for s in ((32, 48), (48, 64), (64,))]
    module, _, outputs = joint(layer, inputs, mode="symbolic")
    graph = prepared(module).graph
    made = twins(graph, rules_of(graph, forward_outputs=outputs))
    order = candidates.order_of(made.graph)
    shared = Growths(order, made.rules)
    anchors = [*made.anchors(made.first), *made.anchors(made.second)]
    assert_as_grown(shared, anchors, order, made.rules)
    assert shared.grown == len(anchors) // 2
    assert any(growth.regions for growth in (shared.of(*pair) for pair in anchors))


def loads_one(y: Tensor, t: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return (y + t) * t


def loads_two(y: Tensor, t: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return (y + t) * u


def waits(y: Tensor, t: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return y.tanh() * y.sin().cos().sin().sin(), t.sin().cos().sin()


def waits_not(y: Tensor, t: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return y.tanh() * t.sin().cos().sin().sin(), y.sin().cos().sin()


def sees_through(y: Tensor, t: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return y * v.float().expand(32, 64)


@pytest.mark.parametrize(
    "first, second, is_shared",
    [
        (loads_one, loads_one, True),
        (loads_one, loads_two, False),
        (loads_two, loads_one, False),
        (waits, waits, True),
        (waits, waits_not, False),
        (waits_not, waits, False),
        (sees_through, sees_through, True),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_what_differs_around_the_nodes_counts(first: Any, second: Any, is_shared: bool) -> None:
    def both(*inputs: Tensor) -> tuple[Any, ...]:
        x, w, *others = inputs[:5]
        x2, w2, *others2 = inputs[5:]
        return first(x @ w, *others), second(x2 @ w2, *others2)

    shapes = ((32, 48), (48, 64), (32, 64), (32, 64), (64,))
    inputs = [
        torch.randn(s).to(torch.bfloat16 if s == (64,) else torch.float32) for s in shapes * 2
    ]
    graph = prepared(trace(both, *inputs)).graph
    rules, order = rules_of(graph), candidates.order_of(graph)
    shared = Growths(order, rules)
    anchors = candidates.anchors(graph)
    assert_as_grown(shared, anchors, order, rules)
    assert shared.grown == (1 if is_shared else 2)
    assert all(shared.of(*pair).regions for pair in anchors)
