"""Eager dropout: under `rng=eager`, native_dropout's mask becomes an operand.

    y, mask = native_dropout(x, p, True)   ->   mask = eager_keep_mask(shape of x, p)
                                                y = x * mask * (1 / (1 - p))

The numbers are those that eager draws, in the order in which eager draws them: each mask depends on
the one before. Legal when every random operation of the graph is a dropout of a contiguous tensor,
and nothing is recomputed under a checkpoint, where PyTorch itself keeps the random state.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torch_evt.graphs import is_contiguous, rename, tensor_of
from torch_evt.runtime.random_masks import EAGER_KEEP_MASK

aten = torch.ops.aten


def apply(graph: fx.Graph) -> int:
    """Rewrite in place; the number of dropouts rewritten."""
    random = [node for node in graph.nodes if _is_random(node)]
    if not random or not all(_is_plain_dropout(node) for node in random):
        return 0
    if any("recompute" in node.meta for node in graph.nodes):
        return 0
    after: fx.Node | None = None
    for node in random:
        after = _rewrite(graph, node, after)
    return len(random)


def _is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention is tagged as random even without dropout."""
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in tags:
        return False
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    for position, argument in enumerate(schema):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0.0)
    return True


def _is_plain_dropout(node: fx.Node) -> bool:
    if node.target is not aten.native_dropout.default:
        return False
    x, p, train = node.args
    value = tensor_of(x)
    return (
        train is True
        and isinstance(p, float)
        and 0.0 < p < 1.0
        and value is not None
        and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and is_contiguous(value)
        and all(user.target is operator.getitem for user in node.users)
    )


def _rewrite(graph: fx.Graph, node: fx.Node, after: fx.Node | None) -> fx.Node:
    x, p, _ = node.args
    value = tensor_of(x)
    assert isinstance(x, fx.Node) and isinstance(p, float) and value is not None
    outputs: dict[Any, list[fx.Node]] = {0: [], 1: []}
    for user in node.users:
        outputs[user.args[1]].append(user)
    with graph.inserting_before(node):
        size: list[Any] = []
        for d, extent in enumerate(value.shape):
            if isinstance(extent, int):
                size.append(extent)
                continue
            node_of_size = graph.call_function(aten.sym_size.int, (x, d))
            node_of_size.meta["val"] = extent
            size.append(node_of_size)
        mask = graph.call_function(
            EAGER_KEEP_MASK, (size, p, after), {"dtype": value.dtype, "device": value.device}
        )
        mask.meta["val"] = torch.empty_like(value, dtype=torch.bool)
        kept = graph.call_function(aten.mul.Tensor, (x, mask))
        kept.meta["val"] = torch.empty_like(value)
        scaled = graph.call_function(aten.mul.Tensor, (kept, 1.0 / (1.0 - p)))
        scaled.meta["val"] = torch.empty_like(value)
    replacements = {0: scaled, 1: mask}
    for index, getitems in outputs.items():
        new = replacements[index]
        for old in getitems:
            for key in ("partitioner_tag", "stack_trace", "nn_module_stack"):
                if key in old.meta:
                    new.meta[key] = old.meta[key]
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        if getitems:
            rename(new, getitems[0].name)
    kept.meta.update({k: v for k, v in scaled.meta.items() if k == "partitioner_tag"})
    graph.erase_node(node)
    return mask
