"""Candidates: for every anchor, the regions that are legal.

A region grows from its anchor through the users of what it holds, in the order of the graph. A
user is taken in with the elementwise producers that only it needs (sideways growth: a derivative,
a mask). A value that depends on the region but stays outside can never enter it again: that would
make two kernels wait for each other. Each stage of the growth is a candidate, without the loose
ends that would only cost a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from torch_evt import errors
from torch_evt.errors import Reason
from torch_evt.graphs import tensor_of
from torch_evt.mainloops import MainLoop, for_target
from torch_evt.partition.builder import Builder
from torch_evt.partition.elementwise import constant, is_arithmetic, is_elementwise
from torch_evt.partition.halves import Label
from torch_evt.partition.region import (
    Refused,
    Region,
    is_reduction,
    is_swap,
    is_view,
    works,
)


@dataclass(frozen=True)
class Growth:
    """What grew from one anchor.

    regions: the candidates, small to large. reason, blocker: why the last one is not larger.
    """

    anchor: fx.Node
    regions: tuple[Region, ...]
    reason: Reason | None
    blocker: fx.Node | None = None


@dataclass(frozen=True)
class Rules:
    """What limits growth. taken: nodes that belong to other regions already."""

    labels: Mapping[fx.Node, Label]
    device_kind: str
    exact_rounding: bool = False
    disabled: tuple[str, ...] = ()
    taken: set[fx.Node] = field(default_factory=set)


@dataclass
class Trail:
    """What a growth has looked at, in order: all that it depends on beside the rules.

    inspected: nodes that could have entered, the anchor among them. taken_in: those that did.
    closed: nodes whose dependents could not enter any more.
    """

    inspected: list[fx.Node] = field(default_factory=list)
    taken_in: list[fx.Node] = field(default_factory=list)
    closed: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    """Where each node of a graph stands, and, as the bits of a number, the positions of all nodes
    that depend on it."""

    position: Mapping[fx.Node, int]
    dependents: Mapping[fx.Node, int]


def order_of(graph: fx.Graph) -> Order:
    """The order of a graph's nodes."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    dependents: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        bits = 0
        for user in node.users:
            bits |= 1 << position[user] | dependents[user]
        dependents[node] = bits
    return Order(position, dependents)


