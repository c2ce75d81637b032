"""The greedy plan: the region with the largest gain first, as long as one gains anything.

Of equal gains the later anchor's: where two products meet (a gated form, a residual), the later one
loads what the earlier one has left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from torch_evt import errors
from torch_evt.devices import Device
from torch_evt.errors import Reason
from torch_evt.partition.candidates import Growth, Rules, anchors, order_of
from torch_evt.partition.growths import Growths
from torch_evt.partition.price import InductorModel, region_us
from torch_evt.partition.region import Region


@dataclass(frozen=True)
class Priced:
    """A region with its modelled time and the time of what it replaces, in microseconds."""

    region: Region
    modelled_us: float
    replaced_us: float

    @property
    def gain_us(self) -> float:
        return self.replaced_us - self.modelled_us


@dataclass(frozen=True)
class Left:
    """An anchor without a region, and why; `best` is the candidate that came closest."""

    anchor: fx.Node
    reason: Reason
    blocker: fx.Node | None
    best: Priced | None


@dataclass(frozen=True)
class Chosen:
    """A chosen region and the candidates of its anchor that lost, best first."""

    priced: Priced
    losers: tuple[Priced, ...]


@dataclass(frozen=True)
class Choice:
    """What the greedy plan chose in one graph, in the order of the anchors."""

    chosen: tuple[Chosen, ...]
    left: tuple[Left, ...]


def choose(
    graph: fx.Graph,
    device: Device,
    rules: Rules,
    fixed: Iterable[Region] = (),
    *,
    growths: Growths | None = None,
    model: InductorModel | None = None,
) -> Choice:
    """Choose regions for every anchor of `graph`.

    fixed: regions that are chosen already; they come first, as long as each gains something.
    growths: of the same graph by the same rules, where some are known; model: of the same graph.
    rules.taken receives the nodes of the chosen regions.
    """
    order = order_of(graph)
    positions = order.position
    model = model or InductorModel(graph, device, rules.labels)
    taken = rules.taken
    chosen: dict[fx.Node, Chosen] = {}
    accepted: list[Region] = []
    for region in fixed:
        priced = Priced(region, region_us(region, device), model.replaced_us(region))
        if priced.gain_us <= 0:
            continue
        chosen[region.anchor] = Chosen(priced, ())
        accepted.append(region)
        taken.update(region.nodes)
    shared = growths or Growths(order, rules)
    grown: dict[fx.Node, Growth] = {}
    loops = dict(anchors(graph))
    rank: dict[fx.Node, list[Priced]] = {}

    def reprice(anchor: fx.Node) -> None:
        grown[anchor] = shared.of(anchor, loops[anchor])
        gone = frozenset(taken)
        rank[anchor] = sorted(
            (
                Priced(r, region_us(r, device), model.replaced_us(r, gone))
                for r in grown[anchor].regions
            ),
            key=lambda p: -p.gain_us,
        )

    open_anchors = [a for a in loops if a not in chosen]
    for anchor in open_anchors:
        reprice(anchor)
    blocked: dict[fx.Node, Reason] = {}
    while True:
        best = max(
            ((rank[a][0], a) for a in open_anchors if rank[a] and rank[a][0].gain_us > 0),
            key=lambda pair: (pair[0].gain_us, positions[pair[1]]),
            default=None,
        )
        if best is None:
            break
        priced, anchor = best
        if taken & set(priced.region.nodes):
            reprice(anchor)
            continue
        if waits_for_itself(priced.region, accepted):
            rank[anchor].pop(0)
            blocked.setdefault(anchor, errors.ORDER)
            continue
        chosen[anchor] = Chosen(priced, tuple(rank[anchor][1:]))
        accepted.append(priced.region)
        taken.update(priced.region.nodes)
        open_anchors.remove(anchor)
    left = []
    for anchor in open_anchors:
        growth = grown[anchor]
        best_left = rank[anchor][0] if rank[anchor] else None
        reason = growth.reason or errors.BARE
        if best_left is not None:
            reason = blocked.get(anchor, errors.SLOWER)
        elif anchor in blocked:
            reason = blocked[anchor]
        left.append(Left(anchor, reason, growth.blocker, best_left))
    ordered = sorted(chosen.values(), key=lambda c: positions[c.priced.region.anchor])
    return Choice(tuple(ordered), tuple(left))


def waits_for_itself(region: Region, others: Iterable[Region]) -> bool:
    """Whether `region` would depend on its own result once it and `others` are single kernels.

    Convex regions can still wait for each other: one needs a result of the other and the other way
    round.
    """
    owner: dict[fx.Node, Region] = {n: other for other in others for n in other.nodes}
    inside = set(region.nodes)
    seen: set[fx.Node] = set()
    stack = [u for n in region.nodes for u in n.users if u not in inside]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if node in inside:
            return True
        other = owner.get(node)
        members: Iterable[fx.Node] = other.nodes if other is not None else (node,)
        for member in members:
            seen.add(member)
            for user in member.users:
                if user in inside:
                    return True
                if user not in seen:
                    stack.append(user)
    return False
