"""One small step, run through the pipeline with passes that are changed or fail."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpreted import PLACE, interpreted
from torch_evt import pipeline
from torch_evt.partition.plan import GraphPlan
from torch_evt.passes import Pass, State
from torch_evt.runtime import counters

LISTS = ("JOINT", "BEFORE_CUT", "HALF", "INFERENCE", "PLACE_INFERENCE")
EVERY_PASS = [(name, step.name) for name in LISTS for step in getattr(pipeline, name)]
TRAINING_PASSES = [pair for pair in EVERY_PASS if "INFERENCE" not in pair[0]]
QUIET = {**PLACE, "evt.strict": False}


class Layers(nn.Module):
    """Two products with something to fuse in both halves and in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 24)
        self.second = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(x))
        return torch.tanh(self.second(hidden))


def step(options: dict[str, Any], *, inference: bool = False) -> dict[str, Tensor]:
    """One step of the model: its result, and its gradients when training."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    model, x = Layers(), torch.randn(12, 32)
    compiled = torch.compile(model, backend=interpreted, options=options)
    if inference:
        with torch.no_grad():
            return {"y": compiled(x)}
    x.requires_grad_()
    result = compiled(x)
    (result * torch.cos(torch.arange(result.numel())).view_as(result)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 4 and x.grad is not None
    return {"y": result.detach(), "x": x.grad, **gradients}


def planned(options: dict[str, Any], **kwargs: Any) -> tuple[dict[str, Tensor], GraphPlan]:
    plans: list[GraphPlan] = []
    with pipeline.observed(plans.append):
        found = step(options, **kwargs)
    (plan,) = plans
    return found, plan


@functools.cache
def inductors(inference: bool) -> dict[str, Tensor]:
    """The step without any region."""
    return step({"evt.place": "never"}, inference=inference)


def assert_inductors(found: dict[str, Tensor], *, inference: bool = False) -> None:
    """The step is bit for bit what it is without any region, and no region ran."""
    assert not counters.region_runs
    wanted = inductors(inference)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_close(found: dict[str, Tensor]) -> None:
    for name, tensor in inductors(False).items():
        assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def change(
    monkeypatch: pytest.MonkeyPatch, where: str, name: str, run: Callable[[State], None]
) -> None:
    """Let the pass `name` of one list run something else."""
    before: tuple[Pass, ...] = getattr(pipeline, where)
    assert any(step_.name == name for step_ in before)
    after = tuple(replace(s, run=run) if s.name == name else s for s in before)
    monkeypatch.setattr(pipeline, where, after)


def original(where: str, name: str) -> Callable[[State], None]:
    return next(s.run for s in getattr(pipeline, where) if s.name == name)


def planted(state: State) -> None:
    raise ZeroDivisionError("planted on purpose")
