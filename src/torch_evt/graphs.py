"""Small helpers on FX graphs and symbolic sizes, shared by the rewrites and the partitioner.

Sizes are compared by their symbolic expressions and never by `==` on a SymInt, which would add a
guard and so a recompilation.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import sympy
import torch
from torch import fx

from torch_evt.errors import PassError
from torch_evt.torch_compat import lazy_module

aten = torch.ops.aten
Size = int | torch.SymInt


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that `node` was traced with; None for everything that is not one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def expression(size: Size) -> sympy.Expr:
    """A size as a sympy expression."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(int(size))


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of their symbols, without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    left, right = expression(a), expression(b)
    return bool(left == right) or bool(sympy.expand(left - right) == 0)


def is_one(size: Size) -> bool:
    return same_size(size, 1)


def same_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; symbolic where one of them is. 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def contiguous_stride(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a row-major tensor of that shape, as `torch.empty` gives them."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (1 if same_size(size, 0) else size)
    return tuple(reversed(strides))


def is_contiguous(value: torch.Tensor) -> bool:
    """Whether a fake tensor is row-major, ignoring the strides of dimensions of size 1."""
    return all(
        is_one(size) or same_size(have, want)
        for size, have, want in zip(
            value.shape, value.stride(), contiguous_stride(value.shape), strict=True
        )
    )


def size_nodes(graph: fx.Graph) -> dict[sympy.Expr, fx.Node]:
    """The first node that computes each symbolic size of the graph."""
    found: dict[sympy.Expr, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found.setdefault(expression(value), node)
    return found


def output_node(graph: fx.Graph) -> fx.Node:
    """The node that returns the graph's results."""
    node: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return node


def output_values(graph: fx.Graph) -> list[Any]:
    """What the graph returns, flattened: nodes, None or constants."""
    return list(torch.utils._pytree.tree_leaves(output_node(graph).args))


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A graph module with a graph of its own; parameters, submodules and values are the same."""
    return module_of(module, module.graph)


def module_of(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module of a copy of `graph`, which itself stays as it is and keeps its owner.

    root: has the attributes that the graph reads.
    """
    copied = _copied(root, graph)
    for old, new in zip(graph.nodes, copied.graph.nodes, strict=True):
        rename(new, old.name)
    return copied


def renumbered(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, str]]:
    """A copy whose names fx chose in order, and the new name of each old one.

    Copying such a graph, or a part of it, keeps its names; partitioners rely on that.
    """
    copied = _copied(module, module.graph)
    pairs = zip(module.graph.nodes, copied.graph.nodes, strict=True)
    return copied, {old.name: new.name for old, new in pairs}


def _copied(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = copy.node_copy(node, lambda n: env[n])
    copy._codegen = graph._codegen
    module = lazy_module(root, copy)
    module.meta = dict(getattr(root, "meta", {}))
    return module


_FREE_NAME = "torch_evt_node"
_numbers = itertools.count()


def replace_contents(graph: fx.Graph, replacement: fx.Graph) -> None:
    """Make `graph` hold what `replacement` holds, in place; names and metadata carry over."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    env: dict[fx.Node, fx.Node] = {}
    for node in replacement.nodes:
        args = fx.map_arg(node.args, env.__getitem__)
        kwargs = fx.map_arg(node.kwargs, env.__getitem__)
        # Names of erased nodes stay taken, and up to PyTorch 2.12 asking for a taken one takes a
        # time that grows with their number: ask for a free one.
        free = f"{_FREE_NAME}_{next(_numbers)}"
        new = graph.create_node(node.op, node.target, args, kwargs, free, node.type)
        new.meta = dict(node.meta)
        rename(new, node.name)
        env[node] = new


COMPARED = "torch_evt_compared"
"""Key of node.meta: the value decides a comparison with a maximum (`partition.maxima`). Copies of a
graph keep it, so that the halves know what the joint graph did."""


def draws(node: fx.Node) -> bool:
    """Whether a node takes numbers from a generator whose state the next such node continues."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags


def sort_topologically(graph: fx.Graph) -> None:
    """Put every node behind its inputs, otherwise keeping the order, and that of nodes that draw
    random numbers in any case. PassError on a cycle."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    drawing = [node for node in graph.nodes if draws(node)]
    next_to_draw = dict(zip(drawing, drawing[1:], strict=False))
    for node in next_to_draw.values():
        waiting[node] += 1
    ready = [(position[node], node) for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        followers = [*node.users, next_to_draw[node]] if node in next_to_draw else node.users
        for user in followers:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, (position[user], user))
    if len(order) != len(position):
        stuck = [node.name for node, count in waiting.items() if count > 0][:5]
        raise PassError(f"the graph has a cycle through {', '.join(stuck)}")
    last = order[0]
    for node in order[1:]:
        if node.op != "placeholder":
            last.append(node)
        last = node


def signature(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """What a rewrite must not change: the inputs' names and every result's dtype, shape, stride.

    The stride of a dimension of size 1 addresses nothing, and may change.
    """
    inputs: list[tuple[Any, ...]] = [(n.name,) for n in graph.nodes if n.op == "placeholder"]
    results: list[tuple[Any, ...]] = []
    for value in output_values(graph):
        tensor = tensor_of(value)
        if tensor is None:
            results.append((type(value).__name__,))
        else:
            results.append(
                (
                    tensor.dtype,
                    tuple(map(expression, tensor.shape)),
                    tuple(
                        expression(stride)
                        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
                        if not is_one(size)
                    )
                    if tensor.layout is torch.strided
                    else None,
                )
            )
    return inputs + results


def verify(graph: fx.Graph, before: list[tuple[Any, ...]], name: str) -> None:
    """Check a graph after the pass `name`. Raises PassError where it is malformed or where its
    signature is not `before`."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise PassError(f"{name} left a malformed graph: {error}") from error
    after = signature(graph)
    if len(after) != len(before):
        raise PassError(f"{name} changed the number of inputs or results")
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            raise PassError(f"{name} changed input or result {i} from {old} to {new}")


_TAGS = ("recompute", "ac_graph_id", "partitioner_tag", "stack_trace", "nn_module_stack")


def insert(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """A new call at the graph's insertion point, traced on the fake tensors of its arguments.

    like: the node whose place it is to take; its tags, and its fake mode, are the new node's.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta.update({key: like.meta[key] for key in _TAGS if key in like.meta})
    values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with getattr(like.meta["val"], "fake_mode", nullcontext()):
        node.meta["val"] = target(*values[0], **values[1])
    return node


def replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Put a node that was just inserted in another's place, name included."""
    name = old.name
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    rename(new, name)


def same_checkpoint(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes belong to one checkpoint, so that they may become one node."""
    return all(a.meta.get(tag) == b.meta.get(tag) for tag in ("recompute", "ac_graph_id"))


def number_of(value: Any) -> float | None:
    """The value of a Python number, or of a node that makes a 0-dimensional constant of one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    made: Any = None
    if isinstance(value, fx.Node):
        if value.target is aten.scalar_tensor.default:
            made = value.args[0]
        elif value.target is aten.full.default and not value.args[0]:
            made = value.args[1]
    return float(made) if isinstance(made, (int, float)) else None


def rename(node: fx.Node, name: str) -> None:
    """Give a node the name of one that is gone (fx itself never gives a name twice)."""
    node.name = name
