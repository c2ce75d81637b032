"""A region: an anchor and the nodes fused with it; its tree, what it reads, what it leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torch_evt.errors import Reason
from torch_evt.graphs import Size, expression, is_one, same_size, tensor_of
from torch_evt.mainloops import MainLoop
from torch_evt.partition.elementwise import CONVERT, VIEWS, is_arithmetic, is_elementwise
from torch_evt.partition.space import Space
from torch_evt.tree.ir import Layout, ReduceOp, Sink, Tree

aten = torch.ops.aten

REDUCTIONS: dict[Any, ReduceOp] = {
    aten.sum.dim_IntList: "sum",
    aten.sum.default: "sum",
    aten.amax.default: "max",
}
"""Operations that a Reduce sink can compute."""


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

    transposed: the nodes have the two last coordinates exchanged. aliases: further nodes of the
    region whose value it is; only the region reads them, but another one may see through to them.
    """

    nodes: tuple[fx.Node, ...]
    sink: Sink
    transposed: bool = False
    aliases: tuple[fx.Node, ...] = ()


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
        """Whether it is more than its anchor, see `works`."""
        return works(self.anchor, self.nodes, self.kept)


def works(anchor: fx.Node, nodes: Iterable[fx.Node], kept: frozenset[fx.Node]) -> bool:
    """Whether a region holds an arithmetic node or a reduction beside its anchor's own bias.

    A node of which only the copy outside is read is no work of the region's.
    """
    return any(
        n is not anchor and n not in kept and (is_arithmetic(n) or is_reduction(n)) for n in nodes
    )


def is_reduction(node: fx.Node) -> bool:
    """Whether a Reduce sink can compute a node, its axes aside."""
    return node.op == "call_function" and node.target in REDUCTIONS


def is_view(node: fx.Node) -> bool:
    """Whether a node keeps the row-major order of its input's elements."""
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
    """Whether a node copies its input into row-major order."""
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
    for name, size, stride in zip(names, shape, strides, strict=True):
        if same_size(stride, 1) and not is_one(size):
            axis = name
    if axis == "-":  # one row or one column: the last dimension counts as contiguous
        axis = names[-1] if same_size(strides[-1], 1) else "-"
    alignment = 16
    steps = [
        s
        for n, s, size in zip(names, strides, shape, strict=True)
        if n != axis and not is_one(size)
    ]
    for step in (*steps, value.storage_offset()):
        alignment = math.gcd(alignment, known_factor(step) * value.element_size())
    return Layout(axis, alignment)


def known_factor(size: Size) -> int:
    """An integer that divides a size whatever its symbols are."""
    if isinstance(size, int):
        return size
    coefficient, _ = expression(size).as_coeff_Mul()
    return int(coefficient) if coefficient.is_Integer else 1
