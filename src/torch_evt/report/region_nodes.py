"""A region's tree held against the graph nodes that it replaced, both in fp64, on the operands of
one real run. No rounding stands between the two, so they agree to many more digits than any kernel:
what this finds is a fault of the compiler, not of a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torch_evt.replaced import PlacedRegion, Shape, concrete
from torch_evt.runtime.check import Fault, Run, worst_index
from torch_evt.testing import Fp64Arithmetic, tensor_error
from torch_evt.tree.evaluate import evaluate

TOLERANCE = 1e-9
"""The largest relative error of a tree beside its nodes, both in fp64."""
VANISHING = 1e-12
"""A difference this small beside the largest norm among the nodes' values is rounding."""


def faults_of(region: PlacedRegion, run: Run) -> list[Fault]:
    """What the tree computes otherwise than its nodes, on the operands of `run`.

    Raises `replaced.NoSize` where the operands do not show every symbolic size.
    """
    module, shapes = concrete(region, run.inputs)
    values, faults = _values(region, module, shapes, run)
    if faults:
        return faults
    scaled = _Scaled(module)
    with Fp64Arithmetic(), torch.no_grad():  # type: ignore[no-untyped-call]
        results = dict(zip(region.nodes.results, scaled.run(*values), strict=True))
    exact = evaluate(
        run.tree, run.inputs, run.sizes, run.overwritten, compute_dtype=torch.float64, exact=True
    )
    seen: set[str] = set()
    for i, (names, tensor) in enumerate(zip(region.stored, exact, strict=True)):
        tile = tensor.transpose(-1, -2) if region.transposed[i] else tensor
        for name in names:
            if name not in results:  # the operator's own result, of which the node is a view
                continue
            seen.add(name)
            fault = _compare(f"output {i} (node {name})", tile, results[name], scaled.largest)
            if fault is not None:
                faults.append(fault)
    faults += [
        Fault("nodes", f"node {name}", "no output of the kernel stands for it")
        for name in results
        if name not in seen
    ]
    return faults


def operands_of(
    region: PlacedRegion, module: fx.GraphModule, shapes: list[Shape], run: Run
) -> dict[str, Tensor | None]:
    """The nodes' inputs by the module's names, as the kernel was given them; None where it was not
    given one, or not in that size."""
    given: dict[str, Tensor] = {}
    for operand, tensor in zip(region.operands, run.inputs, strict=True):
        given.setdefault(operand.root, tensor)
    found: dict[str, Tensor | None] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, shape in zip(placeholders, shapes, strict=True):
        tensor_ = given.get(region.nodes.reads[node.name])
        fits = tensor_ is not None and tensor_.numel() == torch.Size(shape).numel()
        found[node.name] = tensor_.reshape(shape) if fits and tensor_ is not None else None
    return found


def _values(
    region: PlacedRegion, module: fx.GraphModule, shapes: list[Shape], run: Run
) -> tuple[list[Tensor], list[Fault]]:
    values, faults = [], []
    for name, tensor in operands_of(region, module, shapes, run).items():
        if tensor is None:
            node = region.nodes.reads[name]
            faults.append(
                Fault("nodes", f"operand {node}", "the nodes read it, the kernel is not given it")
            )
        else:
            values.append(tensor.double() if tensor.is_floating_point() else tensor)
    return values, faults


class _Scaled(fx.Interpreter):
    """Remembers the largest norm among all values."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.largest = 0.0

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point():
            norm = float(value[value.isfinite()].norm())
            self.largest = max(self.largest, norm)
        return value


def _compare(where: str, tree: Tensor, nodes: Tensor, largest: float) -> Fault | None:
    if tree.numel() != nodes.numel():
        sizes = f"{tuple(tree.shape)} in the tree, {tuple(nodes.shape)} in the graph"
        return Fault("nodes", where, f"the shapes differ: {sizes}")
    tree = tree.reshape(nodes.shape)
    error = tensor_error(tree, nodes)
    if error.l2 <= TOLERANCE and error.max_abs <= TOLERANCE:
        return None
    finite = tree.isfinite() & nodes.isfinite()
    difference = (tree.double() - nodes.double())[finite]
    same = torch.equal(tree.isfinite(), nodes.isfinite())
    if same and difference.numel() and float(difference.abs().max()) <= VANISHING * largest:
        return None
    index = worst_index(tree, nodes)
    text = f"the tree is not what its nodes compute: at {index} it gives {float(tree[index]):.7g} "
    text += f"in place of {float(nodes[index]):.7g}; relative error {error}"
    return Fault("nodes", where, text, index)
