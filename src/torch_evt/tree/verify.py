"""The rules that a tree keeps beyond the grammar's form.

A tree that passes has one meaning for every emitter: it is well-typed, its axes exist where they
are used, its arguments and sizes are numbered without holes, and no kernel that computes it can
read what it has already overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import torch

from torch_evt.errors import TreeError
from torch_evt.tree.dtypes import DTYPES, ValueType, dtype_name, is_known, type_of_dtype
from torch_evt.tree.ir import (
    Accumulator,
    Cast,
    Compute,
    Const,
    Index,
    Keep,
    Layout,
    Load,
    Operand,
    Over,
    Reduce,
    ReduceOp,
    Select,
    Statistic,
    Store,
    Tree,
    Value,
    children,
    postorder,
)
from torch_evt.tree.scope import Scope, epilogue_scope, operand_scope, pair_names
from torch_evt.tree.shapes import needed_axes, scoped_loads, sources
from torch_evt.tree.text import value_text
from torch_evt.tree.types import node_type, reduced_type, value_type

__all__ = ["value_type", "verify"]

_ALIGNMENTS = (1, 2, 4, 8, 16)
_LONGEST = 200


@dataclass(frozen=True)
class _Facts:
    """What is known about a checked value: its type and the axes that it depends on."""

    type: ValueType
    axes: frozenset[str]


def verify(tree: Tree) -> None:
    """Raises TreeError, naming the value, operand or sink, for a tree that breaks a rule."""
    if tree.mainloop not in ("gemm", "rows"):
        raise TreeError(f'the main loop is "gemm" or "rows", not {tree.mainloop!r}')
    if not tree.sinks:
        raise TreeError("a tree without sinks computes nothing")
    _check_operands(tree)
    _check_numbers(tree)
    _check_sinks(tree)
    _check_overwritten(tree)
    sized = {source.axis for source in sources(tree) if source.term.op is None}
    for axis in needed_axes(tree):
        if axis not in sized:
            raise TreeError(f"no tensor of the tree has the whole axis {axis}: its size is unknown")


def _check_operands(tree: Tree) -> None:
    if tree.mainloop == "rows":
        if tree.operands:
            raise TreeError('a "rows" tree has no operands')
        return
    names = tuple(operand.name for operand in tree.operands)
    if not names or len(names) % 2 or names != pair_names(len(names)):
        raise TreeError(f"a gemm has operands A, B, then A1, B1, ..., not {', '.join(names)}")
    for operand in tree.operands:
        where = f"operand {operand.name}"
        _check_dtype(operand.dtype, where)
        if operand.dtype == torch.float64 or type_of_dtype(operand.dtype) != "float":
            raise TreeError(f"{where} cannot be {dtype_name(operand.dtype)}: products are fp32")
        scope = operand_scope(operand)
        if operand.value is None:
            if operand.layout is None:
                raise TreeError(f"{where} is a tensor and needs a layout")
            _check_layout(operand.layout, (*scope.axes, "-"), where)
        else:
            _check_operand_tree(operand, operand.value, scope, where)


def _check_operand_tree(operand: Operand, value: Value, scope: Scope, where: str) -> None:
    if operand.layout is not None:
        raise TreeError(f"{where} is computed, so it has no layout")
    facts = _check_values([value], scope, "operand", where)
    if facts[value].type != "float":
        raise TreeError(f"{where} must be a float value, not {facts[value].type}")


def _check_numbers(tree: Tree) -> None:
    """Arguments, overwritten ones and sizes: 0, 1, ... without holes, of one dtype and rank."""
    seen: dict[tuple[bool, int], Load] = {}
    sizes: set[int] = set()
    for load, _ in scoped_loads(tree):
        other = seen.setdefault((load.overwritten, load.argument), load)
        if (other.dtype, len(other.index)) != (load.dtype, len(load.index)):
            raise TreeError(
                f"argument {load.argument} is loaded with two dtypes or numbers of dimensions"
            )
        sizes.update(term.size for term in load.index if term.size is not None)
    into = [s.into for s in tree.sinks if isinstance(s, Store) and s.into is not None]
    if len(into) != len(set(into)):
        raise TreeError("two stores overwrite the same argument")
    _check_dense((n for overwritten, n in seen if not overwritten), "arguments")
    _check_dense(into, "overwritten arguments")
    _check_dense(sizes, "sizes")


def _check_dense(numbers: Iterable[int], what: str) -> None:
    found = sorted(numbers)
    if found != list(range(len(found))):
        raise TreeError(f"{what} must be numbered 0, 1, ... without holes, not {found}")


def _check_sinks(tree: Tree) -> None:
    scope = epilogue_scope(tree)
    for number, sink in enumerate(tree.sinks):
        where = f"sink {number} ({type(sink).__name__.lower()})"
        starts = [sink.value, sink.column] if isinstance(sink, Select) else [sink.value]
        facts = _check_values(starts, scope, tree.mainloop, where, len(tree.operands) // 2)
        found = facts[sink.value].type
        _check_dtype(sink.dtype, where)
        if isinstance(sink, Store):
            # what is overwritten has the layout of its owner, a new output is dense
            legal = ("m", "n") if sink.into is None else (*scope.axes, "-")
            _check_layout(sink.layout, legal, where)
        elif isinstance(sink, Reduce):
            found = _check_reduce(sink, tree, found, where)
        else:
            column = facts[sink.column]
            if column.type != "int":
                raise TreeError(f"{where}: the column must be an int, not {column.type}")
            if "n" in column.axes:
                raise TreeError(f"{where}: the column must not depend on n")
        if type_of_dtype(sink.dtype) != found:
            raise TreeError(
                f"{where} writes {dtype_name(sink.dtype)} but its value is {found}: cast it"
            )


def _check_reduce(sink: Reduce, tree: Tree, found: ValueType, where: str) -> ValueType:
    """The type of the reduced value."""
    if sink.over not in get_args(Over) or sink.op not in get_args(ReduceOp):
        raise TreeError(f"{where}: there is no {sink.op} over {sink.over}")
    if sink.fold_batch and not tree.batched:
        raise TreeError(f"{where} folds the batch of a tree that has none")
    try:
        return reduced_type(sink.op, found)
    except TreeError as error:
        raise TreeError(f"{where}: {error}") from None


def _check_overwritten(tree: Tree) -> None:
    """An overwritten argument is read exactly where it is written, so that no write comes first."""
    stores = {s.into: s for s in tree.sinks if isinstance(s, Store) and s.into is not None}
    tile = epilogue_scope(tree).default_index("tile")
    for load, _ in scoped_loads(tree):
        if not load.overwritten:
            continue
        store = stores.get(load.argument)
        if store is None:
            raise TreeError(f"no store overwrites argument {load.argument} that a load reads so")
        if load.index != tile or (load.dtype, load.layout) != (store.dtype, store.layout):
            raise TreeError(
                f"overwritten argument {load.argument} must be read as it is written: the same "
                "element, dtype and layout"
            )


def _check_values(
    starts: list[Value], scope: Scope, block: str, where: str, products: int = 0
) -> dict[Value, _Facts]:
    """Checks all values of one block ("gemm", "rows" or "operand"), arguments before users."""
    facts: dict[Value, _Facts] = {}
    types: dict[Value, ValueType] = {}
    for value in postorder(starts):
        try:
            _check_value(value, scope, block, products)
            types[value] = node_type(value, types)
        except TreeError as error:
            text = value_text(value, scope)
            text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
            raise TreeError(f"{where}, value {text}: {error}") from None
        axes = frozenset().union(*(facts[child].axes for child in children(value)))
        if isinstance(value, Statistic):
            axes -= {scope.column}
        facts[value] = _Facts(types[value], axes | _own_axes(value, scope))
    return facts


def _own_axes(value: Value, scope: Scope) -> frozenset[str]:
    if isinstance(value, Accumulator):
        return frozenset(scope.axes)
    if isinstance(value, Load):
        return frozenset(term.axis for term in value.index)
    return frozenset((value.axis,)) if isinstance(value, Index) else frozenset()


def _check_value(value: Value, scope: Scope, block: str, products: int) -> None:
    """The rules of one value that are not about its arguments' types."""
    if isinstance(value, Accumulator):
        if block == "operand":
            raise TreeError("an operand is computed before there is an accumulator")
        if not 0 <= value.index < products:
            raise TreeError(f"there is no product {value.index}")
    elif isinstance(value, Load):
        _check_load(value, scope, block)
    elif isinstance(value, Const):
        if type(value.value) not in (float, int, bool):
            raise TreeError(f"a constant is a float, int or bool, not {type(value.value).__name__}")
        if type(value.value) is int and not -(2**63) <= value.value < 2**63:
            raise TreeError("an int constant must fit into int64")
    elif isinstance(value, Index):
        _check_axis(value.axis, scope)
    elif isinstance(value, Cast):
        _check_dtype(value.dtype, "the cast")
        if value.dtype == torch.float64:
            raise TreeError("a cast to f64 would promise more than fp32 arithmetic holds")
    elif isinstance(value, Statistic):
        if block != "rows":
            raise TreeError('a statistic needs the main loop that holds the whole axis: "rows"')
        if value.over != "columns" or value.op not in ("sum", "max", "logsumexp"):
            raise TreeError("a statistic is a sum, max or logsumexp over columns")
    elif isinstance(value, Keep):
        if type(value.p) is not float or not 0.0 <= value.p <= 1.0 or math.isnan(value.p):
            raise TreeError("p is a float from 0 to 1")
    elif isinstance(value, Compute) and not isinstance(value.arguments, tuple):
        raise TreeError("arguments must be a tuple")


