"""Sizes that change from call to call, and the sizes 0 and 1."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.training.runs import Block, Outcome, Step, check, left_by, one_step, weighted
from torch import Tensor, nn
from torch.nn import functional as F

from interpreted import interpreted

# the last ones equal a width of the model, which a guard would tell apart
BATCHES = [(6, 16), (9, 16), (48, 16)]
LENGTHS = [(3, 5, 16), (3, 7, 16), (3, 16, 16)]
BOTH = [(3, 5, 16), (4, 7, 16), (16, 16, 16)]


class Attention(nn.Module):
    """Attention written out, with a position table and a mask cut to the length, and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(20, 16))
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = F.gelu(self.query(x) + self.positions[:length])
        scores = x @ self.key(x).transpose(1, 2) * 0.3
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.block(scores.masked_fill(later, -1e4).softmax(-1) @ x)


def steps(marked: Sequence[int] = (), mark: Any = torch._dynamo.mark_dynamic) -> Step:
    """One step for each input; the dimensions that are marked before each call."""

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled, outputs = wrap(model), []
        for x in inputs:
            for dimension in marked:
                mark(x, dimension)
            outputs.append(compiled(x))
            weighted(outputs[-1]).backward()
        return left_by(model, inputs, outputs)

    return step


def ran_every_time(found: Outcome, calls: Sequence[int]) -> bool:
    """Whether the regions of the i-th compilation ran in calls[i] steps, and nothing else did."""
    expected: dict[str, int] = {}
    for plan, count in zip(found.plans, calls, strict=True):
        assert plan.placed and {region.half for region in plan.regions} == {"forward", "backward"}
        for region in plan.regions:
            expected[region.tree] = expected.get(region.tree, 0) + count
    return expected == found.runs


@pytest.mark.parametrize(
    ("make", "shapes", "backend"),
    [
        pytest.param(Block, BATCHES, interpreted, id="batch"),
        pytest.param(Block, BATCHES, "evt", id="batch-inductor"),
        pytest.param(Attention, LENGTHS, interpreted, id="length"),
        pytest.param(Attention, LENGTHS, "evt", id="length-inductor", marks=pytest.mark.slow),
        pytest.param(Attention, BOTH, interpreted, id="both"),
    ],
)
def test_a_size_that_changes_compiles_once_more(make: Any, shapes: Any, backend: Any) -> None:
    """As with Inductor: once for the first size, then once for all."""
    found = check(make, shapes, steps(), backend=backend, seeds=(0,))
    assert len(found.plans) == 2
    assert ran_every_time(found, [1, len(shapes) - 1])


@pytest.mark.parametrize(
    ("make", "shapes", "marked", "backend"),
    [
        pytest.param(Block, BATCHES, (0,), interpreted, id="batch"),
        pytest.param(Attention, BOTH, (0, 1), interpreted, id="both"),
        pytest.param(Block, BATCHES, (0,), "evt", id="batch-inductor"),
        pytest.param(Attention, BOTH, (0, 1), "evt", id="both-inductor", marks=pytest.mark.slow),
    ],
)
def test_a_marked_size_compiles_once(make: Any, shapes: Any, marked: Any, backend: Any) -> None:
    found = check(make, shapes, steps(marked), backend=backend, seeds=(0,))
    assert len(found.plans) == 1
    assert ran_every_time(found, [len(shapes)])


def test_a_size_without_a_hint_takes_0_and_1_too() -> None:
    """Regions then run on no rows at all."""
    shapes = [(6, 16), (1, 16), (0, 16), (9, 16)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        step = steps((0,), torch._dynamo.decorators.mark_unbacked)
        found = check(Block, shapes, step, seeds=(0,))
    assert len(found.plans) == 1
    assert ran_every_time(found, [len(shapes)])


@pytest.mark.parametrize("shape", [(1, 16), (1, 1, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_batch_of_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = check(Block, [shape], one_step, dtype=dtype)
    assert min(found.halves) > 0 and found.ran()


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        ((0, 16), interpreted),
        ((0, 3, 16), interpreted),
        ((3, 0, 16), interpreted),
        ((0, 16), "evt"),
    ],
)
def test_an_empty_batch_is_inductors(shape: tuple[int, ...], backend: Any) -> None:
    """Nothing is fused; the gradients are zero, not missing."""
    found = check(Block, [shape], one_step, backend=backend, seeds=(0,))
    (plan,) = found.plans
    assert not plan.placed and not found.runs
    assert {unfused.code for unfused in plan.unfused} == {"empty"}
    gradients = [t for name, t in found.tensors.items() if name.startswith("grad:")]
    assert len(gradients) == 7 and not any(t.any() for t in gradients)


def test_the_sizes_0_and_1_are_compiled_apart_as_always() -> None:
    shapes = [(5, 16), (7, 16), (1, 16), (0, 16), (4, 16)]
    found = check(Block, shapes, steps(), seeds=(0,))
    assert [plan.placed for plan in found.plans] == [True, True, True, False]
    check(Block, shapes, steps(), seeds=(0,), backend="aot_eager", options={})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(found.plans)
