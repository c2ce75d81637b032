"""The index space: which shapes belong to it, and the coordinates that index an operand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tracing import guards, trace
from torch import Tensor

from torch_evt.partition.space import Groups, IndexedOperand, SizedTerm, Space

SIZES = st.lists(st.sampled_from((1, 2, 3, 4)), min_size=0, max_size=3)


@dataclass(frozen=True)
class Case:
    """A shape of (l, m, n) with its dimensions by coordinate, and an operand that broadcasts."""

    batched: bool
    by_axis: tuple[tuple[int, ...], ...]
    operand: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for sizes in self.by_axis for size in sizes)

    @property
    def extents(self) -> tuple[int, int, int]:
        l, m, n = (math.prod(sizes) for sizes in self.by_axis)  # noqa: E741
        return l, m, n

    @property
    def space(self) -> Space:
        l, m, n = self.extents  # noqa: E741
        return Space(l if self.batched else None, m, n)


@st.composite
def cases(draw: Any) -> Case:
    batched = draw(st.booleans())
    by_axis = (
        tuple(draw(SIZES)) if batched else (1,) * draw(st.integers(0, 2)),
        tuple(draw(SIZES)),
        tuple(draw(SIZES)),
    )
    shape = [size for sizes in by_axis for size in sizes]
    own = [size if draw(st.booleans()) else 1 for size in shape]
    while own and own[0] == 1 and draw(st.booleans()):
        own = own[1:]
    order = draw(st.permutations(range(len(own)))) if draw(st.booleans()) else range(len(own))
    laid = torch.randn([own[d] for d in order])
    operand = laid.permute([list(order).index(d) for d in range(len(own))])
    if own and draw(st.integers(0, 3)) == 0:  # every other element
        wide = torch.randn(*own[:-1], 2 * own[-1])
        operand = wide[..., ::2]
    if draw(st.integers(0, 3)) == 0:  # a dimension that is there, but with stride 0
        target = shape[len(shape) - len(own) :]
        operand = operand.expand(
            [
                draw(st.sampled_from((o, t))) if o == 1 else o
                for o, t in zip(own, target, strict=True)
            ]
        )
    return Case(batched, by_axis, operand)


def brute_force(indexed: IndexedOperand, operand: Tensor, extents: tuple[int, int, int]) -> Tensor:
    """The operand at every (l, m, n), read element by element as the terms say."""
    seen = operand.view(indexed.shape)  # as the kernel gets it
    where = dict(
        zip("lmn", torch.meshgrid(*map(torch.arange, extents), indexing="ij"), strict=True)
    )
    index = []
    for term in indexed.terms:
        at = where[term.axis]
        if term.op is not None:
            at = at // term.divisor if term.op == "div" else at % term.divisor
        index.append(at)
    return seen[tuple(index)].expand(extents)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases())
def test_an_index_map_reads_the_broadcast_operand(case: Case) -> None:
    indexed = case.space.operand(case.operand, case.shape)
    if indexed is None:
        return
    assert len(indexed.shape) == len(indexed.strides) == len(indexed.terms)
    assert case.operand.view(indexed.shape).stride() == indexed.strides
    wanted = case.operand.expand(case.shape).reshape(case.extents)
    assert torch.equal(brute_force(indexed, case.operand, case.extents), wanted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_a_broadcast_over_whole_coordinates_always_has_an_index_map(case: Case) -> None:
    shape = case.extents if case.batched else case.extents[1:]
    for kept in ([], [0], [1], [0, 1], [0, 1, 2]):
        own = [size if d in kept else 1 for d, size in enumerate(shape)]
        operand = torch.randn(own[::-1]).permute(*reversed(range(len(own))))
        indexed = case.space.operand(operand, shape)
        assert indexed is not None
        wanted = operand.expand(shape).reshape(case.extents)
        assert torch.equal(brute_force(indexed, operand, case.extents), wanted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_the_dimensions_of_a_shape_are_found_again(case: Case) -> None:
    groups = case.space.groups(case.shape)
    assert groups is not None
    rank = len(case.shape)
    found = [math.prod(case.shape[d] for d in groups.of(axis, rank)) for axis in ("l", "m", "n")]
    assert tuple(found) == case.extents


def test_a_shape_that_crosses_a_coordinate_is_none_of_the_space() -> None:
    assert Space(None, 6, 20).groups((2, 12, 5)) is None
    assert Space(None, 6, 20).groups((120,)) is None
    assert Space(None, 6, 20).groups((2, 6, 20)) is None
    assert Space(4, 6, 20).groups((2, 6, 20)) is None
    assert Space(4, 6, 20).groups((2, 2, 3, 2, 20)) == Groups(2, 4)
    assert Space(4, 6, 20).operand(torch.randn(2, 6, 20), (2, 6, 20)) is None


@pytest.mark.parametrize(
    ("operand", "shape", "terms"),
    [
        ((5, 8), (3, 5, 8), [SizedTerm("m", "mod", 5), SizedTerm("n")]),
        ((3, 1, 8), (3, 5, 8), [SizedTerm("m", "div", 5), SizedTerm("n")]),
        ((8,), (3, 5, 8), [SizedTerm("n")]),
        ((3, 5, 1), (3, 5, 8), [SizedTerm("m")]),
        ((), (3, 5, 8), []),
        ((3, 5, 2, 1), (3, 5, 2, 4), [SizedTerm("m"), SizedTerm("n", "div", 4)]),
        ((4,), (3, 5, 2, 4), [SizedTerm("n", "mod", 4)]),
        ((5, 1, 2, 4), (3, 5, 1, 2, 4), [SizedTerm("m", "mod", 5), SizedTerm("n")]),
    ],
)
def test_terms_of_common_broadcasts(
    operand: tuple[int, ...], shape: tuple[int, ...], terms: list[SizedTerm]
) -> None:
    found = Space(None, 15, 8).operand(torch.randn(operand), shape)
    assert found is not None
    assert list(found.terms) == terms


def test_what_one_div_or_mod_cannot_say_has_no_index_map() -> None:
    space = Space(None, 24, 8)
    shape = (2, 3, 4, 8)
    assert space.operand(torch.randn(1, 3, 1, 8), shape) is None  # (m div 4) mod 3
    assert space.operand(torch.randn(2, 3, 4, 4), shape) is None  # no broadcast at all
    assert space.operand(torch.randn(1, 2, 3, 4, 8), shape) is None  # more dimensions


def test_dimensions_of_one_coordinate_that_lie_apart_become_a_div_and_a_mod() -> None:
    operand = torch.randn(5, 3, 8).transpose(0, 1)
    found = Space(None, 15, 8).operand(operand, (3, 5, 8))
    assert found is not None
    assert found.terms == (SizedTerm("m", "div", 5), SizedTerm("m", "mod", 5), SizedTerm("n"))
    assert found.strides == operand.stride()


def test_symbolic_sizes_are_matched_without_a_guard() -> None:
    def f(x: Tensor, row: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        b, s, n = x.shape
        return x.reshape(b * s, n) + row, x + table

    module = trace(f, torch.randn(3, 5, 8), torch.randn(8), torch.randn(5, 8), mode="symbolic")
    x, row, table = (n.meta["val"] for n in module.graph.nodes if n.op == "placeholder")
    b, s, n = x.shape
    before = guards(module)
    space = Space(None, b * s, n)
    assert space.groups(x.shape) == Groups(0, 2)
    assert space.groups((s * b, n)) == Groups(0, 1)
    assert space.groups((b, s)) is None
    found = space.operand(row, (b * s, n))
    assert found is not None and [t.axis for t in found.terms] == ["n"]
    found = space.operand(table, x.shape)
    assert found is not None
    assert [(t.axis, t.op) for t in found.terms] == [("m", "mod"), ("n", None)]
    assert str(found.terms[0].divisor) == str(s)
    assert guards(module) == before
