"""Random small programs around matrix products, as Python source, for property-based tests.

The index space of a product has five dimensions, (b, g, s, h, d). Without a batch its rows are
b*g*s, with one its batch is b*g and its rows are s; its columns are h*d. A value has a *form*:
which neighbouring dimensions are merged, so that every way to view it is one choice of cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

DIMENSIONS = "bgshd"
Form = tuple[str, ...]
"""The merged dimensions of a shape: ("bgs", "hd") is (b*g*s, h*d)."""

SMOOTH = (
    "torch.tanh({0})",
    "torch.sigmoid({0})",
    "F.gelu({0})",
    "F.gelu({0}, approximate='tanh')",
    "F.silu({0})",
    "-{0}",
    "0.5 * {0} + 1",
    "1 - {0}",
    "torch.exp(torch.tanh({0}))",
    "torch.rsqrt({0} * {0} + 1)",
    "1 / ({0} ** 2 + 2)",
    "torch.add({0}, {0}, alpha=-0.25)",
    "torch.sin({0})",  # no epilogue holds it
)
KINKED = ("torch.relu({0})", "{0}.abs()", "torch.where({0} > 0.25, {0}, -{0})", "{0} * ({0} <= 1)")


@dataclass(frozen=True)
class Given:
    """An input: its shape, its dtype, and the order in which its dimensions lie in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]

    def make(self) -> Tensor:
        laid = [self.shape[d] for d in self.order]
        inverse = [self.order.index(d) for d in range(len(self.order))]
        if self.dtype == torch.bool:
            return (torch.rand(laid) > 0.3).permute(inverse)
        if not self.dtype.is_floating_point:
            return torch.randint(-2, 3, laid).to(self.dtype).permute(inverse)
        return torch.randn(laid).to(self.dtype).permute(inverse)


