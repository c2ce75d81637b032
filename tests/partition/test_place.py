"""Placing: a region's kernel in the place of its nodes gives the same results, for any region."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition.planning import joint, prepared, regions, rules_of, with_gradients
from tests.partition.programs import Program, programs
from tests.tracing import relative_error, run, trace
from torch import Tensor, fx

from torch_evt.graphs import copy_of, signature, verify
from torch_evt.joint import recompose
from torch_evt.partition import candidates, place
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
        again = candidates.build(
            anchor, region.mainloop, nodes, rules, recompute=bool(region.kept)
        )
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


def check(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    exact: Sequence[Tensor],
    room: float,
    forward_outputs: int | None = None,
) -> int:
    """Every candidate alone gives the graph's results; how many there were."""
    wanted = run(module, *inputs)
    ready = prepared(module)
    variants = placed_alone(ready, forward_outputs)
    for variant in variants:
        assert sum(is_region(n.target) for n in variant.graph.nodes) == 1
        ours = run(variant, *inputs)
        tree = next(n.args[1] for n in variant.graph.nodes if is_region(n.target))
        for i, (our, their, true) in enumerate(zip(ours, wanted, exact, strict=True)):
            assert (our.dtype, strides(our)) == (their.dtype, strides(their))
            allowed = room + 4 * relative_error(their, true)
            error = relative_error(our, their)
            assert error <= allowed, (i, error, allowed, tree)
    return len(variants)


FAST = settings(max_examples=40, deadline=None, derandomize=True)
DTYPES = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 2e-2), "fp16": (torch.float16, 3e-3)}


def smooth_or_not(dtype: torch.dtype) -> st.SearchStrategy[Program]:
    """Programs of a dtype. Half types round inside a chain and not inside a region, which moves a
    jump from one element to the next: there the programs are smooth."""
    return programs(dtype, smooth=dtype != torch.float32)


def exactly(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


@FAST
@given(st.sampled_from(list(DTYPES)).flatmap(lambda name: st.tuples(st.just(name), smooth_or_not(DTYPES[name][0]))), st.integers(0, 2**16))
def test_every_candidate_placed_alone_agrees(drawn: tuple[str, Program], seed: int) -> None:
    name, program = drawn
    inputs = program.make_inputs(seed)
    exact = program.function(exact=True)(*exactly(program, inputs))
    check(trace(program.function(), *inputs), inputs, exact, DTYPES[name][1])


@FAST
@given(st.sampled_from(list(DTYPES)).flatmap(lambda name: st.tuples(st.just(name), smooth_or_not(DTYPES[name][0]))), st.integers(0, 2**16))
def test_every_candidate_of_a_joint_graph_placed_alone_agrees(drawn: tuple[str, Program], seed: int) -> None:
    name, program = drawn
    inputs = program.make_inputs(seed)
    module, arguments, outputs = joint(program.function(), inputs)
    doubled = exactly(program, arguments)
    exact = with_gradients(program.function(exact=True), len(inputs))(*doubled)
    check(module, arguments, exact, DTYPES[name][1], outputs)
