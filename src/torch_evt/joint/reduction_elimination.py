"""Reduction elimination: sums whose value is known without reading all that is summed.

    sum_c(one_hot(t)[c] * v)        -> v where t is a class, 0 elsewhere
    sum_c(one_hot(t)[c] * w[c])     -> w[t]                         w: class weights
    sum(x expanded)                 -> x * size
    sum(a + b), sum(-a), sum(a * c), sum(a / c), sum(where(m, a, 0)), widening casts
                                    -> the same of the sums of a and b, where these are known;
                                       c and m do not depend on the axis
    mean                            -> sum / size

The sum over the classes in the gradient of a cross-entropy is of the first kind, and with label
smoothing of the third too. What is left reads one value a row, or one a column.

Legal when a one-hot's label is one of the classes, which the loss itself proves where it gathers by
that label, or else masked. Picking one value is exact. All other rules reassociate and compute in
fp32: not under `precision=eager`. Where v is infinite, 0 * v is NaN, and so was its sum, which is
now infinite. A symbolic size may be kept, but not be summed over or counted.
"""

from __future__ import annotations

from collections.abc import Callable
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
from torch_evt.joint.one_hot import (
    CONVERT,
    DEPTH,
    PRODUCTS,
    TENSORS,
    VIEWS,
    OneHot,
    axes,
    axis_through,
    one_hot_in,
    size_along,
    spelled,
    static,
    unexpanded,
)

aten = torch.ops.aten
_SUMS = {aten.sum.dim_IntList, aten.sum.default}
_MEANS = {aten.mean.dim, aten.mean.default}
_HALVES = (torch.float16, torch.bfloat16)


def apply(graph: fx.Graph, *, exact_rounding: bool = False) -> int:
    """Rewrite in place; the number of sums that went away, or read less.

    exact_rounding: only what changes no value (`precision=eager`).
    """
    gathered = {
        (spelled(n.args[2]), size)
        for n in graph.nodes
        if n.target is aten.gather.default
        for size in [static(n.args[0].meta["val"].shape[n.args[1]])]
    }
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _SUMS | _MEANS or not node.users:
            continue
        with graph.inserting_before(node):
            elimination = _Elimination(graph, node, gathered, exact_rounding)
            value = elimination.value()
        if value is None:
            elimination.forget()
            continue
        count += 1
        if value in elimination.found:
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        else:
            replace(graph, node, value)
    graph.eliminate_dead_code()
    return count


