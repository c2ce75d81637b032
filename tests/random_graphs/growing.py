"""A program as it grows: what exists so far, and how a statement is tried and taken in.

Every statement is run as it is added, on real tensors. One that PyTorch refuses, or whose values
leave a sane range, is not taken, so that the error standard stays meaningful.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .program import Dim, Leaf, Statement

T = TypeVar("T")

LARGEST = 60.0
SMALLEST = 1e-2
"""Bounds of a value's largest element and of its root mean square."""

REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)


@dataclass
class Value:
    """A name in the program. fresh: nobody has read it and it is no view, so that it may be
    changed in place; dims: its shape in terms of the sizes."""

    name: str
    dims: tuple[Dim, ...]
    tensor: Tensor
    fresh: bool = False

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def width(self) -> int:
        """The last dimension; 0 where it is no constant."""
        last = self.dims[-1] if self.dims else 0
        return last if isinstance(last, int) else 0

    @property
    def is_float(self) -> bool:
        return self.tensor.is_floating_point()

    @property
    def is_half(self) -> bool:
        return self.tensor.dtype in (torch.bfloat16, torch.float16)


def is_wide(value: Value) -> bool:
    return value.is_float and value.rank >= 2 and value.width > 0


def is_matrix(value: Value) -> bool:
    return value.is_float and value.rank == 2


