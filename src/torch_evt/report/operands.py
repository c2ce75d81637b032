"""Whether every region reads what was computed for it: one value has the same bits wherever it is
read. A mask that forward and backward see differently, a buffer that was overwritten too early or
two operands exchanged show here, though every region by itself is right.

Values are kept as digests: nothing of the step's size is held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_evt.replaced import PlacedRegion
from torch_evt.runtime.check import Fault, Run


@dataclass(frozen=True)
class Seen:
    """A value in row-major order. where: who had it, in words."""

    digest: bytes
    dtype: torch.dtype
    elements: int
    where: str
    norm: float


@dataclass
class _Call:
    """One call of a graph: the regions that ran, the values they had by the nodes' names."""

    ran: set[str] = field(default_factory=set)
    values: dict[str, Seen] = field(default_factory=dict)


class Operands:
    """Takes the runs of a step in order, and says which operands are not what they were before."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], list[_Call]] = {}

    def faults_of(self, region: PlacedRegion, run: Run) -> list[Fault]:
        """The operands of this run that differ from what is known of them."""
        graph, half = run.name.split(" ")[:2]
        calls = self._calls.setdefault((graph, half), [_Call()])
        if run.name in calls[-1].ran:  # the graph is called again
            calls.append(_Call())
        call = calls[-1]
        call.ran.add(run.name)
        faults = []
        for i, (operand, tensor) in enumerate(zip(region.operands, run.inputs, strict=True)):
            value = _seen(tensor, f"as operand {i} of {run.name}")
            names = (operand.name, operand.root)
            known = [call.values[n] for n in names if operand.fixed and n in call.values][:1]
            if not known and operand.given and half == "backward":
                forward = self._calls.get((graph, "forward"), [])
                known = [c.values[operand.name] for c in forward if operand.name in c.values]
            known = [k for k in known if (k.dtype, k.elements) == (value.dtype, value.elements)]
            if known and all(k.digest != value.digest for k in known):
                faults.append(_fault(i, operand.name, value, known[-1]))
            else:
                for name in names:
                    call.values.setdefault(name, value)
        call.values.update(_left(region, run))
        return faults


def _left(region: PlacedRegion, run: Run) -> Iterator[tuple[str, Seen]]:
    """What a region left, by the names of the nodes in whose place it stands."""
    for i, names in enumerate(region.stored):
        tensor = run.results[i]
        tensor = tensor.transpose(-1, -2) if region.transposed[i] else tensor
        for name in names:
            yield name, _seen(tensor, f"as output {i} of {run.name}")


def _seen(tensor: Tensor, where: str) -> Seen:
    flat = tensor.detach().reshape(-1).cpu()
    digest = hashlib.blake2b(flat.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16)
    norm = float(flat.double().norm())
    return Seen(digest.digest(), tensor.dtype, tensor.numel(), where, norm)


def _fault(position: int, name: str, value: Seen, known: Seen) -> Fault:
    text = f"it is not what it was {known.where}: its norm is {value.norm:.7g} in place of "
    text += f"{known.norm:.7g}"
    if value.dtype == torch.bool:
        text += " (a mask: of its values, those that are True)"
    return Fault("operand", f"operand {position} ({name})", text)
