"""Rewrites of a tree that keep every value, so that equal work has one spelling.

Nothing is reassociated and x + 0.0 stays, since -0.0 + 0.0 is 0.0. Identical sinks stay: each is
an output of its own.
"""

from __future__ import annotations

import torch

from torch_evt.tree.dtypes import ValueType
from torch_evt.tree.functions import FUNCTIONS
from torch_evt.tree.ir import Cast, Compute, Const, Load, Tree, Value, postorder
from torch_evt.tree.rewrite import rebuild
from torch_evt.tree.types import node_type

_FOLDED = ("add", "sub", "mul", "div", "neg", "abs", "maximum", "minimum")
"""What IEEE 754 defines to the last bit, so that a tree has the same text on every machine."""


def simplify(tree: Tree) -> Tree:
    """An equal tree without casts, factors and negations that change nothing.

    Constant float arithmetic is folded in fp64. Raises TreeError for an ill-typed tree.
    """
    types: dict[Value, ValueType] = {}

    def rewrite(value: Value) -> Value:
        types[value] = node_type(value, types)
        result = _simpler(value, types)
        types[result] = types[value]
        return result

    return rebuild(tree, rewrite)


def _simpler(value: Value, types: dict[Value, ValueType]) -> Value:
    """A simpler equal value of the same type; its arguments are simple already."""
    if isinstance(value, Cast):
        return value.value if _holds(value.value, value.dtype, types) else value
    if not isinstance(value, Compute):
        return value
    arguments = value.arguments
    if value.function == "where" and isinstance(arguments[0], Const):
        chosen, other = arguments[1:] if arguments[0].value else arguments[:0:-1]
        # a bool beside a float becomes a float, so it cannot stand for the whole
        return chosen if types[chosen] == types[value] and not _loads(other) else value
    if value.function == "neg":
        inner = arguments[0]
        if isinstance(inner, Compute) and inner.function == "neg":
            return inner.arguments[0]
    if value.function in _FOLDED and _all_float_constants(arguments):
        return _fold(value)
    one = Const(1.0)
    if value.function in ("mul", "div") and arguments[1] is one:
        return arguments[0] if types[arguments[0]] == "float" else value
    if value.function == "mul" and arguments[0] is one:
        return arguments[1] if types[arguments[1]] == "float" else value
    return value


def _holds(value: Value, dtype: torch.dtype, types: dict[Value, ValueType]) -> bool:
    """Whether a cast to dtype cannot change the value."""
    if isinstance(value, (Cast, Load)) and value.dtype == dtype:
        return True
    exact: dict[ValueType, torch.dtype] = {
        "float": torch.float32,  # what arithmetic is done in
        "int": torch.int64,
        "bool": torch.bool,
    }
    return exact[types[value]] == dtype


def _loads(value: Value) -> bool:
    """Whether the value reads an argument, which would be left without a use and its number."""
    return any(isinstance(v, Load) for v in postorder([value]))


def _all_float_constants(arguments: tuple[Value, ...]) -> bool:
    return all(isinstance(a, Const) and isinstance(a.value, float) for a in arguments)


def _fold(value: Compute) -> Value:
    constants = [a.value for a in value.arguments if isinstance(a, Const)]
    formula = FUNCTIONS[value.function].formula
    return Const(float(formula(*(torch.tensor(c, dtype=torch.float64) for c in constants))))
