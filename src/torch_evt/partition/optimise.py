"""The plan of a graph: by the integer program, or the greedy plan where that is no worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from torch_evt import errors
from torch_evt.devices import Device
from torch_evt.partition import greedy
from torch_evt.partition.candidates import Growth, Rules, anchors, order_of
from torch_evt.partition.copies import with_copies
from torch_evt.partition.early import Early
from torch_evt.partition.greedy import Choice, Chosen, Left, Priced
from torch_evt.partition.growths import Growths
from torch_evt.partition.instead import Instead
from torch_evt.partition.kernels import Kernel, Saving, enumerate_kernels
from torch_evt.partition.price import InductorModel, region_us
from torch_evt.partition.problem import Problem, Solution
from torch_evt.partition.program import solve
from torch_evt.partition.recompute import Recomputation
from torch_evt.partition.region import Region
from torch_evt.torch_compat import timed

_LEAST_SAVED = 1.0
"""A save_weight, in us a byte, beside which no kernel's time counts."""

_NO_ANSWER = (
    "checkpointing wants products computed again in backward, which the program does not plan: "
    "min-cut decides what is saved, and then each half is planned"
)


@dataclass(frozen=True)
class Optimum:
    """What was decided. choice: the regions. kernels: all that run, Inductor's and the libraries'
    among them; None by the greedy plan alone. saved: the forward values kept for backward; None
    where min-cut shall decide. objective_us: modelled microseconds of all kernels, without the
    price of saving. bytes_moved: by all kernels. greedy_us: objective_us with the greedy plan's
    regions.
    """

    choice: Choice
    solver: str
    optimal: bool = False
    kernels: tuple[Kernel, ...] | None = None
    saved: frozenset[fx.Node] | None = None
    objective_us: float | None = None
    bytes_moved: int | None = None
    greedy_us: float | None = None
    notes: tuple[str, ...] = ()


def optimise(
    graph: fx.Graph,
    device: Device,
    rules: Rules,
    num_forward_outputs: int,
    saving: Saving,
    *,
    nodes: int,
) -> Optimum:
    """The best plan over all enumerated kernels.

    nodes: of the search tree at most; 0: the greedy plan alone.
    """
    order = order_of(graph)
    loops = dict(anchors(graph))
    rules = replace(rules, taken=set())
    shared = Growths(order, rules)
    with timed("evt.joint.plan.growth"):
        growths = {anchor: shared.of(anchor, loop) for anchor, loop in loops.items()}
    model = InductorModel(graph, device, rules.labels)
    with timed("evt.joint.plan.greedy"):
        planned = greedy.choose(graph, device, rules, growths=shared, model=model)
    if nodes == 0:
        return Optimum(planned, "greedy")
    with timed("evt.joint.plan.copies"):
        early = Early(graph, rules.labels, model.size)
        growths = {anchor: early.extended(growth, rules) for anchor, growth in growths.items()}
        growths = _with_copies(growths, model, order.position, rules)
    greedy_regions = [chosen.priced.region for chosen in planned.chosen]
    regions = [region for growth in growths.values() for region in growth.regions]
    with timed("evt.joint.plan.enumeration"):
        kernels, problem = enumerate_kernels(
            graph,
            device,
            rules.labels,
            model,
            early,
            [*regions, *greedy_regions],
            num_forward_outputs,
            saving,
            [greedy_regions],
        )
    notes: list[str] = []
    with timed("evt.joint.plan.solve"):
        greedy_answer = _restricted(problem, kernels, greedy_regions, nodes)
        start = () if greedy_answer is None else greedy_answer.chosen
        answer = solve(problem, nodes=nodes, start=start)
    if answer is None and saving.budget is not None:
        least = replace(problem, memory_budget=None, save_weight=_LEAST_SAVED)
        answer = solve(least, nodes=nodes)
        if answer is not None:
            needed = sum(problem.sizes[v] for v in answer.saved)
            notes.append(
                f"evt.memory_budget={saving.budget} cannot be met: the least that a plan here can "
                f"save is {needed} bytes, which is planned"
            )
    found = [a for a in (answer, greedy_answer) if a is not None]
    if not found:
        notes.append(
            _NO_ANSWER if saving.must_not else "the program has no answer within its limits"
        )
        if saving.budget is not None:
            notes.append(f"evt.memory_budget={saving.budget} has no effect on what min-cut saves")
        return Optimum(planned, "greedy", notes=tuple(notes))
    best = min(found, key=lambda a: a.objective_us)
    chosen = [kernels[r] for r in best.chosen]
    number = list(graph.nodes)
    results = frozenset(number[value] for value, _ in problem.results)
    instead = Instead(chosen, number, results, model)
    return Optimum(
        _choice(chosen, growths, model, instead, order.position),
        "highs",
        best.optimal and best is answer,
        tuple(chosen),
        frozenset(number[v] for v in best.saved),
        _time_us(problem, best),
        sum(kernel.bytes_moved for kernel in chosen),
        None if greedy_answer is None else _time_us(problem, greedy_answer),
        tuple(notes),
    )


