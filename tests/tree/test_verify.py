"""The verifier: accepts every valid tree, and names what breaks a rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from tests.tree.strategies import trees

from torch_evt.errors import TreeError
from torch_evt.tree.ir import (
    Accumulator,
    Cast,
    Compute,
    Const,
    Index,
    Keep,
    Layout,
    Load,
    Operand,
    Reduce,
    Statistic,
    Store,
    Term,
    Tree,
    Value,
)
from torch_evt.tree.text import parse
from torch_evt.tree.verify import value_type, verify

HEAD = "gemm(A: bf16 k 16, B: bf16 k 16) -> "
BATCHED = "gemm(A: bf16 l k 16, B: bf16 k 16) -> "
BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
N16 = Layout("n", 16)
A, B = Operand("A", BF16, Layout("k", 16)), Operand("B", BF16, Layout("k", 16))


def store(value: str, dtype: str = "f32") -> str:
    return f"{HEAD}store(0: {dtype} n 16, {value})"


def gemm(value: Value, dtype: torch.dtype = F32) -> Tree:
    return Tree("gemm", (A, B), (Store(value, dtype, N16),))


@settings(max_examples=80, deadline=None)
@given(trees())
def test_every_tree_of_the_strategy_is_accepted(tree):
    verify(tree)


@pytest.mark.parametrize(
    "text",
    [
        store("acc0 * tile(0: bool n 1)"),
        store("where(eq(column(0: i64), index(n)), acc0, 0.0)"),
        store("eq(column(0: i64), index(n))", "bool"),
        store("index(m) * 3 + tile(0: u8 n 1)", "i64"),
        BATCHED + "store(0: f32 n 16, acc0 + row(0: f32 [l, n]) + scalar(1: f32 [l mod s0]))",
        BATCHED + "reduce(0: f32, sum, all, acc0); reduce(1: f32, sum, all, fold l, acc0)",
        HEAD + "reduce(0: i64, sum, columns, gt(acc0, 0.0))",
        HEAD + "select(0: f32, acc0, where(lt(column(0: i64), 0), 0, column(0: i64)))",
        HEAD + "store(into 0: f32 - 4, acc0 + tile(into 0: f32 - 4))",
        "gemm(A: bf16 = tile(0: bf16 k 16) * row(1: bf16), B: bf16 = tile(2: f8e4m3 n 16) * "
        "row(3: f32)) -> store(0: f64 m 8, acc0)",
        "rows() -> v0 = tile(0: f32 n 16); "
        "select(0: f32, v0, cast(statistic(v0, columns, max), i64))",
        "rows() -> store(into 0: f32 n 16, exp(tile(into 0: f32 n 16)))",
    ],
)
def test_legal_but_unusual_trees_are_accepted(text):
    verify(parse(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # types
        (store("acc0 + index(m)"), r"value acc0 \+ index\(m\): an int and a float meet"),
        (store("acc0 * 2"), "an int and a float meet"),
        (store("exp(index(n))"), r"exp takes float arguments, not int"),
        (store("tile(0: bool n 1) + true", "bool"), "add takes float or int arguments, not bool"),
        (store("logical_not(acc0)", "bool"), "logical_not takes bool arguments, not float"),
        (store("where(acc0, 1.0, 0.0)"), "where needs a bool condition, not float"),
        (store("where(true, acc0, 1)"), "an int and a float meet"),
        (store("eq(acc0, 0)", "bool"), "an int and a float meet"),
        (store("keep(acc0, 1, 0.1)", "bool"), "keep needs an int seed and an int offset"),
        (store("keep(1, 1, 1.5)", "bool"), "p is a float from 0 to 1"),
        (store("keep(1, 1, nan)", "bool"), "p is a float from 0 to 1"),
        (store("cast(acc0, f64)"), "a cast to f64"),
        (store("index(m)"), r"sink 0 \(store\) writes f32 but its value is int"),
        (store("gt(acc0, 0.0)"), "writes f32 but its value is bool"),
        (store("acc0", "i32"), "writes i32 but its value is float"),
        (HEAD + "reduce(0: i64, logsumexp, rows, index(m))", "logsumexp takes float values"),
        (HEAD + "reduce(0: bool, max, rows, gt(acc0, 0.0))", "max takes float or int values"),
        (HEAD + "reduce(0: f32, sum, rows, index(m))", "writes f32 but its value is int"),
        (HEAD + "select(0: f32, acc0, column(0: f32))", "the column must be an int, not float"),
        (store(str(2**63), "i64"), "must fit into int64"),
        # axes
        (store("acc0 + row(0: f32 [l, n])"), "axis l is not in the index space"),
        (store("acc0 + tile(0: f32 k 4 [m, k])"), "axis k is not in the index space"),
        (store("cast(index(l), f32)"), "axis l is not in the index space"),
        (
            "gemm(A: bf16 = tile(0: bf16 k 16) * row(1: f32 [n]), B: bf16 k 16) -> "
            "store(0: f32 n 16, acc0)",
            r"operand A, value row\(1: f32 \[n\]\): axis n is not in the index space \(m, k\)",
        ),
        (
            "gemm(A: bf16 k 16, B: bf16 = tile(0: bf16 n 16 [m, n])) -> store(0: f32 n 16, acc0)",
            r"axis m is not in the index space \(k, n\)",
        ),
        (
            "gemm(A: bf16 l k 16, B: bf16 = tile(0: bf16 n 16 [l, k, n])) -> "
            "store(0: f32 n 16, acc0)",
            "axis l is not in the index space",
        ),
        (HEAD + "select(0: f32, acc0, column(0: i64) + index(n))", "must not depend on n"),
        (HEAD + "select(0: f32, acc0, cast(acc0, i64))", "must not depend on n"),
        (HEAD + "reduce(0: f32, sum, rows, fold l, acc0)", "folds the batch of a tree that has"),
        # main loops and operands
        (store("statistic(acc0, columns, max)"), "a statistic needs the main loop"),
        (
            "rows() -> store(0: f32 n 4, statistic(tile(0: f32 n 4), rows, max))",
            "a statistic is a sum, max or logsumexp over columns",
        ),
        (
            "rows() -> store(0: f32 n 4, statistic(tile(0: f32 n 4), columns, moments))",
            "a statistic is a sum, max or logsumexp over columns",
        ),
        ("rows() -> store(0: f32 n 4, tile(0: f32 n 4) + acc0)", "there is no product 0"),
        (store("acc1"), "value acc1: there is no product 1"),
        ("rows(A: bf16 k 16) -> store(0: f32 n 4, tile(0: f32 n 4))", "has no operands"),
        ("gemm(A: bf16 k 16) -> store(0: f32 n 4, acc0)", "a gemm has operands A, B, then"),
        ("gemm(B: bf16 k 16, A: bf16 k 16) -> store(0: f32 n 4, acc0)", "a gemm has operands"),
        ("gemm() -> store(0: f32 n 4, tile(0: f32 n 4))", "a gemm has operands"),
        ("gemm(A: bf16 k 16, B: f64 k 16) -> store(0: f32 n 4, acc0)", "B cannot be f64"),
        ("gemm(A: i8 k 16, B: bf16 k 16) -> store(0: f32 n 4, acc0)", "A cannot be i8"),
        ("gemm(A: bf16, B: bf16 k 16) -> store(0: f32 n 4, acc0)", "A is a tensor and needs"),
        (
            "gemm(A: bf16 k 16 = tile(0: bf16 k 16), B: bf16 k 16) -> store(0: f32 n 4, acc0)",
            "A is computed, so it has no layout",
        ),
        (
            "gemm(A: bf16 = tile(0: i8 k 16), B: bf16 k 16) -> store(0: f32 n 4, acc0)",
            "operand A must be a float value, not int",
        ),
        (
            "gemm(A: bf16 = tile(0: bf16 k 16) * acc0, B: bf16 k 16) -> store(0: f32 n 4, acc0)",
            "computed before there is an accumulator",
        ),
        (
            "gemm(A: bf16 = statistic(tile(0: f32 k 4), columns, max), B: bf16 k 16) -> "
            "store(0: f32 n 4, acc0)",
            "a statistic needs the main loop",
        ),
        # layouts, loads, numbers
        ("gemm(A: bf16 n 16, B: bf16 k 16) -> store(0: f32 n 4, acc0)", "contiguous axis is one"),
        ("gemm(A: bf16 l 16, B: bf16 k 16) -> store(0: f32 n 4, acc0)", "contiguous axis is one"),
        ("gemm(A: bf16 k 3, B: bf16 k 16) -> store(0: f32 n 4, acc0)", "alignment is one of"),
        (HEAD + "store(0: f32 - 4, acc0)", r"contiguous axis is one of \('m', 'n'\), not -"),
        (HEAD + "store(0: f32 n 32, acc0)", "alignment is one of"),
        (store("acc0 + tile(0: f32 l 4)"), "contiguous axis is one"),
        (store("acc0 + tile(0: f32)"), "a tile has a layout, and no other load has one"),
        (store("acc0 + row(0: f32 n 4)"), "a tile has a layout, and no other load has one"),
        (store("acc0 + row(0: f64)"), "f64 cannot be loaded"),
        (store("acc0 + row(1: f32)"), r"arguments must be numbered .* not \[1\]"),
        (store("acc0 + row(0: f32 [n div s1])"), r"sizes must be numbered .* not \[1\]"),
        (store("acc0 + row(0: f32) + row(0: bf16)"), "argument 0 is loaded with two dtypes"),
        (store("acc0 + row(0: f32) + scalar(0: f32)"), "argument 0 is loaded with two dtypes"),
        # overwritten arguments
        (HEAD + "store(into 1: f32 n 4, acc0)", r"overwritten arguments must be numbered"),
        (HEAD + "store(into 0: f32 n 4, acc0); store(into 0: f32 n 4, acc0)", "two stores"),
        (store("acc0 + tile(into 0: f32 n 4)"), "no store overwrites argument 0"),
        (
            HEAD + "store(into 0: f32 n 4, acc0 + tile(into 0: bf16 n 4))",
            "read as it is written",
        ),
        (
            HEAD + "store(into 0: f32 n 4, acc0 + tile(into 0: f32 m 4))",
            "read as it is written",
        ),
        (
            HEAD + "store(into 0: f32 n 4, acc0 + tile(into 0: f32 n 4 [m mod s0, n]))",
            "read as it is written",
        ),
        (
            HEAD + "store(into 0: f32 n 4, acc0 + row(into 0: f32))",
            "read as it is written",
        ),
        (
            "gemm(A: f32 = tile(into 0: f32 k 4), B: bf16 k 16) -> store(into 0: f32 n 4, acc0)",
            "an operand cannot read an argument that the epilogue overwrites",
        ),
        # sizes that no tensor gives
        ("rows() -> store(0: f32 n 4, cast(index(n), f32))", "no tensor of the tree has the whole"),
        (
            "rows() -> store(0: f32 n 4, tile(0: f32 n 4 [m mod s0, n]))",
            "no tensor of the tree has the whole axis m",
        ),
    ],
)
def test_a_broken_rule_is_named(text, message):
    with pytest.raises(TreeError, match=message):
        verify(parse(text))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Tree("conv", (), ()), "the main loop is"),
        (Tree("gemm", (A, B), ()), "a tree without sinks"),
        (gemm(Compute("softmax", (Accumulator(),))), "there is no function 'softmax'"),
        (gemm(Compute("exp", (Accumulator(), Accumulator()))), "exp takes 1 arguments, not 2"),
        (gemm(Const("1")), "a constant is a float, int or bool, not str"),
        (gemm(Cast(Accumulator(), torch.complex64)), "dtype torch.complex64 is not one of"),
        (gemm(Accumulator(), torch.complex64), "dtype torch.complex64 is not one of"),
        (gemm(Load(0, torch.complex64, ())), "dtype torch.complex64 is not one of"),
        (gemm(Load(0, F32, (Term("n", None, 0),))), "a size belongs to div and mod"),
        (gemm(Load(0, F32, (Term("n", "div"),))), "a size belongs to div and mod"),
        (gemm(Load(0, F32, (Term("n", "xor", 0),))), "an index map divides by div or mod"),
        (gemm(Cast(Index("q"), F32)), "axis q is not in the index space"),
        (gemm(Keep(Const(1), Const(1), 1), torch.bool), "p is a float"),
        (
            Tree("gemm", (A, B), (Reduce(Accumulator(), "rows", "mean", F32),)),
            "there is no mean over rows",
        ),
        (
            Tree(
                "gemm",
                (A, Operand("B", BF16, None, False, Statistic(Const(1.0), "rows", "sum"))),
                (Store(Accumulator(), F32, N16),),
            ),
            "a statistic needs the main loop",
        ),
    ],
)
def test_a_tree_that_no_text_can_say_is_refused_too(tree, message):
    with pytest.raises(TreeError, match=message):
        verify(tree)


def test_the_message_names_the_offending_value_and_stays_short():
    value: Value = Accumulator()
    for _ in range(500):
        value = Compute("add", (value, Compute("tanh", (value,))))
    with pytest.raises(TreeError) as error:
        verify(gemm(Compute("add", (value, Const(1)))))
    assert "an int and a float meet" in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Accumulator(), "float"),
        (Load(0, torch.uint8, ()), "int"),
        (Load(0, torch.bool, ()), "bool"),
        (Load(0, torch.float8_e5m2, ()), "float"),
        (Const(math.pi), "float"),
        (Const(3), "int"),
        (Const(True), "bool"),
        (Index("m"), "int"),
        (Cast(Index("m"), BF16), "float"),
        (Compute("mul", (Const(True), Const(2.0))), "float"),
        (Compute("add", (Const(True), Const(2))), "int"),
        (Compute("where", (Const(True), Const(False), Const(True))), "bool"),
        (Compute("where", (Const(True), Const(False), Const(2))), "int"),
        (Compute("le", (Const(3), Const(2))), "bool"),
        (Statistic(Const(True), "columns", "sum"), "int"),
        (Keep(Const(3), Const(2), 0.1), "bool"),
    ],
)
def test_value_types(value, expected):
    assert value_type(value) == expected
