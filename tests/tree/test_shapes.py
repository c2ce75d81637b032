"""Sizes of index spaces and outputs; symbolic sizes stay symbolic."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_evt.errors import TreeError
from torch_evt.tree.shapes import (
    IndexSpace,
    OutputSpec,
    axis_sizes,
    check_inputs,
    index_space,
    output_specs,
)
from torch_evt.tree.text import parse

F32 = torch.float32
EVERY_SINK = (
    "store(0: f32 n 4, acc0); store(1: bf16 m 4, acc0); reduce(2: f32, sum, rows, acc0); "
    "reduce(3: f32, sum, columns, acc0); reduce(4: f32, max, all, acc0); "
    "reduce(5: f32, moments, columns, acc0); reduce(6: f32, moments, all, acc0); "
    "select(7: f32, acc0, column(0: i64))"
)
PLAIN = parse(f"gemm(A: f32 k 4, B: f32 n 4) -> {EVERY_SINK}")
BATCHED = parse(
    f"gemm(A: f32 l k 4, B: f32 n 4) -> {EVERY_SINK}; reduce(8: f32, sum, rows, fold l, acc0); "
    "reduce(9: f32, sum, columns, fold l, acc0); reduce(10: f32, moments, rows, fold l, acc0)"
)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def test_every_output_of_a_plain_tree():
    inputs = tensors((5, 3), (3, 7), (5,))
    assert index_space(PLAIN, inputs, ()) == IndexSpace(None, 5, 7, 3)
    shapes = [(5, 7), (5, 7), (7,), (5,), (), (2, 5), (2,), (5,)]
    strides = [(7, 1), (1, 5), (1,), (1,), (), (5, 1), (1,), (1,)]
    dtypes = [F32, torch.bfloat16, *[F32] * 6]
    expected = map(OutputSpec, shapes, strides, dtypes)
    assert output_specs(PLAIN, inputs, ()) == tuple(expected)


def test_every_output_of_a_batched_tree():
    inputs = tensors((4, 5, 3), (3, 7), (4, 5))
    assert index_space(BATCHED, inputs, ()) == IndexSpace(4, 5, 7, 3)
    specs = output_specs(BATCHED, inputs, ())
    shapes = [(4, 5, 7), (4, 5, 7), (4, 7), (4, 5), (), (2, 4, 5), (2,), (4, 5)]
    assert [s.shape for s in specs] == [*shapes, (7,), (5,), (2, 7)]
    assert [s.stride for s in specs[:2]] == [(35, 7, 1), (35, 1, 5)]


@pytest.mark.parametrize("shape", [(0, 3, 4), (4, 0, 3), (2, 5, 0), (1, 1, 1)])
def test_strides_are_those_that_torch_gives_empty_and_single_axes(shape):
    batch, m, n = shape
    inputs = [torch.randn(batch, m, 3), torch.randn(3, n), torch.randn(batch, m)]
    for spec, axis in zip(output_specs(BATCHED, inputs, ())[:2], "nm", strict=True):
        like = torch.empty(shape) if axis == "n" else torch.empty(batch, n, m).mT
        assert spec.stride == like.stride()
    for spec in output_specs(BATCHED, inputs, ())[2:]:
        assert spec.stride == torch.empty(spec.shape).stride()


def test_the_space_comes_from_computed_operands_loads_and_overwritten_tiles():
    tree = parse(
        "gemm(A: f32 l = tile(0: f32 k 4), B: f32 = tile(1: f32 n 4)) -> store(0: f32 n 4, acc0)"
    )
    inputs = tensors((2, 5, 3), (3, 7))
    assert index_space(tree, inputs, ()) == IndexSpace(2, 5, 7, 3)
    tree = parse(
        "gemm(A: f32 k 4, B: f32 = tile(0: f32 n 4 [k, n div s0])) -> "
        "store(0: f32 n 4, acc0 + row(1: f32))"
    )
    assert index_space(tree, tensors((5, 3), (3, 2), (7,)), (4,)) == IndexSpace(None, 5, 7, 3)
    rows = parse("rows() -> store(0: f32 n 4, tile(0: f32 n 4 [m mod s0, n]) * column(1: f32))")
    assert index_space(rows, tensors((2, 7), (6,)), (2,)) == IndexSpace(None, 6, 7, None)
    into = parse("rows() -> store(into 0: f32 n 4, row(0: f32) * 2.0)")
    assert index_space(into, tensors((7,)), (), tensors((6, 7))) == IndexSpace(None, 6, 7, None)


def test_an_axis_that_no_tensor_has_is_an_error():
    tree = parse("rows() -> store(0: f32 n 4, tile(0: f32 n 4 [m mod s0, n]))")
    with pytest.raises(TreeError, match="whole axis m"):
        index_space(tree, tensors((2, 7)), (2,))


@pytest.mark.parametrize("tree", [PLAIN, BATCHED])
def test_symbolic_sizes_add_no_guards(tree):
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    shapes = [(5, 3), (3, 7), (5,)] if tree is PLAIN else [(4, 5, 3), (3, 7), (4, 5)]
    # the same number is the same symbol, as in a traced graph
    inputs = [
        mode.from_tensor(
            torch.randn(shape),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(shape)),
        )
        for shape in shapes
    ]
    before = len(environment.guards)
    specs = output_specs(tree, inputs, ())
    space = index_space(tree, inputs, ())
    assert isinstance(space.m, torch.SymInt)
    assert any(isinstance(size, torch.SymInt) for spec in specs for size in spec.stride)
    assert len(environment.guards) == before
    concrete = output_specs(tree, tensors(*shapes), ())
    hints = [tuple(s if isinstance(s, int) else s.node.hint for s in spec.shape) for spec in specs]
    assert hints == [spec.shape for spec in concrete]


@pytest.mark.parametrize("tree", [PLAIN, BATCHED])
def test_sizes_without_a_hint_are_never_compared(tree):
    """Comparing an unbacked symbol raises, so that a hidden max() or == cannot slip in."""
    environment = ShapeEnv()
    batch, m, n, k = (environment.create_unbacked_symint() for _ in range(4))
    a = (batch, m, k) if tree.batched else (m, k)
    column = (batch, m) if tree.batched else (m,)
    inputs = [SimpleNamespace(shape=shape) for shape in (a, (k, n), column)]
    specs = output_specs(tree, inputs, ())
    assert specs[0].shape[-1] is n
    assert str(specs[1].stride[-1]) == str(m)
    assert str(specs[0].stride[-2]) == str(n)


def test_every_product_has_a_reduced_axis_of_its_own():
    tree = parse(
        "gemm(A: f32 k 4, B: f32 n 4, A1: f32 k 4, B1: f32 = tile(0: f32 n 4)) -> "
        "store(0: f32 n 4, acc0 + acc1)"
    )
    inputs = tensors((5, 3), (3, 7), (5, 2), (2, 7))
    assert axis_sizes(tree, inputs, ()) == {"m": 5, "n": 7, "k0": 3, "k1": 2}
    check_inputs(tree, inputs, ())
    assert index_space(tree, inputs, ()) == IndexSpace(None, 5, 7, 3)


CHECKED = parse(
    "gemm(A: f32 l k 4, B: bf16 n 4) -> store(0: f32 n 4, acc0 + row(0: f32) + "
    "tile(1: f32 n 4 [l div s0, m mod s1, n])); store(into 0: f32 n 4, acc0)"
)


def good() -> tuple[list[torch.Tensor], list[int], list[torch.Tensor]]:
    inputs = tensors((4, 5, 3), (3, 7), (7,), (2, 3, 7))
    inputs[1] = inputs[1].bfloat16()
    return inputs, [3, 3], tensors((4, 5, 7))


def test_inputs_that_fit_pass_the_check():
    check_inputs(CHECKED, *good())


@pytest.mark.parametrize(
    ("which", "at", "wrong", "message"),
    [
        (0, 0, torch.randn(5, 3), "input 0 needs 3 dimensions, not 2"),
        (0, 0, torch.randn(4, 5, 2), "input 1 has size 3 in dimension 0, but axis k0 needs 2"),
        (0, 1, torch.randn(3, 7), "input 1 needs dtype bf16, not f32"),
        (0, 2, torch.randn(6), "input 2 has size 6 in dimension 0, but axis n needs 7"),
        (0, 2, torch.randn(()), "input 2 needs 1 dimensions, not 0"),
        (0, 3, torch.randn(1, 3, 7), "input 3 has size 1 in dimension 0, but axis l needs 2"),
        (0, 3, torch.randn(2, 5, 7), "input 3 has size 5 in dimension 1, but axis m needs 3"),
        (1, 0, 0, "size s0 must be positive"),
        (2, 0, torch.randn(4, 6, 7), "overwritten argument 0 has size 6 in dimension 1"),
        (2, 0, torch.randn(4, 5, 7).half(), "overwritten argument 0 needs dtype f32, not f16"),
    ],
)
def test_inputs_that_do_not_fit_are_named(which, at, wrong, message):
    given = good()
    given[which][at] = wrong
    with pytest.raises(TreeError, match=message):
        check_inputs(CHECKED, *given)


@pytest.mark.parametrize(
    ("which", "message"),
    [(0, r"4 input\(s\), not 3"), (1, r"2 size\(s\), not 1"), (2, r"1 overwritten .* not 0")],
)
def test_a_wrong_count_is_named(which, message):
    given = good()
    given[which].pop()
    with pytest.raises(TreeError, match=message):
        check_inputs(CHECKED, *given)
