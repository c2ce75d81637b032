"""Activation checkpointing: what the user wants saved is saved, the rest is computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.training.runs import BACKENDS, Block, Outcome, check, left_by, one_step, weighted
from torch import Tensor, nn
from torch._functorch.config import patch as functorch_config
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
PRODUCTS = (aten.addmm.default, aten.mm.default)
ROWS, HIDDEN = 6, 48
HIDDEN_BYTES = 4 * ROWS * HIDDEN
KEEP, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


class Two(nn.Module):
    def __init__(self, **checkpointing: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.checkpointing) if self.checkpointing else block(x)
        return x


def selective(policy: Callable[..., CheckpointPolicy]) -> dict[str, Any]:
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    return {"use_reentrant": False, "context_fn": context}


def products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return KEEP if op in PRODUCTS else AGAIN


def activations(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return KEEP if op is aten.gelu.default else AGAIN


def everything_else(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return AGAIN if op in PRODUCTS else KEEP


def trained(backend: Any = None, seeds: tuple[int, ...] = (0, 1), **checkpointing: Any) -> Outcome:
    """A checked step that saved just what Inductor would have saved."""
    how = {} if backend is None else {"backend": backend}
    model = functools.partial(Two, **checkpointing)
    found = check(model, [(ROWS, 16)], one_step, seeds=seeds, **how)
    assert found.ran() and min(found.halves) > 0
    for plan in found.plans:
        assert plan.saved_bytes == plan.inductor_saved_bytes
    return found


def saved(found: Outcome) -> Mapping[str, int | None]:
    return {s.tensor: s.bytes for s in found.plans[0].saved if not s.tensor.startswith("primals")}


def products_in_backward(found: Outcome) -> int:
    plan = found.plans[0]
    return sum(item.half == "backward" for item in (*plan.regions, *plan.unfused))


def test_without_a_checkpoint_pre_activations_and_activations_are_saved() -> None:
    """What the tests below differ from."""
    found = trained()
    assert found.halves == (3, 4)
    assert [*saved(found).values()].count(HIDDEN_BYTES) == 4
    assert products_in_backward(found) == 8  # two gradients for each of four products


@pytest.mark.parametrize("reentrant", [False, True])
def test_full_checkpointing_saves_the_inputs_and_computes_again(reentrant: bool) -> None:
    found = trained(use_reentrant=reentrant)
    assert [*saved(found).values()] == [4 * ROWS * 16]  # what goes into the second block
    assert products_in_backward(found) == 8 + 2  # the product up again in each block
    again = [r.tree for r in found.plans[0].regions if r.half == "backward"]
    assert sum("gelu_tanh(" in tree for tree in again) == 2  # fused there, too
    assert found.halves == (3, 4)
    assert any("products computed again" in note for note in found.plans[0].notes)


@BACKENDS
def test_products_that_must_be_saved_are_and_activations_are_computed_again(backend: Any) -> None:
    found = trained(backend, (0, 1) if callable(backend) else (0,), **selective(products))
    assert [name for name, size in saved(found).items() if size == HIDDEN_BYTES] == [
        "addmm",
        "addmm_2",
    ]
    assert products_in_backward(found) == 8  # no product twice
    assert found.halves == (4, 4)


def test_activations_that_must_be_saved_are_and_products_are_computed_again() -> None:
    plain, found = trained(), trained(**selective(activations))
    kept = [name for name, size in saved(found).items() if size == HIDDEN_BYTES]
    activated = [name for name in saved(plain) if name.startswith("mul")]
    assert set(activated) <= set(kept) and len(activated) == 2
    assert not any(name.startswith("addmm") for name in kept)


def test_products_that_must_not_be_saved_are_not() -> None:
    found = trained(**selective(everything_else))
    kept = saved(found)
    assert kept and not any(name.startswith("addmm") for name in kept)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_compiled_model_runs_forward_twice(reentrant: bool) -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        output = checkpoint(wrap(model), *inputs, use_reentrant=reentrant)
        weighted(output).backward()
        return left_by(model, inputs, output)

    found = check(Block, [(ROWS, 16)], step)
    assert {region.half for region in found.regions} >= {"forward", "backward"}
    assert sum(found.runs.values()) == 6 * found.steps
    if not reentrant:
        assert found.halves == (2, 2) and found.ran(2, 1)


@pytest.mark.parametrize(("budget", "recomputed_products"), [(0.0, 2), (0.5, 0)])
def test_a_memory_budget_of_pytorchs_is_kept(budget: float, recomputed_products: int) -> None:
    plain = trained(seeds=(0,))
    with functorch_config(activation_memory_budget=budget):
        found = trained(seeds=(0,))
    used, most = (sum(size or 0 for size in saved(o).values()) for o in (found, plain))
    assert used == 0 if budget == 0 else 0 < used < 0.6 * most
    assert products_in_backward(found) >= 8 + recomputed_products
