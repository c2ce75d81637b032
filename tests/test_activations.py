"""Activations between two linear layers: each is fused forward, and its derivative backward.

The first product's epilogue adds the bias and computes the activation; where the derivative needs
more than the activation's result, it leaves that too. The second product's data gradient holds the
derivative, computed from what was left, and sums its columns for the bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from interpreted import PLACE, interpreted
from torch_evt import pipeline
from torch_evt.partition.plan import GraphPlan
from torch_evt.runtime import counters
from torch_evt.testing import check_model


@dataclass(frozen=True)
class Case:
    """forward, backward: what the two kernels do in fp32, dtypes and layouts left out."""

    name: str
    function: Callable[[Tensor], Tensor]
    forward: str
    backward: str


CASES = []


class Layers(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.second = nn.Linear(48, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def weighted(result: Tensor) -> Tensor:
    weights = 1 + torch.cos(torch.arange(result.numel())).view(result.shape) / 2
    return (result.float().square() * weights).sum()


def trained(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> tuple[dict[str, list[str]], GraphPlan]:
    """A step, checked by the error standard: the kernels of each half, and the plan."""
    torch._dynamo.reset()
    counters.reset()
    plans: list[GraphPlan] = []

    def make(seed: int) -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
        torch.manual_seed(seed)
        x = torch.randn(24, 32).to(dtype).requires_grad_()
        return Layers(function).to(dtype), (x,), weighted

    with pipeline.observed(plans.append):
        check_model(
            make,
            dtype=dtype,
            backend=interpreted,
            options=PLACE,
            seeds=(0,),  # type: ignore[arg-type]
        ).raise_if_failed()
    (plan,) = plans
    assert plan.placed and len(counters.region_runs) == len({r.tree for r in plan.regions})
    trees: dict[str, list[str]] = {"forward": [], "backward": []}
    for region in plan.regions:
        text = region.tree.split(" -> ", 1)[1]
        trees[region.half].append(re.sub(r": (f32|bf16)( n 16)?", "", text))
    return trees, plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_activation_is_fused_in_both_halves(case: Case) -> None:
    trees, plan = trained(case.function, torch.float32)
    assert trees == {"forward": [case.forward], "backward": [case.backward]}
    assert plan.saved_bytes == plan.inductor_saved_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_half_precision_the_kernels_read_and_leave_as_much(case: Case) -> None:
    trees, _ = trained(case.function, torch.bfloat16)
    ((forward,), (backward,)) = trees["forward"], trees["backward"]
    for text, wanted in ((forward, case.forward), (backward, case.backward)):
        for word in ("store(", "reduce(", "tile(", "row("):
            assert text.count(word) == wanted.count(word), text
        functions = re.findall(r"(\w+)\(", wanted)
        assert set(functions) <= set(re.findall(r"(\w+)\(", text)), text
