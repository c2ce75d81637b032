"""Cutting the joint graph where the plan says: what is saved, what backward computes again.

Min-cut obeys the marks of activation checkpointing (`torch.utils.checkpoint.CheckpointPolicy`): a
node marked MUST_SAVE is never computed again, one marked MUST_RECOMPUTE is never saved. With every
planned value marked the one way, and every forward node that backward then needs the other way, it
has no choice left (torch/_functorch/partitioners.py, `solve_min_cut`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_evt.graphs import draws, output_values, tensor_of
from torch_evt.partition.halves import label_joint
from torch_evt.partition.price import computes_pointwise

_MARK, _REGION = "recompute", "ac_graph_id"
_TO_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_TO_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def users_marks(graph: fx.Graph) -> tuple[frozenset[fx.Node], frozenset[fx.Node]]:
    """The nodes that the user's checkpointing wants saved, and those it wants computed again."""
    saved = {n for n in graph.nodes if n.meta.get(_MARK) in _TO_SAVE}
    again = {n for n in graph.nodes if n.meta.get(_MARK) in _TO_RECOMPUTE}
    return frozenset(saved), frozenset(again)


def mark(graph: fx.Graph, saved: Collection[str], num_forward_outputs: int) -> str | None:
    """Mark a joint graph so that exactly the values of these names are saved for backward.

    Marks that are there already are replaced: the plan has kept to them. Returns None, or, with the
    graph left as it is, why it cannot be cut so.
    """
    labels = label_joint(graph, num_forward_outputs)
    gradients = {v for v in output_values(graph)[num_forward_outputs:] if isinstance(v, fx.Node)}
    later = [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and n.name not in saved
        and (labels[n] == "backward" or (labels[n] == "either" and n in gradients))
    ]
    again: set[fx.Node] = {n for n in later if labels[n] == "either"}
    while later:
        for source in later.pop().all_input_nodes:
            if source.op != "call_function" or source.name in saved or source in again:
                continue
            if labels[source] == "backward" or isinstance(source.meta.get("val"), torch.SymInt):
                continue
            if labels[source] == "forward" and not computes_pointwise(source):
                return f"backward would have to compute {source.name} again"
            again.add(source)
            later.append(source)
    if any(draws(node) for node in again):
        return "backward would have to draw random numbers again"
    if any(_MARK in node.meta and draws(node) for node in graph.nodes):
        return "a checkpointed part of the model draws random numbers"
    for node in graph.nodes:
        node.meta.pop(_MARK, None)
        if node in again:
            node.meta[_MARK] = CheckpointPolicy.MUST_RECOMPUTE
        elif node.name in saved:
            node.meta[_MARK] = CheckpointPolicy.MUST_SAVE
        if _MARK in node.meta:
            node.meta.setdefault(_REGION, 0)
    return None


def unmark(graph: fx.Graph) -> None:
    """Forget the marks in a half: passes tell nodes with different ones apart."""
    for node in graph.nodes:
        for key in (_MARK, _REGION):
            node.meta.pop(key, None)


def not_planned(
    forward: fx.Graph, saved: Collection[str], num_forward_outputs: int
) -> Iterable[str]:
    """The tensors that a forward graph saves, inputs aside, though nobody planned it."""
    for value in output_values(forward)[num_forward_outputs:]:
        is_tensor = isinstance(value, fx.Node) and tensor_of(value) is not None
        if is_tensor and value.op != "placeholder" and value.name not in saved:
            yield value.name
