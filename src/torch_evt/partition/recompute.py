"""Computing forward values again in backward: which ones may be, and from what.

A value is computed again by a chain of elementwise operations that starts from values in memory.
Random draws and products never are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from torch_evt.partition.elementwise import constant, is_elementwise
from torch_evt.partition.halves import Label
from torch_evt.partition.maxima import is_compared
from torch_evt.partition.price import passes, works

_WORTH = 1.05
"""What may be read to compute a value again, over the value's own bytes."""

Nodes = frozenset[fx.Node]


@dataclass(frozen=True)
class Chain:
    """The nodes that compute a value again, views among them, and the values they read. Without
    nodes: reading the value itself is cheaper, or it cannot be computed again."""

    nodes: Nodes
    reads: Nodes


class Recomputation:
    """Answers for one joint graph. labels: of its nodes; size: bytes of a node's tensor."""

    def __init__(self, labels: Mapping[fx.Node, Label], size: Callable[[fx.Node], int]) -> None:
        self._labels = labels
        self._size = size

    def possible(self, value: fx.Node) -> bool:
        """Whether a forward value is cheap to compute again: elementwise, not
        random, and no value that is compared with its maximum."""
        return (
            self._labels[value] == "forward"
            and is_elementwise(value)
            and not is_compared(value)
            and all(works(root(s)) or constant(s) is not None for s in value.all_input_nodes)
        )

    def chain(
        self,
        value: fx.Node,
        reads: Collection[fx.Node],
        fits: Callable[[fx.Node], bool] = lambda _: True,
    ) -> Chain:
        """How to compute a value again from smaller ones, or from what is read anyway.

        reads: the values that are read anyway. fits: which nodes may be part of the chain.
        """
        if not self.possible(value) or not fits(value):
            return Chain(frozenset(), frozenset({value}))
        nodes = {value}
        wanted: set[fx.Node] = set()
        for source in value.all_input_nodes:
            if constant(source) is not None:
                continue
            before, between = root(source), views(source)
            if before in reads:
                more = Chain(frozenset(), frozenset({before}))
            else:
                more = self.chain(before, reads, fits)
            if more.nodes or all(fits(view) for view in between):
                nodes |= more.nodes | set(between)
            wanted |= more.reads
        new = sum(self._size(v) for v in wanted if v not in reads)
        if new > _WORTH * self._size(value):
            return Chain(frozenset(), frozenset({value}))
        return Chain(frozenset(nodes), frozenset(wanted))


def root(node: fx.Node) -> fx.Node:
    """The value that reading a node reads: views and widening casts are seen through."""
    while node.op == "call_function" and passes(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def views(node: fx.Node) -> list[fx.Node]:
    """The views and widening casts from a node up to its root, the root left out."""
    return list(_views(node))


def _views(node: fx.Node) -> Iterator[fx.Node]:
    while node.op == "call_function" and passes(node) and node.all_input_nodes:
        yield node
        node = node.all_input_nodes[0]
