"""Mending a graph in which a value has another dtype than the graph says.

Inductor's softmax patterns put a value of float64 where float32 was (PyTorch 2.11 to 2.13: a
quotient in float64 that is rounded to float32 before the softmax). The loss then comes out in
float64, and backward reads its gradient as float32: gradients of 0 or NaN.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_evt.graphs import tensor_of

_CONVERT = torch.ops.prims.convert_element_type.default


def apply(graph: fx.Graph) -> int:
    """Round elementwise float64 results to the dtypes that the graph declares; their number."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return sum(_as_declared(graph, node) for node in nodes)


def _as_declared(graph: fx.Graph, node: fx.Node) -> int:
    """Round an elementwise float64 result to the dtype that the graph says it has."""
    value, operator = tensor_of(node), node.target
    if value is None or value.dtype == torch.float64 or not value.dtype.is_floating_point:
        return 0
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return 0
    sources = [t for t in map(tensor_of, node.all_input_nodes) if t is not None]
    wide = [t for t in sources if t.dtype == torch.float64]
    if not wide or torch.Tag.pointwise not in operator.tags:
        return 0
    if any(torch.result_type(w, t) != torch.float64 for w in wide for t in sources):
        return 0  # a scalar tensor does not widen others
    with graph.inserting_after(node):
        rounded = graph.call_function(_CONVERT, (node, value.dtype))
    rounded.meta.update(node.meta)
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
    node.meta["val"] = value.to(torch.float64)
    return 1
