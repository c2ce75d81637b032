"""Sizes: of a tree's index space, from its tensors, and of its new outputs, from the index space.

`inputs` are the tensors of the operands that have no tree of their own, in order, then arguments
0, 1, ...; `sizes` are the run-time sizes that index maps divide by; `overwritten` are the arguments
that Stores overwrite. `index_space` and `output_specs` do arithmetic on sizes and never compare
them, so that symbolic sizes stay symbolic and no guard is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_evt.errors import TreeError
from torch_evt.tree.dtypes import dtype_name
from torch_evt.tree.ir import (
    Load,
    Reduce,
    Sink,
    Store,
    Term,
    Tree,
    Value,
    postorder,
    roots,
    sink_values,
)
from torch_evt.tree.scope import epilogue_scope, operand_scope

Size = int | torch.SymInt


@dataclass(frozen=True)
class IndexSpace:
    """l: None without batch. k: None without operands; the first product's reduced axis."""

    l: Size | None  # noqa: E741  the name of the axis everywhere
    m: Size
    n: Size
    k: Size | None


@dataclass(frozen=True)
class OutputSpec:
    """A new output: its sizes, its strides in elements, its dtype."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Source:
    """One dimension of one tensor, and the coordinate that indexes it.

    axis: "l", "m", "n", or "k0", "k1", ... for the reduced axis of each product.
    """

    tensor: int
    overwritten: bool
    dimension: int
    axis: str
    term: Term


def tensor_operands(tree: Tree) -> int:
    """How many operands are tensors of their own: where the arguments start in `inputs`."""
    return sum(operand.value is None for operand in tree.operands)


def scoped_loads(tree: Tree) -> Iterator[tuple[Load, int]]:
    """Every load, once in each block that has it, with the number of the block's product."""
    starts: list[tuple[int, list[Value]]] = [
        (i // 2, [operand.value])
        for i, operand in enumerate(tree.operands)
        if operand.value is not None
    ]
    starts.append((0, [value for sink in tree.sinks for value in sink_values(sink)]))
    for product, values in starts:
        yield from ((v, product) for v in postorder(values) if isinstance(v, Load))


def sources(tree: Tree) -> Iterator[Source]:
    """Every dimension of every tensor of the kernel: operands, then arguments, then overwritten."""

    def key(axis: str, product: int) -> str:
        return f"k{product}" if axis == "k" else axis

    tensors = 0
    for i, operand in enumerate(tree.operands):
        if operand.value is None:
            for dimension, axis in enumerate(operand_scope(operand).axes):
                yield Source(tensors, False, dimension, key(axis, i // 2), Term(axis))
            tensors += 1
    for load, product in scoped_loads(tree):
        position = load.argument if load.overwritten else tensors + load.argument
        for dimension, term in enumerate(load.index):
            yield Source(position, load.overwritten, dimension, key(term.axis, product), term)
    for sink in tree.sinks:
        if isinstance(sink, Store) and sink.into is not None:
            for dimension, axis in enumerate(epilogue_scope(tree).axes):
                yield Source(sink.into, True, dimension, axis, Term(axis))


def needed_axes(tree: Tree) -> tuple[str, ...]:
    """The axes that must have a size, named as in `Source`."""
    products = tuple(f"k{i}" for i in range(len(tree.operands) // 2))
    return (*epilogue_scope(tree).axes, *products)


def axis_sizes(
    tree: Tree, inputs: Sequence[Any], sizes: Sequence[Size], overwritten: Sequence[Any] = ()
) -> dict[str, Size]:
    """The size of every axis, each from the first tensor that has it undivided.

    Raises TreeError where no tensor does.
    """
    found: dict[str, Size] = {}
    for source in sources(tree):
        if source.term.op is None and source.axis not in found:
            tensor = (overwritten if source.overwritten else inputs)[source.tensor]
            found[source.axis] = tensor.shape[source.dimension]
    for axis in needed_axes(tree):
        if axis not in found:
            raise TreeError(f"no tensor of the tree has the whole axis {axis}: its size is unknown")
    return found


def index_space(
    tree: Tree, inputs: Sequence[Any], sizes: Sequence[Size], overwritten: Sequence[Any] = ()
) -> IndexSpace:
    """The tree's index space, from objects with a `.shape`; a "rows" tree takes it from its loads.

    Raises TreeError where no tensor has one of the axes undivided.
    """
    found = axis_sizes(tree, inputs, sizes, overwritten)
    return IndexSpace(found["l"] if tree.batched else None, found["m"], found["n"], found.get("k0"))


def output_specs(
    tree: Tree, inputs: Sequence[Any], sizes: Sequence[Size], overwritten: Sequence[Any] = ()
) -> tuple[OutputSpec, ...]:
    """The new outputs, in order.

    Store: [m, n], or [l, m, n] when batched, with n or m contiguous as its layout says. Reduce over
    rows: [n], over columns: [m], with l in front when it is not folded; over all: []; moments: 2
    in front of that. Select: [m] or [l, m].
    """
    space = index_space(tree, inputs, sizes, overwritten)
    return tuple(
        OutputSpec(*_shape_and_stride(sink, space), sink.dtype) for sink in tree.new_outputs
    )


def _shape_and_stride(sink: Sink, space: IndexSpace) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    batch = () if space.l is None else (space.l,)
    if isinstance(sink, Store):
        shape = (*batch, space.m, space.n)
        if sink.layout.axis == "m":
            row = _at_least_one(space.m)
            inner: tuple[Size, ...] = (1, row)
            outer = row * _at_least_one(space.n)
        else:
            row = _at_least_one(space.n)
            inner = (row, 1)
            outer = row * _at_least_one(space.m)
        return shape, (*((outer,) if batch else ()), *inner)
    if isinstance(sink, Reduce):
        kept = () if sink.fold_batch else batch
        shape = {"rows": (*kept, space.n), "columns": (*kept, space.m), "all": ()}[sink.over]
        if sink.op == "moments":
            shape = (2, *shape)
    else:
        shape = (*batch, space.m)
    return shape, _contiguous(shape)


def _contiguous(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * _at_least_one(size)
    return tuple(reversed(strides))


def _at_least_one(size: Size) -> Size:
    # torch strides over an empty axis as over one of size 1; comparing a symbol would guard on it
    return max(size, 1) if isinstance(size, int) else size


def check_inputs(
    tree: Tree, inputs: Sequence[Any], sizes: Sequence[Size], overwritten: Sequence[Any] = ()
) -> None:
    """Raises TreeError for tensors that do not fit the tree: count, rank, dtype or size.

    Compares sizes, so it is for concrete tensors: tests and debugging, not the hot path.
    """
    first = tensor_operands(tree)
    ranks: dict[tuple[bool, int], int] = {}
    dtypes: dict[tuple[bool, int], torch.dtype] = {}
    plain = (operand for operand in tree.operands if operand.value is None)
    for position, operand in enumerate(plain):
        ranks[False, position] = 3 if operand.batched else 2
        dtypes[False, position] = operand.dtype
    for value in postorder(roots(tree)):
        if isinstance(value, Load):
            at = (value.overwritten, value.argument + (0 if value.overwritten else first))
            ranks[at], dtypes[at] = len(value.index), value.dtype
    for sink in tree.sinks:
        if isinstance(sink, Store) and sink.into is not None:
            ranks[True, sink.into] = 3 if tree.batched else 2
            dtypes[True, sink.into] = sink.dtype
    used = [s.term.size + 1 for s in sources(tree) if s.term.size is not None]
    expected = {
        "input": (len(inputs), sum(not at[0] for at in ranks)),
        "overwritten argument": (len(overwritten), sum(at[0] for at in ranks)),
        "size": (len(sizes), max(used, default=0)),
    }
    for what, (got, wanted) in expected.items():
        if got != wanted:
            raise TreeError(f"the tree needs {wanted} {what}(s), not {got}")
    for at, rank in ranks.items():
        tensor = (overwritten if at[0] else inputs)[at[1]]
        if len(tensor.shape) != rank:
            raise TreeError(f"{_where(*at)} needs {rank} dimensions, not {len(tensor.shape)}")
        if tensor.dtype != dtypes[at]:
            wanted_name, got_name = dtype_name(dtypes[at]), dtype_name(tensor.dtype)
            raise TreeError(f"{_where(*at)} needs dtype {wanted_name}, not {got_name}")
    _check_sizes(tree, inputs, sizes, overwritten)


def _check_sizes(
    tree: Tree, inputs: Sequence[Any], sizes: Sequence[Size], overwritten: Sequence[Any]
) -> None:
    for number, size in enumerate(sizes):
        if size <= 0:
            raise TreeError(f"size s{number} must be positive to divide by it, not {size}")
    found = axis_sizes(tree, inputs, sizes, overwritten)
    for source in sources(tree):
        tensor = (overwritten if source.overwritten else inputs)[source.tensor]
        term, whole = source.term, found[source.axis]
        if term.size is None:
            wanted: Size = whole
        elif term.op == "mod":
            wanted = sizes[term.size]
        else:
            wanted = -(-whole // sizes[term.size])
        got = tensor.shape[source.dimension]
        if got != wanted:
            raise TreeError(
                f"{_where(source.overwritten, source.tensor)} has size {got} in dimension "
                f"{source.dimension}, but axis {source.axis} needs {wanted} there"
            )


def _where(overwritten: bool, position: int) -> str:
    return f"overwritten argument {position}" if overwritten else f"input {position}"
