"""A plan for a GPU that is made on a CPU: attention is one node, as it is one kernel there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_evt import explain
from torch_evt.partition.plan import GraphPlan

LENGTH, WIDTH = 40, 32
FORWARD, BACKWARD = 4, 5
"""Products of the projections; the input needs no gradient."""
H200 = {"evt.target": "h200", "evt.place": "always"}


class Attention(nn.Module):
    """Four projections around attention; arguments: for scaled_dot_product_attention."""

    def __init__(self, key_heads: int = 4, checkpointed: bool = False, **arguments: Any) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, 8 * key_heads), nn.Linear(WIDTH, 8 * key_heads)
        self.mask = nn.Parameter(torch.randn(LENGTH, LENGTH))
        self.arguments = arguments
        self.checkpointed = checkpointed

    def attend(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).view(*x.shape[:2], -1, 8).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        y = F.scaled_dot_product_attention(*heads, **self.arguments)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)
        return (x + y).square().mean()


def products(graph: GraphPlan) -> int:
    """The products of the plan; attention's own would be among them."""
    return len(graph.regions) + len(graph.unfused)


def squares_saved(graph: GraphPlan) -> list[int]:
    """Bytes of what is saved in the size of a score for every query and key."""
    scores = 2 * 4 * LENGTH * LENGTH
    return [s.bytes for s in graph.saved if s.bytes is not None and s.bytes >= scores]


def planned(model: nn.Module, **options: Any) -> GraphPlan:
    torch._dynamo.reset()
    x = torch.randn(2, LENGTH, WIDTH)
    (graph,) = explain(model, x, options={**H200, **options}).graphs
    return graph


MASK = torch.randn(LENGTH, LENGTH)


@pytest.mark.parametrize(
    "model",
    [
        Attention(dropout_p=0.1),
        Attention(dropout_p=0.1, attn_mask=MASK),
        Attention(dropout_p=0.1, is_causal=True, scale=0.3),
        Attention(key_heads=2, dropout_p=0.1, enable_gqa=True),
    ],
    ids=["dropout", "mask", "causal", "grouped"],
)
def test_only_the_projections_are_products(model: Attention) -> None:
    graph = planned(model)
    assert products(graph) == FORWARD + BACKWARD
    assert not squares_saved(graph)


def test_a_plan_for_the_cpu_keeps_the_trace_as_it_is() -> None:
    graph = planned(Attention(dropout_p=0.1), **{"evt.target": "cpu"})
    assert products(graph) > FORWARD + BACKWARD
    assert squares_saved(graph)


def test_checkpointed_attention_is_one_node_too() -> None:
    graph = planned(Attention(dropout_p=0.1, checkpointed=True))
    assert products(graph) == 2 * FORWARD + BACKWARD
    assert not squares_saved(graph)


def test_autocast_reaches_it() -> None:
    model = Attention(dropout_p=0.1)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    graph = planned(Cast())
    assert products(graph) == FORWARD + BACKWARD
    assert not squares_saved(graph)


def test_a_mask_with_a_gradient_is_left_to_the_trace() -> None:
    model = Attention(dropout_p=0.1)
    model.arguments["attn_mask"] = model.mask
    assert products(planned(model)) > FORWARD + BACKWARD
