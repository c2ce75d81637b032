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

_WORTH = 1.125
"""What may be read to compute a value again, over the value's own bytes."""

_LONGEST = 6
"""Operations after each other in a chain."""

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
        self._possible: dict[fx.Node, bool] = {}
        self._sources: dict[fx.Node, list[tuple[fx.Node, list[fx.Node]]]] = {}

    def possible(self, value: fx.Node) -> bool:
        """Whether a value that no tangent enters is cheap to compute again: elementwise, not
        random, and no value that is compared with its maximum."""
        known = self._possible.get(value)
        if known is None:
            known = self._possible[value] = (
                self._labels[value] in ("forward", "either")
                and is_elementwise(value)
                and not is_compared(value)
                and all(works(root(s)) or constant(s) is not None for s in value.all_input_nodes)
            )
        return known

    def _sources_of(self, value: fx.Node) -> list[tuple[fx.Node, list[fx.Node]]]:
        """The values that a value is computed from, each with the views between."""
        known = self._sources.get(value)
        if known is None:
            known = self._sources[value] = [
                (root(source), views(source))
                for source in value.all_input_nodes
                if constant(source) is None
            ]
        return known

    def chain(
        self,
        value: fx.Node,
        reads: Collection[fx.Node],
        fits: Callable[[fx.Node], bool] = lambda _: True,
        *,
        longest: int = _LONGEST,
    ) -> Chain:
        """How to compute a value again from smaller ones, or from what is read anyway.

        reads: the values that are read anyway. fits: which nodes may be part of the chain.
        longest: operations after each other.
        """
        itself = Chain(frozenset(), frozenset({value}))
        if longest == 0 or not self.possible(value) or not fits(value):
            return itself
        nodes = {value}
        wanted: set[fx.Node] = set()
        left = _WORTH * self._size(value)
        sources = self._sources_of(value)
        fixed = {before for before, _ in sources if before in reads or not self.possible(before)}
        left -= sum(self._size(before) for before in fixed if before not in reads)
        for before, between in sources:
            if left < 0:
                return itself
            if before in fixed:
                more = Chain(frozenset(), frozenset({before}))
            else:
                more = self.chain(before, reads, fits, longest=longest - 1)
                left -= sum(self._size(v) for v in more.reads - wanted if v not in reads)
            if more.nodes or all(fits(view) for view in between):
                nodes |= more.nodes | set(between)
            wanted |= more.reads
        if left < 0:
            return itself
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
