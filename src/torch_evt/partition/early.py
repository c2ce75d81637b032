"""Values that only backward needs, computed in forward: a mask saved in place of what it compares.

No tangent enters such a value, so that it may be computed in either half. It belongs to forward
where it is smaller than the one forward value that it is computed from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from torch_evt.graphs import tensor_of
from torch_evt.partition import candidates
from torch_evt.partition.builder import Builder
from torch_evt.partition.candidates import Growth, Rules
from torch_evt.partition.elementwise import constant, is_elementwise
from torch_evt.partition.halves import Label, label_joint
from torch_evt.partition.maxima import is_compared
from torch_evt.partition.price import passes, works
from torch_evt.partition.recompute import Nodes, root, views
from torch_evt.partition.region import Region


def masks_apart(graph: fx.Graph, num_forward_outputs: int) -> frozenset[str]:
    """Names of the comparisons for whose sake alone a value of forward would be saved.

    As nodes of their own they can be saved in its place; within a named function they cannot. Only
    backward needs such a comparison, and needs its value for nothing else.
    """
    comparisons = [node for node in graph.nodes if compares(node)]
    if not comparisons:
        return frozenset()
    labels = label_joint(graph, num_forward_outputs)

    def is_apart(node: fx.Node) -> bool:
        sources = [root(s) for s in node.all_input_nodes if constant(s) is None]
        return (
            labels[node] == "either"
            and len(sources) == 1
            and sources[0].op == "call_function"
            and labels[sources[0]] == "forward"
            and all(labels[r] == "forward" or compares(r) for r in _read_by(sources[0]))
        )

    return frozenset(node.name for node in comparisons if is_apart(node))


def compares(node: fx.Node) -> bool:
    """Whether a node computes a mask, element by element."""
    value = tensor_of(node)
    return value is not None and value.dtype == torch.bool and is_elementwise(node)


def _read_by(value: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a value or a view of it."""
    for user in value.users:
        if passes(user):
            yield from _read_by(user)
        elif user.op != "output":
            yield user


class Early:
    """Answers for one joint graph. labels: of its nodes; size: bytes of a node's tensor."""

    def __init__(
        self, graph: fx.Graph, labels: Mapping[fx.Node, Label], size: Callable[[fx.Node], int]
    ) -> None:
        self._labels = labels
        self._size = size
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self._readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "output" or not passes(node):
                for source in dict.fromkeys(map(root, node.all_input_nodes)):
                    self._readers[source].append(node)
        found = {node: self._found(node) for node in graph.nodes if labels[node] == "forward"}
        self.of = {value: nodes for value, nodes in found.items() if nodes}
        """Forward value -> the nodes, views among them, that forward may compute in place of
        leaving it for backward."""
        self.nodes: Nodes = frozenset().union(*self.of.values())
        self._together: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for nodes in self.of.values():
            for node in nodes:
                self._together[node] |= nodes

    def _found(self, value: fx.Node) -> Nodes:
        """The nodes after which the least is left for backward."""
        later = [node for node in self._readers[value] if self._labels[node] != "forward"]
        if not later or not works(value) or value.op != "call_function":
            return frozenset()
        inside: set[fx.Node] = set()
        best, least = 0, self._size(value)
        order: list[fx.Node] = []
        pending = set(later)
        while pending:
            node = min(pending, key=self._position.__getitem__)
            pending.remove(node)
            if not self._may_enter(node, value, inside):
                continue
            inside.add(node)
            order.append(node)
            pending.update(self._readers[node])
            left = sum(self._size(v) for v in inside if not inside.issuperset(self._readers[v]))
            if left < least and inside.issuperset(later):
                best, least = len(order), left
        chosen = order[:best]
        between = {view for node in chosen for s in node.all_input_nodes for view in views(s)}
        return frozenset(chosen) | {v for v in between if self._labels[v] == "either"}

    def _may_enter(self, node: fx.Node, value: fx.Node, inside: Collection[fx.Node]) -> bool:
        sources = [root(s) for s in node.all_input_nodes if constant(s) is None]
        return (
            self._labels[node] == "either"
            and is_elementwise(node)
            and works(node)
            and not is_compared(node)
            and all(source is value or source in inside for source in sources)
        )

    def extended(self, growth: Growth, rules: Rules) -> Growth:
        """The growth with regions that compute such values (forward), or read them (backward)."""
        forward = rules.labels[growth.anchor] == "forward"
        nodes_of = self._with if forward else self._without
        builder: Builder | None = None
        found: list[Region] = []
        for region in growth.regions:
            nodes = nodes_of(region)
            if len(nodes) == len(region.nodes):
                continue
            builder = builder or candidates.builder_of(growth.anchor, region.mainloop, rules)
            ordered = sorted(nodes, key=self._position.__getitem__)
            built = candidates.rebuild(builder, ordered, region.kept)
            if isinstance(built, Region):
                found.append(built)
        return replace(growth, regions=growth.regions + tuple(found)) if found else growth

    def _with(self, region: Region) -> Nodes:
        """The region's nodes and all such values of what it leaves in memory."""
        left = {root(node) for output in region.outputs for node in output.nodes}
        return frozenset(region.nodes).union(*(self.of.get(value, ()) for value in left))

    def _without(self, region: Region) -> Nodes:
        """The region's nodes less such values, which it then reads."""
        less = (self._together[node] for node in region.nodes if node in self._together)
        return frozenset(region.nodes).difference(*less)
