"""Rewriting a tree bottom-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from torch_evt.tree.ir import (
    Cast,
    Compute,
    Keep,
    Neighbour,
    Select,
    Sink,
    Statistic,
    Store,
    Tree,
    Value,
    postorder,
    roots,
)


def with_children(value: Value, child: Callable[[Value], Value]) -> Value:
    """`value` with each child replaced."""
    if isinstance(value, Compute):
        return Compute(value.function, tuple(child(a) for a in value.arguments))
    if isinstance(value, Cast):
        return Cast(child(value.value), value.dtype)
    if isinstance(value, Statistic):
        return Statistic(child(value.value), value.over, value.op)
    if isinstance(value, Neighbour):
        return Neighbour(child(value.value))
    if isinstance(value, Keep):
        return Keep(child(value.seed), child(value.offset), value.p)
    return value


def rebuild(tree: Tree, rewrite: Callable[[Value], Value]) -> Tree:
    """The tree with `rewrite` applied to every value once, arguments before users."""
    new: dict[Value, Value] = {}
    for value in postorder(roots(tree)):
        new[value] = rewrite(with_children(value, new.__getitem__))
    operands = tuple(
        o if o.value is None else dataclasses.replace(o, value=new[o.value]) for o in tree.operands
    )
    sinks = tuple(
        dataclasses.replace(s, value=new[s.value], column=new[s.column])
        if isinstance(s, Select)
        else dataclasses.replace(s, value=new[s.value])
        for s in tree.sinks
    )
    return Tree(tree.mainloop, operands, sinks)


def read_as_stored(sinks: Sequence[Sink]) -> list[Sink]:
    """The sinks, with every value that one of them stores in half precision read as it is stored.

    Backward computes from what was stored. A maximum or a logarithm of a sum that forward had taken
    of the value before its rounding would not belong to it.
    """
    halves = (torch.float16, torch.bfloat16)
    rounded = {s.value: s.dtype for s in sinks if isinstance(s, Store) and s.dtype in halves}
    own: dict[Value, Value] = {}
    read: dict[Value, Value] = {}
    starts = [s.value for s in sinks] + [s.column for s in sinks if isinstance(s, Select)]
    for value in postorder(starts):
        own[value] = read[value] = with_children(value, read.__getitem__)
        if value in rounded:
            read[value] = Cast(own[value], rounded[value])

    def rewritten(sink: Sink) -> Sink:
        if isinstance(sink, Store):
            return dataclasses.replace(sink, value=own[sink.value])
        if isinstance(sink, Select):
            return dataclasses.replace(sink, value=read[sink.value], column=read[sink.column])
        return dataclasses.replace(sink, value=read[sink.value])

    return [rewritten(sink) for sink in sinks]
