"""With eager's generator, random numbers are drawn in the order of the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from interpreted import PLACE, interpreted
from torch_evt import pipeline
from torch_evt.partition.plan import GraphPlan

Forward = Callable[[Tensor], tuple[Tensor, ...]]


class Drawing(nn.Module):
    def __init__(self, draw: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 16)
        self.draw = draw

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.draw(self.linear(x))


def rand(y: Tensor) -> Tensor:
    return y * torch.rand(12, 16)


DRAWS: dict[str, Forward] = {
    "dropout, rand": lambda y: (F.dropout(y, 0.5), rand(y)),
    "rand, dropout": lambda y: (rand(y), F.dropout(torch.tanh(y), 0.5)),
    "rand, rand": lambda y: (rand(y), rand(torch.tanh(y))),
    "dropout, rand, dropout": lambda y: (F.dropout(y, 0.5), rand(y), F.dropout(y.sigmoid(), 0.3)),
    "dropout, bernoulli": lambda y: (
        F.dropout(y, 0.5),
        y * torch.bernoulli(torch.full_like(y, 0.4)),
    ),
    "normal_": lambda y: (F.dropout(y, 0.5), y + torch.empty(12, 16).normal_()),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", DRAWS)
def test_every_output_is_eagers(name: str, training: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(3)
    model, x = Drawing(DRAWS[name]), torch.randn(12, 24)
    plans: list[GraphPlan] = []
    compiled = torch.compile(model, backend=interpreted, options={**PLACE, "evt.rng": "eager"})
    with torch.set_grad_enabled(training):
        torch.manual_seed(0)
        expected = [model(x), model(x)]
        with pipeline.observed(plans.append):
            compiled(x)
        torch.manual_seed(0)
        found = [compiled(x), compiled(x)]
    for ours, eager in zip(found, expected, strict=True):
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b)
    # a region that needs a later draw than one that waits for it is not placed
    (plan,) = plans
    refused = [note for note in plan.notes if "another order" in note]
    assert plan.regions or refused
