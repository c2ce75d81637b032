"""Every kernel that may run in a graph, as candidates of the integer program.

Four kinds: the regions of every anchor; library calls; the groups that Inductor would fuse; and
what such a group becomes when regions take nodes out of it. A backward group may compute forward
values again in place of reading them, a forward group may leave out what only backward would read.
With every library call and every whole group among them, the program always has an answer.

Views, widening casts and constants are free: reading one is reading what it is made of.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from torch import fx

from torch_evt.devices import Device
from torch_evt.graphs import output_values, tensor_of
from torch_evt.mainloops import for_target
from torch_evt.partition.early import Early
from torch_evt.partition.elementwise import constant
from torch_evt.partition.halves import Label
from torch_evt.partition.plan import Half
from torch_evt.partition.price import (
    InductorModel,
    passes,
    product_us,
    region_bytes,
    region_us,
    works,
)
from torch_evt.partition.problem import Candidate, Problem
from torch_evt.partition.recompute import Nodes, Recomputation, root, views
from torch_evt.partition.region import Region, is_widening

_MAX_REMAINDERS = 48
"""Ways in which regions may take nodes out of one group."""
_REGION_US = 0.01
"""What a region has to gain at least to be worth it, in microseconds: the model knows no less."""
_LATER_US = 1e-3
"""By how much the last anchor's region is cheaper than the first's. It settles ties: where two
products meet (a gated form, a residual), the later one loads what the earlier one has left."""
_MAX_TOGGLES = 3
"""Values of one kernel that are recomputed, or left out, each apart from the others."""


@dataclass(frozen=True)
class Kernel:
    """What a candidate stands for. nodes: what it computes; bytes_moved: what it reads from and
    leaves in memory; region: None where Inductor or a library runs it."""

    candidate: Candidate
    nodes: Nodes
    bytes_moved: int
    region: Region | None = None


@dataclass(frozen=True)
class Saving:
    """What the user asked for: save_weight in us a byte, memory_budget in bytes, None for any;
    values that must or must not be saved."""

    weight: float = 0.0
    budget: int | None = None
    must: Nodes = frozenset()
    must_not: Nodes = frozenset()

    @property
    def costs(self) -> bool:
        """Whether saving is not free, so that computing again may be worth a kernel of its own."""
        return self.weight > 0 or self.budget is not None or bool(self.must_not)


def enumerate_kernels(
    graph: fx.Graph,
    device: Device,
    labels: Mapping[fx.Node, Label],
    model: InductorModel,
    early: Early,
    regions: Sequence[Region],
    num_forward_outputs: int,
    saving: Saving,
    together: Sequence[Sequence[Region]] = (),
) -> tuple[list[Kernel], Problem]:
    """All kernels and the problem over them, candidate by candidate.

    labels: of the graph's nodes. model, early: of the same graph. regions: of all anchors.
    together: sets of regions that the program should be able to choose whatever the limits (a
    greedy plan).
    """
    return _Enumerator(graph, device, labels, model, early, num_forward_outputs).run(
        regions, saving, together
    )


class _Enumerator:
    def __init__(
        self,
        graph: fx.Graph,
        device: Device,
        labels: Mapping[fx.Node, Label],
        model: InductorModel,
        early: Early,
        num_forward_outputs: int,
    ) -> None:
        self.device, self.labels, self.model, self.early = device, labels, model, early
        self.recomputation = Recomputation(labels, model.size)
        self.number = {node: i for i, node in enumerate(graph.nodes)}
        self.runs = {n for n in graph.nodes if _runs(n)}
        self.inputs: dict[Nodes, tuple[dict[fx.Node, int], dict[fx.Node, Nodes]]] = {}
        self.in_memory = {n for n in graph.nodes if _lies_in_memory(n)}
        self.kernels: dict[object, Kernel] = {}
        self.results = self._results(output_values(graph), num_forward_outputs)
        self.returned = {value for value, _ in self.results}
        self.readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
        for node in graph.nodes:
            if node.op == "call_function" and not passes(node):
                for source in node.all_input_nodes:
                    self.readers[root(source)].add(node)

    def _results(self, values: Sequence[object], forward: int) -> set[tuple[fx.Node, Half]]:
        halves: set[Half] = {label for label in self.labels.values() if label != "either"}
        both = {"forward", "backward"} <= halves
        only: Half = next(iter(sorted(halves)), "forward")
        found: set[tuple[fx.Node, Half]] = set()
        for i, value in enumerate(values):
            if isinstance(value, fx.Node) and root(value) in self.in_memory:
                half: Half = ("forward" if i < forward else "backward") if both else only
                found.add((root(value), half))
        return found

    def half(self, node: fx.Node) -> Half:
        label = self.labels[node]
        return "backward" if label == "either" else label

    def run(
        self, regions: Sequence[Region], saving: Saving, together: Sequence[Sequence[Region]]
    ) -> tuple[list[Kernel], Problem]:
        for region in regions:
            self._add_region(region)
        for node in self.number:
            if node.op == "call_function" and node not in self.model.groups and works(node):
                self._add_library_call(node)
        for nodes in self._remainders(regions, together):
            self._add_group(nodes)
        if saving.costs:
            self._add_recomputations()
        kernels = sorted(self.kernels.values(), key=_by_contents)
        return kernels, self._problem(kernels, saving)

    def _problem(self, kernels: Sequence[Kernel], saving: Saving) -> Problem:
        values = {v for k in kernels for v in (*k.candidate.reads, *k.candidate.stores)}
        results = {(self.number[v], half) for v, half in self.results}
        kept_anyway = {v for v, half in results if half == "forward"}
        nodes = list(self.number)
        sizes = {
            v: 0 if v in kept_anyway else self.model.size(nodes[v])
            for v in values
            if nodes[v].op == "call_function"
        }
        return Problem(
            [kernel.candidate for kernel in kernels],
            sizes,
            frozenset(results),
            saving.weight,
            saving.budget,
            frozenset(self.number[root(v)] for v in saving.must),
            frozenset(self.number[root(v)] for v in saving.must_not),
        )

    def _add(
        self,
        half: Half,
        cost_us: float,
        nodes: Nodes,
        reads: Iterable[fx.Node],
        stores: Iterable[fx.Node],
        bytes_moved: int,
        *,
        covers: Nodes | None = None,
        copies: Nodes = frozenset(),
        region: Region | None = None,
    ) -> None:
        """Keep a kernel, the cheaper one where two compute, read and store the same."""
        numbers = self.number
        candidate = Candidate(
            half,
            cost_us,
            frozenset(numbers[n] for n in (nodes if covers is None else covers) if n in self.runs),
            frozenset(numbers[v] for v in reads if v in self.in_memory),
            frozenset(numbers[v] for v in stores),
            frozenset(numbers[v] for v in copies),
        )
        if not candidate.covers and not candidate.copies:
            return
        key = (half, candidate.covers, candidate.reads, candidate.stores, region is not None)
        known = self.kernels.get(key)
        if known is None or cost_us < known.candidate.cost_us:
            self.kernels[key] = Kernel(candidate, nodes, bytes_moved, region)

    def _add_region(self, region: Region) -> None:
        inside = frozenset(region.nodes)
        if region.kept and self.half(region.anchor) == "forward":
            region = replace(region, kept=self._kept_in_forward(region.kept, inside))
        place = self.number[region.anchor] / len(self.number)
        stores = {root(n) for output in region.outputs for n in output.nodes}
        self._add(
            self.half(region.anchor),
            region_us(region, self.device) + _REGION_US - _LATER_US * place,
            inside,
            {root(i.node) for i in region.inputs},
            stores & inside,
            region_bytes(region),
            covers=inside - region.kept,
            region=region,
        )

    def _kept_in_forward(self, kept: Nodes, inside: Nodes) -> Nodes:
        """The kept nodes that forward needs outside the region, and what these need: of the others
        backward alone would read the originals, and it can compute them again."""
        needed: set[fx.Node] = set()
        left = {
            node
            for node in kept
            if any((root(node), half) in self.results for half in ("forward", "inference"))
            or any(self.half(r) == "forward" for r in self.readers[root(node)] - inside)
        }
        while left:
            node = left.pop()
            needed.add(node)
            left |= (kept & {*node.all_input_nodes}) - needed
        return frozenset(needed)

    def _add_library_call(self, node: fx.Node) -> None:
        if _is_part(node):
            return
        parts = frozenset(u for u in node.users if _is_part(u))
        stores = {n for n in (node, *parts) if n in self.in_memory}
        reads: dict[fx.Node, int] = defaultdict(int)
        for source in node.all_input_nodes:  # q, k and v may be parts of one value
            whole = root(source)
            reads[whole] = min(self.model.size(whole), reads[whole] + self.model.size(source))
        written = sum(self.model.size(n) for n in stores)
        if for_target(node.target) is not None:
            cost = product_us(node, self.device)
        else:
            cost = self.model.kernel_us(reads, written, frozenset())
        moved = sum(reads.values()) + written
        self._add(self.half(node), cost, frozenset({node, *parts}), reads, stores, moved)

    def _remainders(
        self, regions: Sequence[Region], together: Sequence[Sequence[Region]]
    ) -> Iterator[_Remainder]:
        """Every group: whole, and less what regions take, or forward computes early."""
        taking: dict[Nodes, dict[fx.Node | None, dict[_Part, None]]] = defaultdict(dict)
        groups = {id(g): g.nodes for g in self.model.groups.values()}.values()
        homes: dict[Half, dict[fx.Node, Nodes]] = defaultdict(dict)
        for nodes in groups:
            homes[self.half(next(iter(nodes)))].update(dict.fromkeys(nodes, nodes))

        def parts_of(region: Region) -> dict[Nodes, _Part]:
            return _parts(region, homes[self.half(region.anchor)])

        for region in regions:
            for nodes, part in parts_of(region).items():
                taking[nodes].setdefault(region.anchor, {})[part] = None
        for group, taken in _by_group(self.early.nodes, homes["backward"]).items():
            taking[group] = {None: {_Part(taken, frozenset()): None}, **taking[group]}
        for early in self.early.of.values():
            for group, taken in _by_group(early, homes["backward"]).items():
                taking[group][None][_Part(taken, frozenset())] = None
        taken_together: list[dict[Nodes, list[_Part]]] = []
        for chosen in together:
            taken_together.append(defaultdict(list))
            for region in chosen:
                for nodes, part in parts_of(region).items():
                    taken_together[-1][nodes].append(part)
        for nodes in groups:
            ways: dict[_Part, None] = {_Part(frozenset(), frozenset()): None}
            for parts in taken_together:
                ways[_joined(parts[nodes])] = None
            by_anchor = [list(parts) for parts in taking[nodes].values()]
            for way in itertools.islice(_ways(by_anchor), _MAX_REMAINDERS):
                ways[way] = None
            for way in ways:
                for component in _components(nodes - way.taken):
                    yield _Remainder(component, way.taken, way.copied)

    def _add_group(self, remainder: _Remainder) -> None:
        half = self.half(next(iter(remainder.nodes)))
        self._add_kernels(remainder, half)
        if half == "forward":
            needed, idle = self._stored(remainder, half)
            early = (self.early.of.get(value, frozenset()) for value in needed | idle)
            if more := frozenset().union(*early):
                self._add_kernels(replace(remainder, nodes=remainder.nodes | more), half)

    def _add_kernels(self, remainder: _Remainder, half: Half) -> None:
        nodes = remainder.nodes
        needed, idle = self._stored(remainder, half)
        instead = {value: self._stored_instead(value, nodes) for value in idle}
        if nodes not in self.inputs:  # of several remainders, each of other regions
            reads = self.model.reads_of(nodes)
            self.inputs[nodes] = reads, self._recomputable(reads, half)
        reads, chains = self.inputs[nodes]
        for left_out in _subsets(idle):
            stores = needed.union(idle - left_out, *(instead[value] for value in left_out))
            written = sum(self.model.size(v) for v in stores)
            for again in _subsets(chains.keys()):
                own = reads
                if again:
                    own = self.model.reads_of(nodes.union(*(chains[value] for value in again)))
                cost = self.model.kernel_us(own, written, remainder.taken)
                self._add(half, cost, nodes, own, stores, sum(own.values()) + written)

    def _stored(self, remainder: _Remainder, half: Half) -> tuple[Nodes, Nodes]:
        """The values of a group that others read: those that must be stored, and those that only
        backward reads and can compute again."""
        needed, idle = set(), set()
        outside = remainder.nodes | remainder.copied
        for node in remainder.nodes:
            if node not in self.in_memory or is_widening(node):
                continue
            readers = self.readers[node] - outside
            result = node in self.returned
            if not readers and not result:
                continue
            forward = result or any(self.half(r) == half for r in readers)
            if forward or half != "forward" or not self.recomputation.chain(node, ()).nodes:
                needed.add(node)
            else:
                idle.add(node)
        return frozenset(needed), frozenset(idle)

    def _stored_instead(self, value: fx.Node, nodes: Nodes) -> Nodes:
        """What a kernel of these nodes must store for backward to compute a value again."""
        return self.recomputation.chain(value, ()).reads & nodes

    def _recomputable(self, reads: Mapping[fx.Node, int], half: Half) -> dict[fx.Node, Nodes]:
        """The values that a backward kernel reads and can compute again, and by which nodes."""
        if half != "backward":
            return {}
        found: dict[fx.Node, Nodes] = {}
        ordered = sorted(reads, key=self.number.__getitem__)  # one's chain changes what others read
        read, more = set(reads), True
        while more:
            more = False
            for value in [v for v in ordered if v not in found]:
                chain = self.recomputation.chain(value, read)
                if chain.nodes:
                    found[value], more = chain.nodes, True
                    read = read - {value} | chain.reads
        return found

    def _add_recomputations(self) -> None:
        """A kernel for each forward value that a library call or region reads in backward."""
        wanted = {
            v
            for k in list(self.kernels.values())
            if k.candidate.half == "backward"
            for v in k.candidate.reads
        }
        for value, number in self.number.items():
            if number not in wanted or not self.recomputation.possible(value):
                continue
            chain = frozenset({value, *(v for s in value.all_input_nodes for v in views(s))})
            reads = self.model.reads_of(chain)
            written = self.model.size(value)
            cost = self.model.kernel_us(reads, written, frozenset())
            moved = sum(reads.values()) + written
            copy = frozenset({value})
            self._add("backward", cost, chain, reads, copy, moved, covers=frozenset(), copies=copy)


def _by_contents(kernel: Kernel) -> tuple[object, ...]:
    """A key that does not depend on the order in which sets of nodes are walked."""
    candidate = kernel.candidate
    sets = (candidate.covers, candidate.copies, candidate.reads, candidate.stores)
    return (candidate.half, *(sorted(values) for values in sets), kernel.region is not None)


@dataclass(frozen=True)
class _Part:
    """What a region takes out of a group, and what it has a copy of."""

    taken: Nodes
    copied: Nodes


@dataclass(frozen=True)
class _Remainder:
    """One kernel that is left of a group. taken: by regions; copied: of which they have copies."""

    nodes: Nodes
    taken: Nodes
    copied: Nodes


def _parts(region: Region, home: Mapping[fx.Node, Nodes]) -> dict[Nodes, _Part]:
    """What a region takes out of each group. home: the group of each node of the region's half."""
    copied = _by_group(region.kept, home)
    return {
        group: _Part(
            nodes - copied.get(group, frozenset()), nodes if group in copied else frozenset()
        )
        for group, nodes in _by_group(region.nodes, home).items()
    }