class _Outside:
    """The nodes that depend on a region but are not in it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._bits = 0

    def __contains__(self, node: fx.Node) -> bool:
        return bool(self._bits >> self._order.position[node] & 1)

    def add(self, node: fx.Node) -> None:
        self._bits |= 1 << self._order.position[node]

    def add_dependents(self, node: fx.Node) -> None:
        self._bits |= self._order.dependents[node]


def anchors(graph: fx.Graph) -> list[tuple[fx.Node, MainLoop]]:
    """Every anchor of the graph with its main loop."""
    found = []
    for node in graph.nodes:
        loop = for_target(node.target) if node.op == "call_function" else None
        if loop is not None:
            found.append((node, loop))
    return found


def build(
    anchor: fx.Node,
    mainloop: MainLoop,
    nodes: Iterable[fx.Node],
    rules: Rules,
    *,
    kept: frozenset[fx.Node] = frozenset(),
) -> Region | Reason:
    """The region of exactly these nodes (given in graph order), or why it is illegal.

    kept: as for `Builder.finish`.
    """
    try:
        builder = builder_of(anchor, mainloop, rules)
    except Refused as refusal:
        return refusal.reason
    return rebuild(builder, nodes, kept)


def rebuild(
    builder: Builder, nodes: Iterable[fx.Node], kept: frozenset[fx.Node]
) -> Region | Reason:
    """The same by a builder that may hold other nodes, of which it keeps what it can."""
    reason = _fill(builder, nodes)
    if reason is not None:
        return reason
    return builder.finish(kept)


def _fill(builder: Builder, nodes: Iterable[fx.Node]) -> Reason | None:
    """Make a builder hold exactly these nodes, as if it took them in in this order, its anchor
    first; the reason if it cannot."""
    wanted = [builder.anchor, *(node for node in nodes if node is not builder.anchor)]
    same = 0
    for held, node in zip(builder.nodes, wanted, strict=False):
        if held is not node:
            break
        same += 1
    builder.rewind(same)
    for node in wanted[same:]:
        reason = builder.add(node)
        if reason is not None:
            return reason
    return None


def grow(
    anchor: fx.Node, mainloop: MainLoop, order: Order, rules: Rules, trail: Trail | None = None
) -> Growth:
    """All candidates of one anchor. trail: is told what they depend on (`partition.growths`)."""
    trail = trail or Trail()
    trail.inspected.append(anchor)
    half = rules.labels[anchor]
    if half == "either":
        return Growth(anchor, (), errors.NO_HALF)
    try:
        builder = builder_of(anchor, mainloop, rules)
    except Refused as refusal:
        return Growth(anchor, (), refusal.reason)
    first: tuple[Reason, fx.Node] | None = None
    positions = order.position
    outside = _Outside(order)
    pending = {user for user in anchor.users}
    stages: list[list[fx.Node]] = []
    while pending:
        node = min(pending, key=positions.__getitem__)
        pending.remove(node)
        if node.op == "output":
            continue
        trail.inspected.append(node)
        reason = _take(builder, node, outside, positions, rules, half, trail)
        if reason is not None:
            outside.add(node)
            if first is None and not is_view(node):
                first = (reason, node)
        elif is_arithmetic(node) or is_reduction(node):
            stages.append(list(builder.nodes))
        if reason is None and not is_reduction(node):
            pending.update(u for u in node.users if u not in outside and not builder.holds(u))
        else:
            outside.add_dependents(node)
            trail.closed.append(node)
            pending = {waiting for waiting in pending if waiting not in outside}
    trail.taken_in += builder.nodes
    regions = _legal(builder, stages, positions)
    reason, blocker = first if first is not None else (errors.BARE, None)
    return Growth(anchor, tuple(regions), reason, blocker)


def builder_of(anchor: fx.Node, mainloop: MainLoop, rules: Rules) -> Builder:
    """A builder that holds the anchor alone. Raises Refused where it can have no region."""
    return Builder(
        anchor,
        mainloop,
        rules.device_kind,
        exact_rounding=rules.exact_rounding,
        disabled=rules.disabled,
    )


def _take(
    builder: Builder,
    node: fx.Node,
    outside: _Outside,
    positions: Mapping[fx.Node, int],
    rules: Rules,
    half: Label,
    trail: Trail,
) -> Reason | None:
    """Take a node into the region, with the producers that only it needs."""
    reason = _may_enter(node, outside, rules, half)
    if reason is not None:
        return reason
    producers = _own_producers(builder, node, outside, positions, rules, half, trail)
    mark = builder.mark()
    if producers and all(builder.add(p) is None for p in producers) and builder.add(node) is None:
        return None
    builder.rewind(mark)
    return builder.add(node)


def _may_enter(node: fx.Node, outside: _Outside, rules: Rules, half: Label) -> Reason | None:
    if node in rules.taken:
        return errors.TAKEN
    label = rules.labels.get(node)
    if label != half and not (half == "backward" and label == "either"):
        return errors.OTHER_HALF
    if any(source in outside for source in node.all_input_nodes):
        return errors.ORDER
    return None


def _own_producers(
    builder: Builder,
    node: fx.Node,
    outside: _Outside,
    positions: Mapping[fx.Node, int],
    rules: Rules,
    half: Label,
    trail: Trail,
) -> list[fx.Node]:
    """Elementwise producers, full tiles, that nobody but `node` and the others of them needs."""
    own: list[fx.Node] = []
    wanted = {node}
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if builder.holds(source) or source in wanted or constant(source) is not None:
            continue
        value = tensor_of(source)
        if value is None or not (is_elementwise(source) or is_view(source)):
            continue
        trail.inspected.append(source)
        if (
            builder.space.groups(value.shape) is None
            or _may_enter(source, outside, rules, half) is not None
        ):
            continue
        if builder.anchor in source.users:
            continue  # in memory anyway: the product reads it
        if not all(user in wanted or builder.holds(user) for user in source.users):
            continue
        if is_view(source) and not is_elementwise(source.args[0]):  # type: ignore[arg-type]
            continue  # a view of something loaded: the load sees through it
        wanted.add(source)
        own.append(source)
        stack.extend(source.all_input_nodes)
    return sorted(own, key=positions.__getitem__)


def _legal(
    builder: Builder,
    stages: list[list[fx.Node]],
    positions: Mapping[fx.Node, int],
) -> list[Region]:
    """The regions of the stages, each also without its loose ends. The builder's nodes change."""
    found: list[Region] = []
    seen: set[frozenset[fx.Node]] = set()
    for stage in [*stages, list(builder.nodes)]:
        for nodes in (stage, _without_loose_ends(builder.anchor, stage)):
            key = frozenset(nodes)
            if key in seen:
                continue
            seen.add(key)
            ordered = sorted(nodes, key=positions.__getitem__)
            if _fill(builder, ordered) is not None:
                continue
            for kept in dict.fromkeys((frozenset(), builder.recomputable())):
                if works(builder.anchor, nodes, kept):
                    region = builder.finish(kept)
                    found += [region] if isinstance(region, Region) else []
    return found


def _without_loose_ends(anchor: fx.Node, nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes without those whose value only nodes outside use, though what they are computed
    from is stored as well: storing less costs nothing, for outside they fuse with their users."""
    kept = set(nodes)
    changed = True
    while changed:
        changed = False
        for node in reversed(nodes):
            if node not in kept or node is anchor or is_reduction(node) or is_swap(node):
                continue
            if any(user in kept for user in node.users):
                continue
            sources = [s for s in node.all_input_nodes if s in kept]
            stored_anyway = [
                s for s in sources if any(u not in kept and u is not node for u in s.users)
            ]
            if sources and len(stored_anyway) == len(sources):
                kept.discard(node)
                changed = True
    return [node for node in nodes if node in kept]
