"""Growth: which regions an anchor gets, what is pulled in sideways, what never enters again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.partition.planning import growths, joint, largest, prepared, regions, rules_of
from tests.tracing import trace
from torch import Tensor

from torch_evt import errors
from torch_evt.partition import candidates
from torch_evt.partition.region import Region
from torch_evt.tree.text import to_text

aten = torch.ops.aten


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


PRODUCT = (x(12, 8), x(8, 16))


def held(function: Callable[..., Any], *inputs: Tensor, **limits: Any) -> list[list[str]]:
    """The nodes of each candidate of the only anchor."""
    graph = prepared(trace(function, *inputs)).graph
    (growth,) = growths(graph, rules_of(graph, **limits))
    return [[n.name for n in region.nodes] for region in growth.regions if not region.kept]


def test_each_arithmetic_step_is_a_candidate() -> None:
    assert held(lambda a, b: torch.tanh(a @ b).exp().neg(), *PRODUCT) == [
        ["mm", "tanh"],
        ["mm", "tanh", "exp"],
        ["mm", "tanh", "exp", "neg"],
    ]


def test_a_view_belongs_to_the_step_behind_it() -> None:
    found = held(lambda a, b: torch.tanh(a @ b).view(3, 4, 16).exp(), *PRODUCT)
    assert found == [["mm", "tanh"], ["mm", "tanh", "view", "exp"]]


def test_every_product_is_an_anchor_in_the_order_of_the_graph() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return torch.addmm(c, a, b) @ d + torch.bmm(a[None], b[None])[0].sum()

    graph = prepared(trace(f, *PRODUCT, x(16), x(16, 4))).graph
    names = [anchor.name for anchor, _ in candidates.anchors(graph)]
    assert names == ["addmm", "mm", "bmm"]


def test_a_producer_that_only_the_region_needs_is_pulled_in() -> None:
    """A derivative or a mask is computed from what was saved, not read from memory."""

    def f(a: Tensor, b: Tensor, saved: Tensor) -> Tensor:
        return a @ b * (1 - torch.tanh(saved) ** 2)

    graph = prepared(trace(f, *PRODUCT, x(12, 16))).graph
    region = largest(graph)
    assert {n.target for n in region.nodes} >= {aten.tanh.default, aten.sub.Tensor}
    assert [given.node.name for given in region.inputs] == ["a_1", "b_1", "saved_1"]


def test_a_producer_that_others_need_is_read() -> None:
    def f(a: Tensor, b: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        derivative = torch.tanh(saved)
        return a @ b * derivative, derivative

    graph = prepared(trace(f, *PRODUCT, x(12, 16))).graph
    region = largest(graph)
    assert [given.node.name for given in region.inputs] == ["a_1", "b_1", "tanh"]
    assert not any(n.target is aten.tanh.default for n in region.nodes)


def test_an_operand_of_the_product_is_read_again_and_not_computed_again() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        gate = torch.sigmoid(a)
        return torch.tanh(gate @ b) * gate

    graph = prepared(trace(f, x(12, 16), x(16, 16))).graph
    region = largest(graph)
    assert [given.node.name for given in region.inputs] == ["sigmoid", "b_1", "sigmoid"]
    assert [n.name for n in region.nodes] == ["mm", "tanh", "mul"]


def test_a_small_producer_is_read_and_not_computed_for_every_element() -> None:
    def f(a: Tensor, b: Tensor, row: Tensor) -> Tensor:
        return a @ b * torch.exp(row)

    graph = prepared(trace(f, *PRODUCT, x(16))).graph
    region = largest(graph)
    assert [given.node.name for given in region.inputs] == ["a_1", "b_1", "exp"]


def test_what_depends_on_something_outside_never_enters_again() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        z = a @ b
        return torch.tanh(z) * z.sin() + z

    found = held(f, *PRODUCT)
    assert found == [["mm", "tanh"]]  # sin stays outside, and so the product and the sum


def test_what_reads_a_reduction_stays_outside() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        z = (a @ b).exp()
        return z / z.sum(1, keepdim=True)

    graph = prepared(trace(f, *PRODUCT)).graph
    for region in regions(graph):
        assert not any(n.target is aten.div.Tensor for n in region.nodes)
    assert any(n.target is aten.sum.dim_IntList for r in regions(graph) for n in r.nodes)


def test_a_loose_end_is_left_outside_where_its_source_is_stored_anyway() -> None:
    """`z + 1` is only read outside; z is stored for `sin`: without it there is one store less."""

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        z = torch.relu(a @ b)
        return z.sin(), (z + 1).sin()

    graph = prepared(trace(f, *PRODUCT)).graph
    sets = [{n.name for n in region.nodes} for region in regions(graph)]
    assert {"mm", "relu"} in sets and {"mm", "relu", "add"} in sets


def test_the_other_half_stays_outside() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return (F.gelu(a @ b) @ c,)

    module, _, outputs = joint(f, [*PRODUCT, x(16, 4)])
    graph = prepared(module).graph
    rules = rules_of(graph, forward_outputs=outputs)
    halves = set()
    for region in regions(graph, rules):
        half = rules.labels[region.anchor]
        halves.add(half)
        allowed = {half} | ({"either"} if half == "backward" else set())
        assert {rules.labels[n] for n in region.nodes} <= allowed
    assert halves == {"forward", "backward"}


def test_what_is_taken_stays_outside() -> None:
    graph = prepared(trace(lambda a, b: torch.tanh(a @ b).exp(), *PRODUCT)).graph
    rules = rules_of(graph)
    exp = next(n for n in graph.nodes if n.target is aten.exp.default)
    rules.taken.add(exp)
    (growth,) = growths(graph, rules)
    assert all(exp not in region.nodes for region in growth.regions)
    assert (growth.reason, growth.blocker) == (errors.TAKEN, exp)


def test_the_blocker_is_the_first_node_that_could_not_be_held() -> None:
    graph = prepared(trace(lambda a, b: torch.tanh(a @ b).sin().cos(), *PRODUCT)).graph
    (growth,) = growths(graph)
    assert growth.reason == errors.NOT_FUSIBLE
    assert growth.blocker is not None and growth.blocker.target is aten.sin.default


def test_building_the_same_nodes_gives_the_same_region() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        y = F.gelu(torch.addmm(c, a, b))
        return y, y.sum(0), y.sin()

    graph = prepared(trace(f, *PRODUCT, x(16))).graph
    for region in regions(graph):
        again = candidates.build(
            region.anchor,
            region.mainloop,
            region.nodes,
            rules_of(graph),
            kept=region.kept,
        )
        assert isinstance(again, Region)
        assert to_text(again.tree) == to_text(region.tree)
        assert again == region


@pytest.mark.parametrize("wrong", ["sin", "log"])
def test_building_with_a_node_that_cannot_be_held_gives_the_reason(wrong: str) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return getattr(torch.exp(a @ b), wrong)().double()

    graph = prepared(trace(f, *PRODUCT)).graph
    anchor, loop = candidates.anchors(graph)[0]
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    built = candidates.build(anchor, loop, nodes, rules_of(graph))
    assert built == (errors.NOT_FUSIBLE if wrong == "sin" else errors.VALUE_DTYPE)


def test_nothing_grows_from_a_product_that_no_main_loop_takes() -> None:
    graph = prepared(trace(lambda a, b: torch.tanh(a.double() @ b.double()), *PRODUCT)).graph
    (growth,) = growths(graph)
    assert growth.regions == () and growth.reason == errors.OPERAND_DTYPE
    graph = prepared(trace(lambda a, b: torch.tanh(a @ b), *PRODUCT)).graph
    unknown = candidates.Rules(rules_of(graph).labels, "abacus")
    (growth,) = growths(graph, unknown)
    assert growth.regions == () and growth.reason == errors.OPERAND_DTYPE
