"""Placing: a region's kernel in the place of its nodes gives the same results, for any region."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition.planning import joint, prepared, regions, rules_of, with_gradients
from tests.partition.programs import Program, programs
from tests.tracing import guards, relative_error, run, trace
from torch import Tensor, fx

from torch_evt import devices
from torch_evt.graphs import copy_of, signature, verify
from torch_evt.joint import recompose
from torch_evt.partition import candidates, place
from torch_evt.partition.greedy import choose
from torch_evt.partition.region import Region
from torch_evt.runtime.ops import is_region
from torch_evt.tree.text import to_text


def placed_alone(module: fx.GraphModule, forward_outputs: int | None) -> list[fx.GraphModule]:
    """For each candidate of a graph, a copy in which only that one is placed, with poison.

    As in the compiler, a candidate is found in the copy by its nodes' names and built again.
    """
    found = []
    for region in regions(module.graph, rules_of(module.graph, forward_outputs=forward_outputs)):
        copied = copy_of(module)
        rules = rules_of(copied.graph, forward_outputs=forward_outputs)
        named = {n.name: n for n in copied.graph.nodes}
        nodes = [named[n.name] for n in region.nodes]
        anchor = named[region.anchor.name]
        again = candidates.build(anchor, region.mainloop, nodes, rules, recompute=bool(region.kept))
        assert isinstance(again, Region)
        assert to_text(again.tree) == to_text(region.tree)
        before = signature(copied.graph)
        place.place(copied.graph, again, {}, poison=True)
        recompose.expand(copied.graph)
        verify(copied.graph, before, "place")
        found.append(copied)
    return found


def strides(tensor: Tensor) -> list[int]:
    """The strides that address something."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def agree(
    ours: Sequence[Tensor], wanted: Sequence[Tensor], exact: Sequence[Tensor], room: float
) -> None:
    """Relative L2 errors within `room`, and more where the wanted values are inexact themselves."""
    for i, (our, their, true) in enumerate(zip(ours, wanted, exact, strict=True)):
        assert (our.dtype, strides(our)) == (their.dtype, strides(their))
        allowed = room + 4 * relative_error(their, true)
        assert relative_error(our, their) <= allowed, f"result {i}"


def check(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    exact: Sequence[Tensor],
    room: float,
    forward_outputs: int | None = None,
) -> int:
    """Every candidate alone gives the graph's results; how many there were."""
    wanted = run(module, *inputs)
    variants = placed_alone(prepared(module), forward_outputs)
    for variant in variants:
        assert sum(is_region(n.target) for n in variant.graph.nodes) == 1
        agree(run(variant, *inputs), wanted, exact, room)
    return len(variants)


def drawn_programs(least: int = 1) -> st.SearchStrategy[tuple[Program, float, int]]:
    """(program, allowed relative error, seed of its inputs).

    Half types round inside a chain and not inside a region, which carries a value over a jump:
    there the programs are smooth.
    """
    kinds = ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3))
    return st.one_of(
        st.tuples(
            programs(dtype, smooth=dtype != torch.float32, least=least),
            st.just(room),
            st.integers(0, 2**16),
        )
        for dtype, room in kinds
    )


def doubled(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


def examples(number: int) -> settings:
    return settings(max_examples=number, deadline=None, derandomize=True)


@examples(60)
@given(drawn_programs())
def test_every_candidate_placed_alone_agrees(drawn: tuple[Program, float, int]) -> None:
    program, room, seed = drawn
    inputs = program.make_inputs(seed)
    exact = program.function(exact=True)(*doubled(inputs))
    check(trace(program.function(), *inputs), inputs, exact, room)


@examples(40)
@given(drawn_programs())
def test_every_candidate_of_a_joint_graph_placed_alone_agrees(
    drawn: tuple[Program, float, int],
) -> None:
    program, room, seed = drawn
    inputs = program.make_inputs(seed)
    module, arguments, outputs = joint(program.function(), inputs)
    exact = with_gradients(program.function(exact=True), len(inputs))(*doubled(arguments))
    check(module, arguments, exact, room, outputs)


@examples(25)
@given(drawn_programs(least=2))
def test_symbolic_sizes_agree_and_no_candidate_adds_a_guard(
    drawn: tuple[Program, float, int],
) -> None:
    program, room, seed = drawn
    inputs = program.make_inputs(seed)
    exact = program.function(exact=True)(*doubled(inputs))
    module = trace(program.function(), *inputs, mode="symbolic")
    before = guards(module)
    check(module, inputs, exact, room)
    assert guards(module) == before


FREE_LAUNCHES_SLOW_MEMORY = dataclasses.replace(
    devices.device("h200"), memory_bandwidth=1e6, launch_us=0.0
)
"""A device on which nearly every region gains."""


@examples(40)
@given(drawn_programs())
def test_all_chosen_regions_placed_together_agree(drawn: tuple[Program, float, int]) -> None:
    program, room, seed = drawn
    inputs = program.make_inputs(seed)
    module, arguments, outputs = joint(program.function(), inputs)
    exact = with_gradients(program.function(exact=True), len(inputs))(*doubled(arguments))
    wanted = run(module, *arguments)
    ready = prepared(module)
    before = signature(ready.graph)
    rules = rules_of(ready.graph, forward_outputs=outputs)
    choice = choose(ready.graph, FREE_LAUNCHES_SLOW_MEMORY, rules)
    replaced: dict[fx.Node, fx.Node] = {}
    for chosen in choice.chosen:
        place.place(ready.graph, chosen.priced.region, replaced, poison=True)
    recompose.expand(ready.graph)
    verify(ready.graph, before, "place")
    assert sum(is_region(n.target) for n in ready.graph.nodes) == len(choice.chosen)
    agree(run(ready, *arguments), wanted, exact, room)
