"""Growth once for every structure: layers that are alike share it.

What grows from an anchor depends on a few nodes around it: those that could enter (a `Trail` names
them), what these and their loads read, and who uses them. A pattern describes these nodes by how
they are found from the anchor, and all of each that a growth can ask for. Where the same pattern is
found around another anchor, the same regions grow there, of other nodes: they are copied. Nothing
is assumed about where the other anchor came from; whatever differs lets it grow afresh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torch_evt.graphs import expression
from torch_evt.mainloops import MainLoop
from torch_evt.partition.candidates import Growth, Order, Rules, Trail, grow
from torch_evt.partition.elementwise import CONVERT, VIEWS
from torch_evt.partition.maxima import is_compared
from torch_evt.partition.region import Input, Output, Region

aten = torch.ops.aten

_SEEN_THROUGH = VIEWS | {CONVERT, aten.expand.default}
"""Operations whose input a load may read in place of their result."""

_PATTERNS = 16
"""How many patterns are tried for one anchor; more would cost more than growing."""


@dataclass(frozen=True)
class _Facts:
    """What growth can ask of one node. number: the same for equal descriptions.

    arguments: the nodes among its arguments, in order, each as often as it occurs.
    """

    number: int
    arguments: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Pattern:
    """The nodes that a growth depends on; below, a node is its index among them.

    steps: (known node, its k-th neighbour) of every node but the anchor, the neighbours being its
    arguments and, in the order of the graph, its users, counted as -1, -2, ...
    facts, arguments: of each node; an argument that is none of the nodes is -1. users: how many
    users a node has, where it counts. order: the nodes that can enter, in the order of the graph.
    closed: nodes with those that depend on them. taken: those that belong to other regions.
    """

    growth: Growth
    nodes: tuple[fx.Node, ...]
    steps: tuple[tuple[int, int], ...]
    facts: tuple[int, ...]
    arguments: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    closed: tuple[tuple[int, frozenset[int]], ...]
    taken: frozenset[int]


class Growths:
    """What grows from the anchors of one graph, which must stay as it is meanwhile.

    rules.taken may change between two anchors. grown: how many growths were not shared.
    """

    def __init__(self, order: Order, rules: Rules) -> None:
        self.grown = 0
        self._order = order
        self._rules = rules
        self._numbers: dict[Any, int] = {}
        self._facts: dict[fx.Node, _Facts] = {}
        self._users: dict[fx.Node, list[fx.Node]] = {}
        self._patterns: defaultdict[tuple[int, ...], list[_Pattern]] = defaultdict(list)

    def of(self, anchor: fx.Node, mainloop: MainLoop) -> Growth:
        """All candidates of one anchor, as `candidates.grow` finds them."""
        around = (anchor, *self._facts_of(anchor).arguments, *self._users_of(anchor))
        known = self._patterns[tuple(self._facts_of(node).number for node in around)]
        for place, pattern in enumerate(known):
            nodes = self._found(pattern, anchor)
            if nodes is not None:
                known.insert(0, known.pop(place))
                return _moved(pattern.growth, dict(zip(pattern.nodes, nodes, strict=True)))
        trail = Trail()
        growth = grow(anchor, mainloop, self._order, self._rules, trail)
        self.grown += 1
        known.insert(0, self._pattern(growth, trail))
        del known[_PATTERNS:]
        return growth

    def _pattern(self, growth: Growth, trail: Trail) -> _Pattern:
        inspected = set(trail.inspected)
        # whose users are looked at one by one; of others it matters whether all of them are inside
        open_nodes = {n for n in inspected if n.target is aten.permute.default}
        open_nodes.update(trail.taken_in, (growth.anchor,))
        nodes = [growth.anchor]
        index = {growth.anchor: 0}
        steps: list[tuple[int, int]] = []
        for i, node in enumerate(nodes):  # grows meanwhile
            neighbours: list[tuple[int, fx.Node]] = []
            if node in inspected or node.target in _SEEN_THROUGH:
                neighbours += enumerate(self._facts_of(node).arguments)
            if node in open_nodes:
                neighbours += ((-1 - k, user) for k, user in enumerate(self._users_of(node)))
            for k, other in neighbours:
                if other not in index:
                    index[other] = len(nodes)
                    nodes.append(other)
                    steps.append((i, k))
        positions = self._order.position
        return _Pattern(
            growth,
            tuple(nodes),
            tuple(steps),
            tuple(self._facts_of(node).number for node in nodes),
            self._arguments(nodes, index),
            tuple((index[node], len(node.users)) for node in inspected),
            tuple(index[node] for node in sorted(inspected, key=positions.__getitem__)),
            tuple((index[node], self._dependents(node, nodes)) for node in trail.closed),
            self._taken(nodes),
        )

    def _found(self, pattern: _Pattern, anchor: fx.Node) -> list[fx.Node] | None:
        """The nodes around an anchor that are to it what the pattern's nodes are to theirs; None
        where they differ in anything."""
        nodes = [anchor]
        index = {anchor: 0}
        if self._facts_of(anchor).number != pattern.facts[0]:
            return None
        for (i, k), number in zip(pattern.steps, pattern.facts[1:], strict=True):
            known = nodes[i]
            near = self._facts_of(known).arguments if k >= 0 else self._users_of(known)
            k = k if k >= 0 else -1 - k
            if k >= len(near) or self._facts_of(near[k]).number != number or near[k] in index:
                return None
            index[near[k]] = len(nodes)
            nodes.append(near[k])
        positions = self._order.position
        order = [positions[nodes[i]] for i in pattern.order]
        if (
            all(len(nodes[i].users) == count for i, count in pattern.users)
            and order == sorted(order)
            and self._arguments(nodes, index) == pattern.arguments
            and self._taken(nodes) == pattern.taken
            and all(self._dependents(nodes[i], nodes) == found for i, found in pattern.closed)
        ):
            return nodes
        return None

    def _arguments(
        self, nodes: Sequence[fx.Node], index: Mapping[fx.Node, int]
    ) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple([index.get(argument, -1) for argument in self._facts_of(node).arguments])
            for node in nodes
        )

    def _dependents(self, node: fx.Node, nodes: Sequence[fx.Node]) -> frozenset[int]:
        bits, positions = self._order.dependents[node], self._order.position
        return frozenset([i for i, other in enumerate(nodes) if bits >> positions[other] & 1])

    def _taken(self, nodes: Sequence[fx.Node]) -> frozenset[int]:
        taken = self._rules.taken
        return frozenset([i for i, node in enumerate(nodes) if node in taken] if taken else ())

    def _users_of(self, node: fx.Node) -> list[fx.Node]:
        """A node's users in the order of the graph."""
        found = self._users.get(node)
        if found is None:
            found = sorted(node.users, key=self._order.position.__getitem__)
            self._users[node] = found
        return found

    def _facts_of(self, node: fx.Node) -> _Facts:
        found = self._facts.get(node)
        if found is None:
            arguments: list[fx.Node] = []
            description = (
                node.op,
                self._rules.labels.get(node),
                is_compared(node),
                node.meta.get("recompute"),
                _described(node.meta.get("val"), []),
                # of others not even the name of the target matters
                (node.target, _described(node.args, arguments), _described(node.kwargs, arguments))
                if node.op == "call_function"
                else None,
            )
            number = self._numbers.setdefault(description, len(self._numbers))
            found = self._facts[node] = _Facts(number, tuple(arguments))
        return found


