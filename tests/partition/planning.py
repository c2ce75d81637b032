"""What the partition tests share: a graph ready for planning, and all its candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.tracing import Mode, trace
from torch import Tensor, fx

from torch_evt.graphs import copy_of
from torch_evt.joint import canonicalise, common_subexpressions, recompose
from torch_evt.partition import candidates
from torch_evt.partition.candidates import Growth, Rules
from torch_evt.partition.halves import label_all, label_joint
from torch_evt.partition.region import Region


def prepared(module: fx.GraphModule) -> fx.GraphModule:
    """A copy after the rewrites that come before planning."""
    copied = copy_of(module)
    canonicalise.apply(copied.graph)
    common_subexpressions.apply(copied.graph)
    recompose.apply(copied.graph)
    return copied


def rules_of(graph: fx.Graph, *, forward_outputs: int | None = None, **limits: Any) -> Rules:
    """Rules for an inference graph, or for a joint graph with that many forward outputs."""
    if forward_outputs is None:
        return Rules(label_all(graph, "inference"), "cuda", **limits)
    return Rules(label_joint(graph, forward_outputs), "cuda", **limits)


def growths(graph: fx.Graph, rules: Rules | None = None) -> list[Growth]:
    """What grows from every anchor."""
    rules = rules or rules_of(graph)
    order = candidates.order_of(graph)
    return [
        candidates.grow(anchor, loop, order, rules) for anchor, loop in candidates.anchors(graph)
    ]


def regions(graph: fx.Graph, rules: Rules | None = None) -> list[Region]:
    """Every candidate of every anchor."""
    return [region for growth in growths(graph, rules) for region in growth.regions]


def largest(graph: fx.Graph, rules: Rules | None = None) -> Region:
    """The candidate with the most nodes."""
    return max(regions(graph, rules), key=lambda region: len(region.nodes))


def with_gradients(
    function: Callable[..., tuple[Tensor, ...]], count: int
) -> Callable[..., tuple[Tensor, ...]]:
    """A function of `count` inputs as one of these and the tangents of its floating results, which
    returns the results and the gradients of the floating inputs."""

    def both(*arguments: Tensor) -> tuple[Tensor, ...]:
        leaves = [a.detach().requires_grad_(_floats(a)) for a in arguments[:count]]
        with torch.enable_grad():
            results = function(*leaves)
            pairs = [
                (result, tangent)
                for result, tangent in zip(filter(_floats, results), arguments[count:], strict=True)
                if result.requires_grad
            ]
            gradients = torch.autograd.grad(
                [result for result, _ in pairs],
                [leaf for leaf in leaves if leaf.requires_grad],
                [tangent for _, tangent in pairs],
                allow_unused=True,
            )
        return (*(r.detach() for r in results), *(g for g in gradients if g is not None))

    return both


def joint(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], *, mode: Mode = "fake"
) -> tuple[fx.GraphModule, list[Tensor], int]:
    """A joint graph: the function's results, then the gradients of its floating inputs.

    Returns it with the inputs that it takes (the function's, then random tangents) and the number
    of its forward outputs.
    """
    results = function(*inputs)
    tangents = [torch.randn(r.shape).to(r.dtype) for r in results if _floats(r)]
    both = with_gradients(function, len(inputs))
    module = trace(both, *inputs, *tangents, mode=mode)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for i, placeholder in enumerate(placeholders[len(inputs) :]):
        placeholder.name = placeholder.target = f"tangents_{i}"
    module.recompile()
    return module, [*inputs, *tangents], len(results)


def _floats(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point
