"""Runs one region: finds the kernel of a spec for a device and calls it.

A spec is a tree's text, after "poison: " where every new output is to be filled with NaN before the
kernel runs, so that an element which the kernel leaves unwritten cannot pass for a right one, or
after "verify NAME: " where besides the kernel is to be checked on every call (`runtime.check`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_evt.emit import Kernel, emitter_for
from torch_evt.emit.reference import REFERENCE
from torch_evt.runtime import check
from torch_evt.runtime.counters import region_runs
from torch_evt.tree.ir import Tree
from torch_evt.tree.shapes import OutputSpec, Size, check_inputs, output_specs
from torch_evt.tree.text import parse, to_text

POISON = "poison: "
VERIFY = "verify "


@dataclass(frozen=True)
class Spec:
    """A spec taken apart. text: the tree's, without the prefix. name: the region's, where it is to
    be checked on every call; poison: also true then."""

    text: str
    tree: Tree
    poison: bool
    name: str | None = None


def write_spec(tree: Tree, poison: bool = False, name: str | None = None) -> str:
    """The spec that stands for a tree in a graph.

    name: of a region that is to be checked on every call; must not hold a colon and a space.
    """
    if name is not None:
        return f"{VERIFY}{name}: {to_text(tree)}"
    return POISON + to_text(tree) if poison else to_text(tree)


@functools.cache
def read_spec(spec: str) -> Spec:
    """Parse a spec. Raises TreeError for a text that is no tree's."""
    if spec.startswith(VERIFY):
        name, _, text = spec.removeprefix(VERIFY).partition(": ")
        return Spec(text, parse(text), poison=True, name=name)
    text = spec.removeprefix(POISON)
    return Spec(text, parse(text), poison=spec.startswith(POISON))


@functools.cache
def kernel_of(text: str, device: torch.device) -> Kernel:
    """What runs a tree, given by its text, on a device: the emitter's kernel, or the reference."""
    tree = read_spec(text).tree
    emitter = emitter_for(device)
    if emitter is None or emitter.supports(tree) is not None:
        return REFERENCE.compile(tree)
    return emitter.compile(tree)


def device_of(inputs: Sequence[Tensor], overwritten: Sequence[Tensor] = ()) -> torch.device:
    """Where a region runs: a scalar may lie on the CPU whatever the others do."""
    tensors = (*inputs, *overwritten)
    return next((tensor.device for tensor in tensors if tensor.dim()), tensors[0].device)


def empty_outputs(
    spec: str, inputs: Sequence[Tensor], sizes: Sequence[Size], overwritten: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Uninitialised new outputs of a region, with the strides that its stores ask for.

    For shape propagation: works on fake tensors and symbolic sizes, and adds no guards.
    """
    new = output_specs(read_spec(spec).tree, inputs, sizes, overwritten)
    return _allocate(new, device_of(inputs, overwritten))


def _allocate(new: Sequence[OutputSpec], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=device) for one in new
    )


class _Shaped(NamedTuple):
    shape: torch.Size


@functools.lru_cache(maxsize=4096)
def _layouts(
    text: str,
    inputs: tuple[torch.Size, ...],
    sizes: tuple[int, ...],
    overwritten: tuple[torch.Size, ...],
) -> tuple[OutputSpec, ...]:
    """The new outputs for these shapes; kept, as working them out takes longer than a kernel."""
    shaped = [_Shaped(shape) for shape in inputs]
    return output_specs(read_spec(text).tree, shaped, sizes, [_Shaped(s) for s in overwritten])


def run(
    spec: str,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    out: Sequence[Tensor] | None = None,
    overwritten: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Run a region and return its new outputs.

    inputs: the operands' tensors in order, then the arguments. sizes: the divisors of the tree's
    index maps. out: buffers for the new outputs; allocated here if None. overwritten: the
    arguments that stores overwrite. Nothing is validated, except under poison, which raises
    TreeError for inputs that do not fit the tree; and a region with a name is checked, which raises
    RegionError where nobody listens (`runtime.check`).
    """
    region = read_spec(spec)
    region_runs[region.text] += 1
    if region.poison:
        check_inputs(region.tree, inputs, sizes, overwritten)
    device = device_of(inputs, overwritten)
    if out is None:
        shapes = tuple([tensor.shape for tensor in inputs])
        overwritten_shapes = tuple([tensor.shape for tensor in overwritten])
        new = _layouts(region.text, shapes, tuple(sizes), overwritten_shapes)
        outputs = _allocate(new, device)
    else:
        outputs = tuple(out)
    if region.poison:
        for output in outputs:
            output.fill_(poison_value(output.dtype))
    kernel = kernel_of(region.text, device)
    if region.name is None:
        kernel(inputs, sizes, outputs, overwritten)
    else:
        check.run(region.name, region.tree, kernel, inputs, sizes, outputs, overwritten)
    return outputs


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """NaN for floats, the least value for integers, True for bool: what no test expects to see."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min
