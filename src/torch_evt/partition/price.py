"""What a region costs, and what it replaces: bytes over bandwidth and flops over peak.

The other side is priced as Inductor really runs it: one library call per product, and pointwise
operations and reductions fused greedily into groups. A region takes nodes out of those groups, so
what it replaces is the product plus what its groups become cheaper by: a group that must run
anyway, for a norm say, is not credited twice.

All sizes are hints, so symbolic shapes are priced without adding guards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from torch_evt.devices import Device
from torch_evt.graphs import output_values, tensor_of
from torch_evt.mainloops import for_target
from torch_evt.partition.elementwise import CONVERT, VIEWS, constant
from torch_evt.partition.halves import Label
from torch_evt.partition.region import Region, is_widening
from torch_evt.torch_compat import inductor_generators, size_hint
from torch_evt.tree.ir import Reduce

aten = torch.ops.aten
prims = torch.ops.prims

_CACHED_SPEEDUP = 3.0
"""Reading what the last kernel left in the last-level cache, against reading memory (an assumption
of the model, to be measured by the tuner)."""

_REDUCTIONS = frozenset(
    {
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.amax.default,
        aten.amin.default,
        aten.mean.dim,
        aten.var_mean.correction,
        aten.var.correction,
        aten.any.dim,
        aten.argmax.default,
    }
)
_MOVES = VIEWS | {
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.alias.default,
    aten.detach.default,
}
_GENERATORS = inductor_generators() | {
    aten.full.default,
    aten.scalar_tensor.default,
    prims.iota.default,
}
_POINTWISE = frozenset(
    {CONVERT, aten.clone.default, aten.where.self, aten.gather.default, aten.cat.default}
)


def bytes_of(value: Any) -> int:
    """Bytes of a traced tensor, by its size hints; 0 for anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    total = value.element_size()
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if not (isinstance(stride, int) and stride == 0):  # a broadcast is in memory once
            total *= size_hint(size)
    return total


def product_us(region_or_node: fx.Node, device: Device) -> float:
    """Microseconds of a plain product by a library: operands read, result written, no epilogue."""
    return _main_us(region_or_node, device, _result_bytes(region_or_node))


def region_bytes(region: Region) -> int:
    """Bytes that a region's kernel reads from and leaves in memory."""
    read = sum(bytes_of(value.meta["val"]) for value in {i.node for i in region.inputs})
    return read + sum(bytes_of(output.nodes[0].meta["val"]) for output in region.outputs)


def region_us(region: Region, device: Device) -> float:
    """Modelled microseconds of a region's kernel.

    The main loop with its first full store runs at the larger of its flops and its bytes; what the
    epilogue loads and stores beyond that is streamed without overlap.
    """
    extra = 0
    loads = [i for i in region.inputs[len(region.tree.operands) :]]
    extra += sum(bytes_of(i.node.meta["val"]) for i in loads)
    stored = 0
    for output in region.outputs:
        size = bytes_of(output.nodes[0].meta["val"])
        if isinstance(output.sink, Reduce):
            extra += size
        elif stored == 0:
            stored = size
        else:
            extra += size
    main = _main_us(region.anchor, device, stored)
    return main + extra * region.mainloop.load_us_factor / device.bytes_per_us()


def _result_bytes(anchor: fx.Node) -> int:
    return bytes_of(anchor.meta["val"])


def _main_us(anchor: fx.Node, device: Device, stored: int) -> float:
    has_bias = anchor.target in (aten.addmm.default, aten.baddbmm.default)
    a, b = anchor.args[1:3] if has_bias else anchor.args[:2]
    left, right = tensor_of(a), tensor_of(b)
    result = tensor_of(anchor)
    assert left is not None and right is not None and result is not None
    flops = 2.0 * size_hint(left.shape[-1])
    for size in result.shape:
        flops *= size_hint(size)
    tf32 = torch.get_float32_matmul_precision() != "highest"
    compute = flops / device.flops_per_us(left.dtype, tf32=tf32)
    memory = (bytes_of(left) + bytes_of(right) + stored) / device.bytes_per_us()
    return max(compute, memory) + device.launch_us


@dataclass(frozen=True)
class _Group:
    nodes: frozenset[fx.Node]


