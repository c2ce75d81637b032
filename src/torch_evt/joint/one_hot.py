"""One-hot vectors in a graph: where they are, and of which labels.

    eq(label, 0 1 2 ...)         where(eq(...), number, 0)         scatter(0, axis, label, number)

each with views, broadcasts and casts in between, as `nll_loss`, `one_hot` and hand-written losses
leave them, and as products with something else. Axes are counted from the end, as broadcasting
counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_evt.graphs import Size, is_one, number_of, same_sizes, tensor_of

aten = torch.ops.aten
prims = torch.ops.prims
CONVERT = prims.convert_element_type.default
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
TENSORS = dict.fromkeys(PRODUCTS | QUOTIENTS, 2) | {
    aten.neg.default: 1,
    aten.where.self: 3,
    CONVERT: 1,
}
"""The operations that a one-hot may be behind, and how many of their arguments are values."""
VIEWS = {aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
DEPTH = 8
"""How many operations deep a sum is taken apart; losses are less deep."""


@dataclass(frozen=True)
class OneHot:
    """node is `hot` at the label's place along an axis (counted from the end) and 0 elsewhere.

    viewed: the axis is that of a view of the node, which counts its axes differently.
    """

    node: fx.Node
    axis: int
    label: fx.Node
    hot: float
    viewed: bool = False


def one_hot_in(x: Any, depth: int = DEPTH) -> OneHot | None:
    """The one-hot that makes x zero wherever it is zero; its axis as x counts it."""
    x = unexpanded(x)
    if not isinstance(x, fx.Node):
        return None
    found = _one_hot(x)
    if found is not None or depth == 0 or x.kwargs:
        return found
    if x.target in VIEWS:
        source: Any = x.args[0]
        inner = one_hot_in(source, depth - 1)
        if inner is None:
            return None
        axis = axis_through(source.meta["val"].shape, inner.axis, x.meta["val"].shape)
        return None if axis is None else replace(inner, axis=axis, viewed=True)
    places = x.args[:2] if x.target in PRODUCTS else x.args[:1]
    if x.target is aten.where.self:
        zero_last, zero_first = (number_of(x.args[i]) == 0 for i in (2, 1))
        places = x.args[:2] if zero_last else x.args[2:3] if zero_first else ()
    elif x.target not in TENSORS:
        return None
    return next((hot for a in places if (hot := one_hot_in(a, depth - 1)) is not None), None)


def _one_hot(x: fx.Node) -> OneHot | None:
    """x as a one-hot: a comparison of labels with 0, 1, 2..., or a scatter of one number."""
    if x.target is aten.where.self and number_of(x.args[2]) == 0:
        hot = number_of(x.args[1])
        inner = _one_hot(x.args[0]) if isinstance(x.args[0], fx.Node) else None
        is_comparison = inner is not None and inner.node is x.args[0]
        if hot is None or inner is None or not is_comparison:
            return None
        return replace(inner, node=x, hot=hot)
    if x.target is aten.scatter.value:
        return _scattered(x)
    if x.target is not aten.eq.Tensor:
        return None
    for classes, label in (x.args, x.args[::-1]):
        axis, label = _counting_axis(classes), unexpanded(label)
        value = tensor_of(label)
        if axis is None or value is None or value.dtype.is_floating_point:
            continue
        if is_one(size_along(value, axis)):
            return OneHot(x, axis, label, 1.0)
    return None


def _scattered(x: fx.Node) -> OneHot | None:
    base: Any = x.args[0]
    dim: Any = x.args[1]
    index, hot = x.args[2:4]
    value, places, number = tensor_of(x), tensor_of(index), number_of(hot)
    filled = isinstance(base, fx.Node) and base.target is aten.full.default and base.args[1] == 0
    if not filled or value is None or places is None or number is None:
        return None
    axis = int(dim) % value.dim() - value.dim()
    kept = [1 if d - value.dim() == axis else size for d, size in enumerate(value.shape)]
    return OneHot(x, axis, index, number) if same_sizes(places.shape, kept) else None  # type: ignore[arg-type]


def _counting_axis(x: Any) -> int | None:
    """The axis along which a tensor is 0, 1, 2..., counted from the end."""
    x = unexpanded(x)
    value = tensor_of(x)
    if value is None:
        return None
    wide = [d for d, size in axes(value.shape) if not is_one(size)]
    while x.target in VIEWS:
        x = x.args[0]
    if x.target is not prims.iota.default or len(wide) != 1:
        return None
    from_zero = x.kwargs.get("start") == 0 and x.kwargs.get("step") == 1
    return wide[0] if from_zero else None


def spelled(label: Any) -> Any:
    """A key that two nodes share if they hold the same numbers in the same row-major order."""
    if number_of(label) is not None:
        return number_of(label)
    if not isinstance(label, fx.Node):
        return label
    if label.target in VIEWS or label.target is aten.expand.default:
        return spelled(label.args[0])
    if label.target in (aten.where.self, aten.ne.Scalar, aten.eq.Scalar):
        return (label.target, *map(spelled, label.args))
    return label


def unexpanded(x: Any) -> Any:
    while isinstance(x, fx.Node) and x.target is aten.expand.default:
        x = x.args[0]
    return x


def axes(shape: Sequence[Size]) -> Iterator[tuple[int, Size]]:
    """Each axis, counted from the end, with its size."""
    return ((d - len(shape), size) for d, size in enumerate(shape))


def size_along(value: torch.Tensor, axis: int) -> Size:
    """The size along an axis counted from the end; 1 where there is none."""
    return value.shape[axis] if -axis <= value.dim() else 1


def static(size: Size) -> int | None:
    return size if isinstance(size, int) else None


def axis_through(shape: Sequence[Size], axis: int, other: Sequence[Size]) -> int | None:
    """Where an axis of one shape is in another that differs in dimensions of size 1 alone."""
    if not all(isinstance(size, int) for size in (*shape, *other)):
        return None
    wide = [(d, size) for d, size in axes(shape) if size != 1]
    others = [(d, size) for d, size in axes(other) if size != 1]
    if [size for _, size in wide] != [size for _, size in others]:
        return None
    return next((o for (d, _), (o, _) in zip(wide, others, strict=True) if d == axis), None)
