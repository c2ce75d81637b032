"""Random valid trees for property-based tests, and random tensors that fit a tree.

@given(trees())                     any valid tree
@given(trees(smooth=True))          one whose values do not jump or blow up, so that two ways to
                                    evaluate it agree up to rounding
@given(cases(...))                  such a tree with tensors, sizes and what it overwrites
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from torch_evt.tree.dtypes import type_of_dtype
from torch_evt.tree.functions import FUNCTIONS
from torch_evt.tree.ir import (
    Accumulator,
    Cast,
    Compute,
    Const,
    Index,
    Keep,
    Layout,
    Load,
    Neighbour,
    Operand,
    Reduce,
    Select,
    Sink,
    Statistic,
    Store,
    Term,
    Tree,
    Value,
)
from torch_evt.tree.rewrite import with_children
from torch_evt.tree.scope import Scope, operand_scope
from torch_evt.tree.shapes import scoped_loads, tensor_operands
from torch_evt.tree.types import value_type

Draw = Callable[[st.SearchStrategy], object]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOADED = (*FLOATS, torch.float8_e4m3fn, torch.int64, torch.int32, torch.uint8, torch.bool)
JUMPS = ("relu_grad", "relu_backward")
GROWS = ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "div")


@dataclass
class _Pool:
    """The values drawn so far in one block, by type; later ones are computed from earlier ones."""

    draw: Draw
    scope: Scope
    smooth: bool
    block: str
    counters: dict[str, int]
    leaves: dict[str, list[Value]] = field(default_factory=dict)
    values: dict[str, list[Value]] = field(default_factory=dict)

    def add(self, value: Value, leaf: bool = False) -> Value:
        kind = value_type(value)
        self.values.setdefault(kind, []).append(value)
        if leaf:
            self.leaves.setdefault(kind, []).append(value)
        return value

    def pick(self, kind: str, leaf: bool = False) -> Value:
        choices = (self.leaves if leaf else self.values)[kind]
        return self.draw(st.sampled_from(choices))

    def term(self, axis: str) -> Term:
        if self.draw(st.integers(0, 5)):
            return Term(axis)
        op = self.draw(st.sampled_from(("div", "mod")))
        return Term(axis, op, self.draw(st.integers(0, 1)))

    def load(self, kind: str, dtype: torch.dtype, plain: bool = False) -> Load:
        index = self.scope.default_index(kind)
        if not plain:
            index = tuple(self.term(term.axis) for term in index)
            if self.draw(st.booleans()):
                index = index[::-1]
        number = self.counters["argument"]
        self.counters["argument"] += 1
        load = Load(number, dtype, index)
        if load.kind != "tile":
            return load
        axis = self.draw(st.sampled_from((index[-1].axis, index[-2].axis)))
        return Load(number, dtype, index, Layout(axis, self.draw(st.sampled_from((2, 8, 16)))))

    def leaf(self) -> Value:
        what = self.draw(st.sampled_from(("load", "load", "load", "const", "index")))
        if what == "index":
            return Index(self.draw(st.sampled_from(self.scope.axes)))
        if what == "const":
            return Const(
                self.draw(
                    st.booleans()
                    | st.integers(-3, 3)
                    | (st.floats(-2, 2) if self.smooth else st.floats())
                )
            )
        kinds = ["tile", "row", "scalar"]
        # inside operand B there is nothing that depends on its rows, k, and counts as a column
        kinds += ["column"] if self.scope.row == "m" else []
        kind = self.draw(st.sampled_from(kinds))
        return self.load(kind, self.draw(st.sampled_from(LOADED)))

    def compute(self) -> Value:
        names = [n for n in FUNCTIONS if not (self.smooth and n in GROWS)]
        function = FUNCTIONS[self.draw(st.sampled_from(names))]
        leaf = self.smooth and (function.result == "bool" or function.name in JUMPS)
        kind = {"float": ("float",), "number": ("float", "int"), "bool": ("bool",)}.get(
            function.arguments, ("float", "int", "bool")
        )
        common = self.draw(st.sampled_from(kind))
        arguments = [self.pick(common, leaf) for _ in range(function.arity)]
        if function.arguments == "where":
            arguments[0] = self.pick("bool")
        mixed = function.arity - 1 if function.arity > 1 else None
        if mixed and function.arguments != "bool" and self.draw(st.integers(0, 3)) == 0:
            arguments[mixed] = self.pick("bool", leaf)
        return Compute(function.name, tuple(arguments))

    def special(self) -> Value:
        what = ["cast", "neighbour", "keep"] + ["statistic"] * (self.block == "rows")
        what = self.draw(st.sampled_from(what))
        if what == "neighbour":
            return Neighbour(self.pick(self.draw(st.sampled_from(("float", "int", "bool")))))
        if what == "keep":
            p = self.draw(st.sampled_from((0.0, 0.1, 0.5)))
            return Keep(self.pick("int", True), self.pick("int"), p)
        if what == "statistic":
            op = self.draw(st.sampled_from(("sum", "max", "logsumexp")))
            return Statistic(self.pick("float"), "columns", op)
        kind = self.draw(st.sampled_from(("float", "int", "bool")))
        if kind == "float" and self.smooth:
            return Cast(self.pick("float"), self.draw(st.sampled_from(FLOATS)))
        dtypes = (*FLOATS, torch.int64, torch.int32) if kind != "float" else FLOATS
        return Cast(self.pick(kind, leaf=self.smooth), self.draw(st.sampled_from(dtypes)))

    def grow(self) -> None:
        """Leaves of every type, then a few computed values."""
        for _ in range(self.draw(st.integers(0, 4))):
            self.add(self.leaf(), leaf=True)
        self.add(self.load("row", torch.float32), leaf=True)
        self.add(Const(1), leaf=True)
        self.add(Const(True), leaf=True)
        for _ in range(self.draw(st.integers(0, 8))):
            special = self.draw(st.integers(0, 3)) == 0
            self.add(self.special() if special else self.compute())


@st.composite
def trees(draw, smooth: bool = False, mainloop: str | None = None) -> Tree:
    """A valid tree; new ones reach every node, sink, load kind, index map and operand form."""
    mainloop = mainloop or draw(st.sampled_from(("gemm", "gemm", "rows")))
    counters = {"argument": 0}
    operands = []
    if mainloop == "gemm":
        names = ("A", "B") if draw(st.integers(0, 3)) else ("A", "B", "A1", "B1")
        operands = [draw(_operands(name, smooth, counters)) for name in names]
    batched = any(operand.batched for operand in operands)
    pool = _Pool(draw, Scope("m", "n", batched), smooth, mainloop, counters)
    for i in range(len(operands) // 2):
        pool.add(Accumulator(i))
    tile = pool.add(pool.load("tile", torch.float32, plain=True), leaf=True)
    overwrites = draw(st.booleans())
    stored = Layout(draw(st.sampled_from(("m", "n"))), 16)
    if overwrites:
        index = pool.scope.default_index("tile")
        pool.add(Load(0, torch.bfloat16, index, stored, True), leaf=True)
    pool.grow()
    first = Compute("add", (pool.pick("float"), tile))  # so that every axis has a size
    sinks: list[Sink] = [Store(first, torch.float32, Layout("n", 16))]
    sinks += [draw(_sinks(pool)) for _ in range(draw(st.integers(0, 3)))]
    if overwrites:
        sinks.insert(draw(st.integers(0, 1)), Store(pool.pick("float"), torch.bfloat16, stored, 0))
    return _renumbered(Tree(mainloop, tuple(operands), tuple(sinks)))


@st.composite
def _operands(draw, name: str, smooth: bool, counters: dict[str, int]) -> Operand:
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    batched = draw(st.booleans())
    head = Operand(name, dtype, None, batched)
    scope = operand_scope(head)
    if draw(st.integers(0, 2)):
        layout = Layout(draw(st.sampled_from((scope.row, scope.column))), 16)
        return Operand(name, dtype, layout, batched)
    pool = _Pool(draw, scope, smooth, "operand", counters)
    tile = pool.add(pool.load("tile", torch.float32, plain=True), leaf=True)
    pool.grow()
    value = Compute("mul", (pool.pick("float"), tile))
    return Operand(name, dtype, None, batched, value)


@st.composite
def _sinks(draw, pool: _Pool) -> Sink:
    kind = draw(st.sampled_from(("float", "float", "int", "bool")))
    value = pool.pick(kind)
    dtypes = {"float": FLOATS, "int": (torch.int64, torch.int32), "bool": (torch.bool,)}[kind]
    dtype = draw(st.sampled_from(dtypes))
    what = draw(st.sampled_from(("store", "reduce", "select")))
    if what == "store":
        return Store(value, dtype, Layout(draw(st.sampled_from(("m", "n"))), 4))
    if what == "select":
        column = Load(pool.counters["argument"], torch.int64, pool.scope.default_index("column"))
        pool.counters["argument"] += 1
        return Select(value, column, dtype)
    op = draw(st.sampled_from(("sum", "max", "logsumexp", "moments")))
    if kind != "float":
        op, dtype = "sum", torch.int64
    fold = pool.scope.batched and draw(st.booleans())
    return Reduce(value, draw(st.sampled_from(("rows", "columns", "all"))), op, dtype, fold)


def _renumbered(tree: Tree) -> Tree:
    """The tree with its arguments and sizes numbered 0, 1, ... in the order of their use.

    A load that stands in two blocks is one value, so its numbers are the same in both.
    """
    arguments: dict[int, int] = {}
    sizes: dict[int, int] = {}
    overwritten = {load for load, _ in scoped_loads(tree) if load.overwritten}
    for load, _ in scoped_loads(tree):
        if load not in overwritten:
            arguments.setdefault(load.argument, len(arguments))
        for term in load.index:
            if term.size is not None:
                sizes.setdefault(term.size, len(sizes))

    def term(old: Term) -> Term:
        return old if old.size is None else Term(old.axis, old.op, sizes[old.size])

    def rewrite(value: Value) -> Value:
        if not isinstance(value, Load):
            return value
        number = value.argument if value.overwritten else arguments[value.argument]
        index = tuple(map(term, value.index))
        return Load(number, value.dtype, index, value.layout, value.overwritten)

    return _mapped(tree, rewrite)


def _mapped(tree: Tree, rewrite: Callable[[Value], Value]) -> Tree:
    done: dict[Value, Value] = {}

    def new(value: Value) -> Value:
        if value not in done:
            done[value] = rewrite(with_children(value, new))
        return done[value]

    operands = [
        Operand(o.name, o.dtype, o.layout, o.batched, None if o.value is None else new(o.value))
        for o in tree.operands
    ]
    sinks: list[Sink] = []
    for sink in tree.sinks:
        if isinstance(sink, Store):
            sinks.append(Store(new(sink.value), sink.dtype, sink.layout, sink.into))
        elif isinstance(sink, Select):
            sinks.append(Select(new(sink.value), new(sink.column), sink.dtype))
        else:
            sinks.append(Reduce(new(sink.value), sink.over, sink.op, sink.dtype, sink.fold_batch))
    return Tree(tree.mainloop, tuple(operands), tuple(sinks))


@dataclass(frozen=True)
class Case:
    """A tree with everything that `evaluate` takes. extents: the sizes of l, m, n and k."""

    tree: Tree
    inputs: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    overwritten: tuple[Tensor, ...]
    extents: dict[str, int]


def random_tensor(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random values: normal floats, ints from -4 to 4 (0 to 4 unsigned), bools."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if type_of_dtype(dtype) == "int":
        low = 0 if dtype == torch.uint8 else -4
        return torch.randint(low, 5, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def make_case(
    tree: Tree, extents: dict[str, int], sizes: tuple[int, ...] = (), seed: int = 0
) -> Case:
    """Random tensors for a tree, laid out as its operands, loads and stores say."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(terms: tuple[Term, ...], dtype: torch.dtype, layout: Layout | None) -> Tensor:
        shape = []
        for term in terms:
            size = extents[term.axis]
            if term.size is not None:
                p = sizes[term.size]
                size = p if term.op == "mod" else -(-size // p)
            shape.append(size)
        result = random_tensor(shape, dtype, generator)
        axes = [term.axis for term in terms]
        if layout is None or layout.axis not in axes:
            return result
        at = axes.index(layout.axis)
        return result.movedim(at, -1).contiguous().movedim(-1, at)

    inputs: dict[int, Tensor] = {}
    overwritten: dict[int, Tensor] = {}
    position = 0
    for operand in tree.operands:
        if operand.value is None:
            terms = tuple(map(Term, operand_scope(operand).axes))
            inputs[position] = tensor(terms, operand.dtype, operand.layout)
            position += 1
    for load, _ in scoped_loads(tree):
        if not load.overwritten:
            at = tensor_operands(tree) + load.argument
            if at not in inputs:
                inputs[at] = tensor(load.index, load.dtype, load.layout)
    tile = Scope("m", "n", tree.batched).default_index("tile")
    for sink in tree.sinks:
        if isinstance(sink, Store) and sink.into is not None:
            overwritten[sink.into] = tensor(tile, sink.dtype, sink.layout)
    return Case(
        tree,
        tuple(inputs[i] for i in range(len(inputs))),
        sizes,
        tuple(overwritten[i] for i in range(len(overwritten))),
        extents,
    )


@st.composite
def cases(draw, smooth: bool = True, mainloop: str | None = None) -> Case:
    """A valid tree with small random tensors that fit it."""
    tree = draw(trees(smooth, mainloop))
    extents = {axis: draw(st.integers(1, 4)) for axis in "lmk"}
    extents["n"] = draw(st.sampled_from((2, 4)))
    if any(operand.value is not None for operand in tree.operands):
        extents["k"] = draw(st.sampled_from((2, 4)))  # a neighbour along k needs pairs
    used = {t.size for load, _ in scoped_loads(tree) for t in load.index if t.size is not None}
    sizes = tuple(draw(st.integers(1, 5)) for _ in used)
    return make_case(tree, extents, sizes, draw(st.integers(0, 10**6)))
