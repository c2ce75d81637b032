"""The reference emitter: its kernel is the tree's evaluation in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torch_evt.emit import Kernel
from torch_evt.errors import Reason
from torch_evt.tree.evaluate import evaluate
from torch_evt.tree.ir import Tree


@dataclass(frozen=True)
class Reference:
    """Supports every valid tree."""

    name: str = "reference"

    def supports(self, tree: Tree) -> Reason | None:
        """Always None."""
        return None

    def compile(self, tree: Tree) -> Kernel:
        """A kernel that evaluates the tree and copies the values into the given outputs."""

        def kernel(
            inputs: Sequence[Tensor],
            sizes: Sequence[int],
            outputs: Sequence[Tensor],
            overwritten: Sequence[Tensor],
        ) -> None:
            values = evaluate(tree, inputs, sizes, overwritten)
            for output, value in zip(outputs, values, strict=True):
                output.copy_(value)

        return kernel


REFERENCE = Reference()
