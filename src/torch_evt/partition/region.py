"""A region: an anchor and the nodes fused with it, built node by node, each step checked.

`Builder.add` either takes a node in or says why not (`errors.Reason`); `Builder.finish` turns the
nodes into a tree with its inputs and outputs. The same code builds candidates in the joint graph
and re-checks planned regions on the real halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_evt import errors
from torch_evt.errors import Reason, TreeError
from torch_evt.graphs import (
    Size,
    expression,
    is_contiguous,
    is_one,
    product,
    same_size,
    same_sizes,
    tensor_of,
)
from torch_evt.mainloops import MainLoop
from torch_evt.partition.elementwise import (
    COMPARISONS,
    CONVERT,
    HALVES,
    VIEWS,
    constant,
    function_of,
    is_arithmetic,
    is_elementwise,
    value_of,
)
from torch_evt.partition.space import SizedTerm, Space
from torch_evt.tree.ir import (
    Accumulator,
    Cast,
    Compute,
    Const,
    Layout,
    Load,
    Operand,
    Over,
    Reduce,
    ReduceOp,
    Sink,
    Store,
    Term,
    Tree,
    Value,
    postorder,
    roots,
)
from torch_evt.tree.rewrite import rebuild
from torch_evt.tree.simplify import simplify
from torch_evt.tree.verify import verify

aten = torch.ops.aten
_REDUCTIONS: dict[Any, ReduceOp] = {
    aten.sum.dim_IntList: "sum",
    aten.sum.default: "sum",
    aten.amax.default: "max",
}


class Refused(Exception):
    """A node that cannot be taken in; carries the reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


@dataclass(frozen=True)
class Input:
    """A tensor that the kernel reads: a node, seen under another shape where `view` says so."""

    node: fx.Node
    view: tuple[Size, ...] | None = None
    strides: tuple[Size, ...] | None = None


@dataclass(frozen=True)
class Output:
    """A tensor that the kernel leaves: every node whose value it is, up to a row-major view or a
    widening cast.

    transposed: the nodes have the two last coordinates exchanged.
    """

    nodes: tuple[fx.Node, ...]
    sink: Sink
    transposed: bool = False


@dataclass(frozen=True)
class Region:
    """A legal region. nodes in graph order; inputs in the order of the kernel's tensors.

    kept: nodes that stay in the graph as well, where they fuse with their users: cheaper than
    storing their values.
    """

    anchor: fx.Node
    mainloop: MainLoop
    space: Space
    nodes: tuple[fx.Node, ...]
    tree: Tree
    inputs: tuple[Input, ...]
    sizes: tuple[Size, ...]
    outputs: tuple[Output, ...]
    kept: frozenset[fx.Node] = frozenset()

    @property
    def counts(self) -> bool:
        """Whether it holds an arithmetic node or a reduction beside its anchor's own bias."""
        return any(n is not self.anchor and (is_arithmetic(n) or is_reduction(n)) for n in self.nodes)


