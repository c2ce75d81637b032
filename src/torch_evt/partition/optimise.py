"""The plan of a graph by the integer program, or the greedy plan where that is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from torch_evt import errors
from torch_evt.devices import Device
from torch_evt.partition import greedy
from torch_evt.partition.candidates import Growth, Rules, anchors, grow
from torch_evt.partition.greedy import Choice, Chosen, Left, Priced
from torch_evt.partition.kernels import Saving, enumerate_kernels
from torch_evt.partition.price import InductorModel, region_us
from torch_evt.partition.program import solve
from torch_evt.partition.region import Region


@dataclass(frozen=True)
class Optimised:
    """What the program found. choice: the regions. saved: the forward values to keep for backward.
    objective_us: modelled microseconds of all kernels and of saving; greedy_us: of the greedy plan.
    """

    choice: Choice
    saved: frozenset[fx.Node]
    objective_us: float
    greedy_us: float
    optimal: bool


def optimise(
    graph: fx.Graph,
    device: Device,
    rules: Rules,
    num_forward_outputs: int,
    saving: Saving,
    *,
    nodes: int,
) -> Optimised | None:
    """The best plan over all enumerated kernels; None where the program has no answer.

    nodes: of the search tree at most.
    """
    positions = {node: i for i, node in enumerate(graph.nodes)}
    model = InductorModel(graph, device, rules.labels)
    growths = {a: grow(a, loop, positions, rules) for a, loop in anchors(graph)}
    regions = [region for growth in growths.values() for region in growth.regions]
    first = greedy.choose(graph, device, rules)
    planned = [chosen.priced.region for chosen in first.chosen]
    kernels, problem = enumerate_kernels(
        graph,
        device,
        rules.labels,
        model,
        regions + planned,
        num_forward_outputs,
        saving,
        [planned],
    )
    answer = solve(problem, nodes=nodes)
    if answer is None:
        return None
    taken = [kernels[r].region for r in answer.chosen]
    choice = _choice([r for r in taken if r is not None], growths, model, device, positions)
    number = list(graph.nodes)
    return Optimised(
        choice,
        frozenset(number[v] for v in answer.saved),
        answer.objective_us,
        0.0,
        answer.optimal,
    )


def _choice(
    regions: Sequence[Region],
    growths: Mapping[fx.Node, Growth],
    model: InductorModel,
    device: Device,
    positions: Mapping[fx.Node, int],
) -> Choice:
    """The chosen regions with their prices, and why the other anchors have none."""
    taken = {region.anchor: region for region in regions}

    def ranked(anchor: fx.Node) -> list[Priced]:
        gone = {n: r for r in regions if r.anchor is not anchor for n in r.nodes}
        free = (r for r in growths[anchor].regions if not any(n in gone for n in r.nodes))
        priced = [Priced(r, region_us(r, device), model.replaced_us(r, gone)) for r in free]
        return sorted(priced, key=lambda p: -p.gain_us)

    chosen, left = [], []
    for anchor in sorted(growths, key=positions.__getitem__):
        rank = ranked(anchor)
        if anchor in taken:
            region = taken[anchor]
            gone = {n: r for r in regions if r is not region for n in r.nodes}
            own = Priced(region, region_us(region, device), model.replaced_us(region, gone))
            losers = tuple(p for p in rank if p.region is not region)
            chosen.append(Chosen(own, losers))
        else:
            growth = growths[anchor]
            reason = errors.SLOWER if rank else growth.reason or errors.BARE
            left.append(Left(anchor, reason, growth.blocker, rank[0] if rank else None))
    return Choice(tuple(chosen), tuple(left))
