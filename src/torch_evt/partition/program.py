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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import highspy

from torch_evt.partition.plan import Half

Value = int
"""A node, and the value it computes."""

_MAX_ROUNDS = 50
"""Of ordering cuts; what is not in order then is given up for the greedy plan."""


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
class _Index:
    """Who covers, stores and copies what."""

    covering: dict[Value, list[int]] = field(default_factory=lambda: defaultdict(list))
    storing: dict[tuple[Value, Half], list[int]] = field(default_factory=lambda: defaultdict(list))
    copying: dict[Value, list[int]] = field(default_factory=lambda: defaultdict(list))
    saved_by: dict[Value, int] = field(default_factory=dict)
    """The column of s_v, for every forward value that a backward candidate reads."""

    @classmethod
    def of(cls, problem: Problem) -> _Index:
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


def solve(
    problem: Problem,
    *,
    nodes: int,
    gap: float = 0.0,
    start: Iterable[int] | None = None,
    emergency_s: float = 600.0,
) -> Solution | None:
    """The best choice; None where there is none, or none was found within the limits.

    nodes: of the search tree at most. gap: relative, at which an answer counts as optimal. start:
    a choice to begin with. emergency_s: seconds after which the search is given up altogether.
    """
    index = _Index.of(problem)
    if not problem.must_save <= index.saved_by.keys() - problem.must_not_save:
        return None
    model = _model(problem, index)
    model.setOptionValue("mip_max_nodes", nodes)
    model.setOptionValue("mip_rel_gap", gap)
    model.setOptionValue("time_limit", emergency_s)
    if start is not None:
        _begin_with(model, problem, index, frozenset(start))
    for rounds in range(_MAX_ROUNDS):
        model.run()
        status = model.getModelStatus()
        limited = status == highspy.HighsModelStatus.kSolutionLimit
        if status != highspy.HighsModelStatus.kOptimal and not limited:
            return None
        values = model.getSolution().col_value
        if not values or not math.isfinite(model.getObjectiveValue()):
            return None
        chosen = [r for r in range(len(problem.candidates)) if values[r] > 0.5]
        saved = frozenset(v for v, column in index.saved_by.items() if values[column] > 0.5)
        cuts = _ordering_cuts(problem, index, chosen, saved)
        if not cuts:
            saved = _without_idle(problem, chosen, saved)
            objective = objective_us(problem, chosen, saved)
            return Solution(tuple(chosen), saved, objective, not limited, rounds)
        for row, limit in cuts:
            _add(model, -math.inf, limit, row)
    return None


def _model(problem: Problem, index: _Index) -> highspy.Highs:
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.setOptionValue("output_flag", False)
    model.setOptionValue("log_to_console", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("random_seed", 0)
    for candidate in problem.candidates:
        _binary(model, candidate.cost_us)
    for value in index.saved_by:
        _binary(model, problem.save_weight * problem.sizes[value])

    for covering in index.covering.values():
        _add(model, 1, 1, dict.fromkeys(covering, 1.0))
    for copying in index.copying.values():
        if len(copying) > 1:
            _add(model, -math.inf, 1, dict.fromkeys(copying, 1.0))
    for r, candidate in enumerate(problem.candidates):
        for value in candidate.reads & problem.sizes.keys():
            providers = dict.fromkeys(index.storing[value, candidate.half], 1.0)
            if candidate.half == "backward" and value in index.saved_by:
                providers[index.saved_by[value]] = 1.0
            providers.pop(r, None)
            _add(model, 0, math.inf, {**providers, r: -1.0})
    for value, column in index.saved_by.items():
        stored = dict.fromkeys(index.storing[value, "forward"], 1.0)
        _add(model, 0, math.inf, {**stored, column: -1.0})
    for value, half in sorted(problem.results):
        _add(model, 1, math.inf, dict.fromkeys(index.storing[value, half], 1.0))
    if problem.memory_budget is not None:
        row = {column: float(problem.sizes[v]) for v, column in index.saved_by.items()}
        _add(model, -math.inf, problem.memory_budget, row)
    for value, column in index.saved_by.items():
        if value in problem.must_save:
            model.changeColBounds(column, 1, 1)
        elif value in problem.must_not_save:
            model.changeColBounds(column, 0, 0)
    return model


def _binary(model: highspy.Highs, cost: float) -> None:
    model.addVar(0, 1)
    column = model.getNumCol() - 1
    model.changeColCost(column, cost)
    model.changeColIntegrality(column, highspy.HighsVarType.kInteger)


def _add(model: highspy.Highs, lower: float, upper: float, row: Mapping[int, float]) -> None:
    columns = sorted(row)
    model.addRow(lower, upper, len(columns), columns, [row[c] for c in columns])


def _begin_with(
    model: highspy.Highs, problem: Problem, index: _Index, start: frozenset[int]
) -> None:
    solution = highspy.HighsSolution()
    values = [float(r in start) for r in range(len(problem.candidates))]
    saved = saved_values(problem, start)
    values += [float(value in saved) for value in index.saved_by]
    solution.col_value = values
    model.setSolution(solution)


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


def _without_idle(
    problem: Problem, chosen: Sequence[int], saved: frozenset[Value]
) -> frozenset[Value]:
    """The saved values without those that nothing needs, which a price of 0 lets in."""
    needed = saved_values(problem, chosen)
    for value in sorted(saved - needed, key=lambda v: -problem.sizes[v]):
        if not _cycles(problem, chosen, saved - {value}):
            saved -= {value}
    return saved


def _ordering_cuts(
    problem: Problem, index: _Index, chosen: Sequence[int], saved: frozenset[Value]
) -> list[tuple[dict[int, float], float]]:
    """Rows, each with its upper limit, that forbid the cycles among the chosen candidates.

    A cycle is forbidden for every candidate alike: in each place, for those that share a node with
    the one found there (so that only one of them is ever chosen), read the same value from before
    and store the same value for the next. A value that is a copy may be saved instead, so s_v
    stands on the other side.
    """
    cuts = []
    for cycle in _cycles(problem, chosen, saved):
        row: dict[int, float] = {}
        for r, (comes, goes) in cycle:
            here = problem.candidates[r]
            node = min(here.covers | here.copies)
            alike = index.covering[node] if node in here.covers else index.copying[node]
            for q in alike:
                other = problem.candidates[q]
                if comes in other.reads and goes in other.stores and other.half == here.half:
                    row[q] = 1.0
        for _, (_, value) in cycle:
            if value in index.saved_by and problem.candidates[cycle[0][0]].half == "backward":
                row[index.saved_by[value]] = -1.0
        cuts.append((row, len(cycle) - 1.0))
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
