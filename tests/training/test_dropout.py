"""Dropout: one mask in both halves, whoever draws it, and the gradients that belong to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.runs import (
    EAGER_NUMBERS,
    Block,
    check,
    left_by,
    one_step,
    watched,
    weighted,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from interpreted import PLACE, interpreted
from torch_evt.runtime import counters, ops
from torch_evt.testing import Comparison, Fp64Arithmetic, compare, fp64_copy

SHARES = (0.3, 0.2)
ROWS, WIDTHS = 16, (48, 40)


class Dropping(nn.Module):
    """Two dropouts, each behind a product and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTHS[0])
        self.second = nn.Linear(WIDTHS[0], WIDTHS[1])
        self.third = nn.Linear(WIDTHS[1], 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.gelu(self.first(x)), SHARES[0], self.training)
        x = F.dropout(F.silu(self.second(x)), SHARES[1], self.training)
        return self.third(x)


class Checkpointed(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@contextmanager
def masks_read() -> Iterator[list[Tensor]]:
    """The masks of all regions that run in the block, in the order of the runs: boolean operands,
    and what a tree makes of an operand of uniform numbers."""
    seen: list[Tensor] = []
    run = ops.run

    def spied(spec: str, inputs: Sequence[Tensor], *rest: Any) -> Any:
        seen.extend(x.clone() for x in inputs if x.dtype == torch.bool)
        for argument, p in re.findall(r"gt\(tile\((\d+): f32[^)]*\), ([\d.]+)\)", spec):
            seen.append(inputs[2 + int(argument)] > float(p))  # behind the product's operands
        return run(spec, inputs, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "run", spied)
        yield seen


@contextmanager
def fed(masks: Sequence[Tensor]) -> Iterator[None]:
    """Dropout applies these masks, one after the other, with a single rounding."""
    left = list(masks)

    def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
        exact = x.double() * left.pop(0) / (1 - p)
        return exact.to(x.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        yield
    assert not left


def train(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    output = call(leaf)
    loss = weighted(output)
    loss.backward()
    left = left_by(model, [leaf], output, loss)
    return {name: tensor.detach().clone() for name, tensor in left.items()}


def judged(
    ours: dict[str, Tensor], model: nn.Module, x: Tensor, masks: Sequence[Tensor]
) -> Comparison:
    """Our step beside eager and fp64 with these masks."""
    double = fp64_copy(model)
    with fed(masks):
        eager = train(model, model, x)
    with fed(masks), Fp64Arithmetic():
        exact = train(double, double, x.double())
    return compare(ours, eager, exact, x.dtype)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(interpreted, torch.float32), (interpreted, torch.bfloat16), ("evt", torch.float32)],
    ids=["interpreted-fp32", "interpreted-bf16", "inductor-fp32"],
)
def test_with_inductors_numbers_both_halves_see_one_mask(backend: Any, dtype: torch.dtype) -> None:
    with watched() as plans:
        torch.manual_seed(0)
        model = Dropping().to(dtype)
        compiled = torch.compile(model, backend=backend, options=dict(PLACE))
        drawn = []
        for seed in range(3):
            x = torch.randn(ROWS, 16).to(dtype)
            torch.manual_seed(seed)
            with masks_read() as masks:
                ours = train(compiled, model, x)
            first, second, again_second, again_first = masks
            assert torch.equal(first, again_first) and torch.equal(second, again_second)
            for mask, p in zip((first, second), SHARES, strict=True):
                deviation = (p * (1 - p) / mask.numel()) ** 0.5
                assert abs(mask.float().mean() - (1 - p)) < 5 * deviation
            judged(ours, model, x, [first, second]).raise_if_failed()
            other = first.clone()
            other[0] ^= True
            assert not judged(ours, model, x, [other, second]).passed
            drawn.append(first)
        torch.manual_seed(1)
        with masks_read() as masks:
            train(compiled, model, x)
    assert torch.equal(masks[0], drawn[1])  # the seed decides
    assert not any(torch.equal(a, b) for a, b in zip(drawn, drawn[1:], strict=False))
    (plan,) = plans
    assert [region.half for region in plan.regions] == ["forward"] * 2 + ["backward"] * 2
    assert sum(counters.region_runs.values()) == 4 * 4


def test_under_a_checkpoint_the_recomputed_mask_is_the_same() -> None:
    """With generated code only: run node by node, Inductor's random operation ignores its seed."""
    with watched() as plans:
        torch.manual_seed(0)
        model, x = Checkpointed(), torch.randn(ROWS, 16)
        compiled = torch.compile(model, backend="evt", options=dict(PLACE))
        with masks_read() as masks:
            ours = train(compiled, model, x)
        kept = [[m for m in masks if m.shape[1] == width] for width in WIDTHS]
        assert min(map(len, kept)) >= 2  # forward, and in backward
        assert all(torch.equal(m, same[0]) for same in kept for m in same)
        plain = Dropping()
        plain.load_state_dict(model.state_dict())
        judged(ours, plain, x, [same[0] for same in kept]).raise_if_failed()
    (plan,) = plans
    assert not [s for s in plan.saved if s.tensor.startswith("inductor_random")]
    assert plan.saved_bytes == plan.inductor_saved_bytes
    assert sum(counters.region_runs.values()) == len(plan.regions) >= 4


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
def test_with_eagers_numbers_a_step_is_eagers(dtype: torch.dtype) -> None:
    found = check(Dropping, [(ROWS, 16)], one_step, dtype=dtype, options=EAGER_NUMBERS)
    assert found.halves == (2, 2) and found.ran()
    assert found.trees.count("tile(1: bool") == 2 * found.steps


def test_with_eagers_numbers_under_a_checkpoint() -> None:
    found = check(Checkpointed, [(ROWS, 16)], one_step, options=EAGER_NUMBERS)
    assert min(found.halves) > 0 and found.ran()
    forward = [region.tree for region in found.regions if region.half == "forward"]
    assert not any("bool" in tree for tree in forward)


def test_the_numbers_go_on_from_step_to_step_as_eagers() -> None:
    def steps(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled, outputs = wrap(model), []
        for x in inputs:
            outputs.append(compiled(x))
            weighted(outputs[-1]).backward()
        return {**left_by(model, inputs, outputs), "output:next": torch.rand(3)}

    found = check(Dropping, [(ROWS, 16)] * 3, steps, options=EAGER_NUMBERS)
    assert found.halves == (2, 2) and found.ran(3, 3)


def test_an_evaluated_model_drops_nothing() -> None:
    def evaluated(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        return one_step(model.eval(), inputs, wrap)

    with masks_read() as masks:
        found = check(lambda: Block(p=0.5), [(6, 16)], evaluated)
    assert found.halves == (2, 2) and found.ran() and not masks


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_or_everything_dropped(p: float) -> None:
    found = check(lambda: Block(p=p), [(6, 16)], one_step, options=EAGER_NUMBERS)
    assert found.halves[0] > 0 and found.ran()
