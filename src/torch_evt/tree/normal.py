"""The normal form of a tree: what equal work is written as, and what all caches know it by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch_evt.tree.ir import Load, Term, Tree, Value, postorder, roots
from torch_evt.tree.rewrite import read_as_stored, rebuild
from torch_evt.tree.simplify import simplify
from torch_evt.tree.verify import verify

_REMEMBERED = 4096
"""Trees; the layers of one model have a few hundred different ones."""


@dataclass(frozen=True)
class Normal:
    """A verified tree. arguments, sizes: the former number of each argument and of each size."""

    tree: Tree
    arguments: tuple[int, ...]
    sizes: tuple[int, ...]


@lru_cache(_REMEMBERED)
def normal_form(tree: Tree) -> Normal:
    """The tree with stored values read as they are stored, simplified, its arguments and sizes
    numbered in the order of first use, without those that are not used.

    Raises TreeError for a tree that breaks a rule.
    """
    sinks = tuple(read_as_stored(tree.sinks))
    simple = simplify(Tree(tree.mainloop, tree.operands, sinks))
    loads = [v for v in postorder(roots(simple)) if isinstance(v, Load) and not v.overwritten]
    arguments = tuple(dict.fromkeys(load.argument for load in loads))
    sizes = tuple(dict.fromkeys(t.size for load in loads for t in load.index if t.size is not None))

    def renumbered(value: Value) -> Value:
        if not isinstance(value, Load) or value.overwritten:
            return value
        terms = tuple(
            Term(t.axis, t.op, None if t.size is None else sizes.index(t.size)) for t in value.index
        )
        number = arguments.index(value.argument)
        return Load(number, value.dtype, terms, value.layout)

    normal = rebuild(simple, renumbered)
    verify(normal)
    return Normal(normal, arguments, sizes)


@lru_cache(_REMEMBERED)
def tile_loads(values: tuple[Value, ...]) -> int:
    """How many different loads of whole tiles the values need."""
    return sum(isinstance(v, Load) and v.kind == "tile" for v in postorder(values))
