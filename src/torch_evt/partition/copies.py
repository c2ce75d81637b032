"""Backward regions that compute forward values again in place of reading them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import fx

from torch_evt.graphs import tensor_of
from torch_evt.partition import candidates
from torch_evt.partition.candidates import Rules
from torch_evt.partition.recompute import Recomputation, root, views
from torch_evt.partition.region import Region


def with_copies(
    region: Region, recomputation: Recomputation, position: Mapping[fx.Node, int], rules: Rules
) -> Region | None:
    """The region with copies of all forward values that are cheaper to compute again than to read;
    None where there are none, or the kernel cannot hold them.

    The originals stay in forward: the copies are `kept`. position: of the graph's nodes.
    """

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
    if not again - inside:
        return None
    nodes = sorted(inside | again, key=position.__getitem__)
    kept = region.kept | (again - inside)
    built = candidates.build(region.anchor, region.mainloop, nodes, rules, kept=kept)
    return built if isinstance(built, Region) else None
