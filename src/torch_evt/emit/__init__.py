"""Emitters turn a tree into a kernel; there is at most one for a kind of device.

`reference` runs a tree as plain torch on any device: what every emitter must agree with, and what
runs where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from torch_evt.errors import Reason
from torch_evt.tree.ir import Tree

Kernel = Callable[[Sequence[Tensor], Sequence[int], Sequence[Tensor], Sequence[Tensor]], None]
"""(inputs, sizes, outputs, overwritten) -> None: fills the outputs, overwrites in place.

inputs: the operands' tensors, then the arguments. outputs: one for each new output of the tree,
with the shape, strides and dtype that `tree.shapes.output_specs` gives.
"""


class Emitter(Protocol):
    """A way to make kernels for one kind of device."""

    @property
    def name(self) -> str:
        """How logs, plans and benchmarks call it."""

    def supports(self, tree: Tree) -> Reason | None:
        """None if `compile` takes this tree, otherwise why it does not."""

    def compile(self, tree: Tree) -> Kernel:
        """The kernel of a supported tree."""


EMITTERS: Mapping[str, Emitter] = MappingProxyType({})
"""By device type ("cuda")."""


def emitter_for(device: torch.device) -> Emitter | None:
    """The emitter for a device, None where only the reference runs."""
    return EMITTERS.get(device.type)
