"""The oracle: what a tree means, in plain torch, on any device.

Every value is a tensor that broadcasts to (l, row, column), l being 1 without batch: fp32 (or
`compute_dtype`), int64 or bool. Each value is computed once; what does not depend on an axis has
size 1 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_evt.errors import TreeError
from torch_evt.tree.dtypes import ValueType, type_of_dtype
from torch_evt.tree.functions import FUNCTIONS
from torch_evt.tree.ir import (
    Accumulator,
    Cast,
    Compute,
    Const,
    Index,
    Keep,
    Load,
    Neighbour,
    ReduceOp,
    Select,
    Sink,
    Statistic,
    Store,
    Term,
    Tree,
    Value,
    children,
    postorder,
    sink_values,
)
from torch_evt.tree.philox import uniform
from torch_evt.tree.scope import Scope, epilogue_scope, operand_scope
from torch_evt.tree.shapes import (
    OutputSpec,
    axis_sizes,
    output_specs,
    tensor_operands,
)
from torch_evt.tree.types import meeting_type, value_types


@dataclass(frozen=True)
class _Run:
    """What is the same for all values of one evaluation. arguments: those that Loads number."""

    arguments: Sequence[Tensor]
    overwritten: Sequence[Tensor]
    sizes: Sequence[int]
    dtype: torch.dtype
    exact: bool
    device: torch.device


@dataclass(frozen=True)
class _Space:
    """The index space of one block; extents: (l, row, column)."""

    scope: Scope
    extents: tuple[int, int, int]

    def dimension(self, axis: str) -> int:
        return ("l", self.scope.row, self.scope.column).index(axis)

    def along(self, axis: str, tensor: Tensor) -> Tensor:
        """A vector laid along one axis."""
        shape = [1, 1, 1]
        shape[self.dimension(axis)] = -1
        return tensor.view(shape)


def evaluate(
    tree: Tree,
    inputs: Sequence[Tensor],
    sizes: Sequence[int] = (),
    overwritten: Sequence[Tensor] = (),
    *,
    compute_dtype: torch.dtype = torch.float32,
    exact: bool = False,
) -> tuple[Tensor, ...]:
    """The new outputs of a verified tree; overwritten arguments are written in place.

    inputs: the operands' tensors, then the arguments; sizes: what index maps divide by (see
    `tree.shapes`, which also says the outputs' shapes and strides).
    compute_dtype: float32, or float64. Every product and function works in it; casts and stores
    round from it. All reads of overwritten arguments come before all writes.
    exact: with float64, casts to float dtypes and the rounding of stores are skipped, and float
    outputs are float64: the mathematical value. Overwritten arguments keep their own dtype.
    Raises TreeError for a tree without a size for an axis, or a neighbour over an odd axis.
    """
    found = {axis: int(size) for axis, size in axis_sizes(tree, inputs, sizes, overwritten).items()}
    first = tensor_operands(tree)
    device = (*inputs, *overwritten)[0].device
    run = _Run(inputs[first:], overwritten, sizes, compute_dtype, exact, device)
    products = _products(tree, inputs, found, run)
    space = _space(epilogue_scope(tree), found, 0)
    values = _values(
        [value for sink in tree.sinks for value in sink_values(sink)], space, run, products
    )
    specs = iter(output_specs(tree, inputs, sizes, overwritten))
    outputs = []
    writes = []
    for sink in tree.sinks:
        result = _sink(sink, values, space, tree.batched)
        if isinstance(sink, Store) and sink.into is not None:
            # a bare load is a view of what another write may change first
            writes.append((sink.into, result.clone() if _is_bare(sink.value) else result))
        else:
            outputs.append(_materialise(result, next(specs), run))
    for into, result in writes:
        overwritten[into].copy_(result)
    return tuple(outputs)


def _space(scope: Scope, found: dict[str, int], product: int) -> _Space:
    batch = found["l"] if scope.batched else 1
    row, column = (found[f"k{product}" if a == "k" else a] for a in (scope.row, scope.column))
    return _Space(scope, (batch, row, column))


def _is_bare(value: Value) -> bool:
    while isinstance(value, Cast):
        value = value.value
    return isinstance(value, Load)


def _products(
    tree: Tree, inputs: Sequence[Tensor], found: dict[str, int], run: _Run
) -> list[Tensor]:
    """The accumulators, each (l or 1, m, n)."""
    tensors = iter(inputs)
    operands = []
    for i, operand in enumerate(tree.operands):
        if operand.value is None:
            tensor = next(tensors).to(run.dtype)
            operands.append(tensor if operand.batched else tensor.unsqueeze(0))
        else:
            space = _space(operand_scope(operand), found, i // 2)
            value = _values([operand.value], space, run, [])[operand.value]
            operands.append(_cast(value, operand.dtype, run).expand(space.extents))
    return [
        torch.mm(a[0], b[0]).unsqueeze(0) if len(a) == len(b) == 1 else torch.matmul(a, b)
        for a, b in zip(operands[::2], operands[1::2], strict=True)
    ]


def _values(
    starts: list[Value], space: _Space, run: _Run, products: list[Tensor]
) -> dict[Value, Tensor]:
    """Every value of one block."""
    types = value_types(starts)
    done: dict[Value, Tensor] = {}
    for value in postorder(starts):
        if isinstance(value, Accumulator):
            done[value] = products[value.index]
        elif isinstance(value, Load):
            done[value] = _load(value, space, run)
        elif isinstance(value, Const):
            done[value] = _constant(value, types[value], run)
        elif isinstance(value, Index):
            size = space.extents[space.dimension(value.axis)]
            done[value] = space.along(value.axis, torch.arange(size, device=run.device))
        elif isinstance(value, Cast):
            done[value] = _cast(done[value.value], value.dtype, run)
        elif isinstance(value, Statistic):
            dimension = 2 if value.over == "columns" else 1
            whole = done[value.value].expand(space.extents)
            done[value] = _reduce(whole, value.op, (dimension,), keepdim=True)
        elif isinstance(value, Neighbour):
            done[value] = _neighbour(done[value.value], space)
        elif isinstance(value, Keep):
            done[value] = uniform(done[value.seed], done[value.offset]) > value.p
        else:
            met = meeting_type(value.function, [types[a] for a in value.arguments])
            done[value] = _compute(value, met, [done[a] for a in children(value)], run)
    return done


def _constant(value: Const, kind: ValueType, run: _Run) -> Tensor:
    wide = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}[kind]
    constant = torch.full((1, 1, 1), value.value, dtype=wide, device=run.device)
    # torch.full refuses a float beyond fp32; a conversion makes it inf
    return constant.to(run.dtype) if kind == "float" else constant


def _compute(value: Compute, met: str, arguments: list[Tensor], run: _Run) -> Tensor:
    if met != "bool":
        dtype = run.dtype if met == "float" else torch.int64
        kept = 1 if value.function == "where" else 0  # the condition stays a bool
        arguments[kept:] = [a.to(dtype) for a in arguments[kept:]]
    formula = FUNCTIONS[value.function].formula
    return formula(*arguments)


def _load(load: Load, space: _Space, run: _Run) -> Tensor:
    argument = (run.overwritten if load.overwritten else run.arguments)[load.argument]
    kind = type_of_dtype(load.dtype)
    dtype = {"float": run.dtype, "int": torch.int64, "bool": torch.bool}[kind]
    dimensions = [space.dimension(term.axis) for term in load.index]
    plain = all(term.op is None for term in load.index)
    if plain and len(set(dimensions)) == len(dimensions):
        order = sorted(range(len(dimensions)), key=dimensions.__getitem__)
        view = argument.permute(order)
        missing = (i for i in range(3) if i not in dimensions)
        for dimension in missing:
            view = view.unsqueeze(dimension)
        return view.to(dtype)
    indices = tuple(_coordinates(term, space, run) for term in load.index)
    return argument[indices].to(dtype)


def _coordinates(term: Term, space: _Space, run: _Run) -> Tensor:
    """Which index along one dimension of an argument every element reads."""
    coordinates = torch.arange(space.extents[space.dimension(term.axis)], device=run.device)
    if term.size is not None:
        size = run.sizes[term.size]
        coordinates = coordinates // size if term.op == "div" else coordinates % size
    return space.along(term.axis, coordinates)


def _cast(value: Tensor, dtype: torch.dtype, run: _Run) -> Tensor:
    """Rounds to dtype, and comes back to the dtype that values of its type have."""
    kind = type_of_dtype(dtype)
    if kind == "float":
        return value.to(run.dtype) if run.exact else value.to(dtype).to(run.dtype)
    return value.to(dtype) if kind == "bool" else value.to(dtype).to(torch.int64)


def _neighbour(value: Tensor, space: _Space) -> Tensor:
    columns = space.extents[2]
    if columns % 2:
        raise TreeError(f"a neighbour needs an even number of columns, not {columns}")
    if value.shape[2] == 1:  # the same in every column
        return value
    pairs = value.reshape(*value.shape[:2], columns // 2, 2)
    return pairs.flip(3).reshape(value.shape)


def _reduce(
    value: Tensor, op: ReduceOp, dimensions: tuple[int, ...], *, keepdim: bool = False
) -> Tensor:
    if op == "sum":
        return value.sum(dimensions, keepdim=keepdim)
    if op == "logsumexp":
        return torch.logsumexp(value, dimensions, keepdim=keepdim)
    if op == "moments":
        mean = value.mean(dimensions, keepdim=True)
        squares = (value - mean).square().sum(dimensions)
        return torch.stack((mean.squeeze(dimensions), squares))
    if all(value.shape[dimension] for dimension in dimensions):
        return value.amax(dimensions, keepdim=keepdim)
    kept = [1 if i in dimensions else size for i, size in enumerate(value.shape)]
    least = -torch.inf if value.dtype.is_floating_point else torch.iinfo(value.dtype).min
    result = torch.full(kept, least, dtype=value.dtype, device=value.device)
    return result if keepdim else result.squeeze(dimensions)


def _sink(sink: Sink, values: dict[Value, Tensor], space: _Space, batched: bool) -> Tensor:
    """What a sink writes, before it is rounded; without l unless batched."""
    whole = values[sink.value].expand(space.extents)
    if isinstance(sink, Store):
        return whole if batched else whole[0]
    if isinstance(sink, Select):
        selected = _select(whole, values[sink.column])
        return selected if batched else selected[0]
    if sink.over == "all":
        return _reduce(whole, sink.op, (0, 1, 2))
    dimension = 1 if sink.over == "rows" else 2
    if sink.fold_batch or not batched:
        return _reduce(whole, sink.op, (0, dimension))
    return _reduce(whole, sink.op, (dimension,))


def _select(whole: Tensor, column: Tensor) -> Tensor:
    """One column of every row; 0 where there is no such column."""
    batch, rows, columns = whole.shape
    column = column.expand(batch, rows, 1)
    exists = (column >= 0) & (column < columns)
    if columns == 0:
        return torch.zeros_like(exists, dtype=whole.dtype).squeeze(2)
    taken = whole.gather(2, column.clamp(0, columns - 1))
    return torch.where(exists, taken, torch.zeros_like(taken)).squeeze(2)


def _materialise(result: Tensor, spec: OutputSpec, run: _Run) -> Tensor:
    keep = run.exact and spec.dtype.is_floating_point
    output = torch.empty_strided(
        [int(size) for size in spec.shape],
        [int(step) for step in spec.stride],
        dtype=run.dtype if keep else spec.dtype,
        device=run.device,
    )
    return output.copy_(result)