class InductorModel:
    """How Inductor would run the nodes that no region takes.

    Nodes carry a level: the number of kernels that must end before they can run. Pointwise nodes
    and reductions over the last axis that touch each other on one level are one kernel; a
    reduction over other axes starts a kernel of its own unless only it needs its input.
    """

    def __init__(self, graph: fx.Graph, device: Device, labels: Mapping[fx.Node, Label]) -> None:
        """labels: the half of each node; forward and backward never share a kernel."""
        self.device = device
        self.results = {v for v in output_values(graph) if isinstance(v, fx.Node)}
        self.groups = _grouped(graph, labels)
        self._sizes: dict[fx.Node, int] = {}
        self._moving = {n for n in graph.nodes if _moves(n)}
        self._working = {n for n in graph.nodes if works(n)}
        self._widening = {n for n in graph.nodes if is_widening(n)}
        self._fusible = {n for n in graph.nodes if _fusible(n)}
        self._ways: dict[fx.Node, list[list[tuple[fx.Node, int]]]] = {}
        self._full = {
            id(group): self._price(group.nodes, frozenset())
            for group in {id(g): g for g in self.groups.values()}.values()
        }

    def replaced_us(self, region: Region, others: Collection[fx.Node] = ()) -> float:
        """Microseconds that Inductor saves when `region` runs as a kernel of its own.

        others: nodes that are in other regions already.
        """
        inside = frozenset(region.nodes) - region.kept
        gone = frozenset(others)
        total = product_us(region.anchor, self.device)
        for group in {id(g): g for g in map(self.groups.get, region.nodes) if g}.values():
            before = self._price(group.nodes - gone, gone) if gone else self._full[id(group)]
            after = self._price(
                group.nodes - gone - inside, gone | inside, {n: region for n in region.kept}
            )
            total += before - after
        return total

    def size(self, node: fx.Node) -> int:
        """Bytes of a node's tensor; 0 where it has none."""
        size = self._sizes.get(node)
        if size is None:
            size = self._sizes[node] = bytes_of(node.meta.get("val"))
        return size

    def _price(
        self,
        nodes: frozenset[fx.Node],
        gone: frozenset[fx.Node],
        kept: Mapping[fx.Node, Region] = MappingProxyType({}),
    ) -> float:
        """Microseconds of one kernel of these nodes: what it reads from and leaves in memory.

        gone: nodes that regions compute. kept: nodes here of which a region has a copy of its own.
        """
        if self._working.isdisjoint(nodes):
            return 0.0
        writes = 0
        for node in nodes:
            own = kept.get(node)
            if self.leaves(node, nodes if own is None else nodes | set(own.nodes)):
                writes += self.size(node)
        return self.kernel_us(self.reads_of(nodes), writes, gone)

    def kernel_us(
        self, reads: Mapping[fx.Node, int], written: int, gone: AbstractSet[fx.Node]
    ) -> float:
        """Microseconds of a pointwise or reduction kernel that reads and writes so many bytes.

        gone: nodes that regions compute, so that their values may still lie in the cache.
        """
        cached = 0
        for root, size in reads.items():
            recent = root in gone or for_target(root.target) is not None
            if recent and size <= self.device.l2_bytes / 2:
                cached += size
        from_memory = written + sum(reads.values()) - cached  # exact in any order of the reads
        time = from_memory + cached / _CACHED_SPEEDUP
        return time / self.device.bytes_per_us() + self.device.launch_us

    def reads_of(self, nodes: AbstractSet[fx.Node]) -> dict[fx.Node, int]:
        """The values in memory that a kernel of these nodes reads, each with its bytes."""
        reads: dict[fx.Node, int] = {}
        for node in nodes:
            if node in self._moving:
                continue  # whoever reads it here sees through it
            for way in self._ways_to(node):
                for root, _ in way:
                    if root in nodes and root not in self._moving:
                        break
                else:
                    root, size = way[-1]
                    if root not in nodes and constant(root) is None:
                        reads[root] = max(reads.get(root, 0), size)
        return reads

    def _ways_to(self, node: fx.Node) -> list[list[tuple[fx.Node, int]]]:
        """For each input of a node: what reading it may mean reading, through views and widening
        casts, each with the least bytes on the way."""
        known = self._ways.get(node)
        if known is None:
            known = self._ways[node] = []
            for source in node.all_input_nodes:
                root, size = source, self.size(source)
                way = [(root, size)]
                while root.all_input_nodes and (root in self._moving or root in self._widening):
                    root = root.all_input_nodes[0]
                    if tensor_of(root) is not None:  # several views have no size of their own
                        size = min(size, self.size(root))
                    way.append((root, size))
                known.append(way)
        return known

    def leaves(self, node: fx.Node, nodes: AbstractSet[fx.Node]) -> bool:
        """Whether somebody outside reads a node's value, perhaps through views.

        What reads a widening cast outside reads the value before it instead and casts again,
        where it can be fused with the cast.
        """
        if node not in self._working:
            return False
        stack = [node]
        while stack:
            current = stack.pop()
            if current in self.results:
                return True
            for user in current.users:
                if user.op == "output":
                    return True
                inside = user in nodes
                if user in self._moving or (inside and user in self._widening):
                    stack.append(user)
                elif not inside and not (node in self._widening and user in self._fusible):
                    return True
        return False


