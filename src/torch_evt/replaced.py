"""What a placed region stands for: the nodes that its operator replaced, as a graph that runs.

`torch_evt.verify` runs it in fp64 on the operands that the operator was given. That finds what a
tree alone cannot tell: a tree that is not what its nodes compute, or an operand in a wrong place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_evt.graphs import expression, tensor_of
from torch_evt.joint.recompose import EXPANSION
from torch_evt.partition.candidates import Rules
from torch_evt.partition.elementwise import CONVERT, HALVES
from torch_evt.partition.plan import Half
from torch_evt.partition.region import Region, is_view, is_widening
from torch_evt.runtime.ops import is_region
from torch_evt.torch_compat import size_hint

aten = torch.ops.aten

_MADE: Mapping[Any, int] = {aten.full.default: 1, aten.scalar_tensor.default: 0}
"""Operations that make a constant, and which argument is its value."""


Shape = tuple[int, ...]


class NoSize(Exception):
    """A symbolic size that no operand of the kernel shows."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a region as a graph of their own, recomposed ones expanded.

    graph: its placeholders are what the nodes read, its results the nodes that have to be stored.
    reads: for each placeholder the root of what it stands for in the whole graph; results: the
    names of the results there. region: the region's nodes, anchor: its anchor, by their names here.
    """

    graph: fx.Graph
    reads: Mapping[str, str]
    results: tuple[str, ...]
    region: tuple[str, ...]
    anchor: str


@dataclass(frozen=True)
class Operand:
    """Which node the kernel's operator reads at one place, and which one that is a view of (`root`;
    itself if none). given: it is an input of its half. fixed: it lies in memory, given or left by
    another region, so that all readers see the same bits."""

    name: str
    root: str
    given: bool
    fixed: bool


@dataclass(frozen=True)
class PlacedRegion:
    """A region in its graph.

    name: as its spec has it. operands: one for each tensor of the kernel. stored: for each output
    of the kernel, the names of the nodes in whose place it stands, as the graph has them now, the
    operator's own result first. transposed: for each output, whether the nodes have the last two
    coordinates exchanged. traced: the kernel's operands as they were traced.
    """

    name: str
    half: Half
    nodes: Nodes
    node_names: tuple[str, ...]
    operands: tuple[Operand, ...]
    traced: tuple[Tensor, ...]
    stored: tuple[tuple[str, ...], ...]
    transposed: tuple[bool, ...]
    rules: Rules


def nodes_of(region: Region, replaced: Mapping[fx.Node, fx.Node]) -> Nodes:
    """The region's nodes, before they are replaced. replaced: as for `place`."""
    return _Cut(region, replaced).nodes()