class Growing:
    """batched: whether x0 is (b, t, k) or (b, k); source: of every random choice."""

    def __init__(
        self,
        source: random.Random,
        sizes: tuple[int, int],
        widths: Sequence[int],
        dtype: str,
        *,
        batched: bool,
        autocast: str | None = None,
        dynamic: bool = False,
    ) -> None:
        self.source = source
        self.sizes = {"b": sizes[0], "t": sizes[1]}
        self.widths = list(widths)
        self.dtype = dtype
        self.batched = batched
        self.autocast = autocast
        self.dynamic = dynamic
        self.parameters: list[Leaf] = []
        self.buffers: list[Leaf] = []
        self.inputs: list[Leaf] = []
        self.statements: list[Statement] = []
        self.values: list[Value] = []
        self.random = False
        self.following = False
        """Whether the next statement is sure to read the newest value that suits it."""
        self.space: dict[str, Any] = {
            "torch": torch, "F": F, "self": SimpleNamespace(training=True), **self.sizes
        }  # fmt: skip

    # choices

    def pick(self, options: Sequence[T]) -> T:
        return self.source.choice(options)

    def chance(self, percent: int) -> bool:
        return self.source.random() * 100 < percent

    def number(self) -> float:
        return float(self.pick([0.5, 2.0, -1.0, 0.3, 1.5, -0.7, 0.125]))

    def value(self, wanted: Callable[[Value], bool] = lambda v: v.is_float) -> Value | None:
        """An existing value, more likely a recent one."""
        found = [v for v in reversed(self.values) if wanted(v)]
        if not found:
            return None
        if self.following or self.chance(50):
            return found[0]
        return self.pick(found[: 4 if self.chance(60) else len(found)])

    # leaves

    def parameter(self, dims: Sequence[int]) -> str:
        """A parameter of that shape, now and then one that is used already."""
        dims = tuple(dims)
        known = [leaf.name for leaf in self.parameters if leaf.dims == dims]
        if known and self.chance(30):
            return "self." + self.pick(known)
        name = f"p{len(self.parameters)}"
        shape = ", ".join(map(str, dims))
        fan = max(dims[-1], 1) if len(dims) > 1 else 1
        if not dims:
            make = "torch.tensor(1.3)"
        elif fan > 1:
            make = f"torch.randn({shape}) / {fan}**0.5"
        else:
            make = f"torch.randn({shape})"
        leaf = Leaf(name, dims, make, requires_grad=not self.chance(12))
        self.parameters.append(leaf)
        tensor = self._made(make).to(getattr(torch, self.dtype))
        setattr(self.space["self"], name, tensor.requires_grad_(leaf.requires_grad))
        return "self." + name

    def buffer(self, dims: Sequence[int], make: str) -> str:
        name = f"m{len(self.buffers)}"
        self.buffers.append(Leaf(name, tuple(dims), make))
        tensor = self._made(make)
        if tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, self.dtype))
        setattr(self.space["self"], name, tensor)
        return "self." + name

    def input(self, dims: Sequence[Dim], kind: str = "normal") -> str:
        """A new input. kind: normal | mask | weights | labels (below the first width)."""
        shape = ", ".join(map(str, dims))
        grad = kind == "normal" and (not self.inputs or self.chance(60))
        made = {
            "normal": f"torch.randn({shape}).to(torch.{self.dtype})",
            "weights": f"torch.rand({shape}).to(torch.{self.dtype})",
            "mask": f"torch.rand({shape}) > 0.3",
        }
        make = made.get(kind) or f"torch.randint(0, {kind}, ({shape},))"
        leaf = Leaf(f"x{len(self.inputs)}", tuple(dims), make, requires_grad=grad)
        self.inputs.append(leaf)
        self.space[leaf.name] = self._made(make).requires_grad_(grad)
        if kind in ("normal", "mask"):
            self.values.append(Value(leaf.name, leaf.dims, self.space[leaf.name]))
        return leaf.name

    def _made(self, make: str) -> Tensor:
        tensor: Tensor = eval(make, self.space)
        return tensor

    def as_parameters(self, value: Value) -> str:
        """The value's name, cast to the dtype of parameters where it has another."""
        if self.autocast is None and str(value.tensor.dtype) != f"torch.{self.dtype}":
            return f"{value.name}.to(torch.{self.dtype})"
        return value.name

    # statements

    def size(self, dim: Dim) -> int:
        return dim if isinstance(dim, int) else int(eval(dim, {}, self.sizes))

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        return tuple(map(self.size, dims))

    def add(self, text: str, dims: Sequence[Dim], *, fresh: bool = False) -> Value | None:
        """Bind a new name to an expression; None where its value is refused."""
        found = self.add_several(text, [dims], fresh=fresh)
        return found[0] if found else None

    def add_several(
        self, text: str, dims: Sequence[Sequence[Dim]], *, fresh: bool = False
    ) -> list[Value] | None:
        first = sum(len(statement.binds()) for statement in self.statements)
        names = [f"v{first + i}" for i in range(len(dims))]
        statement = Statement(", ".join(names), text)
        try:
            self._run(statement)
        except REFUSALS:
            return None
        tensors = [self.space[name] for name in names]
        if not all(map(sane, tensors)):
            return None
        values = []
        for name, tensor, dims_ in zip(names, tensors, dims, strict=True):
            assert tuple(tensor.shape) == self.shape(dims_), (text, tensor.shape, dims_)
            values.append(Value(name, tuple(dims_), tensor, fresh))
        self._taken(replace(statement, stand_in=self._stand_in(statement, values[0])))
        self.values += values
        return values

    def change(self, value: Value, text: str) -> bool:
        """A statement that changes `value` in place; False where it is refused."""
        before = value.tensor.detach().clone()
        statement = Statement("", text, in_place=True)
        try:
            self._run(statement)
        except REFUSALS:
            return False
        if not sane(value.tensor):
            with torch.no_grad():
                value.tensor.copy_(before)
            return False
        self._taken(statement)
        return True

    def note(self, text: str) -> bool:
        """A statement for its effect on a buffer."""
        statement = Statement("", text, in_place=True)
        try:
            self._run(statement)
        except REFUSALS:
            return False
        self._taken(statement)
        return True

    def _stand_in(self, statement: Statement, value: Value) -> str:
        """A name that could stand in the place of the new value, were it left out."""
        for other in self.values:
            if (
                other.name in statement.reads()
                and other.dims == value.dims
                and other.tensor.dtype == value.tensor.dtype
            ):
                return other.name
        return ""

    def _run(self, statement: Statement) -> None:
        kind = getattr(torch, self.autocast or "bfloat16")
        with torch.autocast("cpu", kind, enabled=self.autocast is not None):
            exec(statement.line(), self.space)

    def _taken(self, statement: Statement) -> None:
        self.statements.append(statement)
        for value in self.values:
            if value.name in statement.reads():
                value.fresh = False


def sane(tensor: Tensor) -> bool:
    """Whether a value is finite and neither large nor close to zero throughout."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    t = tensor.detach().double()
    if not bool(t.isfinite().all()) or float(t.abs().max()) > LARGEST:
        return False
    return float(t.square().mean().sqrt()) > SMALLEST
