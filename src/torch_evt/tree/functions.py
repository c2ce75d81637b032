"""The closed table of functions that a `Compute` may apply: formula, types, spelling, derivatives.

A formula is torch code, used by `tree.evaluate`; an emitter spells each function in its own
language. A derivative is a tree over the same table, so that whatever computes a function can
compute its derivative too. It is None for an argument that the function is not differentiated in:
where it is constant almost everywhere (comparisons, conditions), or a derivative already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from torch_evt.tree.ir import Compute, Const, Value

Formula = Callable[..., Tensor]
Derivative = Callable[..., Value]


@dataclass(frozen=True)
class Function:
    """One function of the table.

    result: the type of its value; "same": the type that its arguments have in common.
    formula: torch code on tensors that broadcast: floats of one dtype up to fp64, int64 or bool.
    operator: its infix spelling in a tree's text, None where it is written as a call.
    derivatives: one per argument: builds, from the arguments, the partial derivative.
    arguments: which types it takes. A bool beside a float or an int counts as 0 or 1, an int never
    meets a float.
        "float": floats; "number": floats or ints; "any": also bools alone; "bool": bools;
        "where": a bool, then two of any one type.
    """

    name: str
    arity: int
    result: Literal["float", "bool", "same"]
    formula: Formula
    operator: str | None = None
    derivatives: tuple[Derivative | None, ...] = ()
    arguments: Literal["float", "number", "any", "bool", "where"] = "float"


def _call(name: str, *arguments: Value) -> Value:
    return Compute(name, arguments)


def _gelu(approximate: str) -> Formula:
    return lambda x: torch.nn.functional.gelu(x, approximate=approximate)


def _gelu_grad(approximate: str) -> Formula:
    return lambda x: torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)


def _sign(x: Value) -> Value:
    negative = _call("where", _call("lt", x, Const(0.0)), Const(-1.0), Const(0.0))
    return _call("where", _call("gt", x, Const(0.0)), Const(1.0), negative)


def _chosen(loses: str) -> tuple[Derivative, Derivative]:
    """Derivatives of maximum and minimum; as in torch, equal arguments share the gradient."""

    def factor(x: Value, other: Value) -> Value:
        rest = _call("where", _call(loses, x, other), Const(0.0), Const(1.0))
        return _call("where", _call("eq", x, other), Const(0.5), rest)

    return factor, lambda x, other: factor(other, x)


def _square(x: Value) -> Value:
    return _call("mul", x, x)


_ONE, _MINUS_ONE, _ZERO = Const(1.0), Const(-1.0), Const(0.0)


def _arithmetic() -> list[Function]:
    return [
        Function(
            "add", 2, "same", torch.add, "+", (lambda a, b: _ONE, lambda a, b: _ONE), "number"
        ),
        Function(
            "sub", 2, "same", torch.sub, "-", (lambda a, b: _ONE, lambda a, b: _MINUS_ONE), "number"
        ),
        Function("mul", 2, "same", torch.mul, "*", (lambda a, b: b, lambda a, b: a), "number"),
        Function(
            "div",
            2,
            "float",
            torch.div,
            "/",
            (
                lambda a, b: _call("reciprocal", b),
                # b * b would overflow where a / b / b does not
                lambda a, b: _call("neg", _call("div", _call("div", a, b), b)),
            ),
        ),
        Function("neg", 1, "same", torch.neg, None, (lambda x: _MINUS_ONE,), "number"),
        Function("abs", 1, "same", torch.abs, None, (_sign,), "number"),
        Function("maximum", 2, "same", torch.maximum, None, _chosen("lt"), "number"),
        Function("minimum", 2, "same", torch.minimum, None, _chosen("gt"), "number"),
        Function(
            "where",
            3,
            "same",
            torch.where,
            None,
            (
                None,
                lambda c, a, b: _call("where", c, _ONE, _ZERO),
                lambda c, a, b: _call("where", c, _ZERO, _ONE),
            ),
            "where",
        ),
    ]


def _elementary() -> list[Function]:
    def one(name: str, formula: Formula, derivative: Derivative) -> Function:
        return Function(name, 1, "float", formula, None, (derivative,))

    return [
        one("exp", torch.exp, lambda x: _call("exp", x)),
        one("expm1", torch.expm1, lambda x: _call("exp", x)),
        one("log", torch.log, lambda x: _call("reciprocal", x)),
        one("log1p", torch.log1p, lambda x: _call("reciprocal", _call("add", _ONE, x))),
        one("sqrt", torch.sqrt, lambda x: _call("mul", Const(0.5), _call("rsqrt", x))),
        one(
            "rsqrt",
            torch.rsqrt,
            lambda x: _call("div", _call("mul", Const(-0.5), _call("rsqrt", x)), x),
        ),
        one(
            "reciprocal",
            torch.reciprocal,
            lambda x: _call("neg", _square(_call("reciprocal", x))),
        ),
        one("tanh", torch.tanh, lambda x: _call("sub", _ONE, _square(_call("tanh", x)))),
        one(
            "sigmoid",
            torch.sigmoid,
            lambda x: _call("mul", _call("sigmoid", x), _call("sub", _ONE, _call("sigmoid", x))),
        ),
        one(
            "erf",
            torch.erf,
            lambda x: _call(
                "mul", Const(2.0 / math.sqrt(math.pi)), _call("exp", _call("neg", _square(x)))
            ),
        ),
    ]


def _logic() -> list[Function]:
    comparisons = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le}
    comparisons |= {"gt": torch.gt, "ge": torch.ge}
    both = {"logical_and": torch.logical_and, "logical_or": torch.logical_or}
    return [
        *(Function(n, 2, "bool", f, None, (None, None), "any") for n, f in comparisons.items()),
        *(Function(n, 2, "bool", f, None, (None, None), "bool") for n, f in both.items()),
        Function("logical_not", 1, "bool", torch.logical_not, None, (None,), "bool"),
    ]


def _activations() -> list[Function]:
    def pair(name: str, formula: Formula, grad: Formula) -> list[Function]:
        """An activation and its derivative as a factor, x -> f'(x)."""
        return [
            Function(name, 1, "float", formula, None, (lambda x: _call(f"{name}_grad", x),)),
            Function(f"{name}_grad", 1, "float", grad, None, (None,)),
        ]

    def silu_grad(x: Tensor) -> Tensor:
        grad: Tensor = torch.ops.aten.silu_backward(torch.ones_like(x), x)
        return grad

    def relu_backward(g: Tensor, y: Tensor) -> Tensor:
        # a NaN in y is not <= 0 and lets g through, as in aten.threshold_backward
        return torch.where(y <= 0, torch.zeros_like(g), g)

    return [
        *pair("relu", torch.relu, lambda x: (x > 0).to(x.dtype)),
        *pair("gelu_erf", _gelu("none"), _gelu_grad("none")),
        *pair("gelu_tanh", _gelu("tanh"), _gelu_grad("tanh")),
        *pair("silu", torch.nn.functional.silu, silu_grad),
        Function(
            "relu_backward",
            2,
            "float",
            relu_backward,
            None,
            (
                lambda g, y: _call("where", _call("le", y, _ZERO), _ZERO, _ONE),
                None,
            ),
        ),
    ]


FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {f.name: f for f in (*_arithmetic(), *_elementary(), *_logic(), *_activations())}
)
"""Every function by its name. The table is closed: emitters know all of it."""
