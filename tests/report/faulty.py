"""A small training step with two regions in each half, and faults to plant in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpreted import interpreted
from torch_evt import emit, verify
from torch_evt.emit import Kernel
from torch_evt.report.verification import Verification
from torch_evt.runtime import dispatch
from torch_evt.tree.evaluate import evaluate
from torch_evt.tree.ir import Compute, Const, Load, Tree, Value, postorder, roots
from torch_evt.tree.rewrite import rebuild

OPTIONS: Mapping[str, Any] = {
    "evt.place": "always",
    "evt.target": "h200",
    "evt.strict": True,
}


class Net(nn.Module):
    """In its backward half, one region holds a residual, a mask, a derivative and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 24), nn.Linear(24, 24)
        self.third = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.first(x)), 0.2)
        hidden = hidden + torch.tanh(self.second(hidden))
        return self.third(hidden)


def loss(output: Tensor) -> Tensor:
    weights = 1.5 + torch.cos(torch.arange(output.numel(), dtype=torch.float32))
    return (output.float().square() * weights.view_as(output)).sum()


def verified(folder: Any, dtype: torch.dtype = torch.float32, **given: Any) -> Verification:
    torch.manual_seed(11)
    model, x = Net().to(dtype), torch.randn(12, 32, dtype=dtype)
    options = {**OPTIONS, **given.pop("options", {})}
    return verify(
        model, x, loss=loss, options=options, backend=interpreted, folder=str(folder), **given
    )


Change = Callable[[Tree], Tree]
Spoil = Callable[[Tree, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]


@dataclasses.dataclass(frozen=True)
class Faulty:
    """An emitter whose kernels compute another tree, or whose outputs are spoiled: (tree, inputs,
    outputs, what the tree gives)."""

    change: Change | None = None
    spoil: Spoil | None = None
    name: str = "faulty"

    def supports(self, tree: Tree) -> None:
        return None

    def compile(self, tree: Tree) -> Kernel:
        changed = tree if self.change is None else self.change(tree)

        def kernel(inputs: Any, sizes: Any, outputs: Any, overwritten: Any) -> None:
            values = evaluate(changed, inputs, sizes, overwritten)
            if self.spoil is not None:
                self.spoil(tree, inputs, outputs, values)
                return
            for output, value in zip(outputs, values, strict=True):
                output.copy_(value)

        return kernel


@contextmanager
def emitting(faulty: Faulty) -> Iterator[None]:
    """Let that emitter make the kernels of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emit, "EMITTERS", {"cpu": faulty})
        dispatch.kernel_of.cache_clear()
        yield
    dispatch.kernel_of.cache_clear()


def scaled(function: str, factor: float) -> Change:
    """Multiply what one function gives."""

    def one(value: Value) -> Value:
        if isinstance(value, Compute) and value.function == function:
            return Compute("mul", (value, Const(factor)))
        return value

    return lambda tree: rebuild(tree, one)


def exchanged(first: int, second: int) -> Change:
    """Read one argument where the tree reads another of the same kind."""
    numbers = {first: second, second: first}

    def one(value: Value) -> Value:
        if isinstance(value, Load) and value.kind == "tile" and value.dtype == torch.float32:
            return dataclasses.replace(value, argument=numbers.get(value.argument, value.argument))
        return value

    def change(tree: Tree) -> Tree:
        loads = [v for v in postorder(roots(tree)) if isinstance(v, Load) and v.kind == "tile"]
        read = {load.argument for load in loads if load.dtype == torch.float32}
        return rebuild(tree, one) if {first, second} <= read else tree

    return change


def copied(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)
