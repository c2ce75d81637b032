"""The text form of a tree: one line that is its identity, for people, golden files and caches.

    tree       = mainloop "(" [operand {"," operand}] ")" "->" statements {";" statements}
    operand    = name ":" dtype ["l"] [layout] ["=" block]         l: the operand is batched
    block      = expression | "{" {name "=" expression ";"} expression "}"
    statements = {name "=" expression ";"} sink
    sink       = "store" "(" target ":" dtype layout "," expression ")"
               | "reduce" "(" number ":" dtype "," op "," over "," ["fold" "l" ","] expression ")"
               | "select" "(" number ":" dtype "," expression "," expression ")"
    target     = number | "into" number          the new output, or the argument that it overwrites
    expression: + - * / with the usual precedence, calls of the table's functions, names, and
                acc0 | 1.0 | 3 | true | kind "(" ["into"] number ":" dtype [layout] [index] ")"
                | cast(x, dtype) | statistic(x, over, op) | neighbour(x) | keep(seed, offset, p)
                | index(axis)
    index      = "[" [term {"," term}] "]"       term = axis [("div" | "mod") "s" number]
    layout     = (axis | "-") number             the contiguous axis, the alignment in bytes

An index map is written only where it differs from its kind's usual one (`tree.scope`). `to_text`
names a value exactly when it is used more than once (v0, v1, ... in the order of first use, and
loads and computed values only), or when an expression would nest very deeply; names are local to
their block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch_evt.tree.dtypes import dtype_name
from torch_evt.tree.functions import FUNCTIONS
from torch_evt.tree.ir import (
    Accumulator,
    Cast,
    Const,
    Index,
    Keep,
    Layout,
    Load,
    Neighbour,
    Operand,
    Reduce,
    Sink,
    Statistic,
    Store,
    Term,
    Tree,
    Value,
    children,
    postorder,
    sink_values,
)
from torch_evt.tree.parse import parse
from torch_evt.tree.scope import Scope, epilogue_scope, operand_scope

__all__ = ["parse", "to_text", "value_text"]

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3
_DEEPEST = 32
"""An expression that nests deeper gets a name, so that neither people nor the parser drown."""


def to_text(tree: Tree) -> str:
    """The tree as one line; equal trees have equal texts, and `parse` gives the tree back."""
    names = 0
    operands = []
    for operand in tree.operands:
        text = _operand_head(operand)
        if operand.value is not None:
            block = _Block(operand_scope(operand), [operand.value], names)
            statements = [*block.definitions(operand.value), block.text(operand.value)]
            body = "; ".join(statements)
            text += " = " + (body if len(statements) == 1 else "{" + body + "}")
            names = block.names
        operands.append(text)
    epilogue = _Block(
        epilogue_scope(tree), [v for sink in tree.sinks for v in sink_values(sink)], names
    )
    statements = []
    outputs = 0
    for sink in tree.sinks:
        for value in sink_values(sink):
            statements.extend(epilogue.definitions(value))
        statements.append(_sink_text(sink, outputs, epilogue))
        outputs += not (isinstance(sink, Store) and sink.into is not None)
    return f"{tree.mainloop}({', '.join(operands)}) -> {'; '.join(statements)}"


def value_text(value: Value, scope: Scope) -> str:
    """One value as text, for messages."""
    block = _Block(scope, [value], 0)
    statements = [*block.definitions(value), block.text(value)]
    return statements[0] if len(statements) == 1 else "{" + "; ".join(statements) + "}"


class _Block:
    """Writes the values of one scope; a shared one once, as a definition before its first use."""

    def __init__(self, scope: Scope, starts: list[Value], names: int) -> None:
        self.names = names
        self._scope = scope
        self._uses = _count_uses(starts)
        self._written: dict[Value, tuple[str, int, int]] = {}  # text, precedence, nesting

    def definitions(self, start: Value) -> list[str]:
        """Statements that define what `start` needs and that no statement before has defined."""
        statements = []
        for value in postorder([start]):
            if value in self._written:
                continue
            nesting = 1 + max((self._written[c][2] for c in children(value)), default=-1)
            text, precedence = self._expression(value)
            leaf = isinstance(value, (Accumulator, Const, Index))
            if not leaf and (self._uses[value] > 1 or nesting >= _DEEPEST):
                name = f"v{self.names}"
                self.names += 1
                statements.append(f"{name} = {text}")
                text, precedence, nesting = name, _ATOM, 0
            self._written[value] = (text, precedence, nesting)
        return statements

    def text(self, value: Value) -> str:
        return self._written[value][0]

    def _expression(self, value: Value) -> tuple[str, int]:
        """The value's text and the precedence of its outermost operator."""
        if isinstance(value, Accumulator):
            return f"acc{value.index}", _ATOM
        if isinstance(value, Load):
            return _load_text(value, self._scope), _ATOM
        if isinstance(value, Const):
            constant = value.value
            return (str(constant).lower() if isinstance(constant, bool) else repr(constant)), _ATOM
        if isinstance(value, Index):
            return f"index({value.axis})", _ATOM
        arguments = [self.text(argument) for argument in children(value)]
        if isinstance(value, Cast):
            return f"cast({arguments[0]}, {dtype_name(value.dtype)})", _ATOM
        if isinstance(value, Statistic):
            return f"statistic({arguments[0]}, {value.over}, {value.op})", _ATOM
        if isinstance(value, Neighbour):
            return f"neighbour({arguments[0]})", _ATOM
        if isinstance(value, Keep):
            return f"keep({arguments[0]}, {arguments[1]}, {value.p!r})", _ATOM
        function = FUNCTIONS.get(value.function)
        operator = function.operator if function is not None else None
        if operator is None or len(arguments) != 2:
            return f"{value.function}({', '.join(arguments)})", _ATOM
        own = PRECEDENCE[operator]
        left, right = (self._written[argument][1] for argument in value.arguments)
        first = f"({arguments[0]})" if left < own else arguments[0]
        second = f"({arguments[1]})" if right <= own else arguments[1]
        return f"{first} {operator} {second}", own


