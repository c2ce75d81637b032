"""Checks one run of a region: the kernel's outputs against its tree in fp64, on the same operands.

By the error standard (`comparison`) with the reference's evaluation in the kernel's own dtypes in
the place of eager, and u for sums of K terms at least sqrt(K) roundings of fp32. The kernel runs a
second time on the same operands, with its outputs filled otherwise before: an element that keeps
both fillings was never written, and equal inputs must give equal bits.

Operands and outputs are copied where they lie; the fp64 evaluation moves to the CPU where the
device has no memory left. What a run needed is freed before the next region runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_evt.comparison import L2_FACTOR, UNIT, TensorComparison, TensorError, compare
from torch_evt.emit import Kernel
from torch_evt.errors import RegionError
from torch_evt.tree.dtypes import dtype_name
from torch_evt.tree.evaluate import evaluate
from torch_evt.tree.ir import Reduce, Sink, Store, Tree
from torch_evt.tree.shapes import axis_sizes
from torch_evt.tree.text import to_text

_ROUNDING = 2.0**-24
_OTHER_FILLING = 77.0


@dataclass(frozen=True)
class Fault:
    """What is wrong with one region.

    kind: "wrong", "unwritten", "unstable" (two runs on equal operands differ) or "input" (the
    kernel changed an operand), from here; "nodes" and "operand" from `report.verify`. where: which
    output or operand. text: a sentence. index: of the worst element. verdict: the error and its
    limit, where the error standard decided.
    """

    kind: str
    where: str
    text: str
    index: tuple[int, ...] | None = None
    verdict: TensorComparison | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True)
class Run:
    """One run of a region. inputs, overwritten: copies from before it; results: the new outputs,
    then the overwritten arguments after it."""

    name: str
    tree: Tree
    inputs: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    overwritten: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    faults: tuple[Fault, ...]


Listener = Callable[[Run], None]
_listeners: list[Listener] = []  # a context variable would not reach the threads of autograd


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Give every run of a region with a name to `listener`, in order, in place of raising."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def run(
    name: str,
    tree: Tree,
    kernel: Kernel,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    outputs: Sequence[Tensor],
    overwritten: Sequence[Tensor] = (),
) -> None:
    """Run a kernel and check it; tell the listeners, or else raise RegionError where it is wrong.

    Inside a capture of a CUDA graph the kernel runs unchecked.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        kernel(inputs, sizes, outputs, overwritten)
        return
    before = tuple(compact(tensor) for tensor in inputs)
    overwritten_before = tuple(compact(tensor) for tensor in overwritten)
    try:
        kernel(inputs, sizes, outputs, overwritten)
    except Exception as error:
        raise RegionError(
            f"the kernel of the region {name} raises {type(error).__name__}: {error}. "
            f"Its tree: {to_text(tree)}. evt.place=never compiles without regions"
        ) from error
    results = (*outputs, *overwritten)
    again = tuple(torch.empty_like(t).fill_(_other_filling(t.dtype)) for t in outputs)
    overwritten_again = tuple(compact(tensor) for tensor in overwritten_before)
    kernel(inputs, sizes, again, overwritten_again)
    faults = _faults(tree, before, sizes, overwritten_before, results, (*again, *overwritten_again))
    faults += tuple(
        Fault("input", f"input {i}", "the kernel changed it, and it may only read it")
        for i, (old, new) in enumerate(zip(before, inputs, strict=True))
        if not same_bits(old, new)
    )
    done = Run(name, tree, before, tuple(sizes), overwritten_before, results, faults)
    for listener in tuple(_listeners):
        listener(done)
    if faults and not _listeners:
        raise RegionError(
            f"the region {name} is wrong: {'; '.join(map(str, faults))}. Its tree: {to_text(tree)}."
            " torch_evt.verify(model, *inputs) writes a script that reproduces it alone; "
            "evt.place=never compiles without regions"
        )


def _faults(
    tree: Tree,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    overwritten: Sequence[Tensor],
    results: Sequence[Tensor],
    again: Sequence[Tensor],
) -> tuple[Fault, ...]:
    """What is wrong with the results of a kernel.

    inputs, overwritten: the tensors as they were before it; results: the new outputs, then the
    overwritten arguments, as they are after it; again: those of a second run.
    """
    exact = _evaluated(tree, inputs, sizes, overwritten, exact=True)
    reference = _evaluated(tree, inputs, sizes, overwritten, exact=False)
    new = len(tree.new_outputs)
    placed = _positions(tree)
    wheres = [f"output {position} ({describe(sink)})" for position, sink in placed]
    units = [_unit(tree, sink, inputs, sizes) for _, sink in placed]
    verdicts = _verdicts([(results[p], reference[p], exact[p]) for p, _ in placed], wheres, units)
    faults = []
    for (position, _), where, verdict in zip(placed, wheres, verdicts, strict=True):
        ours, second = results[position], again[position]
        fault = _unwritten(where, ours, second) if position < new else None
        fault = fault or _wrong(where, ours, exact[position], verdict)
        fault = fault or _unstable(where, ours, second)
        if fault is not None:
            faults.append(fault)
    return tuple(faults)


def _positions(tree: Tree) -> list[tuple[int, Sink]]:
    """Every sink, with the place of its tensor among new outputs and overwritten arguments."""
    new = list(tree.new_outputs)
    overwriting = [s for s in tree.sinks if isinstance(s, Store) and s.into is not None]
    return [*enumerate(new), *((len(new) + s.into, s) for s in overwriting)]  # type: ignore[operator]


def describe(sink: Sink) -> str:
    """A sink in a few words: "store bf16", "sum over rows f32"."""
    if isinstance(sink, Store):
        return f"store {dtype_name(sink.dtype)}"
    if isinstance(sink, Reduce):
        return f"{sink.op} over {sink.over} {dtype_name(sink.dtype)}"
    return f"select {dtype_name(sink.dtype)}"