class _Cut:
    """Copies a region's nodes, and what its loads see through, into a graph."""

    def __init__(self, region: Region, replaced: Mapping[fx.Node, fx.Node]) -> None:
        self.region = region
        self.inside = set(region.nodes)
        given = [_now(i.node, replaced) for i in region.inputs]
        self.given = {n.name for node in given for n in (node, _root(node))}
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.reads: dict[str, str] = {}
        self.end: fx.Node | None = None  # the last placeholder: they stand in front

    def nodes(self) -> Nodes:
        stored = [node for output in self.region.outputs for node in output.nodes]
        self.graph.output(tuple(self.copy(node) for node in stored))
        names = tuple(self.copy(node).name for node in self.region.nodes if node in self.copies)
        anchor = self.copies[self.region.anchor].name
        return Nodes(self.graph, self.reads, tuple(n.name for n in stored), names, anchor)

    def copy(self, wanted: fx.Node) -> fx.Node:
        stack = [wanted]
        while stack:
            node = stack[-1]
            if node in self.copies:
                stack.pop()
            elif not self._is_computed(node):
                self.copies[node] = self._placeholder(node)
                stack.pop()
            elif missing := [s for s in node.all_input_nodes if s not in self.copies]:
                stack.extend(missing)
            else:
                self.copies[node] = self._computed(node)
                stack.pop()
        return self.copies[wanted]

    def _is_computed(self, node: fx.Node) -> bool:
        if node in self.inside:
            return True
        if node.op != "call_function" or node.name in self.given or tensor_of(node) is None:
            return False
        seen_through = is_view(node) or is_widening(node) or node.target is aten.expand.default
        return seen_through or node.target in _MADE

    def _placeholder(self, node: fx.Node) -> fx.Node:
        at = self.graph._root if self.end is None else self.end
        with self.graph.inserting_after(at):
            self.end = self.graph.placeholder(node.name)
        self.end.meta["val"] = node.meta.get("val")
        self.reads[self.end.name] = _root(node).name
        return self.end

    def _computed(self, node: fx.Node) -> fx.Node:
        expansion = node.meta.get(EXPANSION)
        if expansion is None:
            return self._copied(node, self.copies)
        arguments = iter(node.args)
        inner: dict[fx.Node, fx.Node] = {}
        for one in expansion.graph.nodes:
            if one.op == "placeholder":
                given = next(arguments)
                assert isinstance(given, fx.Node)
                inner[one] = self.copies[given]
            elif one.op != "output":
                inner[one] = self._copied(one, inner)
        result = expansion.graph.output_node().args[0]
        assert isinstance(result, fx.Node)
        return inner[result]

    def _copied(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        copy = self.graph.node_copy(node, env.__getitem__)
        copy.meta = {"val": node.meta.get("val")}
        value = tensor_of(node)
        position = _MADE.get(node.target)
        if position is not None and value is not None and value.dtype in HALVES:
            # the number that a half precision tensor holds, also where the graph runs in fp64
            number = float(torch.tensor(node.args[position], dtype=value.dtype))
            copy.update_arg(position, number)
        return copy


def placed(
    kernel: fx.Node,
    region: Region,
    nodes: Nodes,
    replaced: Mapping[fx.Node, fx.Node],
    *,
    name: str,
    half: Half,
    rules: Rules,
) -> PlacedRegion:
    """The record of a region whose operator `kernel` has just been put into its graph.

    replaced: as for `place`.
    """
    inputs: Sequence[fx.Node] = kernel.args[0]  # type: ignore[assignment]
    given = {_now(i.node, replaced).name for i in region.inputs}
    known = {n.name for output in region.outputs for n in output.nodes}
    stored: list[list[str]] = [[] for _ in region.outputs]
    for item in kernel.users:
        if item.target is operator.getitem:
            names = [item.name, *_stands_for(item, known)]
            stored[item.args[1]].extend(dict.fromkeys(names))  # type: ignore[index]
    return PlacedRegion(
        name=name,
        half=half,
        nodes=nodes,
        node_names=tuple(node.name for node in region.nodes),
        operands=tuple(_operand(node, given) for node in inputs),
        traced=tuple(node.meta["val"] for node in inputs),
        stored=tuple(map(tuple, stored)),
        transposed=tuple(output.transposed for output in region.outputs),
        rules=rules,
    )


def _stands_for(item: fx.Node, known: set[str]) -> list[str]:
    """Names of the region's nodes that one output of the kernel replaced."""
    found = [item.name] if item.name in known else []
    for user in item.users:
        if is_view(user) or user.target in (aten.permute.default, CONVERT):
            found += _stands_for(user, known)
    return found


def _operand(node: fx.Node, given: set[str]) -> Operand:
    """Which node an argument of the operator is; placing views it where needed."""
    if node.name not in given and node.target is aten.view.default:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    root = _root(node)
    source = root
    while source.target in (aten.permute.default, operator.getitem):
        assert isinstance(source.args[0], fx.Node)
        source = source.args[0]
    fixed = source.op in ("placeholder", "get_attr") or is_region(source.target)
    return Operand(node.name, root.name, node.op == "placeholder", fixed)


def _now(node: fx.Node, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
    return replaced.get(node, node)


def _root(node: fx.Node) -> fx.Node:
    """What a node is a row-major view of."""
    while is_view(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def concrete(region: PlacedRegion, inputs: Sequence[Tensor]) -> tuple[fx.GraphModule, list[Shape]]:
    """The region's nodes with all sizes as numbers, and the shape of each placeholder left.

    inputs: the operands of one run of the kernel. Raises NoSize for a size that they do not show.
    """
    sizes = _Sizes(region, inputs)
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    shapes: list[Shape] = []
    for node in region.nodes.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            env[node] = sizes.number(value)
            continue
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = {}
        if node.op == "placeholder":
            assert isinstance(value, Tensor)
            shapes.append(tuple(sizes.number(size) for size in value.shape))
    return fx.GraphModule(torch.nn.Module(), graph), shapes


class _Sizes:
    """Numbers in place of symbolic sizes: as the kernel's operands show them, or, where a run has
    the sizes of the traced call, as they were there."""

    def __init__(self, region: PlacedRegion, inputs: Sequence[Tensor]) -> None:
        self.known: dict[Any, int] = {}
        self.as_traced = True
        for traced, given in zip(region.traced, inputs, strict=True):
            for wanted, size in zip(traced.shape, given.shape, strict=True):
                self.as_traced &= size_hint(wanted) == size
                if expression(wanted).is_Symbol:
                    self.known[expression(wanted)] = int(size)

    def number(self, size: int | torch.SymInt) -> int:
        """The number in place of a size. Raises NoSize."""
        value = expression(size).subs(self.known)
        if value.is_Integer:
            return int(value)
        if not self.as_traced:
            raise NoSize(f"no operand of the kernel shows the size {size}")
        return size_hint(size)
