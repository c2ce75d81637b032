"""Common subexpressions: one value once, so that the plan sees what min-cut will see.

Min-cut starts by merging equal nodes of the joint graph; this runs the very same function first.
Random operations, and values that the graph returns, are never merged.
"""

from __future__ import annotations

from torch import fx

from torch_evt.graphs import replace_contents
from torch_evt.torch_compat import common_subexpressions


def apply(graph: fx.Graph) -> int:
    """Rewrite in place; the number of nodes that went away."""
    before = len(graph.nodes)
    replace_contents(graph, common_subexpressions(graph))
    return before - len(graph.nodes)
