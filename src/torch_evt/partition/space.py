"""The index space of a region, and how tensors of other shapes lie in it.

A node belongs to the space (l, m, n) when its elements in row-major order are those of (l, m, n):
[batch, length, n] and [batch * length, n] are one matrix. An operand that broadcasts is described
by the coordinates that index it (`tree.ir.Term`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_evt.graphs import Size, is_one, product, same_size
from torch_evt.tree.ir import Axis


@dataclass(frozen=True)
class Groups:
    """Which dimensions of a shape make up each coordinate: l = [:m], m = [m:n], n = [n:]."""

    m: int
    n: int

    def of(self, axis: Axis, rank: int) -> range:
        return {"l": range(self.m), "m": range(self.m, self.n), "n": range(self.n, rank)}[axis]


@dataclass(frozen=True)
class SizedTerm:
    """A `tree.ir.Term` whose divisor is still a size, not yet a number of the kernel's `sizes`."""

    axis: Axis
    op: str | None = None
    divisor: Size | None = None


@dataclass(frozen=True)
class IndexedOperand:
    """An operand viewed as `shape` with `strides`, whose dimensions are indexed by `terms`."""

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    terms: tuple[SizedTerm, ...]


@dataclass(frozen=True)
class Space:
    """The sizes of a region's coordinates; l is None for an unbatched product."""

    l: Size | None  # noqa: E741
    m: Size
    n: Size

    def groups(self, shape: Sequence[Size]) -> Groups | None:
        """How a shape's dimensions divide into l, m, n; None where they do not."""
        n_from = _suffix(shape, self.n)
        if n_from is None:
            return None
        m_from = _suffix(shape[:n_from], self.m)
        if m_from is None:
            return None
        rest = shape[:m_from]
        if self.l is None:
            return Groups(0, n_from) if all(map(is_one, rest)) else None
        return Groups(m_from, n_from) if same_size(product(rest), self.l) else None

    def operand(self, operand: torch.Tensor, shape: Sequence[Size]) -> IndexedOperand | None:
        """How a tensor that broadcasts to `shape`, a shape of this space, is indexed.

        None where its broadcast cannot be said with one div or mod a dimension.
        """
        groups = self.groups(shape)
        missing = len(shape) - operand.dim()
        if groups is None or missing < 0:
            return None
        sizes: list[Size] = [*([1] * missing), *operand.shape]
        strides: list[Size] = [*([0] * missing), *operand.stride()]
        found: list[tuple[Size, Size, SizedTerm]] = []
        axes: tuple[Axis, ...] = ("l", "m", "n")
        for axis in axes:
            active = [d for d in groups.of(axis, len(shape)) if not is_one(shape[d])]
            for d in active:
                if not is_one(sizes[d]) and not same_size(sizes[d], shape[d]):
                    return None
            terms = _terms(axis, active, shape, sizes, strides)
            if terms is None:
                return None
            found.extend(terms)
        return IndexedOperand(
            tuple(size for size, _, _ in found),
            tuple(stride for _, stride, _ in found),
            tuple(term for _, _, term in found),
        )


def _suffix(shape: Sequence[Size], size: Size) -> int | None:
    """The first dimension of the suffix whose product is `size`."""
    start, found = len(shape), 1
    total: Size = found
    while not same_size(total, size):
        if start == 0:
            return None
        start -= 1
        total = total * shape[start]
    if is_one(size) and start > 0 and is_one(shape[start - 1]):
        start -= 1
    return start


def _terms(
    axis: Axis,
    active: list[int],
    shape: Sequence[Size],
    sizes: Sequence[Size],
    strides: Sequence[Size],
) -> list[tuple[Size, Size, SizedTerm]] | None:
    """(size, stride, term) of each dimension that a coordinate becomes in the operand."""
    runs: list[list[int]] = []  # of present dimensions that are one dimension in memory
    previous: int | None = None
    for d in active:
        if is_one(sizes[d]):
            previous = None
            continue
        joined = previous is not None and same_size(strides[previous], strides[d] * sizes[d])
        if joined:
            runs[-1].append(d)
        else:
            runs.append([d])
        previous = d
    found: list[tuple[Size, Size, SizedTerm]] = []
    for run in runs:
        first = run[0] == active[0]
        after = [shape[d] for d in active if d > run[-1]]
        size = product(shape[d] for d in run)
        if not after:
            term = SizedTerm(axis) if first else SizedTerm(axis, "mod", size)
        elif first:
            term = SizedTerm(axis, "div", product(after))
        else:
            return None  # (x div p) mod q
        found.append((size, strides[run[-1]], term))
    return found
