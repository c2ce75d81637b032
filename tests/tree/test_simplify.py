"""Simplification: each rule, what it must leave alone, and equal values for random trees."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.tree.strategies import cases

from torch_evt.tree.evaluate import evaluate
from torch_evt.tree.ir import Const
from torch_evt.tree.simplify import simplify
from torch_evt.tree.text import parse, to_text
from torch_evt.tree.verify import verify

HEAD = "gemm(A: bf16 k 16, B: bf16 k 16) -> "


def simple(value: str, dtype: str = "bf16") -> str:
    text = to_text(simplify(parse(f"{HEAD}store(0: {dtype} n 16, {value})")))
    return text.removeprefix(f"{HEAD}store(0: {dtype} n 16, ").removesuffix(")")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("cast(acc0, f32) + 2.0", "acc0 + 2.0"),
        ("cast(cast(acc0, bf16), bf16)", "cast(acc0, bf16)"),
        ("cast(cast(acc0, bf16), f32)", "cast(acc0, bf16)"),
        ("cast(cast(cast(acc0, f32), bf16), bf16)", "cast(acc0, bf16)"),
        ("acc0 + cast(row(0: bf16), bf16)", "acc0 + row(0: bf16)"),
        ("acc0 * 1.0", "acc0"),
        ("1.0 * acc0", "acc0"),
        ("acc0 / 1.0", "acc0"),
        ("neg(neg(acc0))", "acc0"),
        ("neg(neg(neg(acc0)))", "neg(acc0)"),
        ("where(true, acc0, 2.0)", "acc0"),
        ("where(false, 2.0, acc0)", "acc0"),
        ("where(true, 2.0, acc0)", "2.0"),
        ("acc0 * (2.0 + 3.0 * 4.0)", "acc0 * 14.0"),
        ("acc0 * maximum(abs(-3.0), 2.0)", "acc0 * 3.0"),
        ("acc0 * (0.5 * 2.0)", "acc0"),
        ("acc0 + neg(0.0)", "acc0 + -0.0"),
        ("acc0 + 1.0 / 0.0", "acc0 + inf"),
        ("acc0 * (1.0 / 3.0)", f"acc0 * {1 / 3!r}"),
    ],
)
def test_what_changes_nothing_goes(value, expected):
    assert simple(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        "acc0 + 0.0",  # -0.0 + 0.0 is 0.0
        "acc0 - 0.0",
        "acc0 - 1.0",
        "acc0 + 1.0",
        "acc0 * 0.0",
        "0.0 - acc0",
        "1.0 / acc0",
        "1.0 - acc0",
        "acc0 * 2.0 * 3.0",
        "acc0 + 1.0 + 2.0",
        "cast(acc0, bf16) * 2.0",
        "cast(cast(acc0, bf16), f16)",
        "cast(cast(acc0, f16), bf16)",
        "cast(index(m), f32)",
        "acc0 * exp(2.0)",  # its last bit depends on the machine
        "cast(gt(acc0, 0.0), f32)",
        "tile(0: bool n 1) * 1.0",  # the factor makes it a float
        "where(true, tile(0: bool n 1), 2.0)",
        "where(true, acc0, row(0: bf16))",  # argument 0 would be left without a use
        "cast(acc0 * 1e-05, f8e4m3)",
    ],
)
def test_what_could_change_a_value_a_type_or_the_inputs_stays(value):
    assert simple(value) == value


def test_integers_are_not_folded_through_floats():
    assert simple(f"where(eq({2**53}, {2**53 + 1}), 1, 2)", "i64") == (
        f"where(eq({2**53}, {2**53 + 1}), 1, 2)"
    )
    assert simple("cast(cast(tile(0: i32 n 4), i32), i64) + 2", "i64") == "tile(0: i32 n 4) + 2"
    assert simple("cast(tile(0: i64 n 8), i8)", "i8") == "cast(tile(0: i64 n 8), i8)"


def test_identical_stores_and_computed_operands_are_kept():
    text = (
        "gemm(A: bf16 = neg(neg(tile(0: bf16 k 16))), B: bf16 k 16) -> "
        "store(0: f32 n 16, acc0 * 1.0); store(1: f32 n 16, acc0); "
        "select(2: f32, acc0, cast(column(1: i64), i64))"
    )
    assert to_text(simplify(parse(text))) == (
        "gemm(A: bf16 = tile(0: bf16 k 16), B: bf16 k 16) -> store(0: f32 n 16, acc0); "
        "store(1: f32 n 16, acc0); select(2: f32, acc0, column(1: i64))"
    )


def test_folding_rounds_once_from_fp64():
    tree = simplify(parse(f"{HEAD}store(0: f32 n 16, acc0 * (0.1 + 0.2))"))
    assert tree.sinks[0].value.arguments[1] is Const(0.1 + 0.2)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, with one NaN for all NaNs."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.double().nan_to_num(nan=math.pi).contiguous().view(torch.int64)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(smooth=False))
def test_a_simplified_random_tree_is_valid_settled_and_has_bit_equal_values(case):
    tree = simplify(case.tree)
    verify(tree)
    assert simplify(tree) == tree
    results = []
    for each in (case.tree, tree):
        overwritten = [t.clone() for t in case.overwritten]
        # constants that fold in fp64 round once instead of at every step
        outputs = evaluate(
            each, case.inputs, case.sizes, overwritten, compute_dtype=torch.float64, exact=True
        )
        results.append([*outputs, *overwritten])
    for old, new in zip(*results, strict=True):
        assert old.dtype == new.dtype
        assert torch.equal(bits(old), bits(new))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(smooth=True))
def test_a_simplified_random_tree_rounds_as_before_in_fp32(case):
    results = []
    for each in (case.tree, simplify(case.tree)):
        overwritten = [t.clone() for t in case.overwritten]
        outputs = evaluate(each, case.inputs, case.sizes, overwritten)
        results.append([*outputs, *overwritten])
    for old, new in zip(*results, strict=True):
        old, new = old.double(), new.double()
        if not torch.equal(bits(old), bits(new)):
            scale = old.abs().max().item()
            torch.testing.assert_close(new, old, rtol=1e-2, atol=1e-2 * scale, equal_nan=True)
