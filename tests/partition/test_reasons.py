"""Every reason not to fuse can be provoked, and says what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.partition.planning import growths, joint, prepared, rules_of
from tests.tracing import trace
from torch import Tensor, fx

from torch_evt import devices, errors
from torch_evt.errors import REASONS, Reason
from torch_evt.mainloops import for_target
from torch_evt.partition import candidates
from torch_evt.partition.greedy import choose
from torch_evt.partition.region import Region

aten = torch.ops.aten
H200 = devices.device("h200")


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


def grown(function: Callable[..., Any], *inputs: Tensor, **limits: Any) -> Reason | None:
    """Why the first anchor's region is not larger."""
    graph = prepared(trace(function, *inputs)).graph
    return growths(graph, rules_of(graph, **limits))[0].reason


def built(
    function: Callable[..., Any],
    *inputs: Tensor,
    edit: Callable[[fx.Graph], None] = lambda graph: None,
) -> Reason | None:
    """Why the region of all nodes behind the first anchor is illegal; None where it is legal."""
    graph = prepared(trace(function, *inputs)).graph
    edit(graph)
    rules = rules_of(graph)
    anchor, loop = candidates.anchors(graph)[0]
    behind = {anchor}
    for n in graph.nodes:
        if n.op == "call_function" and behind & set(n.all_input_nodes):
            behind.add(n)
    nodes = [n for n in graph.nodes if n in behind]
    region = candidates.build(anchor, loop, nodes, rules)
    return None if isinstance(region, Region) else region


def chosen(function: Callable[..., Any], *inputs: Tensor) -> Reason:
    """Why the first anchor without a region has none in the greedy plan."""
    graph = prepared(trace(function, *inputs)).graph
    return choose(graph, H200, rules_of(graph)).left[0].reason


def joint_reasons(function: Callable[..., Any], *inputs: Tensor) -> list[Reason | None]:
    module, _, outputs = joint(function, inputs)
    graph = prepared(module).graph
    return [g.reason for g in growths(graph, rules_of(graph, forward_outputs=outputs))]


def taken() -> Reason | None:
    """Both products want the one addition; the other region has it already."""
    graph = prepared(trace(lambda a, b: torch.tanh(a @ b + a.exp() @ b), x(6, 5), x(5, 8))).graph
    rules = rules_of(graph)
    first, second = growths(graph, rules)
    largest = max(first.regions, key=lambda region: len(region.nodes))
    rules.taken.update(largest.nodes)
    (anchor, loop) = next(a for a in candidates.anchors(graph) if a[0] is second.anchor)
    return candidates.grow(anchor, loop, candidates.order_of(graph), rules).reason


def elsewhere(graph: fx.Graph) -> None:
    """Move the last input to another device."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    last.meta["val"] = last.meta["val"].to("meta")


def many_loads(a: Tensor, b: Tensor, *tiles: Tensor) -> Tensor:
    result = a @ b
    for tile in tiles:
        result = torch.tanh(result) * tile
    return result


def only_for_backward(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """The product is a factor of a gradient, and nothing that forward returns needs it."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(torch.tanh(a.detach() @ b.detach()))
            return a * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
            return g * ctx.saved_tensors[0], None

    return (Scaled.apply(a, b),)