def _by_group(nodes: Iterable[fx.Node], home: Mapping[fx.Node, Nodes]) -> dict[Nodes, Nodes]:
    """Nodes by the group that they are in; those in none are left out."""
    found: dict[Nodes, set[fx.Node]] = defaultdict(set)
    for node in nodes:
        if node in home:
            found[home[node]].add(node)
    return {group: frozenset(members) for group, members in found.items()}


def _ways(by_anchor: Sequence[Sequence[_Part]]) -> Iterator[_Part]:
    """What the regions of one, two or three anchors take together."""
    for count in (1, 2, 3):
        for anchors in itertools.combinations(by_anchor, count):
            for parts in itertools.product(*anchors):
                if _disjoint(parts):
                    yield _joined(parts)


def _joined(parts: Iterable[_Part]) -> _Part:
    taken: Nodes = frozenset()
    copied: Nodes = frozenset()
    for part in parts:
        taken, copied = taken | part.taken, copied | part.copied
    return _Part(taken, copied)


def _disjoint(parts: Sequence[_Part]) -> bool:
    return len(frozenset().union(*(p.taken for p in parts))) == sum(len(p.taken) for p in parts)


def _is_part(node: fx.Node) -> bool:
    """Whether a node takes one of several results."""
    return getattr(node.target, "__name__", "") == "getitem"


