"""Algebra: constants and common factors moved to where fewer elements are multiplied by them.

    mul(div(neg(x), c1), c2)      -> mul(x, -c2 / c1)          constants folded in fp64
    c * a + c * b, c * a - c * b  -> c * (a + b), c * (a - b)  c: smaller than the sum
    sum(c * a)                    -> c * sum(a)                c: does not depend on the axis
    mm(c * a, b)                  -> c * mm(a, b)              c: a constant
    x * 1, x / 1, x - 0, x ** 1   -> x

Only under `precision=fused`, for all but the last round otherwise. A rule holds where its result
may not overflow or vanish sooner than what it replaces (see the legality of each), never looks
through a cast or a maximum, and joins no nodes of two checkpoints. x + 0 stays, since -0.0 + 0.0 is
0.0. The gradient of a cross-entropy, p * t - y * t with one t a row, becomes (p - y) * t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_evt.graphs import (
    insert,
    is_one,
    number_of,
    replace,
    same_checkpoint,
    same_sizes,
    tensor_of,
)
from torch_evt.joint.one_hot import CONVERT, PRODUCTS, QUOTIENTS, size_along, unexpanded
from torch_evt.joint.reduction_elimination import folded_dims

aten = torch.ops.aten
_MATRIX_PRODUCTS = {aten.mm.default: (0, 1), aten.bmm.default: (0, 1)}
_TRANSPOSES = {aten.permute.default, aten.t.default}
_WIDE_RANGE = (torch.float32, torch.bfloat16)
"""Dtypes that reach as far as fp32."""
_SAFE = 2.0**24
"""A constant between 1 / _SAFE and _SAFE uses up no more than 24 of fp32's 254 binades."""


def apply(graph: fx.Graph) -> int:
    """Rewrite in place; the number of nodes replaced."""
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.users:
            continue
        for rule in _RULES.get(node.target, ()):
            with graph.inserting_before(node):
                new = rule(graph, node)
            if new is not None:
                count += 1
                break
    graph.eliminate_dead_code()
    return count


@dataclass(frozen=True)
class _Product:
    """coefficient * factors[0] * factors[1] ..."""

    coefficient: float
    factors: tuple[fx.Node, ...]


