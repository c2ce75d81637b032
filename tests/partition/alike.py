"""Graphs that hold the same thing twice, and small changes of one half."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx

from torch_evt import pipeline
from torch_evt.graphs import COMPARED, Size, expression, tensor_of
from torch_evt.mainloops import MainLoop
from torch_evt.partition import candidates
from torch_evt.partition.candidates import Growth, Rules
from torch_evt.partition.elementwise import is_arithmetic

aten = torch.ops.aten

Planned = tuple[fx.Graph, Rules]


class _Enough(Exception):
    """What is to be planned is known."""


@contextmanager
def planned() -> Iterator[list[Planned]]:
    """Collects what is to be planned first while the block compiles or explains with
    `evt.strict`; the block ends there."""
    found: list[Planned] = []

    def record(graph: fx.Graph, device: Any, rules: Rules, *_: Any, **__: Any) -> NoReturn:
        found.append((graph, rules))
        raise _Enough

    with mock.patch.object(pipeline, "optimise", record):
        try:
            yield found
        except Exception:
            if not found:
                raise


@dataclass
class Twins:
    """A graph with two copies of one graph, the second behind the first."""

    graph: fx.Graph
    rules: Rules
    first: list[fx.Node]
    second: list[fx.Node]

    def anchors(self, copy: Sequence[fx.Node]) -> list[tuple[fx.Node, MainLoop]]:
        """The anchors among a copy's nodes."""
        inside = set(copy)
        return [pair for pair in candidates.anchors(self.graph) if pair[0] in inside]


def twins(graph: fx.Graph, rules: Rules) -> Twins:
    both, labels = fx.Graph(), {}
    copies: list[list[fx.Node]] = []
    results = []
    for _ in range(2):
        copied: dict[fx.Node, fx.Node] = {}
        results.append(both.graph_copy(graph, copied))
        labels.update({new: rules.labels[old] for old, new in copied.items()})
        copies.append(list(copied.values()))
    labels[both.output(tuple(results))] = "forward"
    return Twins(both, replace(rules, labels=labels, taken=set()), *copies)


Change = Callable[[Twins, fx.Node, random.Random], bool]
"""Changes something about a node of the second copy; False where that cannot be done to it."""


def other_dtype(found: Twins, node: fx.Node, source: random.Random) -> bool:
    value = tensor_of(node)
    if value is None or not value.dtype.is_floating_point:
        return False
    other = torch.bfloat16 if value.dtype == torch.float32 else torch.float32
    node.meta["val"] = value.to(other)
    return True


def other_strides(found: Twins, node: fx.Node, source: random.Random) -> bool:
    value = tensor_of(node)
    if value is None or value.dim() < 2:
        return False
    node.meta["val"] = value.transpose(-1, -2).contiguous().transpose(-1, -2)
    return True


def other_constant(found: Twins, node: fx.Node, source: random.Random) -> bool:
    numbers = [i for i, a in enumerate(node.args) if isinstance(a, (int, float))]
    if not is_arithmetic(node) or not numbers:
        return False
    at = source.choice(numbers)
    node.update_arg(at, -node.args[at] or 3.0)
    return True


def other_dimensions(found: Twins, node: fx.Node, source: random.Random) -> bool:
    if node.target is not aten.sum.dim_IntList or len(node.args[0].meta["val"].shape) < 2:
        return False
    node.update_arg(1, [1] if 0 in node.args[1] else [0])
    return True


def other_operation(found: Twins, node: fx.Node, source: random.Random) -> bool:
    unary = [aten.neg.default, aten.tanh.default, aten.exp.default, aten.sin.default]
    binary = [aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor]
    alike = next((group for group in (unary, binary) if node.target in group), None)
    if alike is None:
        return False
    node.target = source.choice([target for target in alike if target is not node.target])
    return True


def further_user(found: Twins, node: fx.Node, source: random.Random) -> bool:
    if tensor_of(node) is None:
        return False
    with found.graph.inserting_before(found.graph.output_node()):
        user = found.graph.call_function(
            source.choice([aten.neg.default, aten.sin.default, aten.permute.default]), (node,)
        )
        if user.target is aten.permute.default:
            user.args = (node, list(range(node.meta["val"].dim())))
    user.meta["val"] = node.meta["val"]
    found.rules.labels[user] = found.rules.labels[node]  # type: ignore[index]
    return True


def other_label(found: Twins, node: fx.Node, source: random.Random) -> bool:
    labels = [h for h in ("forward", "backward", "either") if h != found.rules.labels[node]]
    found.rules.labels[node] = source.choice(labels)  # type: ignore[index]
    return True


def taken(found: Twins, node: fx.Node, source: random.Random) -> bool:
    found.rules.taken.add(node)
    return True


def compared(found: Twins, node: fx.Node, source: random.Random) -> bool:
    node.meta[COMPARED] = True
    return True


def other_input(found: Twins, node: fx.Node, source: random.Random) -> bool:
    before = found.second[: found.second.index(node)]
    pairs = [
        (old, new)
        for old in node.all_input_nodes
        for new in before
        if new is not old and _described(old) == _described(new) is not None
    ]
    if not pairs:
        return False
    node.replace_input_with(*source.choice(pairs))
    return True


def other_order(found: Twins, node: fx.Node, source: random.Random) -> bool:
    """Put the node as far behind as its users allow, or as far to the front as its inputs do."""
    place = {n: i for i, n in enumerate(found.second)}
    last = max((place[n] for n in node.all_input_nodes), default=None)
    first = min((place[n] for n in node.users if n in place), default=None)
    if node.op != "call_function" or last is None or first is None or first - last <= 2:
        return False
    if source.random() < 0.5:
        found.second[first].prepend(node)
    else:
        found.second[last].append(node)
    return True


CHANGES: tuple[Change, ...] = (
    other_dtype, other_strides, other_constant, other_dimensions, other_operation, further_user,
    other_label, taken, compared, other_input, other_order,
)  # fmt: skip


def _described(node: fx.Node) -> tuple[Any, ...] | None:
    value = tensor_of(node)
    return None if value is None else (value.dtype, *exact(value.shape))


def exact(sizes: Sequence[Size] | None) -> tuple[Any, ...] | None:
    """Sizes that can be compared without a guard."""
    return None if sizes is None else tuple(map(expression, sizes))


def content(growth: Growth) -> tuple[Any, ...]:
    """All that a growth says, for comparison."""
    regions = [
        (
            r.anchor,
            r.mainloop,
            [None if s is None else expression(s) for s in (r.space.l, r.space.m, r.space.n)],
            r.nodes,
            r.tree,
            [(i.node, exact(i.view), exact(i.strides)) for i in r.inputs],
            exact(r.sizes),
            r.outputs,
            r.kept,
        )
        for r in growth.regions
    ]
    return growth.anchor, growth.reason, growth.blocker, regions