@dataclass(frozen=True)
class Program:
    """inputs: the two operands first. lines: the body. results: what it returns."""

    inputs: tuple[Given, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    half: torch.dtype

    def __str__(self) -> str:
        return "\n".join(
            [
                *(f"# x{i}: {g.shape} {g.dtype} {g.order}" for i, g in enumerate(self.inputs)),
                *self.lines,
                f"return {', '.join(self.results)}",
            ]
        )

    def function(self, exact: bool = False) -> Callable[..., tuple[Tensor, ...]]:
        """The program as a function of its inputs; exact: every cast is to fp64."""
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        source = [f"def program({names}):", *(f"    {line}" for line in self.lines)]
        source.append(f"    return ({', '.join(self.results)},)")
        space: dict[str, Any] = {"torch": torch, "F": F}
        space["half"] = torch.float64 if exact else self.half
        space["wide"] = torch.float64 if exact else torch.float32
        exec("\n".join(source), space)
        return space["program"]  # type: ignore[no-any-return]

    def make_inputs(self, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [given.make() for given in self.inputs]


@dataclass
class _Value:
    name: str
    form: Form
    wide: bool


@dataclass
class _Writer:
    """Collects a program's lines, drawing every choice."""

    draw: Callable[..., Any]
    half: torch.dtype
    smooth: bool
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: list[Given] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Values of no form: reductions, transposes."""
    products: int = 1

    def choice(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def write(self, expression: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def extent(self, merged: str) -> int:
        total = 1
        for dimension in merged:
            total *= self.sizes[dimension]
        return total

    def shape(self, form: Form) -> str:
        return "(" + "".join("*".join(merged) + ", " for merged in form) + ")"

    def dtype(self, wide: bool) -> torch.dtype:
        return torch.float32 if wide else self.half

    def given(self, shape: list[int], dtype: torch.dtype) -> str:
        """A new input with its dimensions in any order in memory."""
        orders = list(itertools.permutations(range(len(shape))))
        order = orders[0] if self.draw(st.booleans()) else self.choice(orders)
        self.inputs.append(Given(tuple(shape), dtype, order))
        return f"x{len(self.inputs) - 1}"

    def operand(self, form: Form, dtype: torch.dtype) -> str:
        """An input that broadcasts to a form: a new one, or one that was read before."""
        extents = [self.extent(merged) for merged in form]
        known = [
            f"x{i}"
            for i, given in enumerate(self.inputs)
            if given.dtype == dtype and _broadcasts(given.shape, extents)
        ]
        if known and self.draw(st.integers(0, 2)) == 0:
            return self.choice(known)  # type: ignore[no-any-return]
        shape = [extent if self.draw(st.booleans()) else 1 for extent in extents]
        if self.draw(st.integers(0, 3)) == 0:
            shape = extents
        while shape and shape[0] == 1 and self.draw(st.booleans()):
            shape = shape[1:]
        return self.given(shape, dtype)

    def rank(self, name: str) -> int:
        return len(self.inputs[int(name[1:])].shape)


def _broadcasts(shape: tuple[int, ...], extents: list[int]) -> bool:
    if len(shape) > len(extents):
        return False
    return all(s in (1, e) for s, e in zip(reversed(shape), reversed(extents), strict=False))


def _cuts(writer: _Writer, within: tuple[int, ...]) -> Form:
    """A form; mostly one with cuts where the index space has them."""
    wanted = {i for i in range(1, 5) if writer.draw(st.booleans())}
    if writer.draw(st.integers(0, 9)):
        wanted |= set(within)
    edges = [0, *sorted(wanted), 5]
    return tuple(DIMENSIONS[a:b] for a, b in itertools.pairwise(edges))


@st.composite
def programs(
    draw: Any,
    half: torch.dtype = torch.float32,
    *,
    smooth: bool = False,
    largest: int = 5,
    least: int = 1,
) -> Program:
    """A product, then up to eight random steps, with one to four results.

    half: the dtype of the product. smooth: without kinks and jumps. sizes lie in least ... largest.
    """
    writer = _Writer(draw, half, smooth)
    for dimension in DIMENSIONS:
        writer.sizes[dimension] = draw(
            st.sampled_from([s for s in (1, 2, 3, 5) if least <= s <= largest])
        )
    batched = draw(st.booleans())
    depth = draw(st.sampled_from((2, 4, 6)))
    _product(writer, batched, depth)
    cuts = (2, 3) if batched else (3,)
    for _ in range(draw(st.integers(1, 8))):
        _step(writer, cuts)
    made = [v.name for v in writer.values] + writer.others
    last = made[-1]
    results = draw(st.lists(st.sampled_from(made), min_size=0, max_size=3, unique=True))
    chosen = tuple(dict.fromkeys([writer.values[-1].name, last, *results]))
    return Program(tuple(writer.inputs), tuple(writer.lines), chosen, half)


def _product(writer: _Writer, batched: bool, depth: int) -> None:
    size = writer.sizes
    outer = [size["b"], size["g"]] if batched else []
    a = writer.given([size["b"], size["g"], size["s"], depth], writer.half)
    b = writer.given([*outer, depth, size["h"], size["d"]], writer.half)
    writer.lines += [f"b, g, s, k = {a}.shape", f"h, d = {b}.shape[-2:]"]
    rows, form = ("(b*g, s, k)", ("bg", "s", "hd")) if batched else ("(b*g*s, k)", ("bgs", "hd"))
    columns = "(b*g, k, h*d)" if batched else "(k, h*d)"
    left, right = f"{a}.reshape{rows}", f"{b}.reshape{columns}"
    kind = writer.choice(("plain", "bias", "factors"))
    if kind == "plain":
        name = writer.write(f"{left} @ {right}")
    else:
        bias = writer.operand(form, writer.half)
        factors = ", beta=0.5, alpha=-2.0" if kind == "factors" else ""
        function = "baddbmm" if batched else "addmm"
        if batched:
            bias = f"{bias}.expand{writer.shape(form)}"
        name = writer.write(f"torch.{function}({bias}, {left}, {right}{factors})")
    writer.values.append(_Value(name, form, writer.half == torch.float32))


def _step(writer: _Writer, cuts: tuple[int, ...]) -> None:
    value = writer.choice(writer.values[-3:])
    kinds = [_unary, _unary, _operand, _operand, _pair, _mask, _cast, _view, _view, _reduce]
    writer.choice([*kinds, _swap, _softmax, _second])(writer, value, cuts)


def _new(writer: _Writer, expression: str, form: Form, wide: bool) -> None:
    writer.values.append(_Value(writer.write(expression), form, wide))


def _unary(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    function = writer.choice(SMOOTH if writer.smooth else SMOOTH + KINKED)
    _new(writer, function.format(value.name), value.form, value.wide)


def _operand(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    wide = writer.draw(st.booleans()) or writer.half == torch.float32
    other = writer.operand(value.form, writer.dtype(wide))
    if writer.rank(other) == 0:
        wide = value.wide  # a 0-dimensional tensor does not promote
    function = writer.choice(("{0} + {1}", "{0} * {1}", "{1} - {0}", "{0} / ({1} * {1} + 1)"))
    _new(writer, function.format(value.name, other), value.form, value.wide or wide)


def _pair(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    other = writer.choice(v for v in writer.values if v.form == value.form)
    function = writer.choice(("{0} + {1}", "{0} * torch.tanh({1})", "{0} - 0.5 * {1}"))
    expression = function.format(value.name, other.name)
    _new(writer, expression, value.form, value.wide or other.wide)


def _mask(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    if writer.draw(st.integers(0, 2)) == 0:
        numbers = writer.operand(value.form, torch.int64)
        expression = f"torch.where({numbers} == 1, {value.name}, {value.name} * 3)"
    else:
        mask = writer.operand(value.form, torch.bool)
        function = writer.choice(
            ("{0} * {1}", "torch.where({1}, {0}, -4.0)", "{0}.masked_fill({1}, 0.0)")
        )
        expression = function.format(value.name, mask)
    _new(writer, expression, value.form, value.wide)


def _cast(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    wide = not value.wide or writer.half == torch.float32
    _new(writer, f"{value.name}.to({'wide' if wide else 'half'})", value.form, wide)


def _view(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    form = _cuts(writer, cuts)
    _new(writer, f"{value.name}.reshape{writer.shape(form)}", form, value.wide)


def _reduce(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    rank = len(value.form)
    dims = sorted(writer.draw(st.sets(st.integers(0, rank - 1), min_size=1)))
    function = writer.choice(("sum", "sum", "amax", "mean"))
    if writer.smooth and function == "amax":
        function = "sum"
    keep = writer.draw(st.booleans())
    name = writer.write(f"{value.name}.{function}({dims}, keepdim={keep})")
    writer.others.append(name)
    if keep and writer.draw(st.booleans()):
        _new(writer, f"{value.name} - {name}", value.form, value.wide)


def _swap(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    if len(value.form) < 2:
        return
    copied = writer.choice((".contiguous()", "", ".tanh()"))
    writer.others.append(writer.write(f"{value.name}.transpose(-1, -2){copied}"))


def _softmax(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    _new(writer, f"torch.softmax({value.name}, -1)", value.form, value.wide)


def _second(writer: _Writer, value: _Value, cuts: tuple[int, ...]) -> None:
    """Another product that keeps the columns' number."""
    if len(value.form) != 2 or value.wide != (writer.half == torch.float32):
        return
    size = writer.extent(value.form[1])
    weight = writer.given([size, size], writer.half)
    name = writer.write(f"{value.name} @ {weight} / {max(size, 1)} ** 0.5")
    writer.values.append(_Value(name, value.form, value.wide))