def _identity(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """x * 1, x / 1, x - 0, x ** 1 -> x. Exact.

    Legal unless the graph returns the node, or x is an input, which may have changed in place when
    backward reads it.
    """
    x: Any = node.args[0]
    value = tensor_of(node)
    neutral = 0.0 if node.target in (aten.sub.Tensor, aten.sub.Scalar) else 1.0
    source = tensor_of(x)
    number = number_of(node.args[1])
    if source is None or value is None or node.kwargs or number != neutral:
        return None
    if math.copysign(1.0, number) < 0:
        return None  # -0.0 - -0.0 is 0.0
    alike = source.dtype == value.dtype and same_sizes(source.shape, value.shape)
    returned = any(user.op == "output" for user in node.users)
    if (
        not alike
        or returned
        or x.op == "placeholder"
        or not same_sizes(source.stride(), value.stride())
    ):
        return None
    node.replace_all_uses_with(x)
    graph.erase_node(node)
    return x  # type: ignore[no-any-return]


def _fold(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A chain of products and quotients with constants -> one product.

    Legal where the constant is a normal number of the dtype; what overflowed on the way no longer
    does.
    Only the last of a chain is rewritten, and only nodes that nothing else reads go away.
    """
    users = list(node.users)
    if len(users) == 1 and _scaled(users[0]) is not None and _joins(node, users[0]):
        return None
    coefficient, x, steps = 1.0, node, 0
    while (step := _scaled(x)) is not None and (steps == 0 or _joins(x, node)):
        inner, factor = step
        coefficient, x, steps = coefficient * factor, inner, steps + 1
    if steps < 2:
        return None
    limits = torch.finfo(node.meta["val"].dtype)
    if not limits.tiny <= abs(coefficient) <= limits.max:
        return None
    return _take_over(graph, node, insert(graph, aten.mul.Tensor, (x, coefficient), node))


def _common_factor(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """c * a + c * b -> c * (a + b), where c is smaller than the sum.

    Legal in dtypes with fp32's range, where both products are read by nothing else. A tensor is
    read once instead of twice, and where a and b nearly cancel, less is lost.
    """
    value = tensor_of(node)
    left: Any = node.args[0]
    right: Any = node.args[1]
    if node.kwargs or value is None or value.dtype not in _WIDE_RANGE or left is right:
        return None
    if not all(_is_own_product(x, node) for x in (left, right)):
        return None
    one, other = _flattened(left), _flattened(right)
    common = [
        factor
        for factor in dict.fromkeys(one.factors)
        if factor in other.factors and _is_smaller(factor, value)
    ]
    if not common:
        return None
    rest = [_without(product, common) for product in (one, other)]
    if any(not product.factors for product in rest):
        return None
    result = _added(graph, node, *rest)
    for factor in common:
        result = insert(graph, aten.mul.Tensor, (result, factor), node)
    return _take_over(graph, node, result)


def _added(graph: fx.Graph, node: fx.Node, one: _Product, other: _Product) -> fx.Node:
    """The sum or difference of two products, with as few operations as their signs allow."""
    a = one.coefficient
    b = other.coefficient if node.target is aten.add.Tensor else -other.coefficient
    left, right = _multiplied(graph, node, one), _multiplied(graph, node, other)
    if (a, b) == (-1.0, 1.0):
        return insert(graph, aten.sub.Tensor, (right, left), node)
    if a != 1.0:
        left = insert(graph, aten.mul.Tensor, (left, a), node)
    if abs(b) != 1.0:
        right = insert(graph, aten.mul.Tensor, (right, abs(b)), node)
    return insert(graph, aten.add.Tensor if b > 0 else aten.sub.Tensor, (left, right), node)


def _out_of_sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """sum(a * c) -> sum(a) * c, where c does not depend on the axis.

    Legal in fp32, where only the sum reads the product, and where what reads the sum is pointwise,
    so that the new product is no kernel of its own.
    """
    result, dims = tensor_of(node), folded_dims(node)
    x: Any = node.args[0]
    if not all(_is_pointwise(user) for user in node.users) or result is None:
        return None
    factors: list[Any] = []
    while (split := _split(x, dims)) is not None and same_checkpoint(x, node):
        x, factor = split
        factors.append(factor)
    fp32 = result.dtype == x.meta["val"].dtype == torch.float32
    if not factors or not fp32 or not all(isinstance(size, int) for size in result.shape):
        return None
    total = insert(graph, aten.sum.dim_IntList, (x, sorted(dims), True), node)
    for factor in reversed(factors):
        total = insert(graph, aten.mul.Tensor, (total, factor), node)
    if total.meta["val"].dim() != result.dim():
        total = insert(graph, aten.view.default, (total, list(result.shape)), node)
    return _take_over(graph, node, total)


def _out_of_product(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """mm(c * a, b) -> c * mm(a, b), for a constant c.

    Legal in dtypes with fp32's range. It saves work where c * a would be written for products alone
    although a is in memory, and where c * mm(a, b) is fused: every product that reads c * a is
    itself read by pointwise operations.
    """
    value = tensor_of(node)
    if node.target not in _MATRIX_PRODUCTS or value is None or value.dtype not in _WIDE_RANGE:
        return None
    for place in _MATRIX_PRODUCTS[node.target]:
        moved: list[fx.Node] = []
        scaled = node.args[place]
        while isinstance(scaled, fx.Node) and scaled.target in _TRANSPOSES:
            moved.append(scaled)
            scaled = scaled.args[0]
        split = _scaled(scaled) if isinstance(scaled, fx.Node) else None
        if split is None or not _is_safe(split[1]) or not same_checkpoint(scaled, node):  # type: ignore[arg-type]
            continue
        a, constant = split
        if not _is_in_memory(a, scaled) or not _read_by_fused_products(scaled):  # type: ignore[arg-type]
            continue
        for step in reversed(moved):
            a = insert(graph, step.target, (a, *step.args[1:]), step)
        arguments = [a if i == place else argument for i, argument in enumerate(node.args)]
        product = insert(graph, node.target, tuple(arguments), node)
        return _take_over(graph, node, insert(graph, aten.mul.Tensor, (product, constant), node))
    return None


_RULES: dict[Any, tuple[Callable[[fx.Graph, fx.Node], fx.Node | None], ...]] = {
    **dict.fromkeys(PRODUCTS | QUOTIENTS, (_identity, _fold)),
    aten.sub.Scalar: (_identity,),
    aten.sub.Tensor: (_identity, _common_factor),
    aten.add.Tensor: (_common_factor,),
    aten.pow.Tensor_Scalar: (_identity,),
    aten.neg.default: (_fold,),
    aten.sum.dim_IntList: (_out_of_sum,),
    aten.sum.default: (_out_of_sum,),
    **dict.fromkeys(_MATRIX_PRODUCTS, (_out_of_product,)),
}
"""Operation -> the rules that may replace it, the first that applies."""


def _take_over(graph: fx.Graph, node: fx.Node, new: fx.Node) -> fx.Node | None:
    """Put the new node in the place of the old one, where dtype, shape and strides agree."""
    old, value = tensor_of(node), tensor_of(new)
    assert old is not None and value is not None
    same = old.dtype == value.dtype and same_sizes(old.shape, value.shape)
    if not same or not same_sizes(old.stride(), value.stride()):
        _forget(graph, new)
        return None
    replace(graph, node, new)
    return new


def _forget(graph: fx.Graph, node: fx.Node) -> None:
    """Take out a node that nobody reads, and with it what only it read."""
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if not source.users and source.op == "call_function":
            _forget(graph, source)


def _scaled(node: fx.Node) -> tuple[fx.Node, float] | None:
    """x and c where the node is c * x of floating numbers, of x's dtype and shape."""
    value = tensor_of(node)
    if node.op != "call_function" or node.kwargs or value is None:
        return None
    if not value.dtype.is_floating_point:
        return None
    x: Any = node.args[0]
    factor: float | None = None
    if node.target is aten.neg.default:
        factor = -1.0
    elif node.target in PRODUCTS:
        factor = number_of(node.args[1])
        if factor is None and (factor := number_of(x)) is not None:
            x = node.args[1]
    elif node.target in QUOTIENTS and (divisor := number_of(node.args[1])):
        factor = 1.0 / divisor
    source = tensor_of(x)
    if factor is None or source is None or number_of(x) is not None:
        return None
    alike = source.dtype == value.dtype and same_sizes(source.shape, value.shape)
    return (x, factor) if alike else None


def _joins(inner: fx.Node, outer: fx.Node) -> bool:
    """Whether a node may become one with what reads it: nothing else does."""
    return len(inner.users) == 1 and same_checkpoint(inner, outer)


def _is_own_product(x: Any, node: fx.Node) -> bool:
    value, result = tensor_of(x), tensor_of(node)
    return (
        isinstance(x, fx.Node)
        and value is not None
        and result is not None
        and x.target in {aten.mul.Tensor, aten.mul.Scalar, aten.neg.default}
        and value.dtype == result.dtype
        and same_sizes(value.shape, result.shape)
        and _joins(x, node)
    )


def _flattened(x: fx.Node) -> _Product:
    """A product taken apart: products inside that nothing else reads, and signs and constants."""
    coefficient, factors = 1.0, []
    stack: list[tuple[Any, bool]] = [(x, True)]
    while stack:
        node, inside = stack.pop()
        number, scaled = number_of(node), _scaled(node) if isinstance(node, fx.Node) else None
        if number is not None:
            coefficient *= number
        elif scaled is not None and same_checkpoint(node, x):
            coefficient *= scaled[1]
            stack.append((scaled[0], inside and len(node.users) == 1))
        elif inside and (node is x or _is_own_product(node, x)) and node.target in PRODUCTS:
            stack.extend((argument, True) for argument in reversed(node.args[:2]))
        else:
            factors.append(node)
    return _Product(coefficient, tuple(factors))


def _without(product: _Product, common: list[fx.Node]) -> _Product:
    factors = list(product.factors)
    for factor in common:
        factors.remove(factor)
    return _Product(product.coefficient, tuple(factors))


def _multiplied(graph: fx.Graph, like: fx.Node, product: _Product) -> fx.Node:
    result = product.factors[0]
    for factor in product.factors[1:]:
        result = insert(graph, aten.mul.Tensor, (result, factor), like)
    return result


def _is_smaller(x: fx.Node, result: torch.Tensor) -> bool:
    """Whether a factor of the result's dtype is broadcast to its shape."""
    value = tensor_of(unexpanded(x))
    return (
        value is not None
        and value.dtype == result.dtype
        and any(
            is_one(size_along(value, d)) and not is_one(result.shape[d])
            for d in range(-result.dim(), 0)
        )
    )


def _split(x: Any, dims: set[int]) -> tuple[fx.Node, Any] | None:
    """The factors of a product that nothing else reads: one as large as it, and one that does not
    depend on the dimensions."""
    value = tensor_of(x)
    if value is None or len(x.users) > 1:
        return None
    scaled = _scaled(x)
    if scaled is not None:
        return scaled if _is_safe(scaled[1]) else None
    if x.target is not aten.mul.Tensor:
        return None
    for large, small in (x.args, x.args[::-1]):
        small = unexpanded(small)
        a, c = tensor_of(large), tensor_of(small)
        if a is None or c is None or a.dtype != value.dtype or c.dtype != value.dtype:
            continue
        whole = same_sizes(a.shape, value.shape)
        if whole and all(is_one(size_along(c, d)) for d in dims):
            return large, small
    return None


def _is_safe(constant: float) -> bool:
    return 1 / _SAFE <= abs(constant) <= _SAFE


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and (node.target is CONVERT or torch.Tag.pointwise in tags)


def _is_in_memory(a: fx.Node, scaled: fx.Node) -> bool:
    """Whether a value is stored even if `scaled` is not."""
    if a.op == "placeholder":
        return True
    made_by_kernel = not _is_pointwise(a) and a.target not in _MATRIX_PRODUCTS
    return made_by_kernel or any(user is not scaled and not _is_pointwise(user) for user in a.users)


def _read_by_fused_products(x: fx.Node) -> bool:
    """Whether only products read a value, perhaps transposed, and only pointwise nodes these."""
    for user in x.users:
        if user.target in _TRANSPOSES:
            if not _read_by_fused_products(user):
                return False
        elif user.target not in _MATRIX_PRODUCTS or not all(map(_is_pointwise, user.users)):
            return False
    return bool(x.users)