def _check_load(load: Load, scope: Scope, block: str) -> None:
    _check_dtype(load.dtype, "the load")
    if load.dtype == torch.float64:
        raise TreeError("f64 cannot be loaded: fp32 arithmetic would round it")
    if load.overwritten and block == "operand":
        raise TreeError("an operand cannot read an argument that the epilogue overwrites")
    for term in load.index:
        _check_axis(term.axis, scope)
        if term.op not in (None, "div", "mod"):
            raise TreeError(f"an index map divides by div or mod, not {term.op!r}")
        if (term.op is None) != (term.size is None) or (term.size is not None and term.size < 0):
            raise TreeError("a size belongs to div and mod, and to nothing else")
    if (load.layout is None) != (load.kind != "tile"):
        raise TreeError("a tile has a layout, and no other load has one")
    if load.layout is not None:
        _check_layout(load.layout, (*(term.axis for term in load.index), "-"), "the load")


def _check_axis(axis: str, scope: Scope) -> None:
    if axis not in scope.axes:
        raise TreeError(f"axis {axis} is not in the index space ({', '.join(scope.axes)})")


def _check_layout(layout: Layout, axes: tuple[str, ...], where: str) -> None:
    if layout.axis not in axes:
        raise TreeError(f"{where}: the contiguous axis is one of {axes}, not {layout.axis}")
    if layout.alignment not in _ALIGNMENTS:
        raise TreeError(f"{where}: the alignment is one of {_ALIGNMENTS}, not {layout.alignment}")


def _check_dtype(dtype: torch.dtype, where: str) -> None:
    if not is_known(dtype):
        raise TreeError(f"{where}: dtype {dtype} is not one of {', '.join(DTYPES)}")
