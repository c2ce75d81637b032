"""Gradients of maxima: the value that is compared is the one the maximum was taken of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from interpreted import PLACE, interpreted
from torch_evt import pipeline
from torch_evt.joint import recompose
from torch_evt.partition.maxima import is_compared, mark_compared
from torch_evt.partition.plan import GraphPlan
from torch_evt.testing import check_model
from tracing import trace

Forward = Callable[[Tensor], Tensor]


class Scores(nn.Module):
    """A product, arithmetic, and a maximum of it; `after` says how."""

    def __init__(self, after: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 16, bias=False)
        self.after = after

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.linear(x)
        return self.after(scores), torch.tanh(scores)


def regions_with(after: Forward, dtype: torch.dtype, seeds: tuple[int, ...] = (0, 1)) -> list[str]:
    """The trees of one checked step."""
    plans: list[GraphPlan] = []
    torch._dynamo.reset()

    def make(seed: int) -> object:
        torch.manual_seed(seed)
        x = torch.randn(12, 24, dtype=dtype, requires_grad=True)

        def loss(output: tuple[Tensor, Tensor]) -> Tensor:
            return output[0].float().square().sum() + output[1].float().square().sum()

        return Scores(after).to(dtype), (x,), loss

    with pipeline.observed(plans.append):
        check_model(
            make,  # type: ignore[arg-type]
            dtype=dtype,
            backend=interpreted,  # type: ignore[arg-type]
            options={**PLACE, "evt.solver_nodes": 0},  # all that is legal, whether it pays or not
            seeds=seeds,
        ).raise_if_failed()
    return [region.tree for plan in plans for region in plan.regions]


AFTER: dict[str, Forward] = {
    "amax": lambda s: (s * 0.2041 + 1.5).amax(1),
    "kept dimension": lambda s: (s * 0.2041 + 1.5).amax(0, keepdim=True),
    "amin": lambda s: (s * 0.2041 + 1.5).amin(1),
    "of everything": lambda s: (s * 0.2041 + 1.5).max(),
    "two in a row": lambda s: (s * 0.2041 + 1.5).amax(1).amax(0),
    "behind a view": lambda s: (s * 0.2041 + 1.5).view(3, 4, 16).amax(2),
    "through a function that is expanded for the cut": lambda s: (F.gelu(s) + 1.5).amax(1),
    "further back": lambda s: ((s * 0.3).sigmoid() + 1.5).amax(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", AFTER)
def test_what_is_compared_stays_outside_and_the_gradient_is_right(
    name: str, dtype: torch.dtype
) -> None:
    trees = regions_with(AFTER[name], dtype)
    assert any("tanh" in tree for tree in trees)
    assert not any(text in tree for text in ("0.2041", "0.3", "gelu", "erf") for tree in trees)


def test_a_softmax_compares_nothing_and_is_fused() -> None:
    trees = regions_with(lambda s: torch.softmax(s * 0.2041 + 1.5, -1), torch.float32)
    assert any("0.2041" in tree for tree in trees)


def test_the_mark_outlives_the_expansion_of_a_named_function() -> None:
    def f(x: Tensor) -> Tensor:
        y = F.gelu(x)
        return (y == y.amax(1, keepdim=True)) * y

    graph = trace(f, torch.randn(4, 8)).graph
    assert recompose.apply(graph) == 1
    mark_compared(graph)
    assert recompose.expand(graph) == 1
    erf = next(node for node in graph.nodes if node.target is torch.ops.aten.erf.default)
    assert is_compared(erf)
    assert recompose.apply(graph) == 1
    named = next(n for n in graph.nodes if n.target is torch.ops.torch_evt.gelu_erf.default)
    assert is_compared(named)
