"""The parts of an integer program that can be decided apart, because no row joins them.

Most rows ask for what every answer has: a value that all candidates store which run its node is
there whoever is chosen, and saving it, where that costs nothing, lets nobody wait. Without these
rows a training graph falls apart, into some parts for each layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_evt.partition.plan import Half
from torch_evt.partition.problem import Index, Problem, Value


@dataclass(frozen=True)
class Cut:
    """At most `limit` of the candidates, and one more for each of the values that is saved."""

    candidates: tuple[int, ...]
    saved: tuple[Value, ...]
    limit: float


@dataclass(frozen=True)
class Part:
    """members: its candidates in the whole problem. problem: over them, without what is there
    whoever is chosen. cuts: in the numbers of the whole problem."""

    members: tuple[int, ...]
    problem: Problem
    cuts: tuple[Cut, ...]


def split(problem: Problem, index: Index, cuts: Sequence[Cut]) -> tuple[list[Part], set[Value]]:
    """The parts of a problem with cuts, and the values that are saved because it costs nothing.

    Together with these values, the best answers of the parts are a best answer of the whole.
    """
    surely = _surely_stored(problem, index)
    saved = {v for v in index.saved_by if (v, "forward") in surely and _saves_freely(problem, v)}
    there = surely | {(v, "backward") for v in saved}
    candidates, results = problem.candidates, problem.results - there
    reads = [
        frozenset(v for v in c.reads if v in problem.sizes and (v, c.half) not in there)
        for c in candidates
    ]
    needed = frozenset(v for v, _ in results).union(problem.must_save - saved, *reads)
    touching: dict[Value, list[int]] = defaultdict(list)
    for r, candidate in enumerate(candidates):
        for value in reads[r] | candidate.stores & needed:
            touching[value].append(r)
    groups = _Groups(len(candidates))
    for together in (touching, index.covering, index.copying):
        for members in together.values():
            groups.join(members)
    if problem.memory_budget is not None:
        groups.join(range(len(candidates)))
    for cut in cuts:
        groups.join([*cut.candidates, *(r for v in cut.saved for r in touching[v])])
    values: dict[int, set[Value]] = defaultdict(set)
    for value, members in touching.items():
        values[groups.of(members[0])].add(value)
    parts = []
    for group, members in groups.all().items():
        here = values[group]
        part = Problem(
            [
                replace(candidates[r], reads=reads[r], stores=candidates[r].stores & here)
                for r in members
            ],
            {v: problem.sizes[v] for v in sorted(here)},
            frozenset((v, half) for v, half in results if v in here),
            problem.save_weight,
            problem.memory_budget,
            problem.must_save & here,
            problem.must_not_save & here,
        )
        own = tuple(cut for cut in cuts if groups.of(cut.candidates[0]) == group)
        parts.append(Part(tuple(members), part, own))
    return parts, saved


def _surely_stored(problem: Problem, index: Index) -> set[tuple[Value, Half]]:
    """The values that whoever runs their nodes stores, and nobody who stores them reads."""
    found = set()
    for (value, half), storing in index.storing.items():
        running = index.covering.get(value)
        alone = not any(value in problem.candidates[r].reads for r in storing)
        if running and alone and set(running) <= set(storing):
            found.add((value, half))
    return found


def _saves_freely(problem: Problem, value: Value) -> bool:
    """Whether there is nothing to be gained by not saving a value."""
    size = problem.sizes[value]
    if value in problem.must_not_save or (problem.memory_budget is not None and size > 0):
        return False
    return problem.save_weight * size == 0 or value in problem.must_save


class _Groups:
    """Numbers that belong together."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def of(self, number: int) -> int:
        """The least number of its group."""
        parent = self._parent
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    def join(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        first = self.of(numbers[0])
        for number in numbers:
            other = self.of(number)
            self._parent[max(first, other)] = first = min(first, other)

    def all(self) -> dict[int, list[int]]:
        """Every group, by its least number; groups and numbers ascending."""
        found: dict[int, list[int]] = defaultdict(list)
        for number in range(len(self._parent)):
            found[self.of(number)].append(number)
        return found
