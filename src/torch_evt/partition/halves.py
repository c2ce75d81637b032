"""Which half of training each node of a graph belongs to."""

from __future__ import annotations

from typing import Literal

from torch import fx

from torch_evt.graphs import output_values
from torch_evt.partition.plan import Half

Label = Literal["forward", "backward", "inference", "either"]


def label_joint(graph: fx.Graph, num_forward_outputs: int) -> dict[fx.Node, Label]:
    """Labels of a joint graph's nodes.

    Backward: reachable from a tangent. Forward: a result of the forward pass needs it. Either: the
    rest, which only backward needs although no tangent enters it.
    """
    labels: dict[fx.Node, Label] = {}
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        reached = any(labels.get(source) == "backward" for source in node.all_input_nodes)
        labels[node] = "backward" if is_tangent or reached else "either"
    needed = [v for v in output_values(graph)[:num_forward_outputs] if isinstance(v, fx.Node)]
    while needed:
        node = needed.pop()
        if labels[node] == "either":
            labels[node] = "forward"
            needed.extend(node.all_input_nodes)
    return labels


def label_all(graph: fx.Graph, half: Half) -> dict[fx.Node, Label]:
    """Labels of a graph that is one half, or an inference graph."""
    return {node: half for node in graph.nodes}
