"""What would run in place of a chosen region if all else stayed as it was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from torch_evt.partition.kernels import Kernel
from torch_evt.partition.price import InductorModel, product_us, works
from torch_evt.partition.recompute import root
from torch_evt.partition.region import Region


class Instead:
    """Answers for one graph. numbered: its nodes, in order; results: the values that must be left
    in memory whoever reads them."""

    def __init__(
        self,
        chosen: Sequence[Kernel],
        numbered: Sequence[fx.Node],
        results: frozenset[fx.Node],
        model: InductorModel,
    ) -> None:
        self._model = model
        self._numbered = numbered
        self._results = results
        self._groups = [k for k in chosen if k.region is None and _computes_group(k, model)]
        self._regions = {k.region.anchor: k for k in chosen if k.region is not None}
        self._in_regions = {
            n: k.region.anchor
            for k in self._regions.values()
            if k.region is not None
            for n in k.region.nodes
            if n not in k.region.kept
        }
        self._holder = {n: k for k in self._groups for n in k.nodes}
        self._readers: dict[fx.Node, list[Kernel]] = {}
        for kernel in chosen:
            for number in kernel.candidate.reads:
                self._readers.setdefault(numbered[number], []).append(kernel)

    def us(self, region: Region) -> float:
        """Microseconds that Inductor would need for a region's work: the product alone, and what
        its kernels next to the region would need more, with the region's other nodes in them."""
        own = self._regions[region.anchor]
        inside = frozenset(region.nodes) - region.kept - {region.anchor}
        total = product_us(region.anchor, self._model.device)
        gone = {n for n, anchor in self._in_regions.items() if anchor is not region.anchor}
        loads = {root(i.node) for i in region.inputs[len(region.tree.operands) :]}
        own_nodes = (n for n in region.nodes if n in inside)  # in order: sums depend on it
        groups = {id(g): g.nodes for n in own_nodes if (g := self._model.groups.get(n)) is not None}
        for nodes in groups.values():
            part = nodes & inside
            if not any(works(node) for node in part):
                continue
            near = {id(k): k for n in part for k in self._next_to(n, nodes)}.values()
            merged = part.union(*(k.nodes for k in near))
            reads = {self._numbered[number] for k in near for number in k.candidate.reads}
            reads |= loads & self._model.reads_of(part | region.kept).keys()
            if part & set(region.anchor.users):
                reads.add(region.anchor)
            stores = {
                self._numbered[number]
                for k in (own, *near)
                for number in k.candidate.stores
                if self._numbered[number] in merged
            }
            apart = {id(own), *(id(k) for k in near)}
            written = sum(
                self._model.size(value)
                for value in stores
                if value in self._results
                or any(id(k) not in apart for k in self._readers.get(value, ()))
            )
            sizes = {value: self._model.size(value) for value in reads - merged}
            total += self._model.kernel_us(sizes, written, gone)
            total -= sum(k.candidate.cost_us for k in near)
        return total

    def _next_to(self, node: fx.Node, group: frozenset[fx.Node]) -> list[Kernel]:
        near = (*node.all_input_nodes, *node.users)
        return [self._holder[n] for n in near if n in group and n in self._holder]


def _computes_group(kernel: Kernel, model: InductorModel) -> bool:
    return any(node in model.groups for node in kernel.nodes)