def is_reduction(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _REDUCTIONS


def is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in VIEWS


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor fuses a node with its producers: pointwise operations, views, reductions."""
    return node.op == "call_function" and (
        is_elementwise(node) or is_reduction(node) or is_view(node)
    )


def is_widening(node: fx.Node) -> bool:
    """Whether a node casts to a dtype of more bytes, which loses nothing."""
    value = tensor_of(node)
    before = tensor_of(node.args[0]) if node.args else None
    return (
        node.op == "call_function"
        and node.target is CONVERT
        and value is not None
        and before is not None
        and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and before.element_size() < value.element_size()
    )


def is_swap(node: fx.Node) -> bool:
    """Whether a node exchanges the two last dimensions of its input and keeps the others."""
    value = tensor_of(node)
    if node.op != "call_function" or node.target is not aten.permute.default or value is None:
        return False
    rank = value.dim()
    order = [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr,arg-type]
    return rank >= 2 and order == [*range(rank - 2), rank - 1, rank - 2]


def is_contiguous_copy(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is aten.clone.default
        and node.kwargs.get("memory_format") in (torch.contiguous_format,)
    )


def layout_of(
    value: torch.Tensor, names: str, shape: Sequence[Size], strides: Sequence[Size]
) -> Layout:
    """The layout of a tile: a view of `value` whose dimensions are called `names` ("lmk")."""
    axis = "-"
    for name, size, stride in zip(names, shape, strides):
        if same_size(stride, 1) and not is_one(size):
            axis = name
    if axis == "-":  # one row or one column: the last dimension counts as contiguous
        axis = names[-1] if same_size(strides[-1], 1) else "-"
    alignment = 16
    steps = [s for n, s, size in zip(names, strides, shape) if n != axis and not is_one(size)]
    for step in (*steps, value.storage_offset()):
        alignment = math.gcd(alignment, _known_factor(step) * value.element_size())
    return Layout(axis, alignment)


def _known_factor(size: Size) -> int:
    """An integer that divides a size whatever its symbols are."""
    if isinstance(size, int):
        return size
    coefficient, _ = expression(size).as_coeff_Mul()
    return int(coefficient) if coefficient.is_Integer else 1


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
        self.values: dict[fx.Node, Value] = {}  # full tiles
        self.reductions: dict[fx.Node, Reduce] = {}
        self.swapped: dict[fx.Node, Value] = {}  # tiles with m and n exchanged
        self.arguments: list[Input] = []
        self.sizes: list[Size] = []
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
        self.depth = left.shape[-1]
        prefix = "l" if batched else ""
        self.operands = tuple(
            Operand(name, value.dtype, layout_of(value, prefix + axes, value.shape, value.stride()), batched)
            for name, value, axes in (("A", left, "mk"), ("B", right, "kn"))
        )
        self.operand_nodes = (a, b)
        value: Value = Accumulator(0)
        if has_bias:
            beta = float(self.anchor.kwargs.get("beta", 1))  # type: ignore[arg-type]
            alpha = float(self.anchor.kwargs.get("alpha", 1))  # type: ignore[arg-type]
            if alpha != 1:
                value = Compute("mul", (value, Const(alpha)))
            if beta != 0:
                bias = self._load(self.anchor.args[0], result.shape)
                if beta != 1:
                    bias = Compute("mul", (bias, Const(beta)))
                value = Compute("add", (value, bias))
        self._keep(self.anchor, value)

    def _keep(self, node: fx.Node, value: Value) -> None:
        tensor = tensor_of(node)
        assert tensor is not None
        if self.exact_rounding and tensor.dtype in HALVES:
            value = Cast(value, tensor.dtype)
        self.values[node] = value
        self.nodes.append(node)

    def holds(self, node: Any) -> bool:
        return node in self.values or node in self.reductions or node in self.swapped

    def mark(self) -> tuple[int, int, int]:
        """A point to `rewind` to."""
        return len(self.nodes), len(self.arguments), len(self.sizes)

    def rewind(self, mark: tuple[int, int, int]) -> None:
        """Forget everything that was taken in since `mark`."""
        nodes, arguments, sizes = mark
        for node in self.nodes[nodes:]:
            for held in (self.values, self.reductions, self.swapped):
                held.pop(node, None)  # type: ignore[attr-defined]
        del self.nodes[nodes:], self.arguments[arguments:], self.sizes[sizes:]

    def add(self, node: fx.Node) -> Reason | None:
        """Take a node in, whose full-tile inputs are in or are loaded; the reason if it cannot."""
        mark = self.mark()
        try:
            self._add(node)
        except Refused as refusal:
            self.rewind(mark)
            return refusal.reason
        return None

    def _add(self, node: fx.Node) -> None:
        tensor = tensor_of(node)
        if tensor is None or node.op != "call_function":
            raise Refused(errors.NOT_FUSIBLE)
        if function_of(node) in self.disabled:
            raise Refused(errors.DISABLED)
        if is_reduction(node):
            self._add_reduction(node, tensor)
            return
        if is_swap(node) and node.args[0] in self.values:
            self._add_swap(node, tensor)
            return
        if is_contiguous_copy(node) and node.args[0] in self.swapped:
            self.swapped[node] = self.swapped[node.args[0]]
            self.nodes.append(node)
            return
        if not (is_view(node) or is_elementwise(node)):
            raise Refused(errors.NOT_FUSIBLE)
        if self.space.groups(tensor.shape) is None:
            raise Refused(errors.SHAPE)
        if tensor.dtype == torch.float64 or tensor.dtype.is_complex:
            raise Refused(errors.VALUE_DTYPE)
        if is_view(node):
            source = node.args[0]
            if source not in self.values:
                raise Refused(errors.NOT_FUSIBLE)
            self.values[node] = self.values[source]  # type: ignore[index]
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
        return self._load(argument, shape)

    def _load(self, argument: Any, shape: Sequence[Size]) -> Value:
        """A Load of a node outside, which broadcasts to `shape`.

        Broadcasts and widening casts are seen through: what they read is smaller.
        """
        casts: list[torch.dtype] = []
        while True:
            known = constant(argument)
            if known is not None:
                break
            source = self._narrower(argument)
            if source is None:
                break
            if argument.target is CONVERT:
                casts.append(argument.args[1])
            elif is_view(argument):
                shape = source.meta["val"].shape
            argument = source
        value: Value = known or self._load_tensor(argument, shape)
        for dtype in reversed(casts):
            value = Cast(value, dtype)
        return value

    def _narrower(self, argument: Any) -> fx.Node | None:
        """The input of a broadcast or a widening cast, also of one behind a view of a full tile."""
        value = tensor_of(argument)
        source = argument.args[0] if isinstance(argument, fx.Node) and argument.args else None
        before = tensor_of(source)
        if value is None or before is None or not isinstance(source, fx.Node):
            return None
        if argument.target is aten.expand.default:
            return source
        if is_widening(argument):
            return source if before.dtype in self.mainloop.load_dtypes else None
        if is_view(argument) and self.space.groups(before.shape) is not None:
            return source if self._narrower(source) is not None else None
        return None

    def _load_tensor(self, argument: Any, shape: Sequence[Size]) -> Value:
        tensor = tensor_of(argument)
        anchor = tensor_of(self.anchor)
        if tensor is None or anchor is None:
            raise Refused(errors.NOT_FUSIBLE)
        if tensor.device != anchor.device or tensor.layout is not torch.strided:
            raise Refused(errors.DEVICES)
        if tensor.dtype not in self.mainloop.load_dtypes:
            raise Refused(errors.VALUE_DTYPE)
        operand = self.space.operand(tensor, shape)
        if operand is None:
            raise Refused(errors.BROADCAST)
        view: tuple[Size, ...] | None = operand.shape
        if same_sizes(operand.shape, tensor.shape):
            view = None
        elif is_view(argument):
            source = tensor_of(argument.args[0])
            if source is not None and same_sizes(source.shape, operand.shape):
                if is_contiguous(source) and is_contiguous(tensor):
                    argument, tensor, view = argument.args[0], source, None
        strides = None if view is None else operand.strides
        number = self._number(Input(argument, view, strides))
        terms = tuple(Term(t.axis, t.op, self._size(t)) for t in operand.terms)  # type: ignore[arg-type]
        load = Load(number, tensor.dtype, terms)
        if load.kind == "tile":
            names = "".join(term.axis for term in terms)
            layout = layout_of(tensor, names, operand.shape, operand.strides)
            load = Load(number, tensor.dtype, terms, layout)
        return load

    def _number(self, wanted: Input) -> int:
        for i, known in enumerate(self.arguments):
            if known.node is wanted.node and _same_view(known.view, wanted.view):
                return i
        self.arguments.append(wanted)
        return len(self.arguments) - 1

    def _size(self, term: SizedTerm) -> int | None:
        if term.divisor is None:
            return None
        for i, known in enumerate(self.sizes):
            if same_size(known, term.divisor):
                return i
        self.sizes.append(term.divisor)
        return len(self.sizes) - 1

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
        over, fold_batch = self._folded(node, value)
        op = _REDUCTIONS[node.target]
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

    def _folded(self, node: fx.Node, value: torch.Tensor) -> tuple[Over, bool]:
        """Which coordinates a reduction folds."""
        rank = value.dim()
        wanted = node.args[1] if len(node.args) > 1 else None
        dims = {int(d) % rank for d in wanted} if wanted else set(range(rank))  # type: ignore[union-attr,arg-type]
        groups = self.space.groups(value.shape)
        if groups is None:
            raise Refused(errors.SHAPE)

        def folded(axis: Any) -> bool | None:
            active = [d for d in groups.of(axis, rank) if not is_one(value.shape[d])]
            inside = [d in dims for d in active]
            if all(inside):
                return True if active else None
            if any(inside):
                raise Refused(errors.PARTIAL_SUM)
            return False

        batch, rows, columns = folded("l"), folded("m"), folded("n")
        # None: the coordinate has size 1 and may count as folded or as kept.
        if rows is not False and columns is not False and batch is not False:
            if rows is None and columns:
                return "columns", False
            if columns is None and rows:
                return "rows", batch is True
            return "all", True
        if rows and columns is False:
            return "rows", batch is True
        if columns and rows is False and not batch:
            return "columns", False
        if rows is None and columns is False and batch is not False:
            return "rows", batch is True
        raise Refused(errors.PARTIAL_SUM)

    def finish(self, *, recompute: bool = False) -> Region | Reason:
        """The region with a store for every value that is used outside; the reason if illegal.

        recompute: where all users outside are pointwise or reductions, which Inductor fuses, they
        compute the value again from what the anchor stores.
        """
        inside = set(self.nodes)
        kept = self._recomputed(inside) if recompute else frozenset()
        outputs: list[Output] = []
        stores: dict[tuple[Any, ...], list[fx.Node]] = {}
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
            value = self.swapped[node] if swapped else self.values[stored]
            stores.setdefault((value, tensor.dtype, swapped), []).append(node)
        tiles: list[Output] = []
        for (value, dtype, swapped), nodes in stores.items():
            axis, extent = ("m", self.space.m) if swapped else ("n", self.space.n)
            alignment = math.gcd(16, _known_factor(extent) * dtype.itemsize)
            sink = Store(value, dtype, Layout(axis, alignment))
            tiles.append(Output(tuple(nodes), sink, swapped))
        outputs = tiles + outputs
        if not outputs:
            return errors.BARE
        return self._region(outputs, kept)

    def _recomputed(self, inside: set[fx.Node]) -> frozenset[fx.Node]:
        """The nodes to compute again outside: elementwise ones that only fusible nodes use there,
        and what they need from the region, up to stored values."""
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

    def _region(self, outputs: list[Output], kept: frozenset[fx.Node]) -> Region | Reason:
        reductions = sum(isinstance(o.sink, Reduce) for o in outputs)
        loads = self._used_tile_loads(outputs)
        limits = self.mainloop
        if (
            len(outputs) - reductions > limits.max_stores
            or reductions > limits.max_reductions
            or loads > limits.max_tile_loads
            or len(outputs) > 8
        ):
            return errors.TOO_MANY
        tree = simplify(Tree(self.mainloop.name, self.operands, tuple(o.sink for o in outputs)))
        tree, arguments, sizes = _renumber(tree, self.arguments, self.sizes)
        try:
            verify(tree)
        except TreeError:
            return errors.VALUE_DTYPE
        outputs = [
            Output(o.nodes, sink, o.transposed) for o, sink in zip(outputs, tree.sinks)
        ]
        operands = tuple(Input(node) for node in self.operand_nodes)
        return Region(
            anchor=self.anchor,
            mainloop=self.mainloop,
            space=self.space,
            nodes=tuple(self.nodes),
            tree=tree,
            inputs=operands + tuple(arguments),
            sizes=tuple(sizes),
            outputs=tuple(outputs),
            kept=kept,
        )

    def _used_tile_loads(self, outputs: list[Output]) -> int:
        values = postorder([o.sink.value for o in outputs])
        return sum(isinstance(v, Load) and v.kind == "tile" for v in values)


def _same_view(a: tuple[Size, ...] | None, b: tuple[Size, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    return same_sizes(a, b)


def _renumber(
    tree: Tree, arguments: list[Input], sizes: list[Size]
) -> tuple[Tree, list[Input], list[Size]]:
    """Number arguments and sizes in the order of first use, leaving out what is not used."""
    loads = [v for v in postorder(roots(tree)) if isinstance(v, Load)]
    order = list(dict.fromkeys(load.argument for load in loads))
    size_order = list(
        dict.fromkeys(t.size for load in loads for t in load.index if t.size is not None)
    )

    def renumbered(value: Value) -> Value:
        if not isinstance(value, Load):
            return value
        terms = tuple(
            Term(t.axis, t.op, None if t.size is None else size_order.index(t.size))
            for t in value.index
        )
        return Load(order.index(value.argument), value.dtype, terms, value.layout)

    return rebuild(tree, renumbered), [arguments[i] for i in order], [sizes[i] for i in size_order]
