"""Placing: a region's kernel in the place of its nodes gives the same results, for any region."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.partition.planning import joint, prepared, regions, rules_of, with_gradients
from tests.partition.programs import Program, programs
from tests.tracing import guards, run, strides, trace
from torch import Tensor, fx

from torch_evt import devices
from torch_evt.graphs import copy_of, output_values, signature, sort_topologically, verify
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
        again = candidates.build(
            anchor,
            region.mainloop,
            nodes,
            rules,
            kept=frozenset(named[n.name] for n in region.kept),
        )
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


@examples(100)
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


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def one_tensor_under_two_views(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """t lies along the rows, then across the rows and the columns."""
    first = (a @ b).view(4, 4, 16) + t
    return first.view(4, 4, 4, 4) * t


def one_tensor_by_row_and_by_column(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return torch.tanh(a @ b + t) * t[:, None]


def a_product_with_itself(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    z = a @ b
    return torch.relu(z) * z + z


def an_operand_that_is_also_a_residual(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return torch.tanh(a @ b) + a[:, :1]


def several_sizes(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    first = (a @ b).view(2, 8, 16) + t[:2, :1, None]
    return (first.view(8, 2, 16) * t[:2, :1]).view(16, 4, 4) + t


TRICKY: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    (one_tensor_under_two_views, ((16, 8), (8, 16), (4, 4, 1))),
    (one_tensor_by_row_and_by_column, ((16, 8), (8, 16), (16,))),
    (a_product_with_itself, ((16, 8), (8, 16), (16,))),
    (an_operand_that_is_also_a_residual, ((16, 8), (8, 16), (16,))),
    (several_sizes, ((16, 8), (8, 16), (4, 4))),
]


@pytest.mark.parametrize(("function", "shapes"), TRICKY, ids=[f.__name__ for f, _ in TRICKY])
def test_tricky_reads_agree(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    inputs = weights(*shapes)
    module = trace(function, *inputs)
    ready = prepared(module)
    largest = max(regions(ready.graph), key=lambda region: len(region.nodes))
    products = {largest.anchor, *(n for n in ready.graph.nodes if n.op == "output")}
    assert {n for n in ready.graph.nodes if n.op != "placeholder"} - products <= {
        *largest.nodes,
        *(n for n in ready.graph.nodes if not set(n.all_input_nodes) & set(largest.nodes)),
    }
    check(module, inputs, [1e-5 * r.double().norm().item() for r in run(module, *inputs)])


def test_names_are_those_of_the_nodes_that_were_replaced() -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(a @ b)
        return y, y.sum(0), y.t().contiguous()

    module = prepared(trace(f, *weights((16, 8), (8, 12))))
    names = [n.name for n in output_values(module.graph)]
    largest = max(regions(module.graph), key=lambda region: len(region.nodes))
    kernel = place.place(module.graph, largest, {})
    assert [n.name for n in output_values(module.graph)] == names
    assert is_region(kernel.target) and len(kernel.meta["val"]) == 3
    assert len({n.name for n in module.graph.nodes}) == len(module.graph.nodes)


def test_poison_is_in_the_spec_and_only_where_it_is_asked_for() -> None:
    for poison in (False, True):
        module = prepared(trace(lambda a, b: torch.tanh(a @ b), *weights((16, 8), (8, 12))))
        (region,) = regions(module.graph)
        kernel = place.place(module.graph, region, {}, poison=poison)
        text = to_text(region.tree)
        assert kernel.args[1] == (f"poison: {text}" if poison else text)


def test_the_second_of_two_regions_reads_what_the_first_left() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        first = torch.tanh(a @ b)
        return torch.relu(first @ c) * first

    inputs = weights((16, 8), (8, 12), (12, 12))
    module = trace(f, *inputs)
    ready = prepared(module)
    first, second = (
        max((r for r in regions(ready.graph) if r.anchor.name == name), key=lambda r: len(r.nodes))
        for name in ("mm", "mm_1")
    )
    replaced: dict[fx.Node, fx.Node] = {}
    place.place(ready.graph, first, replaced, poison=True)
    place.place(ready.graph, second, replaced, poison=True)
    assert set(replaced) == {n for r in (first, second) for o in r.outputs for n in o.nodes}
    (ours,), (theirs,) = run(ready, *inputs), run(module, *inputs)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("widen", [False, True], ids=["view", "cast"])
def test_a_region_may_read_what_another_leaves_only_as_a_view_or_a_cast_of_it(widen: bool) -> None:
    """Loads see through both, down to a node that the first region holds and nobody else reads."""

    def f(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        z = x.view(15, 8) @ w
        seen = z.float() if widen else z.view(3, 5, 16)
        y = torch.tanh(seen)
        product = y.reshape(15, 16).to(z.dtype) @ u
        return torch.tanh(product.float() if widen else product.view(3, 5, 16)) + seen

    dtype = torch.bfloat16 if widen else torch.float32
    inputs = [t.to(dtype) for t in weights((3, 5, 8), (8, 16), (16, 16))]
    module = trace(f, *inputs)
    ready = prepared(module)
    first, second = (
        max((r for r in regions(ready.graph) if r.anchor is anchor), key=lambda r: len(r.nodes))
        for anchor, _ in candidates.anchors(ready.graph)
    )
    held = {n for n in first.nodes if n not in {m for o in first.outputs for m in o.nodes}}
    assert held & {i.node for i in second.inputs}  # the case that this test is about
    replaced: dict[fx.Node, fx.Node] = {}
    for region in (first, second):
        place.place(ready.graph, region, replaced, poison=True)
    ready.graph.lint()
    (ours,), (theirs,) = run(ready, *inputs), run(module, *inputs)
    assert (ours - theirs).norm() <= (2e-2 if widen else 1e-5) * theirs.norm()


def test_metadata_of_the_product_goes_to_the_kernel() -> None:
    module = prepared(trace(lambda a, b: torch.tanh(a @ b), *weights((16, 8), (8, 12))))
    (region,) = regions(module.graph)
    region.anchor.meta.update(stack_trace="line 3", nn_module_stack={"a": "b"}, other="left")
    kernel = place.place(module.graph, region, {})
    assert kernel.meta["stack_trace"] == "line 3" and kernel.meta["nn_module_stack"] == {"a": "b"}
    assert "other" not in kernel.meta
    inputs, spec, sizes = kernel.args
    (seen, spec_, sizes_), _ = kernel.meta["eager_input_vals"]
    assert [tuple(t.shape) for t in seen] == [(16, 8), (8, 12)]
    assert (spec_, list(sizes_)) == (spec, list(sizes)) and len(inputs) == 2


@pytest.mark.parametrize("shape", [(3, 4), (5, 7), (2, 9)])
def test_a_symbolic_graph_runs_at_other_sizes(shape: tuple[int, int]) -> None:
    def f(a: Tensor, w: Tensor, bias: Tensor, table: Tensor, per: Tensor) -> tuple[Tensor, ...]:
        b, s, k = a.shape
        z = torch.addmm(bias, a.reshape(b * s, k), w).view(b, s, w.shape[1])
        y = torch.tanh(z + table) * per
        return y, y.sum((0, 1)), y.sum(2)

    def inputs(b: int, s: int) -> list[Tensor]:
        return weights((b, s, 8), (8, 6), (6,), (s, 6), (b, 1, 6))

    module = trace(f, *inputs(3, 5), mode="symbolic")
    before = guards(module)
    ready = prepared(module)
    largest = max(regions(ready.graph), key=lambda region: len(region.nodes))
    assert len(largest.sizes) == 1 and len(largest.outputs) == 3
    kernel = place.place(ready.graph, largest, {}, poison=True)
    assert "symbolic" in str(kernel.target)
    assert guards(module) == before
    given_inputs = inputs(*shape)
    for ours, theirs in zip(run(ready, *given_inputs), run(module, *given_inputs), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_a_size_that_no_node_computes_leaves_the_graph_as_it_was() -> None:
    def f(a: Tensor, w: Tensor, table: Tensor) -> Tensor:
        b, s, k = a.shape
        return torch.tanh((a.reshape(b * s, k) @ w).view(b, s, w.shape[1]) + table)

    ready = prepared(trace(f, *weights((3, 5, 8), (8, 6), (5, 6)), mode="symbolic"))
    largest = max(regions(ready.graph), key=lambda region: len(region.nodes))
    (size,) = largest.sizes
    odd = dataclasses.replace(largest, sizes=(size * 2 + 1,))
    before = str(ready.graph)
    with pytest.raises(place.CannotPlace, match="no node computes the size"):
        place.place(ready.graph, odd, {})
    assert str(ready.graph) == before
    place.place(ready.graph, largest, {})


def test_a_region_reads_what_another_stored_under_the_name_of_a_cast() -> None:
    """Only the cast of the first product is read outside its region; the second region loads the
    product itself, which is the smaller of the two."""

    def f(a: Tensor, b: Tensor, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        z = (a @ b).view(4, 4, 12).float()
        y = z * x
        return y.sum(0), (c @ b).view(4, 4, 12) * z

    inputs = [
        *(t.bfloat16() for t in weights((16, 8), (8, 12))),
        *weights((4, 4, 12)),
        torch.randn(16, 8).bfloat16(),
    ]
    module = trace(f, *inputs)
    ready = prepared(module)
    first = next(r for r in regions(ready.graph) if r.anchor.name == "mm")
    (second,) = (r for r in regions(ready.graph) if r.anchor.name == "mm_1")
    assert {i.node.name for i in second.inputs} == {"c_1", "b_1", "mm"}
    assert "mm" not in {n.name for output in first.outputs for n in output.nodes}
    replaced: dict[fx.Node, fx.Node] = {}
    place.place(ready.graph, first, replaced, poison=True)
    place.place(ready.graph, second, replaced, poison=True)
    ready.graph.eliminate_dead_code()
    for ours, theirs in zip(run(ready, *inputs), run(module, *inputs), strict=True):
        assert (ours.double() - theirs.double()).norm() <= 1e-2 * theirs.double().norm()


@pytest.mark.parametrize("early", [False, True])
def test_a_graph_is_sorted_only_where_a_reader_stands_before_the_kernel(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    sorts = []
    monkeypatch.setattr(
        place, "sort_topologically", lambda graph: sorts.append(sort_topologically(graph))
    )

    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        product = a @ b
        if early:  # it reads the product before the kernel has the residual that it loads
            read = product.cumsum(-1)
            return product + c.cumsum(0), read
        residual = c.cumsum(0)
        read = product.cumsum(-1)
        return product + residual, read

    inputs = weights((8, 16), (16, 24), (8, 24))
    module = prepared(trace(function, *inputs))
    (region,) = [r for r in regions(module.graph) if len(r.inputs) == 3 and len(r.outputs) == 2]
    place.place(module.graph, region, {})
    assert len(sorts) == early
    module.graph.lint()
