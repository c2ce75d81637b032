"""Which operations of a graph an epilogue can hold, and the tree of each.

`value_of(node, argument)` says what a node computes as a `tree.ir.Value`, given its arguments'
values. Everything here is data where it can be: operation -> function of the tree's table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_evt.graphs import tensor_of
from torch_evt.runtime.named_functions import NAMED
from torch_evt.tree.ir import Cast, Compute, Const, Value

aten = torch.ops.aten
prims = torch.ops.prims

CONVERT = prims.convert_element_type.default
HALVES = (torch.float16, torch.bfloat16)

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})

_FUNCTIONS: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.exp.default: "exp",
    aten.expm1.default: "expm1",
    aten.log.default: "log",
    aten.log1p.default: "log1p",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.reciprocal.default: "reciprocal",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.erf.default: "erf",
    aten.relu.default: "relu",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.clamp_min.default: "maximum",
    aten.clamp_max.default: "minimum",
    aten.where.self: "where",
    aten.eq.Scalar: "eq",
    aten.eq.Tensor: "eq",
    aten.ne.Scalar: "ne",
    aten.ne.Tensor: "ne",
    aten.lt.Scalar: "lt",
    aten.lt.Tensor: "lt",
    aten.le.Scalar: "le",
    aten.le.Tensor: "le",
    aten.gt.Scalar: "gt",
    aten.gt.Tensor: "gt",
    aten.ge.Scalar: "ge",
    aten.ge.Tensor: "ge",
    aten.logical_and.default: "logical_and",
    aten.logical_or.default: "logical_or",
    aten.logical_not.default: "logical_not",
    aten.bitwise_and.Tensor: "logical_and",
    aten.bitwise_or.Tensor: "logical_or",
    aten.bitwise_not.default: "logical_not",
}
_BOOL_ONLY = {aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default}
_BACKWARDS = {"gelu_erf_backward", "gelu_tanh_backward", "silu_backward"}
_FUNCTIONS.update({op: name for name, op in NAMED.items() if name not in _BACKWARDS})
_GRADIENTS: dict[Any, str] = {
    NAMED[name]: name.removesuffix("_backward") + "_grad" for name in sorted(_BACKWARDS)
}

_COMPOSED: dict[Any, str] = {aten.pow.Tensor_Scalar: "pow", aten.sign.default: "sign"}
"""Operations that are a tree of several functions."""

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    }
)
"""Operations that keep the row-major order of their input's elements."""

_IDENTITIES = frozenset({aten.alias.default, aten.detach.default})


def constant(node: Any) -> Const | None:
    """The value of a Python number, or of a node that makes a 0-dimensional constant."""
    if isinstance(node, (bool, int, float)):
        return Const(node)
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.full.default and not node.args[0]:
        value = node.args[1]
    elif node.target is aten.scalar_tensor.default:
        value = node.args[0]
    else:
        return None
    tensor = tensor_of(node)
    if tensor is None or not isinstance(value, (bool, int, float)):
        return None
    if tensor.dtype.is_floating_point:
        return Const(_rounded(float(value), tensor.dtype))
    return Const(bool(value)) if tensor.dtype == torch.bool else Const(int(value))


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The value as a tensor of that dtype holds it; fp32 and fp64 keep Python's number."""
    return float(torch.tensor(value, dtype=dtype)) if dtype in HALVES else value


def is_elementwise(node: fx.Node) -> bool:
    """Whether an epilogue can hold the operation, shapes and dtypes aside."""
    return node.op == "call_function" and (
        node.target in _FUNCTIONS
        or node.target in _GRADIENTS
        or node.target in _IDENTITIES
        or node.target in _COMPOSED
        or node.target is CONVERT
    )


def function_of(node: fx.Node) -> str | None:
    """The name of the tree function that a node computes, for people and for `evt.disable`."""
    target = node.target
    return _FUNCTIONS.get(target) or _GRADIENTS.get(target) or _COMPOSED.get(target)


def function_names() -> list[str]:
    """Every name that `function_of` can give."""
    return sorted({*_FUNCTIONS.values(), *_GRADIENTS.values(), *_COMPOSED.values()})


def is_arithmetic(node: fx.Node) -> bool:
    """Whether a node does more than move or cast its input."""
    return function_of(node) is not None


def value_of(node: fx.Node, argument: Callable[[Any], Value]) -> Value | None:
    """What an elementwise node computes, from the values of its arguments; None: not expressible.

    Arithmetic is fp32 whatever the node's dtype; only explicit casts to half types round.
    """
    target = node.target
    if target in _IDENTITIES:
        return argument(node.args[0])
    if target is CONVERT:
        dtype = node.args[1]
        assert isinstance(dtype, torch.dtype)
        return Cast(argument(node.args[0]), dtype)
    if target is aten.pow.Tensor_Scalar:
        return _power(argument(node.args[0]), node.args[1])
    if target is aten.sign.default:
        return _sign(argument(node.args[0])) if _is_float(node) else None
    if target in _BOOL_ONLY and not _is_bool(node):
        return None
    if target in _GRADIENTS:  # g * f'(x)
        gradient, x = node.args
        return Compute("mul", (argument(gradient), Compute(_GRADIENTS[target], (argument(x),))))
    name = _FUNCTIONS.get(target)
    if name is None or set(node.kwargs) - {"alpha"}:
        return None
    arguments = [argument(a) for a in node.args]
    alpha = node.kwargs.get(
        "alpha", node.args[2] if name in ("add", "sub") and len(node.args) > 2 else 1
    )
    if name in ("add", "sub"):
        arguments = arguments[:2]
        if alpha != 1:
            if not isinstance(alpha, (int, float)):
                return None
            arguments[1] = Compute("mul", (arguments[1], Const(float(alpha))))
    arguments = _float_constants(node, name, arguments)
    return Compute(name, tuple(arguments))


def _float_constants(node: fx.Node, name: str, arguments: list[Value]) -> list[Value]:
    """Python ints beside floating tensors are floats: x + 1 is x + 1.0."""
    tensors = [tensor_of(a) for a in node.args]
    if not any(t is not None and t.dtype.is_floating_point for t in tensors):
        return arguments
    return [
        Const(float(a.value))
        if isinstance(a, Const)
        and not isinstance(a.value, bool)
        and not (name == "where" and i == 0)
        else a
        for i, a in enumerate(arguments)
    ]


_LARGEST_POWER = 8


def _power(base: Value, exponent: Any) -> Value | None:
    """base ** exponent as products, a root and a reciprocal; None where it is not made of these."""
    if isinstance(exponent, bool) or not isinstance(exponent, (int, float)):
        return None
    size = abs(float(exponent))
    if size == 0 or size > _LARGEST_POWER or not (2 * size).is_integer():
        return None
    if exponent == -0.5:
        return Compute("rsqrt", (base,))
    whole = int(size)
    value = base
    for bit in bin(whole)[3:]:
        value = Compute("mul", (value, value))
        if bit == "1":
            value = Compute("mul", (value, base))
    if size != whole:
        root = Compute("sqrt", (base,))
        value = Compute("mul", (value, root)) if whole else root
    return Compute("reciprocal", (value,)) if exponent < 0 else value


def _sign(x: Value) -> Value:
    """-1, 0 or 1; 0 for NaN, as torch.sign has it."""
    zero = Const(0.0)
    not_positive = Compute("where", (Compute("lt", (x, zero)), Const(-1.0), zero))
    return Compute("where", (Compute("gt", (x, zero)), Const(1.0), not_positive))


def _is_float(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype.is_floating_point


def _is_bool(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.bool