def worst_index(ours: Tensor, exact: Tensor) -> tuple[int, ...]:
    """Where two tensors of one shape differ most; what is finite in one of them alone first."""
    ours, exact = ours.to(exact.device, torch.float64), exact.to(torch.float64)
    difference = (ours - exact).abs()
    unlike = (ours.isfinite() != exact.isfinite()) | (ours.isnan() != exact.isnan())
    difference = torch.where(unlike, torch.inf, difference.nan_to_num(0.0))
    return tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))


def compact(tensor: Tensor) -> Tensor:
    """A copy with the same strides, of no more memory than they span."""
    if tensor.numel() == 0:
        return tensor.clone()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    flat = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN being equal to NaN."""
    if a.dtype.is_floating_point:
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def _unwritten(where: str, ours: Tensor, again: Tensor) -> Fault | None:
    """Elements that kept what the output was filled with, in two runs with different fillings."""
    if ours.dtype.is_floating_point:
        kept = ours.isnan()
    else:
        kept = ours if ours.dtype == torch.bool else ours == torch.iinfo(ours.dtype).min
    kept = kept & (again == _other_filling(again.dtype))
    if not kept.any():
        return None
    index = tuple(int(i) for i in kept.nonzero()[0])
    count = f"{int(kept.sum())} of {kept.numel()} elements"
    return Fault("unwritten", where, f"{count} were never written, first at {index}", index)


def _wrong(where: str, ours: Tensor, exact: Tensor, verdict: TensorComparison) -> Fault | None:
    if verdict.passed:
        return None
    index = worst_index(ours, exact)
    text = f"at {index} it is {float(ours[index]):.7g} in place of {float(exact[index]):.7g}; "
    text += f"error {verdict.ours}, the reference's {verdict.eager}, limit {verdict.limit}"
    return Fault("wrong", where, text, index, verdict)


def _unstable(where: str, ours: Tensor, again: Tensor) -> Fault | None:
    if same_bits(ours, again):
        return None
    index = worst_index(ours, again)
    text = f"two runs on equal operands gave different bits, most at {index}"
    return Fault("unstable", where, text, index)


def _verdicts(
    triples: Sequence[tuple[Tensor, Tensor, Tensor]], wheres: Sequence[str], units: Sequence[float]
) -> list[TensorComparison]:
    """The error standard on (ours, reference, exact) of every output; one that vanishes beside the
    region's others is judged as such. Of integers and bools, the share that differs is judged."""
    names = [f"output:{where}" for where in wheres]
    floats = [
        (name, *triple)
        for name, triple in zip(names, triples, strict=True)
        if triple[0].dtype.is_floating_point
    ]
    judged = compare(
        {name: ours for name, ours, _, _ in floats},
        {name: reference for name, _, reference, _ in floats},
        {name: exact for name, _, _, exact in floats},
        torch.float32,
        units=dict(zip(names, units, strict=True)),
    )
    found = {verdict.name: verdict for verdict in judged.tensors}
    for name, (ours, reference, exact), unit in zip(names, triples, units, strict=True):
        if name not in found:
            found[name] = _share_verdict(name, ours, reference, exact, unit)
    return [found[name] for name in names]


def _share_verdict(
    name: str, ours: Tensor, reference: Tensor, exact: Tensor, unit: float
) -> TensorComparison:
    count = max(exact.numel(), 1)
    share, allowed = (int((t.to(exact.device) != exact).sum()) / count for t in (ours, reference))
    limit = L2_FACTOR * max(allowed, unit)
    ours_, reference_, limit_ = (TensorError(e, e) for e in (share, allowed, limit))
    return TensorComparison(name, share <= limit, "integer", ours_, reference_, limit_)


def _unit(tree: Tree, sink: Sink, inputs: Sequence[Tensor], sizes: Sequence[int]) -> float:
    """u of an output: its dtype's, or what accumulating its terms in fp32 may cost if that is more.
    A bool or an integer is decided in the dtype of the operands."""
    axes = {axis: int(size) for axis, size in axis_sizes(tree, inputs, sizes).items()}
    terms = sum(size for axis, size in axes.items() if axis.startswith("k"))
    if isinstance(sink, Reduce):
        terms += math.prod(axes[a] for a in {"rows": "m", "columns": "n", "all": "mn"}[sink.over])
    dtype = sink.dtype
    if dtype not in UNIT:
        dtype = tree.operands[0].dtype if tree.operands else torch.float32
    return max(UNIT.get(dtype, UNIT[torch.float32]), math.sqrt(terms) * _ROUNDING)


def _evaluated(
    tree: Tree,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    overwritten: Sequence[Tensor],
    *,
    exact: bool,
) -> tuple[Tensor, ...]:
    """The tree's new outputs and overwritten arguments, in fp64 or as the reference rounds them."""
    dtype = torch.float64 if exact else torch.float32

    def on(device: torch.device | None) -> tuple[Tensor, ...]:
        moved = [t if device is None else t.to(device) for t in inputs]
        written = [t.clone() if device is None else t.to(device, copy=True) for t in overwritten]
        if exact:
            written = [t.double() if t.dtype.is_floating_point else t for t in written]
        new = evaluate(tree, moved, sizes, written, compute_dtype=dtype, exact=exact)
        return (*new, *written)

    try:
        return on(None)
    except torch.OutOfMemoryError:
        return on(torch.device("cpu"))


def _other_filling(dtype: torch.dtype) -> float | int | bool:
    return False if dtype == torch.bool else _OTHER_FILLING if dtype.is_floating_point else 77
