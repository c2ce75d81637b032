"""NaN, infinities and vanishing sums: what is not finite is so exactly where it is in eager."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.training.runs import Block, Layers, check, left_by, one_step, watched, weighted
from torch import Tensor, nn
from torch.nn import functional as F

from interpreted import PLACE, interpreted
from test_models import CASES, Case, Model
from torch_evt.runtime import counters

BAD = (math.nan, math.inf, -math.inf)
TRIED = {
    "relu",
    "two layers with gelu",
    "two layers with relu",
    "two layers with silu",
    "mask",
    "column sums",
    "row sums",
    "norm behind",
    "dropout",
    "division",
    "where",
    "comparison",
}

assert {case.name for case in CASES} >= TRIED

bad_values = pytest.mark.parametrize("bad", BAD, ids=["nan", "inf", "-inf"])


def kinds(t: Tensor) -> Tensor:
    """0 where t is finite; otherwise which of the three it is."""
    return 2 * t.isnan().int() + t.isposinf().int() - t.isneginf().int()


def assert_not_finite_at_the_same_places(
    ours: Mapping[str, Tensor], eager: Mapping[str, Tensor]
) -> None:
    assert ours.keys() == eager.keys()
    for name, theirs in eager.items():
        assert torch.equal(kinds(ours[name]), kinds(theirs)), name
        our, their = (t[theirs.isfinite()].double() for t in (ours[name], theirs))
        assert (our - their).norm() <= 1e-5 * their.norm(), name


def with_bad_rows(model: Any, call: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    output = call(leaf)
    weighted(output).backward()
    return {name: t.detach().clone() for name, t in left_by(model, [leaf], output).items()}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in TRIED], ids=lambda case: case.name
)
def test_what_is_not_finite_spreads_as_in_eager(case: Case) -> None:
    """Each bad value in one row of the inputs, compared with eager in fp32: what overflows or
    becomes undefined there does here."""
    with watched() as plans:
        torch.manual_seed(0)
        model = Model(case.forward, 32)
        options = {**PLACE, "evt.rng": "eager"}
        compiled = torch.compile(model, backend=interpreted, options=options)
        for bad in BAD:
            x = torch.randn(case.shape)
            x[2, 5] = bad
            ours, eager = with_bad_rows(model, compiled, x), with_bad_rows(model, model, x)
            assert not all(t.isfinite().all() for t in ours.values())
            assert_not_finite_at_the_same_places(ours, eager)
    (plan,) = plans
    assert sum(counters.region_runs.values()) == len(BAD) * len(plan.regions) > 0


class Relus(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))))


@bad_values
def test_inputs_that_are_not_finite(bad: float) -> None:
    """By the error standard: NaN and inf are where they are in fp64, all else is as exact."""

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            inputs[0][2, 3] = bad
        left = one_step(model, inputs, wrap)
        assert left["output:"][:2].isfinite().all() and not left["output:"][2].isfinite().any()
        return left

    found = check(Block, [(6, 16)], step, seeds=(0,))
    assert found.halves == (2, 2) and found.ran()


@bad_values
def test_gradients_that_are_not_finite(bad: float) -> None:
    """ReLU's backward gives 0 where it was off, whatever comes in: no product with a mask."""

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        output = wrap(model)(*inputs)
        gradient = torch.ones_like(output)
        row, column = (output.detach() > 0).nonzero()[0].tolist()
        gradient[row, column] = bad
        output.backward(gradient)
        return left_by(model, inputs, output)

    found = check(Relus, [(6, 16)], step)
    assert found.halves == (2, 1) and found.ran()
    weight = found.tensors["grad:first.weight"]
    assert not weight.isfinite().all() and weight.isfinite().any()


@bad_values
def test_a_weight_that_is_not_finite(bad: float) -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            model.first.weight[1, 2] = bad
        return one_step(model, inputs, wrap)

    found = check(Relus, [(6, 16)], step, seeds=(0,))
    assert found.halves == (2, 1) and found.ran()


def test_a_loss_without_any_target_is_nan_and_its_gradients_zero() -> None:
    class Ignored(Layers):
        def forward(self, x: Tensor) -> Tensor:
            logits = self.second(F.gelu(self.first(x)))
            targets = torch.full((x.shape[0],), -100)
            return F.cross_entropy(logits, targets)

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        loss = wrap(model)(*inputs)
        loss.backward()
        return left_by(model, inputs, (), loss)

    found = check(Ignored, [(6, 16)], step)
    assert min(found.halves) > 0 and found.ran()
    assert found.tensors["loss:"].isnan()
    gradients = [t for name, t in found.tensors.items() if name.startswith("grad:")]
    assert len(gradients) == 5 and not any(t.any() for t in gradients)
