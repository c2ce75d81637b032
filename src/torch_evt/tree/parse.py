"""Reads a tree from its text form; the grammar is in `tree/text.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, get_args

import torch

from torch_evt.errors import TreeError
from torch_evt.tree.dtypes import DTYPES
from torch_evt.tree.functions import FUNCTIONS
from torch_evt.tree.ir import (
    Accumulator,
    Axis,
    Cast,
    Compute,
    Const,
    Index,
    Keep,
    Layout,
    Load,
    LoadKind,
    Neighbour,
    Operand,
    Over,
    Reduce,
    ReduceOp,
    Select,
    Sink,
    Statistic,
    Store,
    Term,
    Tree,
    Value,
)
from torch_evt.tree.scope import Scope, operand_scope

_TOKEN = re.compile(
    r"(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<mark>->|[-()\[\]{},:;=+*/])",
    re.ASCII,
)
_SPACE = re.compile(r"\s*")
_AXES, _OVERS, _OPS, _KINDS = map(get_args, (Axis, Over, ReduceOp, LoadKind))
_OPERATORS = {f.operator: f.name for f in FUNCTIONS.values() if f.operator is not None}
_LEVELS = (("+", "-"), ("*", "/"))
_LITERALS = {"inf": float("inf"), "nan": float("nan"), "true": True, "false": False}
_ACCUMULATOR = re.compile(r"acc(\d+)", re.ASCII)
_DEEPEST = 100
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class _Token:
    kind: str  # number, name, mark or end
    text: str
    position: int


def parse(text: str) -> Tree:
    """The tree that `text` says. It is not verified: `tree.verify` does that.

    Raises TreeError with the position and what was expected there.
    """
    reader = _Reader(text)
    tree = reader.tree()
    reader.expect_end()
    return tree


def _tokens(text: str) -> list[_Token]:
    tokens = []
    position = _SPACE.match(text).end()  # type: ignore[union-attr]
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise TreeError(f"at position {position}: {text[position]!r} is no part of a tree")
        tokens.append(_Token(str(match.lastgroup), match.group(), position))
        position = _SPACE.match(text, match.end()).end()  # type: ignore[union-attr]
    return [*tokens, _Token("end", "the end", position)]


class _Reader:
    """Recursive descent over the tokens; every method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._scope = Scope("m", "n", False)
        self._names: dict[str, Value] = {}
        self._nesting = 0

    # tokens

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _peek(self, ahead: int = 1) -> str:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)].text

    def _fail(self, expected: str) -> NoReturn:
        token = self._next
        raise TreeError(f"at position {token.position}: expected {expected}, found {token.text!r}")

    def _advance(self) -> str:
        text = self._next.text
        self._at += 1
        return text

    def _accept(self, text: str) -> bool:
        found = self._next.text == text and self._next.kind != "end"
        self._at += found
        return found

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            self._fail(f"{text!r}")

    def expect_end(self) -> None:
        if self._next.kind != "end":
            self._fail("the end")

    def _name(self, what: str) -> str:
        return self._advance() if self._next.kind == "name" else self._fail(what)

    def _number(self, what: str) -> int:
        if self._next.kind != "number" or not self._next.text.isdigit():
            self._fail(what)
        return int(self._advance())

    def _one_of(self, words: Iterable[str], what: str) -> Any:
        words = tuple(words)
        if self._next.kind not in ("name", "mark") or self._next.text not in words:
            self._fail(f"{what} ({', '.join(words)})")
        return self._advance()

    def _separated(self, read: Callable[[], _Read], end: str) -> list[_Read]:
        """Items with commas between them, up to and with the mark `end`."""
        items: list[_Read] = []
        while not self._accept(end):
            if items:
                self._expect(",")
            items.append(read())
        return items

    # trees

    def tree(self) -> Tree:
        mainloop = self._one_of(("gemm", "rows"), "a main loop")
        self._expect("(")
        operands = tuple(self._separated(self._operand, ")"))
        self._expect("->")
        self._scope = Scope("m", "n", any(operand.batched for operand in operands))
        self._names = {}
        sinks: list[Sink] = []
        outputs = 0
        while True:
            while self._definition():
                self._expect(";")
            sink = self._sink(outputs)
            outputs += not (isinstance(sink, Store) and sink.into is not None)
            sinks.append(sink)
            if not self._accept(";"):
                return Tree(mainloop, operands, tuple(sinks))

    def _operand(self) -> Operand:
        name = self._name("an operand's name")
        if name[0] not in "AB":
            self._at -= 1
            self._fail("an operand's name (A, B, A1, B1, ...)")
        self._expect(":")
        dtype = self._dtype()
        # "l k 16" is a batched operand, "l 16" one whose contiguous axis is the batch
        batched = self._next.text == "l" and not self._peek().isdigit()
        self._at += batched
        layout = self._layout() if self._next.kind == "name" or self._next.text == "-" else None
        operand = Operand(name, dtype, layout, batched)
        if not self._accept("="):
            return operand
        self._scope = operand_scope(operand)
        self._names = {}
        if not self._accept("{"):
            return Operand(name, dtype, layout, batched, self._expression())
        while self._definition():
            self._expect(";")
        value = self._expression()
        self._expect("}")
        return Operand(name, dtype, layout, batched, value)

    def _definition(self) -> bool:
        """Reads `name = expression` if that comes next."""
        if self._next.kind != "name" or self._peek() != "=":
            return False
        name = self._next.text
        if name in _LITERALS or _ACCUMULATOR.fullmatch(name) or name in self._names:
            self._fail("a name that is not in use")
        self._at += 2
        self._names[name] = self._expression()
        return True

    def _sink(self, output: int) -> Sink:
        sink = self._one_of(("store", "reduce", "select"), "a name = or a sink")
        self._expect("(")
        into = self._number("the argument") if sink == "store" and self._accept("into") else None
        if into is None and (self._next.text != str(output) or self._next.kind != "number"):
            self._fail(f"{output}, the next output")
        self._at += into is None
        self._expect(":")
        dtype = self._dtype()
        if sink == "store":
            layout = self._layout()
            self._expect(",")
            value = self._expression()
            self._expect(")")
            return Store(value, dtype, layout, into)
        self._expect(",")
        if sink == "reduce":
            op = self._one_of(_OPS, "a reduction")
            self._expect(",")
            over = self._one_of(_OVERS, "what to fold")
            self._expect(",")
            fold = self._next.text == "fold" and self._peek() == "l"
            if fold:
                self._at += 2
                self._expect(",")
            value = self._expression()
            self._expect(")")
            return Reduce(value, over, op, dtype, fold)
        value = self._expression()
        self._expect(",")
        column = self._expression()
        self._expect(")")
        return Select(value, column, dtype)

    # parts

    def _dtype(self) -> torch.dtype:
        return DTYPES[self._one_of(DTYPES, "a dtype")]

    def _layout(self) -> Layout:
        axis = self._one_of((*_AXES, "-"), "the contiguous axis")
        return Layout(axis, self._number("the alignment in bytes"))

    def _term(self) -> Term:
        axis = self._one_of(_AXES, "an axis")
        if self._next.text not in ("div", "mod"):
            return Term(axis)
        op = self._one_of(("div", "mod"), "an operation")
        match = re.fullmatch(r"s(\d+)", self._next.text, re.ASCII)
        if match is None:
            self._fail("a size (s0, s1, ...)")
        self._at += 1
        return Term(axis, op, int(match.group(1)))

    def _load(self, kind: LoadKind) -> Load:
        start = self._at - 2
        overwritten = self._accept("into")
        argument = self._number("the argument's number")
        self._expect(":")
        dtype = self._dtype()
        layout = self._layout() if self._next.kind == "name" or self._next.text == "-" else None
        if self._accept("["):
            index = tuple(self._separated(self._term, "]"))
        else:
            index = self._scope.default_index(kind)
        load = Load(argument, dtype, index, layout, overwritten)
        if load.kind != kind:
            self._at = start
            self._fail(f"{load.kind}, which is what this index map loads")
        self._expect(")")
        return load

    # expressions

    def _expression(self, level: int = 0) -> Value:
        if level == len(_LEVELS):
            return self._primary()
        value = self._expression(level + 1)
        while self._next.kind == "mark" and self._next.text in _LEVELS[level]:
            function = _OPERATORS[self._advance()]
            value = Compute(function, (value, self._expression(level + 1)))
        return value

    def _primary(self) -> Value:
        if self._next.kind == "number" or self._next.text in ("-", "inf", "nan"):
            return Const(self._constant())
        if self._accept("("):
            value = self._nested(self._expression)
            self._expect(")")
            return value
        if self._next.kind != "name":
            self._fail("a value")
        if self._peek() == "(":
            return self._nested(self._call)
        word = self._next.text
        accumulator = _ACCUMULATOR.fullmatch(word)
        if word in ("true", "false"):
            value = Const(_LITERALS[word])
        elif accumulator is not None:
            value = Accumulator(int(accumulator.group(1)))
        elif word in self._names:
            value = self._names[word]
        else:
            self._fail("a value")
        self._at += 1
        return value

    def _nested(self, read: Callable[[], Value]) -> Value:
        self._nesting += 1
        if self._nesting > _DEEPEST:
            self._fail(f"at most {_DEEPEST} nested expressions (name some of them)")
        value = read()
        self._nesting -= 1
        return value

    def _constant(self) -> float | int:
        sign = -1 if self._accept("-") else 1
        if self._next.text in ("inf", "nan"):
            return sign * _LITERALS[self._advance()]
        if self._next.kind != "number":
            self._fail("a number")
        text = self._advance()
        return sign * (int(text) if text.isdigit() else float(text))

    def _call(self) -> Value:
        word = self._next.text
        if word not in FUNCTIONS and word not in _FORMS and word not in _KINDS:
            self._fail("a function of the table (tree/functions.py)")
        self._at += 2
        if word in _KINDS:
            return self._load(word)  # type: ignore[arg-type]
        if word in _FORMS:
            value = _FORMS[word](self)
            self._expect(")")
            return value
        start = self._at
        arguments = tuple(self._separated(self._expression, ")"))
        if len(arguments) != FUNCTIONS[word].arity:
            self._at = start
            self._fail(f"{FUNCTIONS[word].arity} arguments of {word}, not {len(arguments)}")
        return Compute(word, arguments)

    def _cast(self) -> Value:
        value = self._expression()
        self._expect(",")
        return Cast(value, self._dtype())

    def _statistic(self) -> Value:
        value = self._expression()
        self._expect(",")
        over = self._one_of(_OVERS, "what to fold")
        self._expect(",")
        return Statistic(value, over, self._one_of(_OPS, "a reduction"))

    def _keep(self) -> Value:
        seed = self._expression()
        self._expect(",")
        offset = self._expression()
        self._expect(",")
        return Keep(seed, offset, float(self._constant()))


_FORMS: dict[str, Callable[[_Reader], Value]] = {
    "cast": _Reader._cast,
    "statistic": _Reader._statistic,
    "neighbour": lambda reader: Neighbour(reader._expression()),
    "keep": _Reader._keep,
    "index": lambda reader: Index(reader._one_of(_AXES, "an axis")),
}
