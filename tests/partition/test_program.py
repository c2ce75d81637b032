"""The integer program against trying everything, on small random graphs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from torch_evt.partition.program import Candidate, Problem, Solution, objective_us, solve

Edges = dict[int, tuple[int, ...]]
"""Each node's inputs, in order."""


def random_graph(source: random.Random, size: int) -> tuple[Edges, dict[int, str]]:
    """A graph of forward nodes, then backward ones; some of the forward ones are read there."""
    edges: Edges = {}
    half = {}
    forward = source.randint(2, size - 2)
    for node in range(size):
        half[node] = "forward" if node < forward else "backward"
        before = list(range(max(0, node - 4), node))
        edges[node] = tuple(sorted(source.sample(before, min(len(before), source.randint(0, 2)))))
    return edges, half


def random_problem(source: random.Random, size: int) -> Problem:
    """Every node alone, and random groups of nodes that touch; backward ones with copies."""
    edges, half = random_graph(source, size)
    users: dict[int, set[int]] = {node: set() for node in edges}
    for node, inputs in edges.items():
        for value in inputs:
            users[value].add(node)
    results = {(n, half[n]) for n in edges if not users[n]}  # type: ignore[misc]

    def candidate(covers: set[int], copies: set[int]) -> Candidate:
        inside = covers | copies
        reads = {v for n in inside for v in edges[n]} - inside
        stored = {n for n in covers if not users[n] <= covers or (n, half[n]) in results}
        kept = {n for n in copies if source.random() < 0.5}
        cost = source.randint(1, 30) * 0.5 + 2 * len(reads) + 2 * len(stored | kept)
        return Candidate(
            half[min(covers)],  # type: ignore[arg-type]
            cost,
            frozenset(covers),
            frozenset(reads),
            frozenset(stored | kept),
            frozenset(kept),
        )

    candidates = [candidate({n}, set()) for n in edges]
    for _ in range(source.randint(2, 7)):
        start = source.choice(sorted(edges))
        covers = {start}
        for _ in range(source.randint(1, 3)):
            near = {
                n
                for c in covers
                for n in (*edges[c], *users[c])
                if half[n] == half[start] and n not in covers
            }
            if near:
                covers.add(source.choice(sorted(near)))
        copies: set[int] = set()
        if half[start] == "backward":
            wanted = [v for n in covers for v in edges[n] if half[v] == "forward"]
            copies = {v for v in wanted if source.random() < 0.6}
        candidates.append(candidate(covers, copies))
    sizes = {n: source.randint(1, 8) for n in edges}
    forward = [n for n in edges if half[n] == "forward"]
    return Problem(
        candidates,
        sizes,
        frozenset(results),  # type: ignore[arg-type]
        save_weight=source.choice([0.0, 0.5, 3.0]),
        memory_budget=source.choice([None, None, 4, 10]),
        must_save=frozenset(source.sample(forward, 1)) if source.random() < 0.1 else frozenset(),
        must_not_save=frozenset(source.sample(forward, 1))
        if source.random() < 0.2
        else frozenset(),
    )


def covers_of(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every choice that runs each node once."""
    nodes = sorted({n for c in problem.candidates for n in c.covers})

    def extend(chosen: tuple[int, ...], done: frozenset[int]) -> Iterator[tuple[int, ...]]:
        missing = next((n for n in nodes if n not in done), None)
        if missing is None:
            yield chosen
            return
        for r, candidate in enumerate(problem.candidates):
            if missing in candidate.covers and not candidate.covers & done:
                yield from extend((*chosen, r), done | candidate.covers)

    return extend((), frozenset())


def runs(problem: Problem, chosen: Sequence[int], saved: frozenset[int]) -> bool:
    """Whether the kernels can run one after the other, each finding what it reads."""
    here = {r: problem.candidates[r] for r in chosen}
    copied = [v for c in here.values() for v in c.copies]
    if len(copied) != len(set(copied)):
        return False
    stored = {(v, c.half) for c in here.values() for v in c.stores}
    if not problem.results <= stored or any((v, "forward") not in stored for v in saved):
        return False
    budget = problem.memory_budget
    if budget is not None and sum(problem.sizes[v] for v in saved) > budget:
        return False
    if not problem.must_save <= saved or problem.must_not_save & saved:
        return False
    memory = {"forward": set(), "backward": set(saved)}
    waiting = dict(here)
    while waiting:
        ready = [r for r, c in waiting.items() if c.reads <= memory[c.half]]
        if not ready:
            return False
        for r in ready:
            candidate = waiting.pop(r)
            memory[candidate.half] |= candidate.stores
    return True


def best(problem: Problem) -> float | None:
    """The least objective over all choices and all that may be saved; None where nothing runs."""
    found: float | None = None
    for chosen in covers_of(problem):
        stored = {
            v
            for r in chosen
            for v in problem.candidates[r].stores
            if problem.candidates[r].half == "forward"
        }
        wanted = {
            v
            for r in chosen
            for v in problem.candidates[r].reads
            if problem.candidates[r].half == "backward"
        } | problem.must_save
        useful = sorted(stored & wanted)
        for count in range(len(useful) + 1):
            for some in itertools.combinations(useful, count):
                saved = frozenset(some)
                value = objective_us(problem, chosen, saved)
                if (found is None or value < found) and runs(problem, chosen, saved):
                    found = value
    return found


def answer(problem: Problem) -> Solution | None:
    return solve(problem, nodes=100_000, gap=0.0)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_better_than_the_answer(seed: int) -> None:
    source = random.Random(seed)
    feasible = cut = 0
    for _ in range(60):
        problem = random_problem(source, source.randint(5, 10))
        expected, found = best(problem), answer(problem)
        assert (expected is None) == (found is None)
        if found is None:
            continue
        feasible += 1
        cut += found.rounds > 0
        assert found.objective_us == pytest.approx(expected)
        assert runs(problem, found.chosen, found.saved)
    assert feasible >= 30 and cut >= 1
