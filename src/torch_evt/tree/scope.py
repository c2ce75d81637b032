"""Where a value is computed: in the epilogue, or in one operand's own tree.

Inside an operand the reduced axis k stands in place of n (operand A) or of m (operand B). The scope
says which axes there are, in which order, and hence what the usual index map of a load is.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_evt.tree.ir import Axis, LoadKind, Operand, Term, Tree


@dataclass(frozen=True)
class Scope:
    """axes: the row-like and the column-like axis. batched: whether l is in front of them."""

    row: Axis
    column: Axis
    batched: bool

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of a tile, outermost first."""
        return ("l", self.row, self.column) if self.batched else (self.row, self.column)

    def default_index(self, kind: LoadKind) -> tuple[Term, ...]:
        """The index map that a load of this kind has when its text does not say."""
        axes: tuple[Axis, ...]
        if kind == "tile":
            axes = self.axes
        elif kind == "row":
            axes = (self.column,)
        elif kind == "column":
            axes = ("l", self.row) if self.batched else (self.row,)
        else:
            axes = ()
        return tuple(Term(axis) for axis in axes)


def operand_scope(operand: Operand) -> Scope:
    """The scope of an operand's own tree, and the order of an operand tensor's dimensions."""
    if operand.name.startswith("A"):
        return Scope("m", "k", operand.batched)
    return Scope("k", "n", operand.batched)


def epilogue_scope(tree: Tree) -> Scope:
    """The scope of the sinks."""
    return Scope("m", "n", tree.batched)


def pair_names(operands: int) -> tuple[str, ...]:
    """The names that this many operands of a gemm must have: A, B, A1, B1, ..."""
    return tuple(f"{'AB'[i % 2]}{i // 2 or ''}" for i in range(operands))
