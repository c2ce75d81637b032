"""The greedy plan: disjoint regions that never wait for each other, and only where they gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition.planning import joint, prepared, regions, rules_of
from tests.partition.programs import Program, programs
from tests.tracing import relative_error, run, trace
from torch import Tensor, fx

from torch_evt import devices, errors
from torch_evt.devices import Device
from torch_evt.partition import candidates, describe, place
from torch_evt.partition.greedy import Choice, choose, waits_for_itself
from torch_evt.partition.price import InductorModel, region_us
from torch_evt.partition.region import Region

aten = torch.ops.aten
H200 = devices.device("h200")
FREE = dataclasses.replace(H200, memory_bandwidth=float("inf"), launch_us=0.0)
"""Moving bytes and starting kernels costs nothing, so that fusing cannot gain."""
SLOW = dataclasses.replace(H200, memory_bandwidth=H200.memory_bandwidth / 10)


def layer(x: Tensor, w: Tensor, bias: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    hidden = F.gelu(torch.addmm(bias, x, w), approximate="tanh")
    return (torch.relu(hidden @ v) + x,)


def layer_inputs() -> list[Tensor]:
    return [torch.randn(s) for s in ((256, 64), (64, 128), (128,), (128, 64))]


def plan(module: fx.GraphModule, device: Device, outputs: int | None) -> Choice:
    graph = prepared(module).graph
    return choose(graph, device, rules_of(graph, forward_outputs=outputs))


def chosen_regions(choice: Choice) -> list[Region]:
    return [chosen.priced.region for chosen in choice.chosen]


def has_cycle(graph: fx.Graph, chosen: Iterable[Region]) -> bool:
    """Whether kernels wait for each other, by removing what waits for nothing until all is gone."""
    owner: dict[fx.Node, Any] = {n: n for n in graph.nodes}
    for region in chosen:
        owner.update(dict.fromkeys(region.nodes, region.anchor))
    waiting: dict[Any, set[Any]] = {owner[n]: set() for n in graph.nodes}
    for n in graph.nodes:
        for source in n.all_input_nodes:
            if owner[source] is not owner[n]:
                waiting[owner[n]].add(owner[source])
    while True:
        ready = [unit for unit, needs in waiting.items() if not needs]
        if not ready:
            return bool(waiting)
        for unit in ready:
            del waiting[unit]
        for needs in waiting.values():
            needs.difference_update(ready)


NO_CACHE = dataclasses.replace(H200, l2_bytes=0)
"""Inductor's kernels read what was just written from memory, so that most fusions gain."""

DEVICES = (H200, SLOW, NO_CACHE)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(programs(), st.sampled_from(DEVICES), st.integers(0, 2**16))
def test_regions_are_disjoint_convex_and_gain(program: Program, device: Device, seed: int) -> None:
    module, _, outputs = joint(program.function(), program.make_inputs(seed))
    ready = prepared(module)
    choice = choose(ready.graph, device, rules_of(ready.graph, forward_outputs=outputs))
    found = chosen_regions(choice)
    nodes = [n for region in found for n in region.nodes]
    assert len(nodes) == len(set(nodes))
    assert not has_cycle(ready.graph, found)
    for chosen in choice.chosen:
        assert chosen.priced.gain_us > 0
        assert chosen.priced.region.counts
        gains = [loser.gain_us for loser in chosen.losers]
        assert gains == sorted(gains, reverse=True)
        assert all(gain <= chosen.priced.gain_us for gain in gains)
    anchors = {region.anchor for region in found} | {left.anchor for left in choice.left}
    products = [
        n
        for n in ready.graph.nodes
        if n.target in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
    ]
    assert anchors == set(products)
    assert len(found) + len(choice.left) == len(products)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 2**16))
def test_equal_graphs_get_equal_plans(program: Program, seed: int) -> None:
    plans = []
    clutter = []
    for _ in range(3):
        module, _, outputs = joint(program.function(), program.make_inputs(seed))
        graph = prepared(module).graph
        rules = rules_of(graph, forward_outputs=outputs)
        choice = choose(graph, NO_CACHE, rules)
        plans.append(
            (
                describe.regions_of(choice, rules.labels),
                describe.unfused_of(choice, rules.labels, H200),
            )
        )
        clutter.append([object() for _ in range(7)])  # other addresses, so other orders of sets
    assert plans[0] == plans[1] == plans[2]