def _time_us(problem: Problem, answer: Solution) -> float:
    return sum(problem.candidates[r].cost_us for r in answer.chosen)


def _with_copies(
    growths: Mapping[fx.Node, Growth],
    model: InductorModel,
    position: Mapping[fx.Node, int],
    rules: Rules,
) -> dict[fx.Node, Growth]:
    """The growths with the regions that compute values again, too."""
    recomputation = Recomputation(rules.labels, model.size)
    found = {}
    for anchor, growth in growths.items():
        more = tuple(with_copies(growth.regions, recomputation, position, rules))
        found[anchor] = replace(growth, regions=growth.regions + more)
    return found


def _restricted(
    problem: Problem, kernels: Sequence[Kernel], regions: Sequence[Region], nodes: int
) -> Solution | None:
    """The program's answer with regions of these nodes or none, in the problem's numbers."""
    allowed = {frozenset(region.nodes) for region in regions}
    numbers = [r for r, k in enumerate(kernels) if k.region is None or k.nodes in allowed]
    answer = solve(
        replace(problem, candidates=[problem.candidates[r] for r in numbers]), nodes=nodes
    )
    if answer is None:
        return None
    return replace(answer, chosen=tuple(numbers[r] for r in answer.chosen))


def _choice(
    chosen: Sequence[Kernel],
    growths: Mapping[fx.Node, Growth],
    model: InductorModel,
    instead: Instead,
    position: Mapping[fx.Node, int],
) -> Choice:
    """The chosen regions with their prices, and why the other anchors have none."""
    taken = {k.region.anchor: k.region for k in chosen if k.region is not None}
    owner = {n: r.anchor for r in taken.values() for n in r.nodes if n not in r.kept}

    def ranked(anchor: fx.Node) -> list[Priced]:
        gone = frozenset(n for n, a in owner.items() if a is not anchor)
        free = (
            r
            for r in growths[anchor].regions
            if not any(n in gone for n in r.nodes if n not in r.kept)
        )
        priced = [Priced(r, region_us(r, model.device), model.replaced_us(r, gone)) for r in free]
        return sorted(priced, key=lambda p: -p.gain_us)

    with_region, without = [], []
    for anchor in sorted(growths, key=position.__getitem__):
        rank = ranked(anchor)
        if anchor in taken:
            region = taken[anchor]
            same = (region.nodes, region.tree)
            own = Priced(region, region_us(region, model.device), instead.us(region))
            losers = tuple(p for p in rank if (p.region.nodes, p.region.tree) != same)
            with_region.append(Chosen(own, losers))
        else:
            growth = growths[anchor]
            reason = errors.SLOWER if rank else growth.reason or errors.BARE
            without.append(Left(anchor, reason, growth.blocker, rank[0] if rank else None))
    return Choice(tuple(with_region), tuple(without))
