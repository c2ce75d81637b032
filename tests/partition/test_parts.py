"""Which parts a program falls into."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from torch_evt.partition.parts import Cut, split
from torch_evt.partition.problem import Candidate, Index, Problem


def two_layers() -> Problem:
    """Nodes 0 and 1 in forward, alone or together; each is read by one in backward, 2 and 3."""
    return Problem(
        [
            Candidate("forward", 2.0, frozenset({0}), frozenset(), frozenset({0})),
            Candidate("forward", 3.0, frozenset({0}), frozenset(), frozenset({0})),
            Candidate("forward", 2.0, frozenset({1}), frozenset({0}), frozenset({1})),
            Candidate("backward", 2.0, frozenset({3}), frozenset({1}), frozenset({3})),
            Candidate("backward", 2.0, frozenset({2}), frozenset({0, 3}), frozenset({2})),
        ],
        {0: 8, 1: 8, 2: 8, 3: 8},
        frozenset({(2, "backward")}),
    )


def members(problem: Problem, *cuts: Cut) -> list[tuple[int, ...]]:
    return [part.members for part in split(problem, Index.of(problem), cuts)[0]]


def saved(problem: Problem) -> set[int]:
    return split(problem, Index.of(problem), ())[1]


def test_what_everybody_stores_joins_nobody() -> None:
    assert members(two_layers()) == [(0, 1), (2,), (3,), (4,)]
    assert saved(two_layers()) == {0, 1}


def test_a_value_that_one_candidate_leaves_out_joins_those_that_read_it() -> None:
    problem = two_layers()
    without = replace(problem.candidates[1], stores=frozenset())
    problem = replace(problem, candidates=[problem.candidates[0], without, *problem.candidates[2:]])
    assert members(problem) == [(0, 1, 2, 4), (3,)]
    assert saved(problem) == {1}


def test_a_price_of_saving_joins_forward_and_backward() -> None:
    problem = replace(two_layers(), save_weight=1.0)
    assert members(problem) == [(0, 1, 4), (2, 3)]
    assert saved(problem) == set()


def test_a_value_that_is_in_memory_already_costs_nothing_to_save() -> None:
    problem = replace(two_layers(), save_weight=1.0, sizes={0: 0, 1: 8, 2: 8, 3: 8})
    assert saved(problem) == {0}


def test_a_mark_against_saving_is_kept() -> None:
    problem = replace(two_layers(), must_not_save=frozenset({0}))
    assert saved(problem) == {1}
    assert members(problem) == [(0, 1, 4), (2,), (3,)]


def test_a_budget_makes_one_part() -> None:
    assert members(replace(two_layers(), memory_budget=16)) == [(0, 1, 2, 3, 4)]


def test_a_cut_joins_its_candidates_and_is_in_their_part_alone() -> None:
    cut = Cut((2, 4), (), 1.0)
    problem = two_layers()
    parts, _ = split(problem, Index.of(problem), [cut])
    assert {part.members: part.cuts for part in parts} == {(0, 1): (), (2, 4): (cut,), (3,): ()}


@pytest.mark.parametrize("save_weight", [0.0, 1.0])
def test_every_candidate_is_in_one_part_and_costs_the_same_there(save_weight: float) -> None:
    problem = replace(two_layers(), save_weight=save_weight)
    parts, _ = split(problem, Index.of(problem), ())
    assert sorted(r for part in parts for r in part.members) == list(range(5))
    costs = sum(c.cost_us for part in parts for c in part.problem.candidates)
    assert math.isclose(costs, sum(c.cost_us for c in problem.candidates))
