"""The function table: formulas against torch's own functions, derivatives against autograd."""

import math
import operator

import pytest
import torch
from torch.nn import functional

from torch_evt.tree.functions import FUNCTIONS
from torch_evt.tree.ir import Compute, Const, Index, Value, postorder

AGAINST = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda x: -x,
    "abs": lambda x: x.abs(),
    "exp": lambda x: x.exp(),
    "expm1": lambda x: x.expm1(),
    "log": lambda x: x.log(),
    "log1p": torch.special.log1p,
    "sqrt": lambda x: x.sqrt(),
    "rsqrt": lambda x: 1 / x.sqrt(),
    "reciprocal": lambda x: 1 / x,
    "tanh": functional.tanh,
    "sigmoid": functional.sigmoid,
    "erf": torch.special.erf,
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "relu": functional.relu,
    "gelu_erf": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu_backward": lambda g, y: torch.ops.aten.threshold_backward(g, y, 0),
}
GRADIENTS = {
    "relu_grad": functional.relu,
    "gelu_erf_grad": functional.gelu,
    "gelu_tanh_grad": AGAINST["gelu_tanh"],
    "silu_grad": functional.silu,
}
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
POSITIVE = ("log", "log1p", "sqrt", "rsqrt")


def random(name: str, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random arguments in the function's domain, away from 0 and from each other."""
    result = []
    for i in range(count):
        x = torch.randn(500, dtype=torch.float64) * 2
        x = torch.where(x.abs() < 0.05, 0.05 + i, x)
        result.append((x.abs() if name in POSITIVE else x).to(dtype))
    return result


def evaluated(value: Value, arguments: dict[Value, torch.Tensor]) -> torch.Tensor:
    done = dict(arguments)
    for v in postorder([value]):
        if isinstance(v, Const):
            done[v] = torch.tensor(v.value, dtype=torch.float64)
        elif isinstance(v, Compute):
            done[v] = FUNCTIONS[v.function].formula(*(done[a] for a in v.arguments))
    return done[value]


def test_the_table_is_the_closed_list_of_the_language():
    expected = {*AGAINST, *GRADIENTS, *COMPARISONS, "where"}
    expected |= {"logical_and", "logical_or", "logical_not"}
    assert set(FUNCTIONS) == expected
    assert all(f.name == name for name, f in FUNCTIONS.items())
    assert all(len(f.derivatives) == f.arity for f in FUNCTIONS.values())
    operators = {f.operator: n for n, f in FUNCTIONS.items() if f.operator}
    assert operators == {"+": "add", "-": "sub", "*": "mul", "/": "div"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", AGAINST)
def test_formula_equals_torchs_own_function(name, dtype):
    arguments = random(name, FUNCTIONS[name].arity, dtype)
    result = FUNCTIONS[name].formula(*arguments)
    exact = AGAINST[name](*(a.double() for a in arguments))
    assert result.dtype == dtype
    # a few units in the last place of fp32: gelu near its zero crossing loses no more in torch
    torch.testing.assert_close(result.double(), exact, rtol=5e-6, atol=1e-6)
    torch.testing.assert_close(result, AGAINST[name](*arguments))


@pytest.mark.parametrize("name", GRADIENTS)
def test_grad_functions_are_the_derivative_as_a_factor(name):
    (x,) = random(name, 1, torch.float64)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(GRADIENTS[name](x).sum(), x)
    torch.testing.assert_close(FUNCTIONS[name].formula(x.detach()), expected)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if any(FUNCTIONS[n].derivatives)])
def test_every_derivative_equals_autograd_in_fp64(name):
    function = FUNCTIONS[name]
    tensors = random(name, function.arity, torch.float64)
    if name == "where":
        tensors[0] = tensors[0] > 0
    values = [Index(axis) for axis in "lmn"[: function.arity]]  # stand-ins for any values
    for i, derivative in enumerate(function.derivatives):
        if derivative is None:
            continue
        leaves = [t.clone() for t in tensors]
        leaves[i].requires_grad_()
        (expected,) = torch.autograd.grad(function.formula(*leaves).sum(), leaves[i])
        factor = evaluated(derivative(*values), dict(zip(values, tensors, strict=True)))
        torch.testing.assert_close(factor.expand_as(expected), expected)


