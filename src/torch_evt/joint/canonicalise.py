"""Canonicalise: one spelling for views, permutes, expands and casts.

    view(view(x, a), b)        -> view(x, b)           where x is contiguous
    view(x, shape of x)        -> x
    permute(permute(x, p), q)  -> permute(x, q after p), and x where that is the identity
    expand(x, shape of x)      -> x
    convert(x, dtype of x)     -> x
    t, transpose, reshape, _unsafe_view, squeeze, unsqueeze -> permute or view

Legal when shape and stride stay what they were. A value that the graph returns keeps its node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_evt.graphs import is_contiguous, same_sizes, tensor_of

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
_TO_VIEW = {aten._unsafe_view.default, aten.reshape.default, aten.view.default}
_TO_STATIC_VIEW = {
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}


def apply(graph: fx.Graph) -> int:
    """Rewrite in place; the number of nodes that changed or went away."""
    changed = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or tensor_of(node) is None:
            continue
        changed += _respell(node)
        source = _replacement(node)
        if source is not None and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(source)
            changed += 1
    graph.eliminate_dead_code()
    return changed


def _respell(node: fx.Node) -> int:
    """Give a view or permute its one spelling, shorten chains."""
    value = tensor_of(node)
    source = node.args[0] if node.args else None
    before = tensor_of(source)
    if value is None or before is None or not isinstance(source, fx.Node):
        return 0
    target: Any = node.target
    if target is aten.t.default and before.dim() == 2:
        return _set(node, aten.permute.default, (source, [1, 0]))
    if target is aten.transpose.int:
        order = list(range(before.dim()))
        i, j = (int(d) % before.dim() for d in node.args[1:3])  # type: ignore[arg-type]
        order[i], order[j] = order[j], order[i]
        return _set(node, aten.permute.default, (source, order))
    if target is aten.permute.default and source.target is aten.permute.default:
        inner = [int(d) % before.dim() for d in source.args[1]]  # type: ignore[union-attr,arg-type]
        outer = [int(d) % before.dim() for d in node.args[1]]  # type: ignore[union-attr,arg-type]
        return _set(node, aten.permute.default, (source.args[0], [inner[d] for d in outer]))
    static = all(isinstance(size, int) for size in (*value.shape, *before.shape))
    as_view = static and is_contiguous(before) and is_contiguous(value)
    if target in _TO_VIEW or (target in _TO_STATIC_VIEW and as_view):
        shape = list(value.shape) if static else node.args[1]
        root: Any = source
        while root.target in _TO_VIEW:
            base = tensor_of(root.args[0])
            if base is None or not is_contiguous(base):
                break
            root = root.args[0]
        if root is not source or target is not aten.view.default:
            if target is aten.reshape.default and not is_contiguous(before):
                return 0  # may copy
            return _set(node, aten.view.default, (root, shape))
    return 0


def _set(node: fx.Node, target: Any, args: tuple[Any, ...]) -> int:
    if node.target is target and node.args == args:
        return 0
    node.target, node.args, node.kwargs = target, args, {}
    return 1


def _replacement(node: fx.Node) -> fx.Node | None:
    """The input of a node that does nothing."""
    source = node.args[0] if node.args else None
    value, before = tensor_of(node), tensor_of(source)
    if value is None or before is None or not isinstance(source, fx.Node):
        return None
    if not same_sizes(value.shape, before.shape) or value.dtype != before.dtype:
        return None
    if node.target is aten.permute.default:
        order = [int(d) % before.dim() for d in node.args[1]]  # type: ignore[union-attr,arg-type]
        return source if order == list(range(before.dim())) else None
    if node.target in (aten.view.default, aten.expand.default, _CONVERT) and same_sizes(
        value.stride(), before.stride()
    ):
        return source
    return None
