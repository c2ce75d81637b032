"""What the regions of many programs held: to see that the generator reaches what it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch_evt.tree.ir import Cast, Compute, Load, Reduce, Store, Value, postorder, roots
from torch_evt.tree.parse import parse

from .checking import Outcome


def kinds(outcome: Outcome) -> set[str]:
    """Each kind of thing that a placed region of the program held, by name."""
    found: set[str] = set()
    if outcome.kept:
        found.add("recomputed outside")
    for region in outcome.regions:
        tree = parse(region.tree)
        found.add(f"half {region.half}")
        found.add("batched" if tree.batched else "not batched")
        for operand in tree.operands:
            axis = operand.layout.axis if operand.layout is not None else "none"
            found.add(f"operand {operand.name} {axis}")
        for sink in tree.sinks:
            if isinstance(sink, Store):
                found.add(f"store {sink.layout.axis}")
            elif isinstance(sink, Reduce):
                batch = " and batch" if sink.fold_batch and tree.batched else ""
                found.add(f"reduce {sink.op} over {sink.over}{batch}")
        for value in postorder(roots(tree)):
            found |= _of_value(value)
        if len(tree.sinks) > 1:
            found.add("several sinks")
    return found


def _of_value(value: Value) -> set[str]:
    if isinstance(value, Compute):
        return {f"function {value.function}"}
    if isinstance(value, Cast):
        return {f"cast {str(value.dtype).removeprefix('torch.')}"}
    if isinstance(value, Load):
        found = {f"load {value.kind}", f"load {str(value.dtype).removeprefix('torch.')}"}
        return found | {f"load by {term.op}" for term in value.index if term.op}
    return set()


def report(outcomes: Iterable[Outcome]) -> str:
    """A table: how many programs placed a region, and how many held each kind of thing."""
    outcomes = list(outcomes)
    counts = Counter(kind for outcome in outcomes for kind in kinds(outcome))
    placed = sum(bool(outcome.regions) for outcome in outcomes)
    lines = [
        f"{len(outcomes)} graphs, {placed} with a region, "
        f"{sum(len(outcome.regions) for outcome in outcomes)} regions, "
        f"{sum(bool(outcome.by_noise) for outcome in outcomes)} right only beside rounding noise, "
        f"{sum(bool(outcome.by_seeds) for outcome in outcomes)} only over many seeds"
    ]
    for what in ("discarded", "notes"):
        seen: Counter[str] = Counter()
        for outcome in outcomes:
            seen.update(outcome.notes if what == "notes" else filter(None, [outcome.discarded]))
        lines += [f"{what}: {count} x {text}" for text, count in seen.most_common()]
    lines += [f"{count:6} {kind}" for kind, count in sorted(counts.items())]
    return "\n".join(lines)
