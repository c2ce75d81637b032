"""The types of values: float (fp32 arithmetic), int (exact int64) and bool.

An int never meets a float in one function, since it would have to pass through fp32; a Cast says so
where it is wanted. A bool beside a float or an int counts as 0 or 1 (dropout masks, counts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch_evt.errors import TreeError
from torch_evt.tree.dtypes import ValueType, type_of_dtype
from torch_evt.tree.functions import FUNCTIONS
from torch_evt.tree.ir import (
    Accumulator,
    Cast,
    Const,
    Index,
    Keep,
    Load,
    Neighbour,
    ReduceOp,
    Statistic,
    Value,
    children,
    postorder,
)


def common_type(types: Iterable[ValueType]) -> ValueType:
    """The type in which values of these types meet. Raises TreeError for an int and a float."""
    different = set(types) - {"bool"}
    if len(different) > 1:
        raise TreeError(
            "an int and a float meet in one function; cast one of them to the other's type"
        )
    return different.pop() if different else "bool"


def meeting_type(function: str, types: Sequence[ValueType]) -> ValueType:
    """The type to which a function converts its bool arguments before it works on them.

    For where it is the type of the two choices. Raises TreeError for a function that does not
    exist, a wrong number of arguments, or types that the function does not take.
    """
    if function not in FUNCTIONS:
        raise TreeError(f"there is no function {function!r}; the table is in tree/functions.py")
    entry = FUNCTIONS[function]
    if len(types) != entry.arity:
        raise TreeError(f"{function} takes {entry.arity} arguments, not {len(types)}")
    if entry.arguments == "where":
        if types[0] != "bool":
            raise TreeError(f"where needs a bool condition, not {types[0]}")
        return common_type(types[1:])
    common = common_type(types)
    wanted: dict[str, tuple[ValueType, ...]] = {
        "float": ("float",),
        "number": ("float", "int"),
        "any": ("float", "int", "bool"),
        "bool": ("bool",),
    }
    legal = wanted[entry.arguments]
    if common not in legal:
        raise TreeError(f"{function} takes {' or '.join(legal)} arguments, not {', '.join(types)}")
    return common


def reduced_type(op: ReduceOp, of: ValueType) -> ValueType:
    """The type of a reduction. Sums count bools; raises TreeError for what op does not take."""
    if op == "sum":
        return "int" if of == "bool" else of
    legal = ("float", "int") if op == "max" else ("float",)
    if of not in legal:
        raise TreeError(f"{op} takes {' or '.join(legal)} values, not {of}")
    return of


def node_type(value: Value, types: Mapping[Value, ValueType]) -> ValueType:
    """The type of a value whose arguments' types are in `types`. Raises TreeError if ill-typed."""
    if isinstance(value, Accumulator):
        return "float"
    if isinstance(value, (Load, Cast)):
        return type_of_dtype(value.dtype)
    if isinstance(value, Const):
        if isinstance(value.value, bool):
            return "bool"
        return "int" if isinstance(value.value, int) else "float"
    if isinstance(value, Index):
        return "int"
    if isinstance(value, Statistic):
        return reduced_type(value.op, types[value.value])
    if isinstance(value, Neighbour):
        return types[value.value]
    if isinstance(value, Keep):
        if not types[value.seed] == types[value.offset] == "int":
            raise TreeError("keep needs an int seed and an int offset")
        return "bool"
    arguments = [types[argument] for argument in children(value)]
    met = meeting_type(value.function, arguments)
    result = FUNCTIONS[value.function].result
    return met if result == "same" else result


def value_types(starts: Iterable[Value]) -> dict[Value, ValueType]:
    """The type of every value that `starts` are computed from, in postorder."""
    types: dict[Value, ValueType] = {}
    for value in postorder(starts):
        types[value] = node_type(value, types)
    return types


def value_type(value: Value) -> ValueType:
    """The type of one value. Raises TreeError where it, or what it is computed from, has none."""
    return value_types([value])[value]