def _described(value: Any, nodes: list[fx.Node]) -> Any:
    """A hashable description of an argument or of a traced value, equal for what growth cannot
    tell apart. Nodes are put into `nodes`, and only their places are described."""
    if isinstance(value, fx.Node):
        nodes.append(value)
        return fx.Node
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        sizes = (*value.shape, *value.stride(), value.storage_offset()) if strided else value.shape
        described = tuple([s if type(s) is int else _described(s, nodes) for s in sizes])
        return value.dtype, value.device, value.layout, value.dim(), described
    if isinstance(value, (list, tuple)):
        return type(value), tuple([_described(v, nodes) for v in value])
    if isinstance(value, Mapping):
        return tuple([(key, _described(v, nodes)) for key, v in value.items()])
    if isinstance(value, slice):
        return slice, _described((value.start, value.stop, value.step), nodes)
    if isinstance(value, torch.SymInt):
        return expression(value)
    if isinstance(value, (bool, int, float, str)):
        return type(value), repr(value)  # repr tells -0.0 from 0.0
    if value is None or isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return value
    if isinstance(value, torch.memory_format):
        return value
    return _Unlike()


class _Unlike:
    """The description of what is like nothing else."""


def _moved(growth: Growth, to: Mapping[fx.Node, fx.Node]) -> Growth:
    """A growth of other nodes."""
    return replace(
        growth,
        anchor=to[growth.anchor],
        regions=tuple(_moved_region(region, to) for region in growth.regions),
        blocker=None if growth.blocker is None else to[growth.blocker],
    )


def _moved_region(region: Region, to: Mapping[fx.Node, fx.Node]) -> Region:
    return Region(
        anchor=to[region.anchor],
        mainloop=region.mainloop,
        space=region.space,
        nodes=tuple([to[node] for node in region.nodes]),
        tree=region.tree,
        inputs=tuple([Input(to[i.node], i.view, i.strides) for i in region.inputs]),
        sizes=region.sizes,
        outputs=tuple([_moved_output(output, to) for output in region.outputs]),
        kept=frozenset([to[node] for node in region.kept]),
    )


def _moved_output(output: Output, to: Mapping[fx.Node, fx.Node]) -> Output:
    return Output(
        tuple([to[node] for node in output.nodes]),
        output.sink,
        output.transposed,
        tuple([to[node] for node in output.aliases]),
    )
