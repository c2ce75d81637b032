"""Values in which a gradient looks for a maximum again.

The gradient of a maximum goes where `value == maximum`. Backward may have computed the value a
second time, from a stored product that was rounded. A region that computes the value, without that
rounding or with other contractions, would leave a maximum that equals none of them, and the
gradient would be 0 / 0. So neither such a value nor what it is computed from enters a region,
except the product itself, which is never computed again.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_evt.graphs import COMPARED
from torch_evt.partition.elementwise import is_elementwise
from torch_evt.partition.region import is_view, is_widening

aten = torch.ops.aten

_MAXIMA = frozenset({aten.amax.default, aten.amin.default, aten.max.default, aten.min.default})
_EQUALITY = frozenset({aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor})


def mark_compared(graph: fx.Graph) -> None:
    """Mark every elementwise node whose value decides a comparison with a maximum of itself."""
    for node in graph.nodes:
        if node.target in _MAXIMA and _meets_equality(node):
            stack = [node.args[0]]
            while stack:
                value = stack.pop()
                if not isinstance(value, fx.Node) or COMPARED in value.meta:
                    continue
                if is_elementwise(value) or is_view(value) or is_widening(value):
                    value.meta[COMPARED] = True
                    stack.extend(value.all_input_nodes)


def is_compared(node: fx.Node) -> bool:
    """Whether `mark_compared` marked a node."""
    return COMPARED in node.meta


def _meets_equality(maximum: fx.Node) -> bool:
    """Whether a maximum, seen through what changes no value, is an argument of a comparison."""
    stack = [maximum]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user.target in _EQUALITY:
                return True
            if is_view(user) or is_widening(user) or user.target in _MAXIMA:
                stack.append(user)
    return False