def _lies_in_memory(value: fx.Node) -> bool:
    """Whether a value is written by a kernel and has bytes."""
    return value.op == "call_function" and works(value) and tensor_of(value) is not None


def _runs(node: fx.Node) -> bool:
    """Whether somebody has to run a node: it is computed, and neither a view nor a constant."""
    return node.op == "call_function" and works(node) and not passes(node)


def _subsets(values: AbstractSet[fx.Node]) -> Iterator[Nodes]:
    """None of the values, all of them, and each of them alone where they are few."""
    yield frozenset()
    if values:
        yield frozenset(values)
    if 1 < len(values) <= _MAX_TOGGLES:
        yield from (frozenset({value}) for value in values)


def _components(nodes: Nodes) -> list[Nodes]:
    """The parts of a set of nodes that touch each other, or read the same value."""
    readers: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in nodes and constant(source) is None:
                readers[root(source)].add(node)
    left = set(nodes)
    found = []
    while left:
        stack = [left.pop()]
        component = set(stack)
        while stack:
            node = stack.pop()
            beside = (
                readers[root(source)] for source in node.all_input_nodes if source not in nodes
            )
            for near in itertools.chain(node.all_input_nodes, node.users, *beside):
                if near in left:
                    left.discard(near)
                    component.add(near)
                    stack.append(near)
        found.append(frozenset(component))
    return found
