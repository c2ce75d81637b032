"""The integer program: which candidates run, what is saved for backward, what is computed again.

A candidate r is a kernel that may run: the nodes it runs, its half, the values it reads from and
leaves in memory, its cost. One binary variable x_r a candidate (it is chosen) and one s_v a forward
value (it is saved for backward):

    minimise   sum_r cost_r x_r + save_weight sum_v bytes_v s_v

    (run)      sum_r x_r  = 1     over the r that cover i as the original, for every node i
    (copies)   sum_r x_r <= 1     over the backward r that store a copy of v
    (forward)  x_r <= sum_q x_q         q forward, stores v; for each v that a forward r reads
    (backward) x_r <= s_v + sum_q x_q   q backward, stores v or a copy of v; likewise
    (saved)    s_v <= sum_q x_q         q forward, stores v
    (results)  1   <= sum_q x_q         q in v's half, stores v; each user output, gradient v
    (budget)   sum_v bytes_v s_v <= memory_budget
    (tags)     s_v = 1, s_v = 0         what the user marked
    (order)    sum over a cycle <= its length - 1      where chosen ones wait for each other

Costs are in microseconds, sizes in bytes, save_weight in microseconds a byte. Values that are in
memory anyway (inputs, parameters, tangents) have no rows. HiGHS stops by its node limit and gap,
never by the clock, so that equal problems have equal answers on any machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from torch_evt.partition.parts import Cut, Part, split
from torch_evt.partition.plan import Half
from torch_evt.partition.problem import Candidate as Candidate
from torch_evt.partition.problem import Index as _Index
from torch_evt.partition.problem import (
    Problem,
    Solution,
    Value,
    objective_us,
    saved_values,
)

_MAX_ROUNDS = 50
"""Of ordering cuts; what is not in order then is given up for the greedy plan."""

_SMALL = 1000
"""Candidates of a part that is solved sooner than HiGHS has simplified it."""


@dataclass(frozen=True)
class _Limits:
    """nodes: of a search tree; gap: relative; until: of `time.monotonic`, an emergency."""

    nodes: int
    gap: float
    until: float


@dataclass(frozen=True)
class _Answer:
    """chosen, saved: in the numbers of the whole problem."""

    chosen: tuple[int, ...]
    saved: frozenset[Value]
    optimal: bool


def solve(
    problem: Problem,
    *,
    nodes: int,
    gap: float = 0.0,
    start: Iterable[int] = (),
    emergency_s: float = 600.0,
) -> Solution | None:
    """The best choice; None where there is none, or none was found within the limits.

    nodes: of the search tree of each part at most. gap: relative, at which an answer counts as
    optimal. start: a choice to begin with. emergency_s: seconds after which the search is given up
    altogether.
    """
    index = _Index.of(problem)
    if not problem.must_save <= index.saved_by.keys() - problem.must_not_save:
        return None
    if not problem.results <= index.storing.keys():
        return None
    limits = _Limits(nodes, gap, time.monotonic() + emergency_s)
    begin = frozenset(start)
    cuts: list[Cut] = []
    known: dict[tuple[tuple[int, ...], tuple[Cut, ...]], _Answer] = {}
    for rounds in range(_MAX_ROUNDS):
        parts, free = split(problem, index, cuts)
        answers = []
        for part in parts:
            key = (part.members, part.cuts)
            answer = known.get(key) or _solve_part(part, begin, limits)
            if answer is None:
                return None
            known[key] = answer
            answers.append(answer)
        chosen = sorted(r for answer in answers for r in answer.chosen)
        saved = frozenset(free).union(*(answer.saved for answer in answers))
        found = _ordering_cuts(problem, index, chosen, saved)
        if not found:
            saved = _without_idle(problem, chosen, saved)
            optimal = all(answer.optimal for answer in answers)
            objective = objective_us(problem, chosen, saved)
            return Solution(tuple(chosen), saved, objective, optimal, rounds)
        cuts += found
    return None


def _solve_part(part: Part, start: frozenset[int], limits: _Limits) -> _Answer | None:
    problem, members = part.problem, part.members
    if len(members) == 1 and not problem.sizes and not part.cuts:
        return _Answer(members if problem.candidates[0].covers else (), frozenset(), True)
    index = _Index.of(problem)
    model = _model(problem, index)
    local = {r: column for column, r in enumerate(members)}
    for cut in part.cuts:
        row = {local[r]: 1.0 for r in cut.candidates}
        row.update((index.saved_by[v], -1.0) for v in cut.saved)
        columns = sorted(row)
        model.addRow(-math.inf, cut.limit, len(columns), columns, [row[c] for c in columns])
    model.setOptionValue("mip_max_nodes", limits.nodes)
    model.setOptionValue("mip_rel_gap", limits.gap)
    model.setOptionValue("time_limit", max(0.0, limits.until - time.monotonic()))
    if len(members) <= _SMALL:
        model.setOptionValue("presolve", "off")
        model.setOptionValue("mip_heuristic_run_feasibility_jump", False)
    if start:
        _begin_with(model, problem, index, frozenset(local[r] for r in members if r in start))
    model.run()
    status = model.getModelStatus()
    limited = status == highspy.HighsModelStatus.kSolutionLimit
    if status != highspy.HighsModelStatus.kOptimal and not limited:
        return None
    values = model.getSolution().col_value
    if not values or not math.isfinite(model.getObjectiveValue()):
        return None
    chosen = tuple(r for r, column in local.items() if values[column] > 0.5)
    saved = frozenset(v for v, column in index.saved_by.items() if values[column] > 0.5)
    return _Answer(chosen, saved, not limited)


def _model(problem: Problem, index: _Index) -> highspy.Highs:
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.setOptionValue("output_flag", False)
    model.setOptionValue("log_to_console", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("random_seed", 0)
    costs = [candidate.cost_us for candidate in problem.candidates]
    costs += [problem.save_weight * problem.sizes[v] for v in index.saved_by]
    upper = [0.0 if v in problem.must_not_save else 1.0 for v in index.saved_by]
    lower = [1.0 if v in problem.must_save else 0.0 for v in index.saved_by]
    count = len(problem.candidates)
    columns = np.arange(len(costs), dtype=np.int32)
    model.addVars(len(costs), np.array([0.0] * count + lower), np.array([1.0] * count + upper))
    model.changeColsCost(len(costs), columns, np.array(costs))
    model.changeColsIntegrality(len(costs), columns, np.ones(len(costs), dtype=np.uint8))
    rows = list(_rows(problem, index))
    sizes = [len(row) for _, row, _ in rows]
    model.addRows(
        len(rows),
        np.array([lower for lower, _, _ in rows], dtype=np.float64),
        np.array([upper for _, _, upper in rows], dtype=np.float64),
        sum(sizes),
        np.cumsum([0, *sizes[:-1]], dtype=np.int32),
        np.array([column for _, row, _ in rows for column in row], dtype=np.int32),
        np.array([factor for _, row, _ in rows for factor in row.values()], dtype=np.float64),
    )
    return model


_Row = tuple[float, Mapping[int, float], float]
"""Lower limit, factors by column, upper limit."""


def _rows(problem: Problem, index: _Index) -> Iterator[_Row]:
    for covering in index.covering.values():
        yield 1, dict.fromkeys(covering, 1.0), 1
    for copying in index.copying.values():
        if len(copying) > 1:
            yield -math.inf, dict.fromkeys(copying, 1.0), 1
    for r, candidate in enumerate(problem.candidates):
        for value in candidate.reads & problem.sizes.keys():
            providers = dict.fromkeys(index.storing[value, candidate.half], 1.0)
            if candidate.half == "backward" and value in index.saved_by:
                providers[index.saved_by[value]] = 1.0
            providers.pop(r, None)
            yield 0, {**providers, r: -1.0}, math.inf
    for value, column in index.saved_by.items():
        yield 0, {**dict.fromkeys(index.storing[value, "forward"], 1.0), column: -1.0}, math.inf
    for value, half in sorted(problem.results):
        yield 1, dict.fromkeys(index.storing[value, half], 1.0), math.inf
    if problem.memory_budget is not None:
        row = {column: float(problem.sizes[v]) for v, column in index.saved_by.items()}
        yield -math.inf, row, problem.memory_budget


def _begin_with(
    model: highspy.Highs, problem: Problem, index: _Index, start: frozenset[int]
) -> None:
    solution = highspy.HighsSolution()
    values = [float(r in start) for r in range(len(problem.candidates))]
    saved = saved_values(problem, start)
    values += [float(value in saved) for value in index.saved_by]
    solution.col_value = values
    model.setSolution(solution)


def _without_idle(
    problem: Problem, chosen: Sequence[int], saved: frozenset[Value]
) -> frozenset[Value]:
    """The saved values without those that nothing needs, which a price of 0 lets in."""
    needed = saved_values(problem, chosen)
    if not _cycles(problem, chosen, needed):
        return needed
    for value in sorted(saved - needed, key=lambda v: -problem.sizes[v]):
        if not _cycles(problem, chosen, saved - {value}):
            saved -= {value}
    return saved


def _ordering_cuts(
    problem: Problem, index: _Index, chosen: Sequence[int], saved: frozenset[Value]
) -> list[Cut]:
    """Rows that forbid the cycles among the chosen candidates.

    A cycle is forbidden for every candidate alike: in each place, for those that share a node with
    the one found there (so that only one of them is ever chosen), read the same value from before
    and store the same value for the next. A value that is a copy may be saved instead, so s_v
    stands on the other side.
    """
    cuts = []
    for cycle in _cycles(problem, chosen, saved):
        places: set[int] = set()
        for r, (comes, goes) in cycle:
            here = problem.candidates[r]
            node = min(here.covers | here.copies)
            alike = index.covering[node] if node in here.covers else index.copying[node]
            for q in alike:
                other = problem.candidates[q]
                if comes in other.reads and goes in other.stores and other.half == here.half:
                    places.add(q)
        instead = {value for _, (_, value) in cycle if value in index.saved_by}
        if problem.candidates[cycle[0][0]].half != "backward":
            instead = set()
        cuts.append(Cut(tuple(sorted(places)), tuple(sorted(instead)), len(cycle) - 1.0))
    return cuts


_Place = tuple[int, tuple[Value, Value]]
"""A candidate in a cycle with the value that it reads from before and stores for the next."""


def _cycles(problem: Problem, chosen: Sequence[int], saved: frozenset[Value]) -> list[list[_Place]]:
    """Disjoint cycles among the chosen candidates, a shortest one through each start."""
    storing: dict[tuple[Value, Half], int] = {}
    for r in chosen:
        for value in problem.candidates[r].stores:
            storing[value, problem.candidates[r].half] = r
    before: dict[int, dict[int, Value]] = {r: {} for r in chosen}
    for r in chosen:
        candidate = problem.candidates[r]
        for value in sorted(candidate.reads):
            q = storing.get((value, candidate.half))
            if q is not None and q != r and not (candidate.half == "backward" and value in saved):
                before[r].setdefault(q, value)
    waiting = _in_cycles(before)
    found: list[list[_Place]] = []
    used: set[int] = set()
    for start in sorted(waiting):
        if start in used:
            continue
        path = _shortest_cycle(start, before, waiting - used)
        if path is None:
            continue
        used.update(path)
        # path[i + 1] stores what path[i] reads
        reads = [before[r][path[(i + 1) % len(path)]] for i, r in enumerate(path)]
        found.append([(r, (reads[i], reads[i - 1])) for i, r in enumerate(path)])
    return found


def _in_cycles(before: Mapping[int, Mapping[int, Value]]) -> set[int]:
    """The candidates that are left when all that can run, from either end, has been taken away."""
    left = set(before)
    for edges in (before, _reversed(before)):
        counts = {r: sum(q in left for q in edges[r]) for r in left}
        after = _reversed({r: edges[r] for r in left})
        ready = [r for r, count in counts.items() if count == 0]
        while ready:
            done = ready.pop()
            left.discard(done)
            for r in after.get(done, ()):
                if r in left:
                    counts[r] -= 1
                    if counts[r] == 0:
                        ready.append(r)
    return left


def _reversed(edges: Mapping[int, Iterable[int]]) -> dict[int, dict[int, Value]]:
    result: dict[int, dict[int, Value]] = {r: {} for r in edges}
    for r, others in edges.items():
        for q in others:
            result.setdefault(q, {})[r] = 0
    return result


def _shortest_cycle(
    start: int, before: Mapping[int, Mapping[int, Value]], allowed: set[int]
) -> list[int] | None:
    parent: dict[int, int] = {}
    queue = [start]
    for r in queue:
        for q in before[r]:
            if q == start:
                path = [r]
                while path[-1] != start:
                    path.append(parent[path[-1]])
                return path[::-1]
            if q in allowed and q not in parent:
                parent[q] = r
                queue.append(q)
    return None
