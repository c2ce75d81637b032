"""Place: put a region's operator into its graph, in the place of the region's nodes."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from torch_evt.graphs import (
    Size,
    draws,
    expression,
    rename,
    same_sizes,
    size_nodes,
    sort_topologically,
    tensor_of,
)
from torch_evt.partition.elementwise import CONVERT
from torch_evt.partition.region import Input, Output, Region
from torch_evt.runtime.dispatch import write_spec
from torch_evt.runtime.ops import has_symbols, region_op

aten = torch.ops.aten
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "custom")


class CannotPlace(Exception):
    """A size that no node of the graph computes."""


def place(
    graph: fx.Graph,
    region: Region,
    replaced: dict[fx.Node, fx.Node],
    *,
    poison: bool = False,
    name: str | None = None,
) -> fx.Node:
    """Replace the region's nodes by its operator; returns the operator's node.

    The operator reads the region's inputs, viewed where needed, and its outputs take the names of
    the nodes they replace. replaced: nodes that earlier regions of this graph replaced, and by
    what; this region's are added, its aliases too, each as a view that is dead if nobody reads it.
    poison, name: as for `write_spec`.
    Raises CannotPlace, with the graph unchanged, where a size is needed that no node of the graph
    computes, or an input that is not in the graph any more, or where random numbers would be drawn
    in another order.
    """
    sizes = _Sizes(graph)
    given_inputs = [replace(i, node=replaced.get(i.node, i.node)) for i in region.inputs]
    arguments = [sizes.argument(size) for size in region.sizes]
    views = [None if i.view is None else [sizes.argument(s) for s in i.view] for i in given_inputs]
    shapes = [
        [[sizes.argument(s) for s in _value(node).shape] for node in output.nodes]
        for output in region.outputs
    ]
    aliases = [sizes.known_shapes(output.aliases) for output in region.outputs]
    order = {node: i for i, node in enumerate(graph.nodes)}
    for given in given_inputs:
        if given.node not in order:
            raise CannotPlace(f"{given.node} went with the region that computed it")
    _check_draws(region, given_inputs, order)
    sources = [region.anchor, *(i.node for i in given_inputs), *sizes.used]
    last = max(sources, key=order.__getitem__)
    with graph.inserting_after(last):
        marker = graph.call_function(operator.add, (0, 0))  # gives the insertion point
    with graph.inserting_before(marker):
        created = sizes.create(graph)
        inputs = []
        for given, view in zip(given_inputs, views, strict=True):
            if view is None:
                inputs.append(given.node)
                continue
            assert given.view is not None and given.strides is not None
            value = _value(given.node)
            seen = value.as_strided(given.view, given.strides, value.storage_offset())
            inputs.append(_call(graph, aten.view.default, (given.node, created(view)), seen))
        spec = write_spec(region.tree, poison, name)
        numbers = created(arguments)
        values = ([_value(i) for i in inputs], spec, [_number(n) for n in numbers])
        symbolic = has_symbols(values[0], values[2])
        op = region_op(len(region.outputs), symbolic=symbolic)
        results = op(*values)
        kernel = _call(graph, op, (inputs, spec, numbers), results)
        kernel.meta["eager_input_vals"] = (values, {})
        kernel.meta.update({k: v for k, v in region.anchor.meta.items() if k in _KEPT_META})
        replacements: list[tuple[fx.Node, fx.Node]] = []
        for i, (output, output_shapes) in enumerate(zip(region.outputs, shapes, strict=True)):
            result = _call(graph, operator.getitem, (kernel, i), results[i])
            for node, shape in zip(output.nodes, output_shapes, strict=True):
                replacements.append((node, _seen_as(graph, result, output, node, created(shape))))
            for node, shape in aliases[i].items():
                replaced[node] = _seen_as(graph, result, output, node, created(shape))
    graph.erase_node(marker)
    for node, new in replacements:
        node.replace_all_uses_with(new)
        replaced[node] = new
    names = [(new, node.name) for node, new in replacements]
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)
    for new, name in dict(names).items():
        rename(new, name)
    if any(user < new for _, new in replacements for user in new.users):
        sort_topologically(graph)  # of the whole graph, so only where something stands too early
    return kernel


def _check_draws(region: Region, inputs: Iterable[Input], order: Mapping[fx.Node, int]) -> None:
    """Raise CannotPlace where the kernel needs a later draw than one that needs the kernel."""
    drawing = [node for node in order if draws(node)]
    if len(drawing) < 2:
        return
    before = _reached([i.node for i in inputs], lambda node: node.all_input_nodes)
    after = _reached(region.nodes, lambda node: node.users) - set(region.nodes)
    needed = [order[node] for node in drawing if node in before]
    waiting = [order[node] for node in drawing if node in after]
    if needed and waiting and max(needed) > min(waiting):
        raise CannotPlace("random numbers would be drawn in another order")


def _reached(
    starts: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    seen = set(starts)
    stack = list(seen)
    while stack:
        for node in following(stack.pop()):
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return seen


def _seen_as(
    graph: fx.Graph, result: fx.Node, output: Output, node: fx.Node, shape: list[Any]
) -> fx.Node:
    """The kernel's output under the shape of the node that it replaces."""
    value, wanted = _value(result), _value(node)
    if output.transposed:
        rank = value.dim()
        swap = [*range(rank - 2), rank - 1, rank - 2]
        result = _call(graph, aten.permute.default, (result, swap), value.permute(swap))
        value = _value(result)
    if not same_sizes(value.shape, wanted.shape):
        # a view of the value, not a new one: passes ask who shares memory
        seen = value.as_strided(wanted.shape, wanted.stride())
        result = _call(graph, aten.view.default, (result, shape), seen)
        value = seen
    if value.dtype != wanted.dtype:
        result = _call(graph, CONVERT, (result, wanted.dtype), wanted)
    return result


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node


