"""Rewriting a tree bottom-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch_evt.tree.ir import (
    Cast,
    Compute,
    Keep,
    Neighbour,
    Select,
    Statistic,
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