def works(node: fx.Node) -> bool:
    """Whether a node computes something: no view, no constant, no random numbers."""
    return not _moves(node) and node.target not in _GENERATORS


def computes_pointwise(node: fx.Node) -> bool:
    """Whether a node is computed element by element, or by no work at all."""
    return _fusible(node) and node.target not in _REDUCTIONS


def passes(node: fx.Node) -> bool:
    """Whether reading a node means reading its input: a view, or a widening cast."""
    return _moves(node) or is_widening(node)


def _moves(node: fx.Node) -> bool:
    """Whether a node is a view, or takes one of several views."""
    if getattr(node.target, "__name__", "") == "getitem":
        return node.all_input_nodes[0].target in _MOVES
    return node.target in _MOVES


def _fusible(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    target = node.target
    if target in _MOVES or target in _GENERATORS or target in _POINTWISE or target in _REDUCTIONS:
        return True
    if getattr(target, "__name__", "") == "getitem":
        return _fusible(node.all_input_nodes[0])
    return torch.Tag.pointwise in getattr(target, "tags", ())


def _is_column_reduction(node: fx.Node) -> bool:
    """A reduction that keeps the last axis: it needs all rows, so it ends its kernel."""
    if node.target not in _REDUCTIONS:
        return False
    value = tensor_of(node.all_input_nodes[0])
    dims = node.args[1] if len(node.args) > 1 else None
    if value is None or not isinstance(dims, (list, tuple)) or not dims:
        return False
    return all(int(d) % value.dim() != value.dim() - 1 for d in dims)


def _grouped(graph: fx.Graph, labels: Mapping[fx.Node, Label]) -> dict[fx.Node, _Group]:
    forward = {n for n, label in labels.items() if label == "forward"}
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    fusible = {n for n in nodes if _fusible(n)}
    level: dict[fx.Node, int] = {}
    for node in nodes:
        level[node] = max(
            (
                level[s] + _barrier(s, node, fusible, forward)
                for s in node.all_input_nodes
                if s in level
            ),
            default=0,
        )
    for node in reversed(nodes):  # as late as its users allow, as Inductor inlines it
        users = [u for u in node.users if u.op == "call_function"]
        if node not in fusible or node.target in _REDUCTIONS or len(users) < len(node.users):
            continue
        if users and all(u in fusible and _barrier(node, u, fusible, forward) == 0 for u in users):
            level[node] = max(level[node], min(level[u] for u in users))
    parent = {n: n for n in fusible}

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node  # type: ignore[no-any-return]

    for node in nodes:
        for source in node.all_input_nodes:
            together = node in fusible and source in fusible and level[node] == level[source]
            if together and (node in forward) == (source in forward):
                parent[find(source)] = find(node)
    members: dict[fx.Node, set[fx.Node]] = {}
    for node in fusible:
        members.setdefault(find(node), set()).add(node)
    return {n: group for m in members.values() for group in [_Group(frozenset(m))] for n in m}


def _barrier(source: fx.Node, user: fx.Node, fusible: set[fx.Node], forward: set[fx.Node]) -> int:
    """How many kernels must end between a node and its user."""
    if source not in fusible or user not in fusible or (source in forward) != (user in forward):
        return 1
    if _is_column_reduction(source):
        return 1
    if _is_column_reduction(user) and len(source.users) > 1 and not _moves(source):
        return 1
    return 0
