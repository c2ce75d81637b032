"""Building a region node by node, each step checked.

`Builder.add` either takes a node in or says why not (`errors.Reason`); `Builder.finish` turns the
nodes into a tree with its inputs and outputs. The same code builds candidates in the joint graph
and re-checks planned regions on the real halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torch_evt import errors
from torch_evt.errors import Reason, TreeError
from torch_evt.graphs import Size, is_contiguous, is_one, product, same_size, tensor_of
from torch_evt.mainloops import MainLoop
from torch_evt.partition.elementwise import (
    COMPARISONS,
    HALVES,
    constant,
    function_of,
    is_elementwise,
    value_of,
)
from torch_evt.partition.loads import Loads
from torch_evt.partition.maxima import is_compared
from torch_evt.partition.region import (
    REDUCTIONS,
    Input,
    Output,
    Refused,
    Region,
    is_contiguous_copy,
    is_fusible,
    is_reduction,
    is_swap,
    is_view,
    is_widening,
    known_factor,
    layout_of,
)
from torch_evt.partition.space import Space
from torch_evt.tree.ir import (
    Accumulator,
    Axis,
    Cast,
    Compute,
    Const,
    Layout,
    Operand,
    Over,
    Reduce,
    Store,
    Tree,
    Value,
)
from torch_evt.tree.normal import normal_form, tile_loads

aten = torch.ops.aten


class Builder:
    """Grows one region.

    anchor: the product. exact_rounding: round after every operation (`precision=eager`).
    disabled: functions that stay outside.
    """

    def __init__(
        self,
        anchor: fx.Node,
        mainloop: MainLoop,
        device_kind: str,
        *,
        exact_rounding: bool = False,
        disabled: Iterable[str] = (),
    ) -> None:
        self.anchor = anchor
        self.mainloop = mainloop
        self.exact_rounding = exact_rounding
        self.disabled = frozenset(disabled)
        self.nodes: list[fx.Node] = []
        self._marks: list[tuple[int, int]] = []  # of the loads, before each node
        self.values: dict[fx.Node, Value] = {}  # full tiles
        self.reductions: dict[fx.Node, Reduce] = {}
        self.swapped: dict[fx.Node, Value] = {}  # tiles with m and n exchanged
        self._start(device_kind)

    def _start(self, device_kind: str) -> None:
        result = tensor_of(self.anchor)
        has_bias = self.anchor.target in (aten.addmm.default, aten.baddbmm.default)
        a, b = self.anchor.args[1:3] if has_bias else self.anchor.args[:2]
        left, right = tensor_of(a), tensor_of(b)
        if result is None or left is None or right is None:
            raise Refused(errors.NOT_FUSIBLE)
        allowed = self.mainloop.operand_dtypes.get(device_kind, frozenset())
        if left.dtype not in allowed or right.dtype != left.dtype or result.dtype not in allowed:
            raise Refused(errors.OPERAND_DTYPE)
        if any(same_size(s, 0) for s in (*left.shape, *right.shape)):
            raise Refused(errors.EMPTY)
        batched = result.dim() == 3
        self.space = Space(result.shape[0] if batched else None, *result.shape[-2:])
        self.loads = Loads(self.space, self.mainloop, result.device)
        prefix = "l" if batched else ""
        self.operands = tuple(
            Operand(
                name,
                value.dtype,
                layout_of(value, prefix + axes, value.shape, value.stride()),
                batched,
            )
            for name, value, axes in (("A", left, "mk"), ("B", right, "kn"))
        )
        self.operand_nodes: tuple[Any, Any] = (a, b)
        value: Value = Accumulator(0)
        if has_bias:
            beta = float(self.anchor.kwargs.get("beta", 1))  # type: ignore[arg-type]
            alpha = float(self.anchor.kwargs.get("alpha", 1))  # type: ignore[arg-type]
            if alpha != 1:
                value = Compute("mul", (value, Const(alpha)))
            if beta != 0:
                bias = self.loads.load(self.anchor.args[0], result.shape)
                if beta != 1:
                    bias = Compute("mul", (bias, Const(beta)))
                value = Compute("add", (value, bias))
        self._keep(self.anchor, value)
        self._marks.append((0, 0))

    def _keep(self, node: fx.Node, value: Value) -> None:
        tensor = tensor_of(node)
        assert tensor is not None
        if self.exact_rounding and tensor.dtype in HALVES:
            value = Cast(value, tensor.dtype)
        self.values[node] = value
        self.nodes.append(node)

    def holds(self, node: Any) -> bool:
        """Whether a node is in the region."""
        return node in self.values or node in self.reductions or node in self.swapped

    def mark(self) -> int:
        """A point to `rewind` to: how many nodes are in."""
        return len(self.nodes)

    def rewind(self, mark: int) -> None:
        """Forget every node but the first `mark`, and what was loaded for the others."""
        if mark == len(self.nodes):
            return
        for node in self.nodes[mark:]:
            self.values.pop(node, None)
            self.reductions.pop(node, None)
            self.swapped.pop(node, None)
        self.loads.rewind(self._marks[mark])
        del self.nodes[mark:], self._marks[mark:]

    def add(self, node: fx.Node) -> Reason | None:
        """Take a node in, whose full-tile inputs are in or are loaded; the reason if it cannot."""
        mark = self.loads.mark()
        try:
            self._add(node)
        except Refused as refusal:
            self.loads.rewind(mark)
            return refusal.reason
        self._marks.append(mark)
        return None

    def _add(self, node: fx.Node) -> None:
        tensor = tensor_of(node)
        if tensor is None or node.op != "call_function":
            raise Refused(errors.NOT_FUSIBLE)
        if function_of(node) in self.disabled:
            raise Refused(errors.DISABLED)
        if is_compared(node) and not (is_view(node) or is_widening(node)):
            raise Refused(errors.RECOMPUTED_MAX)
        if is_reduction(node):
            self._add_reduction(node, tensor)
            return
        if is_swap(node) and node.args[0] in self.values:
            self._add_swap(node, tensor)
            return
        source: Any = node.args[0] if node.args else None
        if is_contiguous_copy(node) and source in self.swapped:
            self.swapped[node] = self.swapped[source]
            self.nodes.append(node)
            return
        if not (is_view(node) or is_elementwise(node)):
            raise Refused(errors.NOT_FUSIBLE)
        if self.space.groups(tensor.shape) is None:
            raise Refused(errors.SHAPE)
        if tensor.dtype == torch.float64 or tensor.dtype.is_complex:
            raise Refused(errors.VALUE_DTYPE)
        if is_view(node):
            if source not in self.values:
                raise Refused(errors.NOT_FUSIBLE)
            self.values[node] = self.values[source]
            self.nodes.append(node)
            return
        comparison = function_of(node) in COMPARISONS

        def argument(given: Any) -> Value:
            value = self._argument(given, tensor.shape)
            seen = tensor_of(given)
            if comparison and seen is not None and seen.dtype in HALVES:
                value = Cast(value, seen.dtype)  # the decision that others take, who read it stored
            return value

        value = value_of(node, argument)
        if value is None:
            raise Refused(errors.NOT_FUSIBLE)
        self._keep(node, value)

    def _argument(self, argument: Any, shape: tuple[Size, ...]) -> Value:
        known = constant(argument)
        if known is not None:
            return known
        if argument in self.values:
            tensor = tensor_of(argument)
            assert tensor is not None
            if not same_size(product(tensor.shape), product(shape)):
                raise Refused(errors.BROADCAST)
            return self.values[argument]
        if self.holds(argument):
            raise Refused(errors.ORDER)  # a reduction's result is known only after the last tile
        return self.loads.load(argument, shape)

    def _add_swap(self, node: fx.Node, tensor: torch.Tensor) -> None:
        source = node.args[0]
        value = tensor_of(source)
        copies_only = all(is_contiguous_copy(user) for user in node.users)
        if not self.mainloop.transposed_store or not copies_only or value is None:
            raise Refused(errors.NOT_FUSIBLE)
        groups = self.space.groups(value.shape)
        rank = value.dim()
        one_matrix = groups is not None and groups.n == rank - 1 and groups.m == rank - 2
        if not one_matrix:
            raise Refused(errors.SHAPE)
        self.swapped[node] = self.values[source]  # type: ignore[index]
        self.nodes.append(node)

    def _add_reduction(self, node: fx.Node, tensor: torch.Tensor) -> None:
        source = node.args[0]
        value = tensor_of(source)
        if source not in self.values or value is None:
            raise Refused(errors.NOT_FUSIBLE)
        if not value.dtype.is_floating_point or not tensor.dtype.is_floating_point:
            raise Refused(errors.VALUE_DTYPE)
        if tensor.dtype not in self.mainloop.store_dtypes:
            raise Refused(errors.VALUE_DTYPE)
        over, fold_batch = folded(self.space, node, value)
        op = REDUCTIONS[node.target]
        if (over, op) not in self.mainloop.reductions:
            raise Refused(errors.REDUCE_KIND)
        reduced = self.values[source]  # type: ignore[index]
        if op == "max":
            reduced = self._as_stored(source)
        self.reductions[node] = Reduce(reduced, over, op, tensor.dtype, fold_batch)
        self.nodes.append(node)

    def _as_stored(self, source: Any) -> Value:
        """The anchor's value, rounded as everybody else reads it.

        A gradient finds the maxima again by comparing with the stored values. So the maximum must
        be one of them, bit for bit, which a function computed again elsewhere need not be.
        """
        while source is not self.anchor:
            if not (is_view(source) or is_widening(source)):
                raise Refused(errors.RECOMPUTED_MAX)
            source = source.args[0]
        value = tensor_of(source)
        assert value is not None
        return Cast(self.values[source], value.dtype)

    def finish(self, kept: frozenset[fx.Node] = frozenset()) -> Region | Reason:
        """The region with a store for every value that is used outside; the reason if illegal.

        kept: nodes that stay in the graph as well, so that nothing of them is stored.
        """
        inside = set(self.nodes)
        outputs: list[Output] = []
        stores: dict[fx.Node, list[fx.Node]] = {}  # by the node whose memory they share
        for node in self.nodes:
            if node in kept or all(user in inside and user not in kept for user in node.users):
                continue
            if node in self.reductions:
                outputs.append(Output((node,), self.reductions[node]))
                continue
            swapped = node in self.swapped
            stored = node if swapped else self._narrow(node)
            tensor = tensor_of(stored)
            assert tensor is not None
            if tensor.dtype not in self.mainloop.store_dtypes:
                return errors.VALUE_DTYPE
            if swapped and not is_contiguous_copy(node):
                return errors.STRIDE
            if not is_contiguous(tensor):
                return errors.STRIDE
            stores.setdefault(self._root(stored), []).append(node)
        tiles: list[Output] = []
        for root, nodes in stores.items():
            swapped = root in self.swapped
            value = self.swapped[root] if swapped else self.values[root]
            dtype = root.meta["val"].dtype
            axis, extent = ("m", self.space.m) if swapped else ("n", self.space.n)
            alignment = math.gcd(16, known_factor(extent) * dtype.itemsize)
            sink = Store(value, dtype, Layout(axis, alignment))
            same = () if swapped else (n for n in self.values if self._root(n) is root)
            aliases = tuple(n for n in same if n not in nodes and n not in kept)
            tiles.append(Output(tuple(nodes), sink, swapped, aliases))
        outputs = tiles + outputs
        if not outputs:
            return errors.BARE
        return self._region(outputs, kept)

    def recomputable(self) -> frozenset[fx.Node]:
        """The nodes that users outside can compute again: elementwise ones that only fusible nodes
        use there, and what they need from the region, up to stored values."""
        inside = set(self.nodes)
        wanted = [
            node
            for node in self.nodes
            if node in self.values
            and node is not self.anchor
            and any(user not in inside for user in node.users)
            and all(user in inside or is_fusible(user) for user in node.users)
        ]
        stored = {
            node
            for node in self.nodes
            if any(user not in inside for user in node.users) and node not in wanted
        }
        kept: set[fx.Node] = set()
        while wanted:
            node = wanted.pop()
            if node in kept or node is self.anchor or node in stored:
                continue
            if node in self.reductions or node in self.swapped:
                return frozenset()
            kept.add(node)
            wanted.extend(source for source in node.all_input_nodes if source in inside)
        return frozenset(kept)

    def _narrow(self, node: fx.Node) -> fx.Node:
        """What is stored for a node: in place of a widening cast, the value before it."""
        source = node.args[0] if node.args else None
        if source in self.values and node is not self.anchor:
            assert isinstance(source, fx.Node)
            if is_widening(node):
                return self._narrow(source)
            if is_view(node) and self._narrow(source) is not source:
                return self._narrow(source)
        return node

    def _root(self, node: fx.Node) -> fx.Node:
        """The node that a view is of. Two equal values that are no views of each other stay two
        tensors, for a user may write into one of them."""
        while node is not self.anchor and is_view(node) and node.args[0] in self.values:
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _region(self, outputs: list[Output], kept: frozenset[fx.Node]) -> Region | Reason:
        reductions = sum(isinstance(o.sink, Reduce) for o in outputs)
        loads = tile_loads(tuple(output.sink.value for output in outputs))
        limits = self.mainloop
        if (
            len(outputs) - reductions > limits.max_stores
            or reductions > limits.max_reductions
            or loads > limits.max_tile_loads
            or len(outputs) > 8
        ):
            return errors.TOO_MANY
        sinks = tuple(output.sink for output in outputs)
        try:
            normal = normal_form(Tree(self.mainloop.name, self.operands, sinks))
        except TreeError:  # types that do not go together, integers and floats say
            return errors.VALUE_DTYPE
        outputs = [
            replace(output, sink=sink)
            for output, sink in zip(outputs, normal.tree.sinks, strict=True)
        ]
        operands = tuple(Input(node) for node in self.operand_nodes)
        return Region(
            anchor=self.anchor,
            mainloop=self.mainloop,
            space=self.space,
            nodes=tuple(self.nodes),
            tree=normal.tree,
            inputs=operands + tuple(self.loads.arguments[i] for i in normal.arguments),
            sizes=tuple(self.loads.sizes[i] for i in normal.sizes),
            outputs=tuple(outputs),
            kept=kept,
        )


def folded(space: Space, node: fx.Node, value: torch.Tensor) -> tuple[Over, bool]:
    """Which coordinates a reduction of `value` folds, and whether l is folded with them.

    Raises Refused where it folds a part of a coordinate, or l and n but not m.
    """
    rank = value.dim()
    wanted = node.args[1] if len(node.args) > 1 else None
    dims = {int(d) % rank for d in wanted} if wanted else set(range(rank))  # type: ignore[union-attr,arg-type]
    groups = space.groups(value.shape)
    if groups is None:
        raise Refused(errors.SHAPE)

    def is_folded(axis: Axis) -> bool | None:
        active = [d for d in groups.of(axis, rank) if not is_one(value.shape[d])]
        inside = [d in dims for d in active]
        if all(inside):
            return True if active else None
        if any(inside):
            raise Refused(errors.PARTIAL_SUM)
        return False

    batch, rows, columns = is_folded("l"), is_folded("m"), is_folded("n")
    # None: the coordinate has size 1 and may count as folded or as kept.
    if columns and not rows and not batch:
        return "columns", False
    if rows and not columns:
        return "rows", batch is True
    if rows is not False and columns is not False and batch is not False:
        return "all", True
    if rows is None and columns is False and batch is not False:
        return "rows", batch is True
    raise Refused(errors.PARTIAL_SUM)
