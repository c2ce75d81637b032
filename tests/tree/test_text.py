"""The text form: golden examples, exact round trips, and messages that say where and what."""

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
    Neighbour,
    Operand,
    Reduce,
    Select,
    Statistic,
    Store,
    Term,
    Tree,
    Value,
)
from torch_evt.tree.text import parse, to_text

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
N16, K16 = Layout("n", 16), Layout("k", 16)
M, N, K, L = map(Term, "mnkl")
A, B = Operand("A", BF16, K16), Operand("B", BF16, K16)
ACC = Accumulator()


def call(function: str, *arguments: Value) -> Compute:
    return Compute(function, arguments)


def sole(value: Value) -> str:
    """The text of one value, stored."""
    text = to_text(Tree("gemm", (A, B), (Store(value, BF16, N16),)))
    head, tail = "gemm(A: bf16 k 16, B: bf16 k 16) -> store(0: bf16 n 16, ", ")"
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : -len(tail)]


def test_golden_forward_of_a_linear_with_gelu():
    z = call("add", ACC, Load(0, BF16, (N,)))
    tree = Tree("gemm", (A, B), (Store(z, BF16, N16), Store(call("gelu_tanh", z), BF16, N16)))
    assert to_text(tree) == (
        "gemm(A: bf16 k 16, B: bf16 k 16) -> v0 = acc0 + row(0: bf16); "
        "store(0: bf16 n 16, v0); store(1: bf16 n 16, gelu_tanh(v0))"
    )


def test_golden_backward_of_a_linear_with_gelu():
    z = Load(0, BF16, (M, N), N16)
    d = call("mul", ACC, call("gelu_tanh_grad", z))
    sinks = (Store(d, BF16, N16), Reduce(d, "rows", "sum", BF16))
    tree = Tree("gemm", (A, Operand("B", BF16, N16)), sinks)
    assert to_text(tree) == (
        "gemm(A: bf16 k 16, B: bf16 n 16) -> v0 = acc0 * gelu_tanh_grad(tile(0: bf16 n 16)); "
        "store(0: bf16 n 16, v0); reduce(1: bf16, sum, rows, v0)"
    )


def test_the_designs_own_spelling_with_other_names_is_the_same_tree():
    text = (
        "gemm(A: bf16 k 16, B: bf16 k 16) -> z = acc0 + row(0: bf16); store(0: bf16 n 16, z); "
        "store(1: bf16 n 16, gelu_tanh(z))"
    )
    assert to_text(parse(text)) == text.replace("z;", "v0;").replace("z =", "v0 =").replace(
        " z)", " v0)"
    ).replace("(z)", "(v0)")


def test_golden_batched_tree_with_computed_operand_and_every_sink():
    tile = Load(0, BF16, (L, M, K), K16)
    a = Operand("A", BF16, None, True, call("mul", tile, call("sigmoid", tile)))
    into = Load(0, F32, (L, M, N), N16, overwritten=True)
    table = Load(1, BF16, (Term("m", "mod", 0), N), N16)
    per_group = Load(2, F32, (Term("l", "div", 1), N))
    z = call("add", call("mul", ACC, table), per_group)
    target = Load(3, I64, (L, M))
    tree = Tree(
        "gemm",
        (a, Operand("B", BF16, N16)),
        (
            Store(call("add", into, z), F32, N16, into=0),
            Reduce(z, "rows", "sum", F32),
            Reduce(z, "rows", "sum", F32, fold_batch=True),
            Reduce(z, "columns", "logsumexp", F32),
            Select(Cast(z, BF16), target, F32),
        ),
    )
    text = (
        "gemm(A: bf16 l = {v0 = tile(0: bf16 k 16); v0 * sigmoid(v0)}, B: bf16 n 16) -> "
        "v1 = acc0 * tile(1: bf16 n 16 [m mod s0, n]) + row(2: f32 [l div s1, n]); "
        "store(into 0: f32 n 16, tile(into 0: f32 n 16) + v1); reduce(0: f32, sum, rows, v1); "
        "reduce(1: f32, sum, rows, fold l, v1); reduce(2: f32, logsumexp, columns, v1); "
        "select(3: f32, cast(v1, bf16), column(3: i64))"
    )
    assert to_text(tree) == text
    assert parse(text) == tree


def test_golden_rows_tree():
    x = Load(0, BF16, (M, N), N16)
    top = Statistic(x, "columns", "max")
    kept = Keep(Load(1, I64, ()), Index("m"), 0.1)
    value = call("where", kept, call("sub", x, top), Neighbour(x))
    tree = Tree("rows", (), (Store(value, BF16, N16),))
    assert to_text(tree) == (
        "rows() -> v0 = tile(0: bf16 n 16); store(0: bf16 n 16, "
        "where(keep(scalar(1: i64), index(m), 0.1), v0 - statistic(v0, columns, max), "
        "neighbour(v0)))"
    )
    assert parse(to_text(tree)) == tree


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (call("sub", ACC, call("sub", ACC, ACC)), "acc0 - (acc0 - acc0)"),
        (call("sub", call("sub", ACC, ACC), ACC), "acc0 - acc0 - acc0"),
        (call("mul", call("add", ACC, ACC), Const(-1.5)), "(acc0 + acc0) * -1.5"),
        (call("add", call("mul", ACC, ACC), Const(2.0)), "acc0 * acc0 + 2.0"),
        (call("div", ACC, call("mul", ACC, ACC)), "acc0 / (acc0 * acc0)"),
        (call("sub", Const(1.0), call("neg", ACC)), "1.0 - neg(acc0)"),
    ],
)
def test_infix_has_usual_precedence_and_associates_to_the_left(value, text):
    assert sole(value) == text
    assert parse(to_text(Tree("gemm", (A, B), (Store(value, BF16, N16),)))).sinks[0].value is value