def _count_uses(starts: Iterable[Value]) -> Counter[Value]:
    starts = list(starts)
    uses = Counter(starts)
    for value in postorder(starts):
        uses.update(children(value))
    return uses


def _operand_head(operand: Operand) -> str:
    batched = " l" if operand.batched else ""
    return f"{operand.name}: {dtype_name(operand.dtype)}{batched}{_layout_text(operand.layout)}"


def _layout_text(layout: Layout | None) -> str:
    return "" if layout is None else f" {layout.axis} {layout.alignment}"


def _term_text(term: Term) -> str:
    return term.axis if term.op is None else f"{term.axis} {term.op} s{term.size}"


def _load_text(load: Load, scope: Scope) -> str:
    index = ""
    if load.index != scope.default_index(load.kind):
        index = f" [{', '.join(map(_term_text, load.index))}]"
    into = "into " if load.overwritten else ""
    dtype = dtype_name(load.dtype)
    return f"{load.kind}({into}{load.argument}: {dtype}{_layout_text(load.layout)}{index})"


def _sink_text(sink: Sink, output: int, block: _Block) -> str:
    value = block.text(sink.value)
    dtype = dtype_name(sink.dtype)
    if isinstance(sink, Store):
        target = str(output) if sink.into is None else f"into {sink.into}"
        return f"store({target}: {dtype}{_layout_text(sink.layout)}, {value})"
    if isinstance(sink, Reduce):
        fold = "fold l, " if sink.fold_batch else ""
        return f"reduce({output}: {dtype}, {sink.op}, {sink.over}, {fold}{value})"
    return f"select({output}: {dtype}, {value}, {block.text(sink.column)})"
