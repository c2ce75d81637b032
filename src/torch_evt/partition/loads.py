"""What a region reads: the arguments of its kernel and how each is indexed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_evt import errors
from torch_evt.graphs import Size, is_contiguous, same_size, same_sizes, tensor_of
from torch_evt.mainloops import MainLoop
from torch_evt.partition.elementwise import CONVERT, constant
from torch_evt.partition.region import Input, Refused, is_view, is_widening, layout_of
from torch_evt.partition.space import SizedTerm, Space
from torch_evt.tree.ir import Cast, Load, Term, Value

aten = torch.ops.aten


class Loads:
    """The arguments and run-time sizes of one region, numbered as they come.

    device: where the product runs; every operand has to be there.
    """

    def __init__(self, space: Space, mainloop: MainLoop, device: torch.device) -> None:
        self.space = space
        self.mainloop = mainloop
        self.device = device
        self.arguments: list[Input] = []
        self.sizes: list[Size] = []

    def mark(self) -> tuple[int, int]:
        """A point to `rewind` to."""
        return len(self.arguments), len(self.sizes)

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget what was numbered since `mark`."""
        arguments, sizes = mark
        del self.arguments[arguments:], self.sizes[sizes:]

    def load(self, argument: Any, shape: Sequence[Size]) -> Value:
        """A Load of a node outside the region, which broadcasts to `shape`, or a constant.

        Raises Refused where the operand lies elsewhere, has a dtype that the main loop cannot load,
        or has no index map. Broadcasts and widening casts are
        seen through: what they read is smaller.
        """
        casts: list[torch.dtype] = []
        while True:
            known = constant(argument)
            if known is not None:
                break
            source = self._narrower(argument)
            if source is None:
                break
            if argument.target is CONVERT:
                casts.append(argument.args[1])
            elif is_view(argument):
                shape = source.meta["val"].shape
            argument = source
        value: Value = known or self._tensor(argument, shape)
        for dtype in reversed(casts):
            value = Cast(value, dtype)
        return value

    def _narrower(self, argument: Any) -> fx.Node | None:
        """The input of a broadcast or a widening cast, also of one behind a view of a full tile."""
        value = tensor_of(argument)
        source = argument.args[0] if isinstance(argument, fx.Node) and argument.args else None
        before = tensor_of(source)
        if value is None or before is None or not isinstance(source, fx.Node):
            return None
        if argument.target is aten.expand.default:
            return source
        if is_widening(argument):
            return source if before.dtype in self.mainloop.load_dtypes else None
        if is_view(argument) and self.space.groups(before.shape) is not None:
            return source if self._narrower(source) is not None else None
        return None

    def _tensor(self, argument: Any, shape: Sequence[Size]) -> Value:
        tensor = tensor_of(argument)
        if tensor is None:
            raise Refused(errors.NOT_FUSIBLE)
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise Refused(errors.DEVICES)
        if tensor.dtype not in self.mainloop.load_dtypes:
            raise Refused(errors.VALUE_DTYPE)
        operand = self.space.operand(tensor, shape)
        if operand is None:
            raise Refused(errors.BROADCAST)
        view: tuple[Size, ...] | None = operand.shape
        if same_sizes(operand.shape, tensor.shape):
            view = None
        elif is_view(argument):
            source = tensor_of(argument.args[0])
            if (
                source is not None
                and same_sizes(source.shape, operand.shape)
                and is_contiguous(source)
                and is_contiguous(tensor)
            ):
                argument, tensor, view = argument.args[0], source, None
        strides = None if view is None else operand.strides
        number = self._number(Input(argument, view, strides))
        terms = tuple(Term(t.axis, t.op, self._size(t)) for t in operand.terms)  # type: ignore[arg-type]
        load = Load(number, tensor.dtype, terms)
        if load.kind == "tile":
            names = "".join(term.axis for term in terms)
            layout = layout_of(tensor, names, operand.shape, operand.strides)
            load = Load(number, tensor.dtype, terms, layout)
        return load

    def _number(self, wanted: Input) -> int:
        for i, known in enumerate(self.arguments):
            if known.node is wanted.node and _same_view(known.view, wanted.view):
                return i
        self.arguments.append(wanted)
        return len(self.arguments) - 1

    def _size(self, term: SizedTerm) -> int | None:
        if term.divisor is None:
            return None
        for i, known in enumerate(self.sizes):
            if same_size(known, term.divisor):
                return i
        self.sizes.append(term.divisor)
        return len(self.sizes) - 1


def _same_view(a: tuple[Size, ...] | None, b: tuple[Size, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    return same_sizes(a, b)