@pytest.mark.parametrize("name", ["expm1", "log1p"])
def test_functions_near_zero_keep_the_small_argument(name):
    x = torch.randn(200).abs() * 1e-6 + 1e-9
    result = FUNCTIONS[name].formula(x).double()
    torch.testing.assert_close(result, AGAINST[name](x.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["maximum", "minimum", "abs"])
def test_derivatives_at_a_tie_are_torchs(name):
    function = FUNCTIONS[name]
    tie = torch.zeros(3, dtype=torch.float64) if name == "abs" else torch.randn(3).double()
    tensors = [tie.clone() for _ in range(function.arity)]
    values = [Index(axis) for axis in "lm"[: function.arity]]
    for i, derivative in enumerate(function.derivatives):
        leaves = [t.clone().requires_grad_() for t in tensors]
        expected = torch.autograd.grad(function.formula(*leaves).sum(), leaves[i])[0]
        factor = evaluated(derivative(*values), dict(zip(values, tensors, strict=True)))
        torch.testing.assert_close(factor.expand_as(expected), expected)


def test_what_is_constant_or_a_derivative_already_is_not_differentiated():
    constant = {n for n, f in FUNCTIONS.items() if not any(f.derivatives)}
    assert constant == {*COMPARISONS, *GRADIENTS, "logical_and", "logical_or", "logical_not"}
    assert FUNCTIONS["where"].derivatives[0] is None
    assert FUNCTIONS["relu_backward"].derivatives[1] is None


def test_comparisons_of_big_ints_are_exact():
    big = 2**53 + torch.randint(0, 2, (200,))
    other = 2**53 + torch.randint(0, 2, (200,))
    for name, compare in COMPARISONS.items():
        expected = [compare(a, b) for a, b in zip(big.tolist(), other.tolist(), strict=True)]
        assert FUNCTIONS[name].formula(big, other).tolist() == expected


def test_logic_and_where():
    a, b = torch.rand(100) > 0.5, torch.rand(100) > 0.5
    x, y = torch.randn(100), torch.randn(100)
    assert torch.equal(FUNCTIONS["logical_and"].formula(a, b), a & b)
    assert torch.equal(FUNCTIONS["logical_or"].formula(a, b), a | b)
    assert torch.equal(FUNCTIONS["logical_not"].formula(a), ~a)
    assert torch.equal(FUNCTIONS["where"].formula(a, x, y), torch.where(a, x, y))


def test_relu_backward_drops_inf_and_nan_where_y_is_not_positive_and_lets_nan_in_y_through():
    inf, nan = math.inf, math.nan
    g = torch.tensor([inf, nan, inf, nan, 1.5, 2.5] * 8)
    y = torch.tensor([-1.0, 0.0, 3.0, 4.0, nan, -0.0] * 8)
    result = FUNCTIONS["relu_backward"].formula(g, y)
    expected = torch.tensor([0.0, 0.0, inf, nan, 1.5, 0.0] * 8)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        result, AGAINST["relu_backward"](g, y), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "silu", "gelu_erf", "gelu_tanh", "erf"])
def test_saturating_functions_do_not_overflow_in_fp32(name):
    x = torch.tensor([-1e4, -90.0, -30.0, 30.0, 90.0, 1e4]) * (1 + torch.rand(6))
    for function in (name, f"{name}_grad"):
        if function in FUNCTIONS:
            result = FUNCTIONS[function].formula(x)
            exact = FUNCTIONS[function].formula(x.double())
            assert result.isfinite().all()
            torch.testing.assert_close(result.double(), exact, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize(
    "name",
    # relu_grad of NaN is 0: 1 where x > 0
    [n for n, f in FUNCTIONS.items() if f.arguments == "float" and n != "relu_grad"],
)
def test_a_nan_in_the_first_argument_comes_out_as_a_nan(name):
    arguments = [torch.full((40,), math.nan), *random(name, FUNCTIONS[name].arity, torch.float32)]
    arguments = [a[:40].abs() if i else a for i, a in enumerate(arguments)]
    assert FUNCTIONS[name].formula(*arguments[: FUNCTIONS[name].arity]).isnan().all()