def _value(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None
    return value


def _number(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, fx.Node) else size


class _Sizes:
    """Finds or makes the nodes that compute symbolic sizes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.known = size_nodes(graph)
        self.used: list[fx.Node] = []
        self._products: dict[sympy.Expr, list[fx.Node | int]] = {}
        self._made: dict[sympy.Expr, fx.Node] = {}

    def argument(self, size: Size) -> int | sympy.Expr:
        """An int, or the expression of a size that `create` will have a node for."""
        wanted = expression(size)
        if wanted.is_Integer:
            return int(wanted)
        if wanted in self.known:
            self.used.append(self.known[wanted])
            return wanted
        factors = wanted.as_ordered_factors()
        numbers = [f for f in factors if f.is_Integer]
        symbols = [f for f in factors if not f.is_Integer]
        if not all(f in self.known for f in symbols) or len(factors) < 2:
            raise CannotPlace(f"no node computes the size {wanted}")
        self.used.extend(self.known[f] for f in symbols)
        self._products[wanted] = [self.known[f] for f in symbols]
        self._products[wanted] += [int(n) for n in numbers]
        return wanted

    def known_shapes(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, list[int | sympy.Expr]]:
        """The shapes of nodes as arguments, without those that `argument` has no node for."""
        shapes: dict[fx.Node, list[int | sympy.Expr]] = {}
        for node in nodes:
            with contextlib.suppress(CannotPlace):
                shapes[node] = [self.argument(size) for size in _value(node).shape]
        return shapes

    def create(self, graph: fx.Graph) -> Any:
        """Make the missing nodes at the insertion point; returns expressions -> arguments."""
        for wanted, factors in self._products.items():
            node: Any = factors[0]
            for factor in factors[1:]:
                value = _number(node) * _number(factor)
                node = _call(graph, operator.mul, (node, factor), value)
            self._made[wanted] = node

        def arguments(sizes: list[int | sympy.Expr]) -> list[Any]:
            return [
                s if isinstance(s, int) else self._made.get(s, self.known.get(s)) for s in sizes
            ]

        return arguments