@pytest.mark.parametrize(
    ("constant", "text"),
    [
        (1.0, "1.0"),
        (1, "1"),
        (True, "true"),
        (False, "false"),
        (-0.0, "-0.0"),
        (1e-05, "1e-05"),
        (1e300, "1e+300"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (-(2**63), str(-(2**63))),
        (0.1 + 0.2, "0.30000000000000004"),
    ],
)
def test_constants_keep_their_type_sign_and_every_bit(constant, text):
    value = call("add", ACC, Const(constant))
    assert sole(value) == f"acc0 + {text}"
    tree = Tree("gemm", (A, B), (Store(value, BF16, N16),))
    assert parse(to_text(tree)).sinks[0].value is value


@settings(max_examples=100, deadline=None)
@given(trees())
def test_round_trip_is_exact_for_every_tree(tree):
    text = to_text(tree)
    assert "\n" not in text
    assert parse(text) == tree
    assert to_text(parse(text)) == text


def test_equal_trees_built_in_other_orders_have_one_text():
    bias = Load(0, BF16, (N,))
    first = Tree("gemm", (A, B), (Store(call("add", ACC, bias), BF16, N16),))
    del bias
    again = Store(call("add", Accumulator(0), Load(0, BF16, (Term("n"),))), BF16, Layout("n", 16))
    assert to_text(Tree("gemm", (A, B), (again,))) == to_text(first)


def test_text_of_a_shared_tree_grows_with_its_values_not_with_its_paths():
    value: Value = ACC
    for _ in range(200):
        value = call("mul", value, call("tanh", value))
    tree = Tree("gemm", (A, B), (Store(value, BF16, N16),))
    assert len(to_text(tree)) < 200 * 40
    assert parse(to_text(tree)) == tree


def test_a_very_deep_tree_gets_names_instead_of_a_recursion_error():
    value: Value = ACC
    for _ in range(3000):
        value = call("tanh", value)
    tree = Tree("gemm", (A, B), (Store(value, BF16, N16),))
    assert parse(to_text(tree)) == tree


def test_operand_whose_contiguous_axis_is_the_batch_is_not_taken_for_a_batched_one():
    for batched in (False, True):
        for axis in ("l", "k", "-"):
            a = Operand("A", BF16, Layout(axis, 8), batched)
            tree = Tree("gemm", (a, B), (Store(ACC, BF16, N16),))
            assert parse(to_text(tree)) == tree


HEAD = "gemm(A: bf16 k 16, B: bf16 k 16) -> "


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("conv() -> store(0: f32 n 4, acc0)", 0, "expected a main loop (gemm, rows)"),
        (HEAD + "store(1: bf16 n 16, acc0)", 42, "expected 0, the next output"),
        (HEAD + "store(0: bf17 n 16, acc0)", 45, "expected a dtype (f64, f32"),
        (HEAD + "store(0: bf16 n 16, soft(acc0))", 56, "a function of the table"),
        (HEAD + "store(0: bf16 n 16, tanh(acc0, acc0))", 61, "expected 1 arguments of tanh"),
        (HEAD + "store(0: bf16 n 16, v0)", 56, "expected a value, found 'v0'"),
        (HEAD + "store(0: bf16 n 16, acc0", 60, "expected ')', found 'the end'"),
        (HEAD + "store(0: bf16 n 16, acc0) store", 62, "expected the end, found 'store'"),
        (HEAD + "acc0 = acc0; store(0: bf16 n 16, acc0)", 36, "a name that is not in use"),
        (HEAD + "x = acc0; x = acc0; store(0: bf16 n 16, x)", 46, "a name that is not in use"),
        (HEAD + "store(0: bf16 n 16, row(0: f32 [m]))", 56, "expected column"),
        (HEAD + "store(0: bf16 n 16, row(0: f32 [m div 3]))", 74, "a size (s0, s1, ...)"),
        (HEAD + "reduce(0: bf16, mean, rows, acc0)", 52, "expected a reduction (sum, max"),
        (HEAD + "store(0: bf16 n 16, acc0 ? 1)", 61, "'?' is no part of a tree"),
        ("gemm(C: bf16 k 16) -> store(0: bf16 n 16, acc0)", 5, "an operand's name (A, B"),
        (HEAD + "store(0: bf16 n 16, -acc0)", 57, "expected a number"),
    ],
)
def test_errors_say_the_position_and_what_was_expected(text, position, message):
    with pytest.raises(TreeError) as error:
        parse(text)
    assert f"at position {position}:" in str(error.value)
    assert message in str(error.value)


def test_parser_refuses_absurd_nesting_with_a_tree_error():
    text = HEAD + "store(0: bf16 n 16, " + "tanh(" * 5000 + "acc0" + ")" * 5001
    with pytest.raises(TreeError, match="nested"):
        parse(text)


@pytest.mark.parametrize("cut", range(0, 140, 3))
def test_every_cut_off_text_is_a_tree_error(cut):
    text = (
        HEAD + "v0 = acc0 + row(0: bf16 [n mod s0]); store(0: bf16 n 16, v0); "
        "reduce(1: f32, sum, rows, cast(v0, bf16) * (keep(1, 2, 0.1) - 1e-05))"
    )
    assert parse(text)
    if text[:cut].rstrip().endswith((";", ")")) and "store" in text[:cut]:
        return  # what is left is a tree
    with pytest.raises(TreeError):
        parse(text[:cut])
