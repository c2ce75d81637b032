"""Finding the planned regions again on a real half, or choosing anew where they do not stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from torch_evt.devices import Device
from torch_evt.partition import candidates
from torch_evt.partition.candidates import Rules
from torch_evt.partition.elementwise import is_arithmetic, is_elementwise
from torch_evt.partition.greedy import (
    Choice,
    Chosen,
    Left,
    Priced,
    choose,
    waits_for_itself,
)
from torch_evt.partition.halves import Label
from torch_evt.partition.kernels import Saving
from torch_evt.partition.optimise import Optimum, optimise
from torch_evt.partition.plan import Half, RegionPlan
from torch_evt.partition.region import Region
from torch_evt.tree.text import to_text


@dataclass(frozen=True)
class Expected:
    """What the joint plan expects of one half, all names as they are there.

    regions: each with its entry in the joint graph's choice. left: anchors without one. labels: the
    half in which each node is expected. as_planned: whether the graph was cut where the plan says.
    """

    half: Half
    regions: tuple[tuple[RegionPlan, Chosen], ...] = ()
    left: tuple[tuple[str, Left], ...] = ()
    labels: Mapping[str, Label] = field(default_factory=dict)
    as_planned: bool = False


@dataclass(frozen=True)
class Found:
    """The choice for a half; optimum: where it was chosen anew by the program."""

    choice: Choice
    optimum: Optimum | None = None
    note: str | None = None


def find(
    graph: fx.Graph, expected: Expected, device: Device, rules: Rules, *, solver_nodes: int
) -> Found:
    """The planned regions in a half, as long as all of them stand; else chosen anew.

    rules: with the labels of the half. solver_nodes: 0 for the greedy plan, which keeps the
    regions that stand.
    """
    kept = _standing(graph, [plan for plan, _ in expected.regions], rules)
    note = None
    if kept is None:
        note = f"{expected.half}: min-cut cut the graph otherwise than planned; planned anew"
        kept = []
    elif not expected.as_planned:
        moved = _moved(graph, expected)
        standing = [region for region in kept if not _touches(region, moved)]
        if len(standing) < len(kept):
            anew = len(kept) - len(standing)
            note = (
                f"{expected.half}: {anew} regions chosen again, "
                "because min-cut moved operations next to them into this half"
            )
            kept = standing
    if note is None and expected.as_planned:
        return Found(_as_planned(graph, kept, expected))
    if solver_nodes == 0 or note is None:
        return Found(choose(graph, device, rules, fixed=kept), note=note)
    optimum = optimise(graph, device, rules, 0, Saving(), nodes=solver_nodes)
    return Found(optimum.choice, optimum, note)


def _as_planned(graph: fx.Graph, regions: Sequence[Region], expected: Expected) -> Choice:
    """The joint graph's choice, in terms of this half."""
    chosen = tuple(
        Chosen(Priced(region, old.priced.modelled_us, old.priced.replaced_us), old.losers)
        for region, (_, old) in zip(regions, expected.regions, strict=True)
    )
    named = {node.name: node for node in graph.nodes}
    left = tuple(
        Left(named[name], old.reason, old.blocker, old.best)
        for name, old in expected.left
        if name in named
    )
    return Choice(chosen, left)


def _standing(graph: fx.Graph, planned: Sequence[RegionPlan], rules: Rules) -> list[Region] | None:
    """The planned regions in a half, each with its planned tree; None where one fails."""
    named = {node.name: node for node in graph.nodes}
    loops = dict(candidates.anchors(graph))
    found: list[Region] = []
    for plan in planned:
        nodes = [named[name] for name in plan.nodes if name in named]
        anchor = named.get(plan.anchor)
        if anchor not in loops or len(nodes) < len(plan.nodes):
            return None
        kept = frozenset(named[name] for name in plan.kept)
        region = candidates.build(anchor, loops[anchor], nodes, rules, kept=kept)
        if not isinstance(region, Region) or to_text(region.tree) != plan.tree:
            return None
        if waits_for_itself(region, found):
            return None
        found.append(region)
    return found


def _moved(graph: fx.Graph, expected: Expected) -> set[fx.Node]:
    """The operations that min-cut put into a half where the plan did not expect them: arithmetic,
    and the casts next to it."""

    def is_moved(node: fx.Node) -> bool:
        label = expected.labels.get(node.name, expected.half)
        planned = label == expected.half or (label == "either" and expected.half == "backward")
        return is_elementwise(node) and not planned

    moved = {node for node in graph.nodes if is_moved(node)}
    arithmetic = {node for node in moved if is_arithmetic(node)}
    return {
        node
        for node in moved
        if node in arithmetic or arithmetic & {*node.users, *node.all_input_nodes}
    }


def _touches(region: Region, nodes: set[fx.Node]) -> bool:
    """Whether a region reads one of the nodes, or one of them reads it."""
    return any(
        other in nodes for node in region.nodes for other in (*node.users, *node.all_input_nodes)
    )
