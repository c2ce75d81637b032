"""The operators that carry regions through PyTorch; importing this module registers them.

For k = 1 ... 8 new outputs:

    region_k(Tensor[] inputs, str spec, SymInt[] sizes)         the new outputs
    region_k.out(..., *, Tensor(a!) out, Tensor(b!) out1, ...)  the same, into given buffers
    region_k_symbolic(...)                                      as region_k, without an out form

and, for a region that overwrites some of its arguments (k = 0 ... 8),

    region_k_(Tensor(a!)[] overwritten, Tensor[] inputs, str spec, SymInt[] sizes)

Few operators with the tree in a string keep graphs small, picklable and part of Inductor's cache
key. Inductor (from torch 2.12) finds the out form by its tag and signature and allocates the
outputs itself, so they are part of its memory plan. It has two faults there (seen up to 2.15):

- For an operator that returns a bare tensor it spreads a list of inputs over the arguments of the
  out form. So region_1 returns a list of one.
- For outputs with symbolic sizes it stops on an assertion. So those have an operator of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_evt.runtime.dispatch import empty_outputs, read_spec, run
from torch_evt.tree.shapes import axis_sizes

MAX_OUTPUTS = 8

_ARGUMENTS = "Tensor[] inputs, str spec, SymInt[] sizes"
# an op sees its inputs as they were traced: a tree's text names their contiguous axes
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
# how Inductor knows an out form; torch 2.11 has only the older name, and no use for it
_OUT_TAG = getattr(torch.Tag, "out", None) or torch.Tag.out_variant


def region_op(
    outputs: int, *, overwrites: bool = False, symbolic: bool = False
) -> torch._ops.OpOverload:
    """The operator for a region with this many new outputs.

    overwrites: for a tree that overwrites arguments. symbolic: for a graph in which any size or
    stride of the region's tensors is symbolic (see `has_symbols`).
    The operator's value is a tuple of the outputs, or a list of one; if it overwrites, a bare
    tensor for one output and None for none. Raises ValueError where there is no such operator:
    beyond MAX_OUTPUTS, or without any output.
    """
    if not (0 if overwrites else 1) <= outputs <= MAX_OUTPUTS:
        raise ValueError(f"a region has 1 to {MAX_OUTPUTS} outputs, not {outputs}")
    suffix = "_" if overwrites else "_symbolic" if symbolic else ""
    packet = getattr(torch.ops.torch_evt, f"region_{outputs}{suffix}")
    overload: torch._ops.OpOverload = packet.default
    return overload


def has_symbols(tensors: Sequence[Tensor], sizes: Sequence[int | torch.SymInt]) -> bool:
    """Whether a region with these tensors and sizes needs the symbolic operator."""
    of_tensors = (size for tensor in tensors for size in (*tensor.shape, *tensor.stride()))
    return any(isinstance(size, torch.SymInt) for size in (*sizes, *of_tensors))


def is_region(target: object) -> bool:
    """Whether a graph node's target is one of these operators."""
    overload = isinstance(target, torch._ops.OpOverload)
    return overload and str(target).startswith("torch_evt.region_")


def _bare(outputs: tuple[Tensor, ...]) -> Any:
    """The outputs as torch returns several, one, or none."""
    if len(outputs) > 1:
        return outputs
    return outputs[0] if outputs else None


def _listed(outputs: tuple[Tensor, ...]) -> Any:
    return outputs if len(outputs) > 1 else list(outputs)


def _functional(inputs: Sequence[Tensor], spec: str, sizes: Sequence[int]) -> Any:
    return _listed(run(spec, inputs, sizes))


def _functional_fake(inputs: Sequence[Tensor], spec: str, sizes: Sequence[int]) -> Any:
    return _listed(empty_outputs(spec, inputs, sizes))


def _out(inputs: Sequence[Tensor], spec: str, sizes: Sequence[int], **buffers: Tensor) -> Any:
    return _bare(run(spec, inputs, sizes, tuple(buffers.values())))


def _out_fake(inputs: Sequence[Tensor], spec: str, sizes: Sequence[int], **buffers: Tensor) -> Any:
    return _bare(tuple(buffers.values()))


def _mutating(
    overwritten: Sequence[Tensor], inputs: Sequence[Tensor], spec: str, sizes: Sequence[int]
) -> Any:
    return _bare(run(spec, inputs, sizes, None, overwritten))


def _mutating_fake(
    overwritten: Sequence[Tensor], inputs: Sequence[Tensor], spec: str, sizes: Sequence[int]
) -> Any:
    return _bare(empty_outputs(spec, inputs, sizes, overwritten))


def _flops(inputs: Sequence[Tensor], spec: str, sizes: Sequence[int], **_: Any) -> Any:
    """2 l m n k for each product; as elsewhere in torch, nothing for elementwise work."""
    tree = read_spec(spec).tree
    axes = axis_sizes(tree, inputs, sizes) if tree.operands else {}
    reduced = (size for axis, size in axes.items() if axis.startswith("k"))
    return sum(2 * axes.get("l", 1) * axes["m"] * axes["n"] * k for k in reduced)


def _mutating_flops(
    overwritten: Sequence[Tensor],
    inputs: Sequence[Tensor],
    spec: str,
    sizes: Sequence[int],
    **_: Any,
) -> Any:
    return _flops(inputs, spec, sizes)


def _register() -> torch.library.Library:
    library = torch.library.Library("torch_evt", "FRAGMENT")  # type: ignore[no-untyped-call]

    def define(
        name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *tags: Any
    ) -> None:
        library.define(name + schema, tags=_TAGS + tags)  # type: ignore[no-untyped-call]
        library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"torch_evt::{name}", fake, lib=library)

    def count(name: str, flops: Callable[..., Any]) -> None:
        # a packet's hash changes when it gets another overload: only after the last definition
        register_flop_formula(getattr(torch.ops.torch_evt, name), get_raw=True)(flops)

    for k in range(MAX_OUTPUTS + 1):
        returned = f"({', '.join(['Tensor'] * k)})"
        overwriting = f"(Tensor(a!)[] overwritten, {_ARGUMENTS}) -> {returned}"
        define(f"region_{k}_", overwriting, _mutating, _mutating_fake)
        count(f"region_{k}_", _mutating_flops)
        if k == 0:
            continue
        listed = returned if k > 1 else "Tensor[]"
        define(f"region_{k}", f"({_ARGUMENTS}) -> {listed}", _functional, _functional_fake)
        define(f"region_{k}_symbolic", f"({_ARGUMENTS}) -> {listed}", _functional, _functional_fake)
        aliases = [f"Tensor({letter}!)" for letter in "abcdefgh"[:k]]
        buffers = [f"{alias} out{i or ''}" for i, alias in enumerate(aliases)]
        given = f"({_ARGUMENTS}, *, {', '.join(buffers)}) -> ({', '.join(aliases)})"
        define(f"region_{k}.out", given, _out, _out_fake, _OUT_TAG)
        count(f"region_{k}", _flops)
        count(f"region_{k}_symbolic", _flops)
    return library


if not hasattr(torch.ops.torch_evt, "region_1"):
    _LIBRARY = _register()  # the operators live as long as this object
