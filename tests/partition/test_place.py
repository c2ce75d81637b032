"""Placing: a region's kernel in the place of its nodes gives the same results, for any region."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition.planning import joint, prepared, regions, rules_of, with_gradients
from tests.partition.programs import Program, programs
from tests.tracing import guards, run, strides, trace
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
        assert not (set(again.nodes) - again.kept) & set(copied.graph.nodes)  # nothing runs twice
        found.append(copied)
    return found


def tolerances(
    function: Callable[..., Sequence[Tensor]],
    exact: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Sequence[Tensor]],
    room: float,
) -> list[float]:
    """How far each result may be off: `room` of its norm, and four times what rounding costs the
    function itself, the worst of several inputs. Results that cancel are so judged by what they
    are summed from."""
    norms: list[float] = []
    rounding: list[float] = []
    for arguments in inputs:
        true = exact(*(x.double() if x.is_floating_point() else x for x in arguments))
        pairs = [(a.double(), b.double()) for a, b in zip(function(*arguments), true, strict=True)]
        norms = norms or [b.norm().item() for _, b in pairs]
        errors = [(a - b).norm().item() for a, b in pairs]
        rounding = [max(e, r) for e, r in zip(errors, rounding or errors, strict=True)]
    return [room * n + 4 * r for n, r in zip(norms, rounding, strict=True)]


def agree(ours: Sequence[Tensor], wanted: Sequence[Tensor], allowed: Sequence[float]) -> None:
    """Every result within its tolerance, with the same dtype and strides."""
    for i, (our, their, most) in enumerate(zip(ours, wanted, allowed, strict=True)):
        assert (our.dtype, strides(our)) == (their.dtype, strides(their))
        assert (our.double() - their.double()).norm().item() <= most, f"result {i}"


def check(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    allowed: Sequence[float],
    forward_outputs: int | None = None,
) -> None:
    """Every candidate alone gives the graph's results."""
    wanted = run(module, *inputs)
    for variant in placed_alone(prepared(module), forward_outputs):
        assert sum(is_region(n.target) for n in variant.graph.nodes) == 1
        agree(run(variant, *inputs), wanted, allowed)


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


def inference_case(program: Program, room: float, seed: int) -> tuple[list[Tensor], list[float]]:
    """A program's inputs, and how far its results may be off."""
    sets = [program.make_inputs(seed + i) for i in range(3)]
    return sets[0], tolerances(program.function(), program.function(exact=True), sets, room)


def training_case(
    program: Program, room: float, seed: int
) -> tuple[fx.GraphModule, list[Tensor], int, list[float]]:
    """A program's joint graph, its inputs, how many results are forward, and the tolerances."""
    inputs = program.make_inputs(seed)
    module, arguments, outputs = joint(program.function(), inputs)
    tangents = arguments[len(inputs) :]
    sets = [arguments]
    for i in range(1, 3):
        again = program.make_inputs(seed + i)
        sets.append(again + [torch.randn(t.shape).to(t.dtype) for t in tangents])
    rounded = with_gradients(program.function(), len(inputs))
    exact = with_gradients(program.function(exact=True), len(inputs))
    return module, arguments, outputs, tolerances(rounded, exact, sets, room)


def examples(number: int) -> settings:
    return settings(max_examples=number, deadline=None, derandomize=True)


@examples(60)
@given(drawn_programs())
def test_every_candidate_placed_alone_agrees(drawn: tuple[Program, float, int]) -> None:
    inputs, allowed = inference_case(*drawn)
    check(trace(drawn[0].function(), *inputs), inputs, allowed)


@examples(40)
@given(drawn_programs())
def test_every_candidate_of_a_joint_graph_placed_alone_agrees(
    drawn: tuple[Program, float, int],
) -> None:
    module, arguments, outputs, allowed = training_case(*drawn)
    check(module, arguments, allowed, outputs)


@examples(25)
@given(drawn_programs(least=2))
def test_symbolic_sizes_agree_and_no_candidate_adds_a_guard(
    drawn: tuple[Program, float, int],
) -> None:
    inputs, allowed = inference_case(*drawn)
    module = trace(drawn[0].function(), *inputs, mode="symbolic")
    before = guards(module)
    check(module, inputs, allowed)
    assert guards(module) == before


NO_CACHE = dataclasses.replace(devices.device("h200"), l2_bytes=0)
"""A device on which most fusions gain."""


@examples(40)
@given(drawn_programs())
def test_all_chosen_regions_placed_together_agree(drawn: tuple[Program, float, int]) -> None:
    module, arguments, outputs, allowed = training_case(*drawn)
    wanted = run(module, *arguments)
    ready = prepared(module)
    before = signature(ready.graph)
    rules = rules_of(ready.graph, forward_outputs=outputs)
    choice = choose(ready.graph, NO_CACHE, rules)
    replaced: dict[fx.Node, fx.Node] = {}
    for chosen in choice.chosen:
        place.place(ready.graph, chosen.priced.region, replaced, poison=True)
    recompose.expand(ready.graph)
    verify(ready.graph, before, "place")
    assert sum(is_region(n.target) for n in ready.graph.nodes) == len(choice.chosen)
    agree(run(ready, *arguments), wanted, allowed)