def crossing(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Each product is scaled by a function of the other."""
    first, second = x @ w, y @ v
    one, two = first.exp(), second.exp()
    return first * two, second * one, one, two


def crossing_inputs() -> list[Tensor]:
    return [torch.randn(s) for s in ((64, 32), (32, 48), (64, 32), (32, 48))]


def region_of(graph: fx.Graph, names: list[str]) -> Region:
    named = {n.name: n for n in graph.nodes}
    loops = dict(candidates.anchors(graph))
    anchor = named[names[0]]
    built = candidates.build(anchor, loops[anchor], [named[n] for n in names], rules_of(graph))
    assert isinstance(built, Region)
    return built


def test_two_convex_regions_that_need_each_other_are_seen() -> None:
    graph = prepared(trace(crossing, *crossing_inputs())).graph
    first = region_of(graph, ["mm", "exp", "mul"])
    second = region_of(graph, ["mm_1", "exp_1", "mul_1"])
    assert not waits_for_itself(first, []) and not waits_for_itself(second, [])
    assert waits_for_itself(first, [second]) and waits_for_itself(second, [first])
    for names, waits in ((["mm_1", "exp_1"], False), (["mm_1", "mul_1"], True)):
        smaller = region_of(graph, names)
        assert waits_for_itself(smaller, [first]) == waits
        assert has_cycle(graph, [smaller, first]) == waits


def test_a_region_that_comes_back_to_itself_is_seen() -> None:
    graph = prepared(
        trace(lambda x, w: (z := x @ w) + z.sin(), torch.randn(6, 5), torch.randn(5, 8))
    ).graph
    assert waits_for_itself(region_of(graph, ["mm", "add"]), [])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(programs(), st.integers(0, 2**16), st.data())
def test_waiting_is_seen_exactly_where_the_quotient_has_a_cycle(
    program: Program, seed: int, data: st.DataObject
) -> None:
    module, _, _ = joint(program.function(), program.make_inputs(seed))
    graph = prepared(module).graph
    found = regions(graph)
    if len({region.anchor for region in found}) < 2:
        return
    accepted: list[Region] = []
    for region in data.draw(st.permutations(found)):
        if any(set(region.nodes) & set(other.nodes) for other in accepted):
            continue
        waits = waits_for_itself(region, accepted)
        assert waits == has_cycle(graph, [*accepted, region])
        if not waits:
            accepted.append(region)


def test_a_crossing_is_planned_without_a_cycle_and_runs_right() -> None:
    inputs = crossing_inputs()
    module = trace(crossing, *inputs)
    ready = prepared(module)
    choice = choose(ready.graph, NO_CACHE, rules_of(ready.graph))
    found = chosen_regions(choice)
    assert found
    assert not has_cycle(ready.graph, found)
    replaced: dict[fx.Node, fx.Node] = {}
    for region in found:
        place.place(ready.graph, region, replaced, poison=True)
    for our, their in zip(run(ready, *inputs), run(module, *inputs), strict=True):
        assert relative_error(our, their) < 1e-5


def test_an_anchor_whose_regions_would_all_wait_says_so() -> None:
    def f(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first, second = x @ w, y @ v
        return first * second.cumsum(1), second * first.exp().cumsum(1)

    graph = prepared(trace(f, *crossing_inputs())).graph
    best = choose(graph, H200, rules_of(graph))
    first = region_of(graph, ["mm", "exp", "mul"])
    choice = choose(graph, H200, rules_of(graph), fixed=[first])
    for plan_, region in ((best, chosen_regions(best)[0]), (choice, first)):
        assert chosen_regions(plan_) == [region]
        (left,) = plan_.left
        assert left.reason == errors.ORDER
        assert left.anchor is not region.anchor


def test_where_bytes_and_launches_are_free_nothing_is_fused() -> None:
    module, _, outputs = joint(layer, layer_inputs())
    assert chosen_regions(plan(module, H200, outputs))
    choice = plan(module, FREE, outputs)
    assert chosen_regions(choice) == []
    assert errors.SLOWER in {left.reason for left in choice.left}


@pytest.mark.parametrize("f", [layer, crossing], ids=["layer", "crossing"])
def test_a_tenth_of_the_bandwidth_fuses_no_less(f: Callable[..., Any]) -> None:
    inputs = layer_inputs() if f is layer else crossing_inputs()
    module, _, outputs = joint(f, inputs)
    fast, slow = (chosen_regions(plan(module, device, outputs)) for device in (H200, SLOW))
    assert len(slow) >= len(fast) > 0


def several_candidates(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    product = x @ w
    return torch.relu(product), product.sum(0), torch.tanh(product).sum(1)


def test_the_cheapest_of_several_candidates_is_chosen() -> None:
    graph = prepared(trace(several_candidates, torch.randn(256, 64), torch.randn(64, 128))).graph
    rules = rules_of(graph)
    model = InductorModel(graph, H200, rules.labels)
    gains = [model.replaced_us(r) - region_us(r, H200) for r in regions(graph)]
    (only,) = choose(graph, H200, rules).chosen
    assert len(gains) > 2 and len(set(gains)) > 1
    assert only.priced.gain_us == max(gains)
    assert sorted([only.priced.gain_us, *(p.gain_us for p in only.losers)]) == sorted(gains)


def test_what_is_fixed_comes_first_and_only_where_it_gains() -> None:
    graph = prepared(trace(several_candidates, torch.randn(256, 64), torch.randn(64, 128))).graph
    (best,) = choose(graph, H200, rules_of(graph)).chosen
    smaller = best.losers[0].region
    again = choose(graph, H200, rules_of(graph), fixed=[smaller])
    assert chosen_regions(again) == [smaller]
    assert again.chosen[0].losers == ()
    assert chosen_regions(choose(graph, FREE, rules_of(graph), fixed=[smaller])) == []


def test_a_region_that_loses_its_nodes_to_a_better_one_is_grown_again() -> None:
    """Two products feed one sum: the later one takes it, the other keeps what is its own."""

    def f(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        one, two = a @ b, c @ d
        return torch.tanh(one + two), one.sum(0), two.sum(0)

    inputs = [torch.randn(s) for s in ((256, 64), (64, 128)) * 2]
    graph = prepared(trace(f, *inputs)).graph
    found = chosen_regions(choose(graph, H200, rules_of(graph)))
    names = [[n.name for n in region.nodes] for region in found]
    assert names == [["mm", "sum_1"], ["mm_1", "add", "tanh", "sum_2"]]
