"""Recompose: chains of primitive operations back to one named node; `expand` is the inverse.

    0.5 * x * (1 + tanh(...))            -> gelu_tanh(x)
    g * (0.5 * (1 + tanh(...)) + ...)    -> gelu_tanh_backward(g, x)
    where(y <= 0, 0, g)                  -> relu_backward(g, y)
    and likewise gelu (erf) and silu

The patterns are not written by hand: each is the operation itself, traced through Inductor's own
decomposition table, so that they follow PyTorch's versions. A pattern matches when its whole chain
does: same operations, same constants, one dtype, one shape, one checkpointing tag. Additions and
products match in either order. A node keeps what it replaced, so that it can be expanded again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_evt.graphs import COMPARED, number_of, rename, same_checkpoint, same_sizes, tensor_of
from torch_evt.runtime.named_functions import NAMED
from torch_evt.torch_compat import decomposition_table

aten = torch.ops.aten
EXPANSION = "torch_evt_expansion"
"""Key of node.meta: the `Expansion` of a recomposed node."""

_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}
_KEPT_META = (
    COMPARED,
    "recompute",
    "ac_graph_id",
    "partitioner_tag",
    "stack_trace",
    "nn_module_stack",
)


@dataclass(frozen=True)
class Pattern:
    """name: of the function. graph: its primitive operations. inputs: how many arguments."""

    name: str
    graph: fx.Graph
    inputs: int


@dataclass(frozen=True)
class Expansion:
    """The nodes that a recomposed node replaced, with placeholders for its arguments."""

    graph: fx.Graph
    name: str


def apply(
    graph: fx.Graph, *, exact_rounding: bool = False, apart: Collection[str] = frozenset()
) -> int:
    """Rewrite in place; the number of nodes recomposed.

    exact_rounding: leave half-precision chains alone, since one named node rounds once where the
    chain rounds at every step (`precision=eager`). apart: names of nodes that stay nodes of their
    own, for others are to read them; a chain may end in one.
    """
    count = 0
    by_target: dict[Any, list[Pattern]] = {}
    for pattern in patterns({node.target for node in graph.nodes}):
        by_target.setdefault(_result(pattern.graph).target, []).append(pattern)
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or not node.users:
            continue
        for pattern in by_target.get(node.target, ()):
            match = _match(pattern, node)
            if match is None or (exact_rounding and _is_half(node)):
                continue
            if any(inner is not node and inner.name in apart for inner in _chain(match)):
                continue
            _replace(graph, pattern, node, match)
            count += 1
            break
    graph.eliminate_dead_code()
    return count


def expand(graph: fx.Graph) -> int:
    """Put back the nodes that recomposed nodes replaced; the number of nodes expanded."""
    count = 0
    for node in list(graph.nodes):
        expansion: Expansion | None = node.meta.get(EXPANSION)
        if expansion is None:
            continue
        arguments = iter(node.args)
        env: dict[fx.Node, Any] = {}
        with graph.inserting_before(node):
            for inner in expansion.graph.nodes:
                if inner.op == "placeholder":
                    env[inner] = next(arguments)
                elif inner.op == "output":
                    result = env[inner.args[0]]
                else:
                    env[inner] = graph.node_copy(inner, env.__getitem__)
                    for key in ("partitioner_tag", COMPARED):  # that the chain had not, or not all
                        if key in node.meta:
                            env[inner].meta[key] = node.meta[key]
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        rename(result, expansion.name)
        count += 1
    return count


@dataclass(frozen=True)
class _Source:
    """What a pattern is traced from. contains: operations of which the pattern has at least one,
    and a graph without any of them no match."""

    name: str
    function: Callable[..., Any]
    inputs: int
    contains: frozenset[Any]


_ERF = frozenset({aten.erf.default})
_TANH = frozenset({aten.tanh.default})
_SIGMOID = frozenset({aten.sigmoid.default, aten.exp.default})

_SOURCES = (
    _Source("gelu_erf", lambda x: aten.gelu(x), 1, _ERF),
    _Source("gelu_tanh", lambda x: aten.gelu(x, approximate="tanh"), 1, _TANH),
    _Source("silu", lambda x: aten.silu(x), 1, _SIGMOID),
    _Source("gelu_erf_backward", lambda g, x: aten.gelu_backward(g, x), 2, _ERF),
    _Source(
        "gelu_tanh_backward",
        lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
        2,
        _TANH,
    ),
    _Source("silu_backward", lambda g, x: aten.silu_backward(g, x), 2, _SIGMOID),
    _Source(
        "relu_backward",
        lambda g, x: aten.threshold_backward(g, x, 0),
        2,
        frozenset({aten.where.self}),
    ),
)


def patterns(targets: AbstractSet[Any] | None = None) -> tuple[Pattern, ...]:
    """The patterns that may match in a graph of these operations (None: all), the larger ones
    first, so that a backward is not mistaken for its parts."""
    sources = (s for s in _SOURCES if targets is None or s.contains & targets)
    return tuple(sorted(map(_traced, sources), key=lambda pattern: -len(pattern.graph.nodes)))


@functools.cache
def _traced(source: _Source) -> Pattern:
    arguments = tuple(torch.randn(4, 8) for _ in range(source.inputs))
    graph = make_fx(
        source.function, decomposition_table=decomposition_table(), tracing_mode="fake"
    )(*arguments).graph
    graph.eliminate_dead_code()
    return Pattern(source.name, graph, source.inputs)


def _result(graph: fx.Graph) -> fx.Node:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    result = output.args[0]
    assert isinstance(result, fx.Node)
    return result


def _is_half(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype in (torch.float16, torch.bfloat16)


def _match(pattern: Pattern, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    """Pattern node -> graph node, inputs included; None where the pattern does not match."""
    bound = _match_node(_result(pattern.graph), node, {})
    if bound is None:
        return None
    inputs = [n for n in pattern.graph.nodes if n.op == "placeholder"]
    if any(n not in bound for n in inputs):
        return None
    result = tensor_of(node)
    if result is None or not result.dtype.is_floating_point or result.dtype == torch.float64:
        return None
    for inner, outer in bound.items():
        value = tensor_of(outer)
        if value is None or not same_sizes(value.shape, result.shape):
            if inner.op != "placeholder" and value is not None and value.dim() == 0:
                continue  # a constant
            return None
        intermediate_mask = value.dtype == torch.bool and inner.op != "placeholder"
        if value.dtype != result.dtype and not intermediate_mask:
            return None
        if inner.op != "placeholder" and not same_checkpoint(outer, node):
            return None
    return bound


def _match_node(
    inner: fx.Node, outer: Any, bound: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node] | None:
    if not isinstance(outer, fx.Node):
        return None
    if inner in bound:
        return bound if bound[inner] is outer else None
    if inner.op == "placeholder":
        return {**bound, inner: outer}
    if number_of(inner) is not None and number_of(inner) == number_of(outer):
        return {**bound, inner: outer}
    if outer.op != "call_function" or outer.target != inner.target:
        return None
    if len(inner.args) != len(outer.args) or not _same_keywords(inner, outer):
        return None
    bound = {**bound, inner: outer}
    orders = [tuple(outer.args)]
    if inner.target in _COMMUTATIVE and len(outer.args) == 2:
        orders.append((outer.args[1], outer.args[0]))
    for order in orders:
        attempt = _match_arguments(inner, order, bound)
        if attempt is not None:
            return attempt
    return None


def _match_arguments(
    inner: fx.Node, given: tuple[Any, ...], bound: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node] | None:
    for want, have in zip(inner.args, given, strict=True):
        extended = _match_argument(want, have, bound)
        if extended is None:
            return None
        bound = extended
    return bound


def _match_argument(
    want: Any, have: Any, bound: dict[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node] | None:
    if isinstance(want, fx.Node):
        return _match_node(want, have, bound)
    if isinstance(want, (int, float)) and not isinstance(want, bool):
        same = isinstance(have, (int, float)) and math.isclose(want, have, rel_tol=1e-12)
        return bound if same else None
    return bound if want == have else None


def _same_keywords(inner: fx.Node, outer: fx.Node) -> bool:
    def relevant(node: fx.Node) -> dict[str, Any]:
        dropped = ("dtype", "device", "layout", "pin_memory")  # of constants
        return {k: v for k, v in node.kwargs.items() if k not in dropped}

    return relevant(inner) == relevant(outer)


def _chain(match: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The graph's nodes that a match replaces."""
    return {outer for inner, outer in match.items() if inner.op != "placeholder"}


def _replace(
    graph: fx.Graph, pattern: Pattern, node: fx.Node, match: dict[fx.Node, fx.Node]
) -> None:
    inputs = [match[n] for n in pattern.graph.nodes if n.op == "placeholder"]
    kept = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        if source not in env:
            env[source] = kept.placeholder(source.name)
            env[source].meta["val"] = source.meta["val"]
        else:  # the same value for two arguments
            kept.placeholder(source.name)
    chain = _chain(match)
    for original in graph.nodes:
        if original in chain:
            env[original] = kept.node_copy(original, lambda n: env[n])
    kept.output(env[node])
    with graph.inserting_before(node):
        named = graph.call_function(NAMED[pattern.name], tuple(inputs))
    named.meta.update({k: node.meta[k] for k in _KEPT_META if k in node.meta})
    named.meta["val"] = node.meta["val"]
    named.meta[EXPANSION] = Expansion(kept, node.name)
    name = node.name
    node.replace_all_uses_with(named)
    graph.erase_node(node)
    rename(named, name)
