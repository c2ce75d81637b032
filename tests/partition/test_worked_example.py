"""docs/partitioner.md: its candidates, solved, give what its tables, rows and text say."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import highspy
import pytest
from tests.partition.test_program import covers_of, runs

from torch_evt.partition.program import (
    Candidate,
    Problem,
    Solution,
    _Index,
    _model,
    objective_us,
    saved_values,
    solve,
)

PAGE = (Path(__file__).parents[2] / "docs" / "partitioner.md").read_text(encoding="utf-8")
NODES = "zhycde"
MB = {"z": 8, "h": 8, "d": 8, "e": 8, "y": 2, "c": 2}

Row = tuple[float, frozenset[tuple[str, float]], float]
"""Lower limit, coefficients by the column's name, upper limit."""


def table(first: str) -> list[list[str]]:
    """The cells of the table of the page whose header starts with that column."""
    lines = PAGE[PAGE.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def values(names: str) -> frozenset[int]:
    return frozenset(NODES.index(name) for name in names.split())


KERNELS = table("kernel")
NAMES = [cells[0] for cells in KERNELS]


def example(**asked: Any) -> Problem:
    """The problem of the page."""
    candidates = [
        Candidate(half, float(cost), values(covers), values(reads), values(stores), values(copies))  # type: ignore[arg-type]
        for _, half, covers, reads, stores, copies, cost in KERNELS
    ]
    results = {"y": "forward", "c": "backward", "e": "backward"}
    return Problem(
        candidates,
        {NODES.index(name): size for name, size in MB.items()},
        frozenset((NODES.index(v), half) for v, half in results.items()),  # type: ignore[misc]
        **asked,
    )


def named(problem: Problem, found: Solution) -> tuple[set[str], set[str], float]:
    chosen = {NAMES[r] for r in found.chosen}
    return chosen, {NODES[v] for v in found.saved}, found.objective_us


def row(lower: float, terms: dict[str, float], upper: float) -> Row:
    return lower, frozenset((name, factor) for name, factor in terms.items() if factor), upper


def written_rows() -> list[Row]:
    """The rows of the page, everything on the left."""
    block = re.search(r"^\(run\)       z \+ zh.*?(?=^```)", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    found = []
    for line in block[0].splitlines():
        left, sign, right = re.split(r" (<=|=) ", re.sub(r"^\(\w+\)", "", line).strip())
        terms: Counter[str] = Counter()
        limit = 0.0
        for text, factor in ((left, -1), (right, 1)):
            for term in text.split(" + "):
                if term.isdigit():
                    limit -= factor * int(term)
                else:
                    terms[term] += factor
        if sign == "=":  # 1 - z - zh = 0
            found.append(row(-limit, {n: -f for n, f in terms.items()}, -limit))
        elif right.isdigit():  # z + zh <= 1
            found.append(row(-float("inf"), {n: -f for n, f in terms.items()}, -limit))
        else:  # s <= z + zh
            found.append(row(limit, dict(terms), float("inf")))
    return found


def built_rows(problem: Problem) -> list[Row]:
    """The rows that the program gives HiGHS."""
    index = _Index.of(problem)
    lp = _model(problem, index).getLp()
    columns = NAMES + [f"s({NODES[v]})" for v in index.saved_by]
    matrix = lp.a_matrix_
    by_row = matrix.format_ == highspy.MatrixFormat.kRowwise
    terms: list[dict[str, float]] = [{} for _ in range(lp.num_row_)]
    for line, (start, end) in enumerate(itertools.pairwise(matrix.start_)):
        for place in range(start, end):
            other = matrix.index_[place]
            at, column = (line, other) if by_row else (other, line)
            terms[at][columns[column]] = matrix.value_[place]
    limits = zip(lp.row_lower_, terms, lp.row_upper_, strict=True)
    return [row(lower, found, upper) for lower, found, upper in limits]


def test_the_rows_of_the_page_are_the_programs() -> None:
    written = written_rows()
    assert len(written) == 20
    assert Counter(written) == Counter(built_rows(example()))


def test_the_choices_of_the_page_are_all_that_run_with_what_they_cost() -> None:
    problem = example()
    expected = set()
    extra = [r for r, candidate in enumerate(problem.candidates) if not candidate.covers]
    for cover in covers_of(problem):
        for chosen in (cover, *((*cover, r) for r in extra)):
            saved = saved_values(problem, chosen)
            idle = set(chosen) & set(extra) and saved == saved_values(problem, cover)
            if idle or not runs(problem, chosen, saved):
                continue
            kernels = objective_us(problem, chosen, saved)
            size = sum(problem.sizes[v] for v in saved)
            found = [frozenset(NAMES[r] for r in chosen), frozenset(NODES[v] for v in saved)]
            expected.add((*found, size, kernels, kernels + 1.5 * size))
    stated = {
        (
            frozenset(f"{forward} {backward}".split()),
            frozenset(saves.split()),
            int(size),
            float(kernels),
            float(priced),
        )
        for forward, backward, saves, size, kernels, priced in table("forward")
    }
    assert stated == expected
    assert len(table("forward")) == 10


@pytest.mark.parametrize(
    ("asked", "chosen", "saved", "objective"),
    [
        ({}, {"zh", "y", "c", "de"}, {"z", "h"}, 104),
        ({"save_weight": 1.5}, {"zh", "y", "c", "deh2"}, {"z"}, 124),
        ({"memory_budget": 10}, {"zh", "y", "c", "deh2"}, {"z"}, 112),
        ({"must_not_save": values("h")}, {"zh", "y", "c", "deh2"}, {"z"}, 112),
        ({"save_weight": 1.5, "must_save": values("h")}, {"zh", "y", "c", "de"}, {"z", "h"}, 128),
    ],
    ids=["free", "weight", "budget", "not h", "h"],
)
def test_the_optimum_found_by_hand(
    asked: dict[str, Any], chosen: set[str], saved: set[str], objective: float
) -> None:
    problem = example(**asked)
    found = solve(problem, nodes=1000, gap=0.0)
    assert found is not None and found.optimal and found.rounds == 0
    assert named(problem, found) == (chosen, saved, objective)
    said = re.sub(r"\s+", " ", PAGE)
    assert (
        asked.get("must_save")
        or f"{', '.join(k for k in NAMES if k in chosen)} at {objective}" in said
    )


def test_without_z_saved_there_is_no_answer() -> None:
    assert solve(example(must_not_save=values("z")), nodes=1000) is None


def test_two_convex_candidates_that_wait_for_each_other() -> None:
    a0, a1, a2, b0, b1, b2 = range(6)
    reads = {a0: {a0 + 10}, a1: {a0}, a2: {a0, b2}, b0: {b0 + 10}, b1: {a1, b0}, b2: {b0}}
    alone = [
        Candidate("forward", 10.0, frozenset({n}), frozenset(r), frozenset({n}))
        for n, r in reads.items()
    ]
    both = [
        Candidate("forward", 22.0, frozenset({a0, a1, a2}), frozenset({b2}), frozenset({a1, a2})),
        Candidate("forward", 22.0, frozenset({b0, b1, b2}), frozenset({a1}), frozenset({b1, b2})),
    ]
    sizes = dict.fromkeys(reads, 1)
    problem = Problem([*alone, *both], sizes, frozenset({(a2, "forward"), (b1, "forward")}))
    found = solve(problem, nodes=1000, gap=0.0)
    assert found is not None and found.rounds == 1
    assert found.objective_us == 52
    assert len({6, 7} & set(found.chosen)) == 1
    assert objective_us(problem, (6, 7), frozenset()) == 44
    assert "A and B at 44 us" in PAGE and "three nodes alone: 52 us" in PAGE