class _Elimination:
    """One sum or mean. Nodes are inserted on the way, and taken out by `forget`."""

    def __init__(
        self, graph: fx.Graph, node: fx.Node, gathered: set[Any], exact_rounding: bool
    ) -> None:
        self.graph = graph
        self.node = node
        self.gathered = gathered
        self.exact = exact_rounding
        self.made: list[fx.Node] = []
        self.found: list[fx.Node] = []  # values that were in the graph before
        self.depth = 0
        self.source = node.args[0]
        value = tensor_of(self.source)
        assert value is not None
        self.shape = value.shape
        self.dims = folded_dims(node)

    def forget(self) -> None:
        for node in reversed(self.made):
            self.graph.erase_node(node)
        self.made = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        node = insert(self.graph, target, args, self.node, **kwargs)
        self.made.append(node)
        return node

    def value(self) -> fx.Node | None:
        """What the node is equal to; None where it is not known."""
        result, source = tensor_of(self.node), tensor_of(self.source)
        assert result is not None and source is not None
        if not (result.dtype.is_floating_point and source.dtype.is_floating_point):
            return None
        if all(is_one(self.shape[d]) for d in self.dims):
            return None
        total: Any = self.picked(self.source) if self.exact else self.total(self.source)
        if not isinstance(total, fx.Node) or (self.exact and self.node.target in _MEANS):
            return None
        if self.node.target in _MEANS:
            size = self.extent(self.dims)
            if size is None:
                return None
            total = self.call(aten.div.Tensor, total, size)
        if tensor_of(total).dtype != result.dtype:  # type: ignore[union-attr]
            total = self.call(CONVERT, total, result.dtype)
        kept = [1 if d - len(self.shape) in self.dims else s for d, s in enumerate(self.shape)]
        if not same_sizes(total.meta["val"].shape, kept):
            if not all(isinstance(size, int) for size in kept):
                return None
            total = self.call(aten.expand.default, total, kept)
            total = self.call(aten.clone.default, total, memory_format=torch.contiguous_format)
        if not same_sizes(total.meta["val"].shape, result.shape):
            if not all(isinstance(size, int) for size in result.shape):
                return None
            total = self.call(aten.view.default, total, list(result.shape))
        if not same_sizes(total.meta["val"].stride(), result.stride()):
            return None
        if total not in self.made:
            if any(user.op == "output" for user in self.node.users):
                return None
            self.found.append(total)
        return total  # type: ignore[no-any-return]

    def extent(self, dims: set[int]) -> int | None:
        """How many elements lie along some dimensions; None if a size is symbolic."""
        count = 1
        for d in dims:
            if not isinstance(self.shape[d], int):
                return None
            count *= self.shape[d]
        return count

    def total(self, x: Any) -> Any:
        """The sum of x, broadcast to the whole shape, over the dimensions: a node that broadcasts
        to the sum's shape with its dimensions kept, or None. Half types become fp32."""
        x = unexpanded(x)
        value = tensor_of(x)
        if value is None or not self.may_read(x) or self.depth > DEPTH:
            return None
        own = {d for d in self.dims if not is_one(size_along(value, d))}
        count = self.extent(self.dims - own)
        if count is not None and value.dtype.is_floating_point:
            if not own:
                return self.times(self.wide(x), count)
            if any(is_one(size_along(value, d)) and not is_one(s) for d, s in axes(self.shape)):
                small = self.call(aten.sum.dim_IntList, self.wide(x), sorted(own), True)
                return self.times(small, count)
        picked = self.picked(x)
        if picked is not None:
            return self.wide(picked)
        rule = _RULES.get(x.target)
        if rule is None or x.kwargs:
            return None
        self.depth += 1
        result = rule(self, *x.args)
        self.depth -= 1
        return result

    def may_read(self, x: fx.Node) -> bool:
        """Whether a value may be computed with where the sum is: not across a checkpoint."""
        return x.op == "placeholder" or same_checkpoint(x, self.node)

    def times(self, x: fx.Node, count: int) -> fx.Node:
        return x if count == 1 else self.call(aten.mul.Tensor, x, count)

    def wide(self, x: fx.Node) -> fx.Node:
        value = tensor_of(x)
        assert value is not None
        return self.call(CONVERT, x, torch.float32) if value.dtype in _HALVES else x

    def independent(self, x: Any) -> Any:
        """A factor that does not depend on the dimensions, None if it does."""
        if number_of(x) is not None:
            return x
        x = unexpanded(x)
        value = tensor_of(x)
        if value is None or any(not is_one(size_along(value, d)) for d in self.dims):
            return None
        return x if value.dtype == torch.bool else self.wide(x)

    def of_product(self, a: Any, b: Any) -> Any:
        for one, other in ((a, b), (b, a)):
            factor = self.independent(other)
            if factor is not None and isinstance(one, fx.Node):
                total = self.total(one)
                return None if total is None else self.call(aten.mul.Tensor, total, factor)
        return None

    def of_quotient(self, a: Any, b: Any) -> Any:
        divisor, total = self.independent(b), self.total(a)
        if divisor is None or total is None:
            return None
        return self.call(aten.div.Tensor, total, divisor)

    def of_sum(self, target: Any, a: Any, b: Any) -> Any:
        left, right = self.total(a), self.total(b)
        return None if left is None or right is None else self.call(target, left, right)

    def of_negation(self, a: Any) -> Any:
        total = self.total(a)
        return None if total is None else self.call(aten.neg.default, total)

    def of_where(self, mask: Any, a: Any, b: Any) -> Any:
        keep = self.independent(mask)
        zero_last = number_of(b) == 0
        if keep is None or not (zero_last or number_of(a) == 0):
            return None
        total = self.total(a if zero_last else b)
        if total is None:
            return None
        return self.call(aten.where.self, keep, *((total, b) if zero_last else (a, total)))

    def of_cast(self, a: Any, dtype: torch.dtype) -> Any:
        value = tensor_of(a)
        widening = value is not None and value.dtype in _HALVES and dtype == torch.float32
        return self.total(a) if widening else None

    def picked(self, x: Any) -> fx.Node | None:
        """The sum of a product that holds a one-hot along one of the dimensions: the product's
        value at the label, summed over the other dimensions."""
        hot = one_hot_in(x)
        if hot is None or hot.axis not in self.dims or (self.exact and self.dims != {hot.axis}):
            return None
        classes = static(self.shape[hot.axis])
        if classes is None or size_along(x.meta["val"], hot.axis) != classes:
            return None
        proven = (spelled(hot.label), classes) in self.gathered
        if hot.viewed and not proven:
            return None
        value = self.pick(x, hot.axis, hot)
        if not isinstance(value, fx.Node):
            return None
        if not proven:
            mask = self.in_range(hot, classes)
            value = self.call(aten.where.self, mask, value, self.zero(value))
        others = self.dims - {hot.axis}
        rest = {d for d in others if not is_one(size_along(value.meta["val"], d))}
        count = self.extent(others - rest)
        if count is None:
            return None
        if rest:
            value = self.call(aten.sum.dim_IntList, self.wide(value), sorted(rest), True)
        return self.times(value, count)

    def pick(self, x: Any, axis: int, hot: OneHot) -> Any:
        """The value of x at the label along `axis`: a node of size 1 there, or a number."""
        if x is hot.node:
            return hot.hot
        x = unexpanded(x)
        value = tensor_of(x)
        if value is None or is_one(size_along(value, axis)):
            return x
        if not self.may_read(x):
            return None
        if all(is_one(size) for d, size in axes(value.shape) if d != axis):
            return self.looked_up(x, axis, hot)
        if x.target in VIEWS:
            return self.pick_view(x, axis, hot)
        if x.target not in TENSORS or x.kwargs:
            return None
        tensors = TENSORS[x.target]
        arguments = [self.pick(a, axis, hot) for a in x.args[:tensors]]
        if any(a is None for a in arguments):
            return None
        picked = self.computed(x, arguments, x.args[tensors:])
        same = not isinstance(picked, fx.Node) or picked.meta["val"].dtype == value.dtype
        return picked if same else None

    def computed(self, x: fx.Node, arguments: list[Any], others: tuple[Any, ...]) -> Any:
        """What x computes from other arguments; only numbers give a number."""
        if x.target in PRODUCTS and not isinstance(arguments[0], fx.Node):
            arguments = arguments[::-1]
        first = arguments[0]
        if x.target is aten.where.self and not isinstance(first, fx.Node):
            return arguments[1]
        if not isinstance(first, fx.Node):
            if x.target in PRODUCTS and number_of(first) is not None:
                return first * arguments[1]
            return (
                -first if x.target is aten.neg.default else first if x.target is CONVERT else None
            )
        if x.target in PRODUCTS and first.meta["val"].dtype == x.meta["val"].dtype:
            if arguments[1] == 1.0:
                return first
            if arguments[1] == -1.0:
                return self.call(aten.neg.default, first)
        return self.call(x.target, *arguments, *others)

    def pick_view(self, x: fx.Node, axis: int, hot: OneHot) -> Any:
        source: Any = x.args[0]
        shape = list(x.meta["val"].shape)
        inner = axis_through(shape, axis, source.meta["val"].shape)
        picked = None if inner is None else self.pick(source, inner, hot)
        if not isinstance(picked, fx.Node):
            return picked
        shape[axis] = 1
        total = 1
        for size in shape:
            total *= size
        if picked.meta["val"].numel() != total:
            return None
        return self.call(aten.view.default, picked, shape)

    def looked_up(self, row: fx.Node, axis: int, hot: OneHot) -> Any:
        """row[label], of a tensor that has one value a class."""
        classes, label = static(size_along(row.meta["val"], axis)), hot.label
        shape = label.meta["val"].shape
        if classes is None or hot.viewed or not all(isinstance(size, int) for size in shape):
            return None
        if (spelled(label), classes) not in self.gathered:
            label = self.call(aten.where.self, self.in_range(hot, classes), label, self.zero(label))
        flat = self.call(aten.view.default, row, [classes])
        places = self.call(aten.view.default, label, [label.meta["val"].numel()])
        found = self.call(aten.gather.default, flat, 0, places)
        return self.call(aten.view.default, found, list(shape))

    def in_range(self, hot: OneHot, classes: int) -> fx.Node:
        above = self.call(aten.ge.Scalar, hot.label, 0)
        below = self.call(aten.lt.Scalar, hot.label, classes)
        mask: fx.Node = self.call(aten.logical_and.default, above, below)
        return mask

    def zero(self, like: fx.Node) -> fx.Node:
        value = tensor_of(like)
        assert value is not None
        number: Any = 0.0 if value.dtype.is_floating_point else 0
        made: fx.Node = self.call(
            aten.full.default, [], number, dtype=value.dtype, device=value.device, pin_memory=False
        )
        return made


_RULES: dict[Any, Callable[..., Any]] = {
    aten.mul.Tensor: _Elimination.of_product,
    aten.mul.Scalar: _Elimination.of_product,
    aten.div.Tensor: _Elimination.of_quotient,
    aten.div.Scalar: _Elimination.of_quotient,
    aten.add.Tensor: lambda self, a, b: self.of_sum(aten.add.Tensor, a, b),
    aten.sub.Tensor: lambda self, a, b: self.of_sum(aten.sub.Tensor, a, b),
    aten.neg.default: _Elimination.of_negation,
    aten.where.self: _Elimination.of_where,
    CONVERT: _Elimination.of_cast,
}
"""What the sum of an operation is, from the sums of its arguments."""


def folded_dims(node: fx.Node) -> set[int]:
    """The axes that a sum or a mean folds, counted from the end."""
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    wanted: Any = node.args[1] if len(node.args) > 1 else None
    return {int(d) % rank - rank for d in wanted} if wanted else set(range(-rank, 0))