A, B = (6, 5), (5, 8)
SMALL = (x(*A), x(*B))
PROVOKED: dict[Reason, Callable[[], Reason | None]] = {
    errors.BARE: lambda: grown(lambda a, b: a @ b, *SMALL),
    errors.SLOWER: lambda: chosen(  # the softmax runs anyway, and reads one tile either way
        lambda a, b: torch.softmax(a @ b * 2, 1), *SMALL
    ),
    errors.TAKEN: taken,
    errors.OPERAND_DTYPE: lambda: grown(
        lambda a, b: torch.tanh(a @ b), x(*A).double(), x(*B).double()
    ),
    errors.EMPTY: lambda: grown(lambda a, b: torch.tanh(a @ b), x(0, 5), x(*B)),
    errors.NO_HALF: lambda: joint_reasons(only_for_backward, x(6, 5), x(5, 5))[0],
    errors.NOT_FUSIBLE: lambda: grown(lambda a, b: torch.sin(a @ b), *SMALL),
    errors.VALUE_DTYPE: lambda: grown(lambda a, b: (a @ b).double(), *SMALL),
    errors.SHAPE: lambda: built(lambda a, b: (a @ b).view(4, 12) * 2, *SMALL),
    errors.BROADCAST: lambda: grown(
        lambda a, b, t: (a @ b).view(2, 3, 4, 8) + t, x(24, 5), x(*B), x(1, 3, 1, 8)
    ),
    errors.STRIDE: lambda: built(lambda a, b, t: t.t() + a @ b, *SMALL, x(8, 6)),
    errors.ORDER: lambda: built(lambda a, b: (z := a @ b) - z.sum(1, keepdim=True), *SMALL),
    errors.OTHER_HALF: lambda: joint_reasons(lambda a, b: (torch.tanh(a @ b),), *SMALL)[0],
    errors.PARTIAL_SUM: lambda: grown(lambda a, b: (a @ b).view(2, 3, 8).sum(0), *SMALL),
    errors.REDUCE_KIND: lambda: grown(lambda a, b: (a @ b).amax(), *SMALL),
    errors.RECOMPUTED_MAX: lambda: built(lambda a, b: torch.tanh(a @ b).amax(1), *SMALL),
    errors.TOO_MANY: lambda: built(many_loads, *SMALL, *(x(6, 8) for _ in range(5))),
    errors.DEVICES: lambda: built(lambda a, b, t: a @ b + t, *SMALL, x(6, 8), edit=elsewhere),
    errors.DISABLED: lambda: grown(lambda a, b: torch.tanh(a @ b), *SMALL, disabled=("tanh",)),
}


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.code)
def test_a_reason_is_given_where_it_applies(reason: Reason) -> None:
    assert PROVOKED[reason]() == reason


NEAR: dict[Reason, Callable[[], Reason | None]] = {
    errors.BROADCAST: lambda: built(
        lambda a, b, t: (a @ b).view(2, 3, 4, 8) + t, x(24, 5), x(*B), x(1, 1, 4, 8)
    ),
    errors.STRIDE: lambda: built(lambda a, b, t: a @ b + t.t(), *SMALL, x(8, 6)),
    errors.PARTIAL_SUM: lambda: built(lambda a, b: (a @ b).view(2, 3, 8).sum((0, 1)), *SMALL),
    errors.REDUCE_KIND: lambda: built(lambda a, b: (a @ b).amax(1), *SMALL),
    errors.SHAPE: lambda: built(lambda a, b: (a @ b).view(2, 3, 8) * 2, *SMALL),
    errors.TOO_MANY: lambda: built(many_loads, *SMALL, *(x(6, 8) for _ in range(4))),
    errors.DEVICES: lambda: built(lambda a, b, t: a @ b + t, *SMALL, x(6, 8)),
    errors.ORDER: lambda: built(lambda a, b: ((z := a @ b).exp(), z.sum(1)), *SMALL),
}


@pytest.mark.parametrize("reason", NEAR, ids=lambda reason: reason.code)
def test_just_inside_the_limit_it_is_legal(reason: Reason) -> None:
    assert NEAR[reason]() is None


def test_codes_and_texts_are_unique_and_readable() -> None:
    assert len({reason.code for reason in REASONS}) == len(REASONS)
    assert len({reason.text for reason in REASONS}) == len(REASONS)
    for reason in REASONS:
        assert reason.code == reason.code.lower() and " " not in reason.code
        assert str(reason) == reason.text and not reason.text.endswith(".")
    listed = {value for value in vars(errors).values() if isinstance(value, Reason)}
    assert listed == set(REASONS)


def test_every_product_of_torch_has_a_main_loop_and_nothing_else_has() -> None:
    for target in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default):
        assert for_target(target) is not None
    assert for_target(aten.add.Tensor) is None
