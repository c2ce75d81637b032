"""Small functions as graphs: traced with Inductor's decompositions, run on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from torch_evt.torch_compat import decomposition_table

Mode = Literal["fake", "symbolic"]


def trace(function: Callable[..., Any], *inputs: Any, mode: Mode = "fake") -> fx.GraphModule:
    """The graph of a function, without what its results do not need and without aliases."""
    traced = make_fx(function, tracing_mode=mode, decomposition_table=decomposition_table())
    module = traced(*inputs)
    for node_ in module.graph.nodes:
        if node_.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node_.replace_all_uses_with(node_.args[0])
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def run(module: fx.GraphModule, *inputs: Any) -> list[Any]:
    """The graph's results on these inputs, flattened; works on a graph edited since its code."""
    return list(tree_leaves(fx.Interpreter(module).run(*inputs)))


def targets(module: fx.GraphModule) -> list[Any]:
    """What the graph calls, in order."""
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def node(module: fx.GraphModule, target: Any, index: int = 0) -> fx.Node:
    """The index-th call of `target`, by its overload."""
    return [n for n in module.graph.nodes if n.op == "call_function" and n.target is target][index]


def guards(module: fx.GraphModule) -> int:
    """How many guards the sizes of a symbolically traced graph have collected."""
    (env,) = {
        s.node.shape_env
        for n in module.graph.nodes
        if isinstance(value := n.meta.get("val"), Tensor)
        for s in value.shape
        if isinstance(s, torch.SymInt)
    }
    return len(env.guards)


def strides(tensor: Tensor) -> list[int]:
    """The strides that address something: those of dimensions larger than 1."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def assert_same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Both bit-equal, with the same dtypes, shapes and strides."""
    for our, their in zip(ours, theirs, strict=True):
        if not isinstance(their, Tensor):
            assert our == their
            continue
        assert (our.dtype, our.shape) == (their.dtype, their.shape)
        assert strides(our) == strides(their)
        assert torch.equal(our.nan_to_num(123.0), their.nan_to_num(123.0))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||; 0 where both vanish, inf where only the second does."""
    assert ours.shape == theirs.shape
    if ours.numel() == 0:
        return 0.0
    difference = (ours.double() - theirs.double()).norm().item()
    scale = theirs.double().norm().item()
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")
