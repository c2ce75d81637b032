"""Regions that compute values again in place of reading them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from torch_evt.graphs import tensor_of
from torch_evt.partition import candidates
from torch_evt.partition.builder import Builder
from torch_evt.partition.candidates import Rules
from torch_evt.partition.recompute import Recomputation, root, views
from torch_evt.partition.region import Region


def with_copies(
    regions: Iterable[Region],
    recomputation: Recomputation,
    position: Mapping[fx.Node, int],
    rules: Rules,
) -> Iterator[Region]:
    """The regions of one anchor with copies of all values that are cheaper to compute again than to
    read, where there are any and the kernel can hold them.

    The originals stay where they are: the copies are `kept`. position: of the graph's nodes.
    """
    builder: Builder | None = None
    for region in regions:
        again = _computed_again(region, recomputation, position)
        if not again:
            continue
        builder = builder or candidates.builder_of(region.anchor, region.mainloop, rules)
        nodes = sorted(again.union(region.nodes), key=position.__getitem__)
        built = candidates.rebuild(builder, nodes, region.kept | again)
        if isinstance(built, Region):
            yield built


def _computed_again(
    region: Region, recomputation: Recomputation, position: Mapping[fx.Node, int]
) -> frozenset[fx.Node]:
    """The nodes that the region would hold copies of, the views between them included."""

    @functools.cache
    def fits(node: fx.Node) -> bool:
        value = tensor_of(node)
        return value is not None and region.space.groups(value.shape) is not None

    inside = set(region.nodes)
    sources = {s for node in region.nodes for s in node.all_input_nodes if s not in inside}
    loaded = {root(load.node) for load in region.inputs[len(region.tree.operands) :]}
    again: set[fx.Node] = set()
    waiting = {s for s in sources if root(s) in loaded and root(s) not in inside}
    while waiting:
        found = set()
        for source in sorted(waiting, key=position.__getitem__):
            value = root(source)
            chain = recomputation.chain(value, loaded - {value}, fits)
            if chain.nodes and all(fits(view) for view in views(source)):
                again |= chain.nodes | set(views(source))
                loaded = loaded - {value} | chain.reads
                found.add(source)
        waiting = waiting - found if found else set()
    return frozenset(again - inside)
