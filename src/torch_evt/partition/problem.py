"""What the integer program chooses from and what it answers, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_evt.partition.plan import Half

Value = int
"""A node, and the value it computes."""


@dataclass(frozen=True)
class Candidate:
    """A kernel that may run.

    covers: the nodes that it runs as originals. stores, reads: values it leaves in memory and takes
    from there. copies: those of the stored values that are forward values, computed a second time
    by a backward kernel; copies that stay inside are of no concern here, their cost is in cost_us.
    """

    half: Half
    cost_us: float
    covers: frozenset[Value]
    reads: frozenset[Value]
    stores: frozenset[Value]
    copies: frozenset[Value] = frozenset()


@dataclass(frozen=True)
class Problem:
    """What to choose from.

    sizes: bytes of each value that is not in memory anyway. results: values that must be stored in
    a half: user outputs in forward, gradients in backward. must_save, must_not_save: the user's
    marks on forward values. memory_budget: bytes that may be saved, None for any.
    """

    candidates: Sequence[Candidate]
    sizes: Mapping[Value, int]
    results: frozenset[tuple[Value, Half]]
    save_weight: float = 0.0
    memory_budget: int | None = None
    must_save: frozenset[Value] = frozenset()
    must_not_save: frozenset[Value] = frozenset()


@dataclass(frozen=True)
class Solution:
    """chosen: positions in problem.candidates. objective_us: with the price of saving. optimal:
    whether nothing over these candidates is better by more than the gap. rounds: of ordering cuts.
    """

    chosen: tuple[int, ...]
    saved: frozenset[Value]
    objective_us: float
    optimal: bool
    rounds: int = 0


@dataclass
class Index:
    """Who covers, stores and copies what."""

    covering: dict[Value, list[int]] = field(default_factory=lambda: defaultdict(list))
    storing: dict[tuple[Value, Half], list[int]] = field(default_factory=lambda: defaultdict(list))
    copying: dict[Value, list[int]] = field(default_factory=lambda: defaultdict(list))
    saved_by: dict[Value, int] = field(default_factory=dict)
    """The column of s_v, for every forward value that a backward candidate reads."""

    @classmethod
    def of(cls, problem: Problem) -> Index:
        index = cls()
        for r, candidate in enumerate(problem.candidates):
            for node in candidate.covers:
                index.covering[node].append(r)
            for value in candidate.stores:
                index.storing[value, candidate.half].append(r)
            for value in candidate.copies:
                index.copying[value].append(r)
        read = {v for c in problem.candidates if c.half == "backward" for v in c.reads}
        wanted = read | problem.must_save
        saved = sorted(v for v, half in index.storing if half == "forward" and v in wanted)
        for column, value in enumerate(saved, start=len(problem.candidates)):
            index.saved_by[value] = column
        return index


def saved_values(problem: Problem, chosen: Iterable[int]) -> frozenset[Value]:
    """What a choice must save: what its backward kernels read and none of them stores."""
    backward = [problem.candidates[r] for r in chosen if problem.candidates[r].half == "backward"]
    stored = {v for c in backward for v in c.stores}
    read = {v for c in backward for v in c.reads if v in problem.sizes}
    return frozenset(read - stored) | problem.must_save


def objective_us(problem: Problem, chosen: Iterable[int], saved: Iterable[Value]) -> float:
    """What the program minimises, of one choice."""
    kernels = sum(problem.candidates[r].cost_us for r in chosen)
    return kernels + problem.save_weight * sum(problem.sizes[v] for v in saved)
