"""Building a region: its tree, what it reads and stores, for shapes and layouts of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.partition.planning import growths, largest, prepared, regions, rules_of
from tests.tracing import node, trace
from torch import Tensor, fx

from torch_evt.mainloops import for_target
from torch_evt.partition.builder import Builder
from torch_evt.partition.region import Region
from torch_evt.tree.ir import Reduce
from torch_evt.tree.text import to_text

aten = torch.ops.aten


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


def text(function: Callable[..., Any], *inputs: Tensor, **limits: Any) -> str:
    """The tree of the largest region."""
    graph = prepared(trace(function, *inputs)).graph
    return to_text(largest(graph, rules_of(graph, **limits)).tree)


def builder(function: Callable[..., Any], *inputs: Tensor) -> tuple[Builder, fx.Graph]:
    """A builder on the first product of a function."""
    graph = prepared(trace(function, *inputs)).graph
    for n in graph.nodes:
        loop = for_target(n.target)
        if loop is not None:
            return Builder(n, loop, "cuda"), graph
    raise AssertionError("no product")


M, K, N = 12, 8, 16
PRODUCT = (x(M, K), x(K, N))
HALVES = (x(M, K).bfloat16(), x(K, N).bfloat16())


@pytest.mark.parametrize(
    ("operands", "header"),
    [
        ((x(M, K), x(K, N)), "gemm(A: f32 k 16, B: f32 n 16)"),
        ((x(K, M).t(), x(N, K).t()), "gemm(A: f32 m 16, B: f32 k 16)"),
        ((x(M, 7), x(7, N)), "gemm(A: f32 k 4, B: f32 n 16)"),
        ((x(M, 6), x(6, N)), "gemm(A: f32 k 8, B: f32 n 16)"),
        ((x(M, 2 * K)[:, ::2], x(K, N)), "gemm(A: f32 - 8, B: f32 n 16)"),
        ((x(1, K), x(K, N)), "gemm(A: f32 k 16, B: f32 n 16)"),
        ((x(M, K), x(K, 1)), "gemm(A: f32 k 16, B: f32 k 16)"),
    ],
)
def test_the_layouts_of_operands(operands: tuple[Tensor, Tensor], header: str) -> None:
    assert text(lambda a, b: torch.tanh(a @ b), *operands).startswith(header)


def test_half_types_and_their_alignment() -> None:
    found = text(lambda a, b: torch.tanh(a @ b), x(M, K).bfloat16(), x(K, 6).bfloat16())
    assert found == "gemm(A: bf16 k 16, B: bf16 n 4) -> store(0: bf16 n 4, tanh(acc0))"


def test_a_sliced_operand_is_aligned_by_its_offset() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a[:, 1:9] @ b)

    assert text(f, x(M, 12), x(K, N)).startswith("gemm(A: f32 k 4,")


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda a, b, c: torch.addmm(c, a, b).exp(), "exp(acc0 + row(0: f32))"),
        (lambda a, b, c: torch.addmm(c, a, b, beta=0.5).exp(), "exp(acc0 + row(0: f32) * 0.5)"),
        (lambda a, b, c: torch.addmm(c, a, b, alpha=3).exp(), "exp(acc0 * 3.0 + row(0: f32))"),
        (lambda a, b, c: torch.addmm(c, a, b, beta=0).exp(), "exp(acc0)"),
    ],
)
def test_a_bias_with_its_factors(function: Callable[..., Any], wanted: str) -> None:
    assert f"store(0: f32 n 16, {wanted})" in text(function, *PRODUCT, x(N))


def test_a_column_bias_and_a_tile_bias() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.addmm(c, a, b).exp()

    assert "exp(acc0 + column(0: f32))" in text(f, *PRODUCT, x(M, 1))
    assert "exp(acc0 + tile(0: f32 n 16))" in text(f, *PRODUCT, x(M, N))
    assert "exp(acc0 + tile(0: f32 m 16))" in text(f, *PRODUCT, x(N, M).t())
    assert "exp(acc0 + scalar(0: f32))" in text(f, *PRODUCT, x(1, 1))


def test_one_value_under_several_names_is_stored_once() -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(a @ b)
        return y.view(3, 4, N).sin(), y.view(M, 4, 4).sin()

    graph = prepared(trace(f, *PRODUCT)).graph
    region = largest(graph)
    assert len(region.outputs) == 1
    assert len(region.tree.sinks) == 1


def test_one_argument_that_is_read_twice_is_one_input() -> None:
    def f(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(a @ b * t) + t

    region = largest(prepared(trace(f, *PRODUCT, x(M, N))).graph)
    assert len(region.inputs) == 3
    found = text(f, *PRODUCT, x(M, N))
    assert "tile(1" not in found and "tile(0" in found


def test_arguments_are_numbered_by_first_use() -> None:
    def f(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(a @ b + t) * s

    graph = prepared(trace(f, *PRODUCT, x(N), x(M, N))).graph
    region = largest(graph)
    names = [given.node.name for given in region.inputs]
    assert names == ["a_1", "b_1", "t_1", "s_1"]


def test_a_constant_is_no_argument() -> None:
    found = text(lambda a, b: torch.where(a @ b > 0, a @ b, torch.full((), -3.0)), *PRODUCT)
    assert "scalar(" not in found and "-3.0" in found


def test_a_broadcast_and_a_widening_are_seen_through() -> None:
    def f(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(a @ b) * t.float().expand(M, N)

    row = x(1, N).bfloat16()
    assert "row(0: bf16)" in text(f, *PRODUCT, row)
    mask = torch.rand(M, N) > 0.5
    assert "tile(0: bool n 16)" in text(
        lambda a, b, t: torch.tanh(a @ b) * t.float(), *PRODUCT, mask
    )


def test_an_integer_that_is_widened_is_read_as_it_is() -> None:
    levels = torch.randint(0, 9, (M, N)).to(torch.uint8)

    def shared(a: Tensor, b: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(a @ b) * (wide := t.float()), wide.sin()

    assert "tanh(acc0) * cast(tile(0: u8 n 16), f32)" in text(shared, *PRODUCT, levels)


def test_a_view_of_a_broadcast_is_seen_through() -> None:
    def f(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(a @ b) * t.expand(3, 4, N).view(M, N)

    assert "tanh(acc0) * row(0: f32)" in text(f, *PRODUCT, x(1, 1, N))


def test_in_place_of_a_widening_cast_the_narrow_value_is_stored() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a @ b).float().sin()

    graph = prepared(trace(f, x(M, K).bfloat16(), x(K, N).bfloat16())).graph
    widest = largest(graph)
    assert [s.dtype for s in widest.tree.sinks] == [torch.bfloat16]


def test_a_comparison_sees_the_value_that_others_read() -> None:
    """The product is rounded to bf16 before it is compared: who reads it stored decides alike."""

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        z = a @ b
        return z, torch.where(z > 0.5, z, 0.0)

    read = "v0 = cast(acc0, bf16); store(1: bf16 n 16, where(gt(v0, 0.5), v0, 0.0))"
    assert read in text(f, *HALVES)
    assert "where(gt(acc0, 0.5), acc0, 0.0)" in text(f, *PRODUCT)


def test_under_exact_rounding_every_value_of_a_half_type_is_rounded() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(torch.tanh(a @ b) * 2)

    assert text(f, *HALVES).endswith("store(0: bf16 n 16, exp(tanh(acc0) * 2.0))")
    exact = "cast(exp(cast(cast(tanh(cast(acc0, bf16)), bf16) * 2.0, bf16)), bf16)"
    assert text(f, *HALVES, exact_rounding=True).endswith(f"store(0: bf16 n 16, {exact})")
    assert text(f, *PRODUCT) == text(f, *PRODUCT, exact_rounding=True)


def reductions(function: Callable[..., Any], *inputs: Tensor) -> list[Reduce]:
    tree = largest(prepared(trace(function, *inputs)).graph).tree
    return [sink for sink in tree.sinks if isinstance(sink, Reduce)]


@pytest.mark.parametrize(
    ("function", "inputs", "over", "fold_batch"),
    [
        (lambda a, b: (a @ b).exp().sum(0), PRODUCT, "rows", False),
        (lambda a, b: (a @ b).exp().sum(1, keepdim=True), PRODUCT, "columns", False),
        (lambda a, b: (a @ b).view(3, 4, N).exp().sum((0, 1)), PRODUCT, "rows", False),
        (lambda a, b: (a @ b).view(M, 4, 4).exp().sum((-1, -2)), PRODUCT, "columns", False),
        (lambda a, b: (a @ b).exp().sum(1), (x(2, M, K), x(2, K, N)), "rows", False),
        (lambda a, b: (a @ b).exp().sum((0, 1)), (x(2, M, K), x(2, K, N)), "rows", True),
        (lambda a, b: (a @ b).exp().sum(2), (x(2, M, K), x(2, K, N)), "columns", False),
        (lambda a, b: (a @ b).exp().sum(1), (x(1, K), x(K, N)), "columns", False),
        (lambda a, b: (a @ b).exp().sum(0), (x(M, K), x(K, 1)), "rows", False),
        (lambda a, b: (a @ b).exp().sum((0, 1)), (x(2, 1, K), x(2, K, N)), "rows", True),
        (lambda a, b: (a @ b).exp().sum(2), (x(2, 1, K), x(2, K, N)), "columns", False),
    ],
)
def test_what_a_reduction_folds(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], over: str, fold_batch: bool
) -> None:
    (sink,) = reductions(function, *inputs)
    assert (sink.over, sink.fold_batch, sink.op) == (over, fold_batch, "sum")


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a @ b).sum((0, 2)),  # the batch and the columns, but not the rows
        lambda a, b: (a @ b).view(2, 3, 4, N).sum(1),  # a part of the rows
        lambda a, b: (a @ b).view(2, M, 4, 4).sum(2),  # a part of the columns
        lambda a, b: (a @ b).view(2, 3, 4, N).sum((2, 3)),  # all columns, a part of the rows
        lambda a, b: (a @ b).view(2, M, 4, 4).sum((1, 3)),  # all rows, a part of the columns
        lambda a, b: (a @ b).sum(0),  # the batch alone
    ],
)
def test_what_is_no_whole_coordinate_is_not_folded(function: Callable[..., Any]) -> None:
    graph = prepared(trace(function, x(2, M, K), x(2, K, N))).graph
    assert regions(graph) == []


def test_with_one_row_a_sum_over_the_batch_and_the_columns_is_not_one_over_columns() -> None:
    """Each result is one number, not one a batch."""
    graph = prepared(trace(lambda a, b: (a @ b).exp().sum((0, 2)), x(2, 1, K), x(2, K, N))).graph
    for region in regions(graph):
        for sink in region.tree.sinks:
            assert not isinstance(sink, Reduce) or (sink.over, sink.fold_batch) == ("all", True)


def test_a_maximum_is_over_the_stored_product() -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        z = a @ b
        return z, z.amax(1), z.amax(0)

    sinks = reductions(f, *PRODUCT)
    assert [(s.over, s.op) for s in sinks] == [("columns", "max"), ("rows", "max")]
    stored = "v0 = cast(acc0, bf16); reduce(1: bf16, max, columns, v0)"
    assert stored in text(f, *HALVES)  # of what is stored, not of what is not yet rounded


def test_a_transposed_copy_is_stored_with_its_rows_contiguous() -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(a @ b)
        return y, y.t().contiguous()

    assert "m 16" in text(f, *PRODUCT) and "n 16" in text(f, *PRODUCT)
    region = largest(prepared(trace(f, *PRODUCT)).graph)
    assert [output.transposed for output in region.outputs] == [False, True]


def test_what_is_recomputed_outside_is_not_stored() -> None:
    """The softmax can compute `z * 2` again from z: the region keeps it only for its sums."""

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        double = (z := a @ b) * 2
        return z, double.sum(0), (double - double.amax(1, keepdim=True)).exp()

    graph = prepared(trace(f, *PRODUCT)).graph
    recomputing = [region for region in regions(graph) if region.kept]
    assert recomputing
    for region in recomputing:
        assert [n.name for n in region.kept] == ["mul"]
        assert to_text(region.tree).endswith(
            "store(0: f32 n 16, acc0); reduce(1: f32, sum, rows, acc0 * 2.0)"
        )


def test_a_region_whose_arithmetic_is_all_recomputed_outside_does_not_count() -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        z = a @ b
        return z, torch.softmax(z * 2, 1)

    graph = prepared(trace(f, *PRODUCT)).graph
    assert [to_text(region.tree).count("store") for region in regions(graph)] == [2]


def test_rewinding_forgets_nodes_and_arguments() -> None:
    def f(a: Tensor, b: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return torch.tanh(a @ b + t).view(3, 4, N) * s

    made, graph = builder(f, *PRODUCT, x(M, N), x(4, N))
    add, tanh = (
        node(graph.owning_module, aten.add.Tensor),
        node(graph.owning_module, aten.tanh.default),
    )
    assert made.add(add) is None
    mark = made.mark()
    state = (
        list(made.nodes),
        dict(made.values),
        list(made.loads.arguments),
        list(made.loads.sizes),
    )
    for n in (
        tanh,
        node(graph.owning_module, aten.view.default),
        node(graph.owning_module, aten.mul.Tensor),
    ):
        assert made.add(n) is None
    assert len(made.loads.arguments) == 2 and len(made.loads.sizes) == 1
    made.rewind(mark)
    assert state == (made.nodes, made.values, made.loads.arguments, made.loads.sizes)
    assert not made.holds(tanh) and made.holds(add)


def test_a_refused_node_leaves_nothing_behind() -> None:
    def f(a: Tensor, b: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return torch.where(t, (a @ b).view(2, 3, 2, N), s)

    made, graph = builder(f, *PRODUCT, torch.rand(2, 3, 2, N) > 0.5, x(1, 3, 1, N))
    module = graph.owning_module
    assert made.add(node(module, aten.view.default)) is None
    before = (list(made.nodes), list(made.loads.arguments), list(made.loads.sizes))
    assert made.add(node(module, aten.where.self)) is not None  # the last operand's broadcast
    assert before == (made.nodes, made.loads.arguments, made.loads.sizes)


def test_a_region_with_nothing_but_its_bias_does_not_count() -> None:
    graph = prepared(trace(lambda a, b, c: torch.addmm(c, a, b), *PRODUCT, x(N))).graph
    (growth,) = growths(graph)
    assert growth.regions == ()


def test_a_view_or_a_cast_alone_does_not_count() -> None:
    graph = prepared(trace(lambda a, b: (a @ b).view(3, 4, N).bfloat16(), *PRODUCT)).graph
    assert regions(graph) == []


def test_a_long_chain_is_one_region() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        for _ in range(30):
            y = F.gelu(y) + 1
        return y

    region = largest(prepared(trace(f, *PRODUCT)).graph)
    assert len(region.nodes) == 61
    assert len(region.tree.sinks) == 1
    assert isinstance(region, Region)


def test_what_is_stored_in_half_precision_is_read_as_it_is_stored() -> None:
    """Backward starts from the stored value, so that what forward derives must belong to it."""

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        z = a @ b
        y = z * 0.3 + 1.5
        return z, y, torch.tanh(y), y.sum(0)

    tree = text(f, *HALVES)
    assert "v0 = cast(acc0, bf16) * 0.3 + 1.5; store(1: bf16 n 16, v0)" in tree
    assert (
        "v1 = cast(v0, bf16); store(2: bf16 n 16, tanh(v1)); reduce(3: bf16, sum, rows, v1)" in tree
    )
    assert "cast" not in text(f, *PRODUCT)
