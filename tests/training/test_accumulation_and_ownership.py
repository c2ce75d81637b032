"""Which parameter gets which gradient: accumulated, kept, frozen, tied, or none at all."""

from __future__ import annotations

from typing import Any

import torch
from tests.training.runs import Block, Layers, check, left_by, one_step, weighted
from torch import Tensor, nn
from torch.nn import functional as F


def names_without_gradient(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.grad is None}


def test_gradients_accumulate_over_micro_batches() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled, outputs = wrap(model), []
        for x in inputs:
            outputs.append(compiled(x))
            (weighted(outputs[-1]) / len(inputs)).backward()
        return left_by(model, inputs, outputs)

    found = check(Block, [(6, 16)] * 4, step)
    assert found.halves == (2, 2) and found.ran(4, 4)


def test_several_forwards_before_one_backward() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled = wrap(model)
        outputs = [compiled(x) for x in inputs]
        outputs.append(compiled(outputs[0]))
        loss = sum((weighted(output) for output in outputs), torch.zeros(()))
        loss.backward()
        return left_by(model, inputs, outputs, loss)

    found = check(Block, [(6, 16)] * 2, step)
    assert found.ran(3, 3) and min(found.halves) == 2


def test_a_retained_graph_gives_the_gradients_again() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        output = wrap(model)(*inputs)
        loss = weighted(output)
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        loss.backward(retain_graph=True)
        for before, parameter in zip(first, model.parameters(), strict=True):
            assert parameter.grad is not None and torch.equal(before, parameter.grad)
        loss.backward()
        return left_by(model, inputs, output, loss)

    found = check(Block, [(6, 16)], step)
    assert found.halves == (2, 2) and found.ran(1, 3)


def test_frozen_parameters_get_no_gradient_and_the_others_theirs() -> None:
    frozen = {"up.weight", "norm.weight", "norm.bias", "down.bias"}
    kept: list[set[str]] = []

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        left = one_step(model, inputs, wrap)
        kept.append(names_without_gradient(model))
        return left

    found = check(Block, [(6, 16)], step)
    assert all(names == frozen for names in kept)
    assert min(found.halves) > 0 and found.ran()


def test_a_parameter_frozen_between_two_steps() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled = wrap(model)
        weighted(compiled(*inputs)).backward()
        before = model.first.weight.grad.clone()
        model.first.weight.requires_grad_(False)
        weighted(compiled(*inputs)).backward()
        assert torch.equal(before, model.first.weight.grad)
        return left_by(model, inputs)

    found = check(Layers, [(6, 16)], step)
    assert len(found.plans) == 2 * found.steps and all(plan.placed for plan in found.plans)


def test_only_the_inputs_need_a_gradient() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        return one_step(model.requires_grad_(False), inputs, wrap)

    found = check(Block, [(6, 16)], step)
    assert min(found.halves) > 0 and found.ran()


class Tied(nn.Module):
    """One weight reads the tokens, works in the middle, and writes the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.detach()[:, 0].abs() * 7).long() % 20
        hidden = F.gelu(self.middle(self.embedding(tokens) + x))
        mixed = torch.tanh(hidden @ self.head.weight[:16])
        return torch.tanh(self.head(hidden + mixed))


def test_a_tied_weight_gets_the_sum_of_its_gradients() -> None:
    found = check(Tied, [(6, 16)], one_step)
    assert min(found.halves) > 0 and found.ran()


class Unused(Layers):
    """One parameter is never read, one is read detached, one only where it does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(16, 24)
        self.detached = nn.Parameter(torch.randn(24))
        self.compared = nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x)) * self.detached.detach()
        return torch.tanh(self.second(hidden * (hidden > self.compared)))


def test_a_parameter_without_gradient_keeps_none() -> None:
    without: list[set[str]] = []

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        left = one_step(model, inputs, wrap)
        without.append(names_without_gradient(model))
        return left

    found = check(Unused, [(6, 16)], step)
    expected = {"never.weight", "never.bias", "detached", "compared"}
    assert all(names == expected for names in without)
    assert min(found.halves) > 0 and found.ran()


def test_hooks_on_parameters_see_and_change_their_gradients() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        seen: list[Tensor] = []
        model.first.weight.register_hook(lambda g: g * 2)

        def after(p: Tensor) -> None:
            assert p.grad is not None
            seen.append(p.grad.clone())

        model.second.weight.register_post_accumulate_grad_hook(after)
        left = one_step(model, inputs, wrap)
        (hooked,) = seen
        return {**left, "grad:seen": hooked}

    found = check(Layers, [(6, 16)], step)
    assert found.halves == (2, 1) and found.ran()
