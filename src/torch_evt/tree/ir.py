"""The epilogue tree: the whole language.

A tree says what one kernel computes: a main loop, what happens to its operands before it, and what
happens to its accumulator before memory. Values are immutable and interned: equal values are one
object, so a value used twice is computed once, and comparing or hashing a tree is cheap however
much it shares. The index
space is (l batch, m row, n column); inside an operand's own tree the reduced axis k stands in place
of n (operand A) or m (operand B).

    Value   = Accumulator(i)                      the main loop's i-th result
            | Load(argument, dtype, index, layout, overwritten)
                                                  one element of an argument, see `Term`
            | Const(value)                        a Python float, int or bool
            | Index(axis)                         the coordinate itself, int64
            | Compute(function, arguments)        a function of `tree.functions`
            | Cast(value, dtype)                  a rounding point
            | Statistic(value, over, op)          a reduction over a whole axis, used as a value
            | Neighbour(value)                    the paired column n ^ 1
            | Keep(seed, offset, p)               dropout's keep decision, bool
    Operand = Operand(name, dtype, layout, batched, value)
                                                  value None: the tensor itself; else a tree on k
    Sink    = Store(value, dtype, layout, into)   a full tile; into: the argument it overwrites
            | Reduce(value, over, op, dtype, fold_batch)
                                                  over rows folds m, over columns folds n
            | Select(value, column, dtype)        one column of every row
    Tree    = Tree(mainloop, operands, sinks)

Arithmetic is fp32 unless a Cast says otherwise; integers are exact int64 and never pass through
fp32. The k-th new output of the kernel is the k-th sink that does not overwrite an argument.

A kernel's tensors are, in order: the operands without a tree of their own, then the arguments
0, 1, ... that Loads name. Arguments that are overwritten are numbered apart.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch

Axis = Literal["l", "m", "n", "k"]
Over = Literal["rows", "columns", "all"]
ReduceOp = Literal["sum", "max", "logsumexp", "moments"]
LoadKind = Literal["tile", "row", "column", "scalar"]


@dataclass(frozen=True)
class Layout:
    """How a tile lies in memory.

    axis: the axis with stride 1, or "-" when no axis has it.
    alignment: bytes that divide the base address and every other stride; a power of two up to 16.
    """

    axis: str
    alignment: int


@dataclass(frozen=True)
class Term:
    """The coordinate that indexes one dimension of a loaded argument.

    axis: the coordinate. op: None takes it as it is, "div" and "mod" divide it by a run-time size.
    size: which of the kernel's `sizes` the divisor is; None exactly when op is None.
    """

    axis: Axis
    op: Literal["div", "mod"] | None = None
    size: int | None = None


class _Interned(type):
    """Makes equal values one object: a class call returns the value that already exists."""

    _existing: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
    _lock = threading.Lock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == len(cls.__match_args__):  # type: ignore[attr-defined]
            existing = cls._existing.get(cls._identity(*args))  # type: ignore[attr-defined]
            if existing is not None:
                return existing
        value = super().__call__(*args, **kwargs)
        with cls._lock:
            return cls._existing.setdefault(cls._identity(*value._fields()), value)  # type: ignore[attr-defined]


class _Value(metaclass=_Interned):
    @classmethod
    def _identity(cls, *fields: Any) -> tuple[Any, ...]:
        """What tells a value with these fields, in order, from every other value."""
        return (cls, *fields)

    def _fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self._fields()


@dataclass(frozen=True, eq=False)
class Accumulator(_Value):
    index: int = 0


@dataclass(frozen=True, eq=False)
class Load(_Value):
    """argument[index[0], index[1], ...]; an argument with no dimensions is a scalar.

    overwritten: the argument is one of those that a Store overwrites (read before it is written).
    layout: for tiles only.
    """

    argument: int
    dtype: torch.dtype
    index: tuple[Term, ...]
    layout: Layout | None = None
    overwritten: bool = False

    @cached_property
    def kind(self) -> LoadKind:
        """Tile: depends on a row and a column; row: on a column only; column: on a row only."""
        axes = {term.axis for term in self.index}
        columns = "n" in axes
        rows = "m" in axes
        if "k" in axes:  # inside an operand's tree, where k stands in place of n or m
            return "tile" if (rows or columns) else "row"
        if rows and columns:
            return "tile"
        if columns:
            return "row"
        return "column" if rows else "scalar"


@dataclass(frozen=True, eq=False)
class Const(_Value):
    """A constant. 1, 1.0 and True are three different constants."""

    value: float | int | bool

    @classmethod
    def _identity(cls, *fields: Any) -> tuple[Any, ...]:
        (value,) = fields  # repr tells -0.0 from 0.0 and makes nan equal to itself
        return cls, type(value).__name__, repr(value)


@dataclass(frozen=True, eq=False)
class Index(_Value):
    axis: Axis


@dataclass(frozen=True, eq=False)
class Compute(_Value):
    function: str
    arguments: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Cast(_Value):
    value: Value
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Statistic(_Value):
    """A reduction that every element of its row (over columns) or column (over rows) can read."""

    value: Value
    over: Over
    op: ReduceOp


@dataclass(frozen=True, eq=False)
class Neighbour(_Value):
    value: Value


@dataclass(frozen=True, eq=False)
class Keep(_Value):
    """True where the Philox-4x32-10 uniform number of (seed, offset) exceeds p."""

    seed: Value
    offset: Value
    p: float


Value = Accumulator | Load | Const | Index | Compute | Cast | Statistic | Neighbour | Keep


@dataclass(frozen=True)
class Operand:
    """An input of the main loop: A is (m, k), B is (k, n), with l in front when batched.

    value: None for a tensor; otherwise the operand is computed from Loads over (l, m, k) or
    (l, k, n) and rounded to `dtype`, and `layout` is not used.
    """

    name: str
    dtype: torch.dtype
    layout: Layout | None
    batched: bool = False
    value: Value | None = None


@dataclass(frozen=True)
class Store:
    """Write a full tile. into: None allocates a new output, j overwrites overwritten argument j."""

    value: Value
    dtype: torch.dtype
    layout: Layout
    into: int | None = None


@dataclass(frozen=True)
class Reduce:
    """Fold an axis. rows -> one value a column, columns -> one value a row, all -> one value.

    fold_batch: fold l too (always so for "all"). "moments" has a leading dimension of 2: the mean,
    then the sum of squared deviations from it.
    """

    value: Value
    over: Over
    op: ReduceOp
    dtype: torch.dtype
    fold_batch: bool = False


@dataclass(frozen=True)
class Select:
    """value at one column of every row; `column` is an integer that depends on l and m only."""

    value: Value
    column: Value
    dtype: torch.dtype


Sink = Store | Reduce | Select


@dataclass(frozen=True)
class Tree:
    """mainloop: "gemm" (operands A, B; further products A1, B1, ...) or "rows" (no operand)."""

    mainloop: str
    operands: tuple[Operand, ...]
    sinks: tuple[Sink, ...]

    @property
    def batched(self) -> bool:
        return any(operand.batched for operand in self.operands)

    @property
    def new_outputs(self) -> tuple[Sink, ...]:
        """The sinks that allocate an output, in the order of the kernel's outputs."""
        return tuple(s for s in self.sinks if not (isinstance(s, Store) and s.into is not None))


def children(value: Value) -> tuple[Value, ...]:
    """The values that `value` is computed from."""
    if isinstance(value, Compute):
        return value.arguments
    if isinstance(value, (Cast, Statistic, Neighbour)):
        return (value.value,)
    if isinstance(value, Keep):
        return (value.seed, value.offset)
    return ()


def sink_values(sink: Sink) -> tuple[Value, ...]:
    """The values that a sink reads."""
    return (sink.value, sink.column) if isinstance(sink, Select) else (sink.value,)


def roots(tree: Tree) -> Iterator[Value]:
    """Every value that an operand or a sink reads directly, in order."""
    for operand in tree.operands:
        if operand.value is not None:
            yield operand.value
    for sink in tree.sinks:
        yield from sink_values(sink)


def postorder(starts: Iterable[Value]) -> list[Value]:
    """All values reachable from `starts`, each once, arguments before users."""
    seen: set[Value] = set()
    order: list[Value] = []
    for start in starts:
        stack = [start]
        while stack:
            value = stack[-1]
            waiting = [] if value in seen else [c for c in children(value) if c not in seen]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if value not in seen:
                seen.add(value)
                order.append(value)
    return order
