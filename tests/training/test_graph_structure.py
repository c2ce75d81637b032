"""What models return, share and change: several outputs, views, in-place work, graph breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.runs import BACKENDS, Block, Layers, check, left_by, one_step, weighted
from torch import Tensor, nn
from torch.nn import functional as F

TARGETS = torch.tensor([1, 4, 0, 11, 3, 7])


class TwiceUsed(Layers):
    """The pre-activation is used twice and returned, and so is the hidden value."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        before = self.first(x)
        hidden = F.gelu(before)
        raw = self.second(hidden) + 0.1 * before[:, :12]
        return torch.tanh(raw), raw, hidden, before


def test_intermediate_values_that_are_outputs_too() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        outputs = wrap(model)(*inputs)
        loss = sum((weighted(output) for output in outputs), outputs[1].sum())
        loss.backward()
        return left_by(model, inputs, outputs, loss)

    found = check(TwiceUsed, [(6, 16)], step)
    assert min(found.halves) > 0 and found.ran()


def test_only_one_of_several_outputs_gets_a_gradient() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        outputs = wrap(model)(*inputs)
        weighted(outputs[2]).backward()
        return left_by(model, inputs, outputs)

    found = check(TwiceUsed, [(6, 16)], step)
    assert min(found.halves) > 0 and found.ran()


def test_one_value_returned_twice() -> None:
    class Same(Layers):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            result = super().forward(x)
            return result, result

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        a, b = wrap(model)(*inputs)
        (weighted(a) + (b * b).mean()).backward()
        return left_by(model, inputs, (a, b))

    found = check(Same, [(6, 16)], step)
    assert found.halves == (2, 1) and found.ran()


class Logits(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.second(F.gelu(self.first(x)))
        return F.cross_entropy(logits, TARGETS), logits


@pytest.mark.parametrize("share", [0.0, 0.1], ids=["returned", "used"])
def test_raw_logits_beside_the_loss(share: float) -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        loss, logits = wrap(model)(*inputs)
        total = loss + share * weighted(logits) if share else loss
        total.backward()
        return left_by(model, inputs, logits, total)

    found = check(Logits, [(6, 16)], step)
    assert min(found.halves) > 0 and found.ran()


def test_views_of_results_and_inputs_are_returned() -> None:
    class Views(Layers):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            result = super().forward(x)
            return result.t(), result[1:3], result.view(-1), x.view(-1), self.first.weight.t()

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        outputs = wrap(model)(*inputs)
        sum((weighted(output) for output in outputs), torch.zeros(())).backward()
        return left_by(model, inputs, outputs)

    found = check(Views, [(6, 16)], step)
    assert found.halves == (2, 1) and found.ran()


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_a_gradient_of_another_layout_comes_in(layout: str) -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        output = wrap(model)(*inputs)
        rows, columns = output.shape
        steps = torch.linspace(-1, 1, rows * columns, dtype=output.dtype)
        gradient = steps.view(columns, rows).t()
        if layout == "expanded":
            gradient = steps[3].expand(rows, columns)
        output.backward(gradient)
        return left_by(model, inputs, output)

    found = check(Layers, [(6, 16)], step)
    assert found.halves == (2, 1) and found.ran()


class Running(Layers):
    """Batch norm's running mean by hand, a counter, a buffer of the last value; work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.last: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(24))
        self.register_buffer("last", torch.zeros(6, 24))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x).mul_(1.5), inplace=True)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
            self.last.copy_(hidden)
            self.count += 1
        return torch.tanh(self.second(hidden - self.mean))


def several_steps(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
    compiled, outputs = wrap(model), []
    for x in inputs:
        outputs.append(compiled(x))
        weighted(outputs[-1]).backward()
    return left_by(model, inputs, outputs)


@BACKENDS
def test_buffers_that_change_and_work_in_place(backend: Any) -> None:
    found = check(Running, [(6, 16)] * 2, several_steps, backend=backend, seeds=(0,))
    assert found.halves == (2, 1) and found.ran(2, 2)
    assert found.tensors["buffer:count"] == 2
    assert found.tensors["buffer:last"].any() and found.tensors["buffer:mean"].any()


def test_batch_norm_keeps_its_running_statistics() -> None:
    class Normed(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(24)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.second(F.gelu(self.norm(self.first(x)))))

    found = check(Normed, [(6, 16)] * 2, several_steps)
    assert min(found.halves) > 0 and found.ran(2, 2)
    assert found.tensors["buffer:norm.num_batches_tracked"] == 2


@pytest.mark.parametrize("differentiable", [False, True])
def test_an_input_that_the_model_changes(differentiable: bool) -> None:
    class Adding(Layers):
        def forward(self, x: Tensor, into: Tensor) -> Tensor:
            into.add_(F.gelu(self.first(x)))
            return torch.tanh(self.second(into))

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        x, y = inputs
        into = y * 2 if differentiable else (y * 2).detach()
        output = wrap(model)(x, into)
        (weighted(output) + weighted(into)).backward()
        return left_by(model, inputs, (output, into))

    found = check(Adding, [(6, 16), (6, 24)], step)
    assert found.halves == (2, 1) and found.ran()


def test_a_result_that_the_caller_changes() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        first, second = wrap(model)(*inputs)
        kept = second.detach().clone()
        first.mul_(2)
        assert torch.equal(second.detach(), kept)
        (weighted(first) + weighted(second)).backward()
        return left_by(model, inputs, (first, second))

    class Equal(Layers):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = F.gelu(self.first(x))
            return self.second(hidden) + 1, self.second(hidden) + 1

    found = check(Equal, [(6, 16)], step)
    assert min(found.halves) > 0 and found.ran()


def test_a_graph_break_makes_two_graphs_with_regions_in_each() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layers(16), Layers(12)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            torch._dynamo.graph_break()
            return self.second(hidden)

    found = check(Broken, [(6, 16)], one_step)
    assert len(found.plans) == 2 * found.steps and all(plan.placed for plan in found.plans)
    assert found.halves == (4, 2) and found.ran()


def test_one_module_called_twice_in_a_graph() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    found = check(Shared, [(6, 16)], one_step)
    assert len(found.plans) == found.steps and min(found.halves) > 1 and found.ran()


def test_one_compiled_block_called_by_an_eager_model_and_by_itself() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled = wrap(model)
        through = compiled(torch.sin(compiled(inputs[0])))
        alone = compiled(inputs[1])
        (weighted(through) + weighted(alone)).backward()
        return left_by(model, inputs, (through, alone))

    found = check(Block, [(6, 16)] * 2, step)
    assert found.ran(3, 3) and min(found.halves) == 2


def test_a_compiled_step_equals_a_compiled_module() -> None:
    """The loss outside of what is compiled, inside, and inside together with the model's call."""

    def module(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        return one_step(model, inputs, wrap)

    def function(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        def train(x: Tensor) -> tuple[Tensor, Tensor]:
            output = model(x)
            return weighted(output), output

        loss, output = wrap(train)(*inputs)
        loss.backward()
        return left_by(model, inputs, output, loss)

    outside = check(Layers, [(6, 16)], module)
    inside = check(Layers, [(6, 16)], function)
    assert outside.halves == (2, 1) and min(inside.halves) > 0
    assert outside.ran() and inside.ran()
    for name, tensor in outside.tensors.items():
        assert (inside.tensors[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_a_compiled_optimizer_beside_a_compiled_model() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compiled, update = wrap(model), wrap(optimizer.step)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for x in inputs:
            weighted(compiled(x)).backward()
            update()
            optimizer.zero_grad()
        return {f"update:{name}": p - start[name] for name, p in model.named_parameters()}

    found = check(Layers, [(6, 16)] * 2, step, seeds=(0,))
    assert [plan.placed for plan in found.plans].count(True) == 1
    assert found.halves == (2, 1) and found.ran(2, 2)


class WithHooks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.first(x))
        hidden.register_hook(lambda g: g * 2 + hidden.detach())
        return torch.tanh(self.second(hidden))


def test_a_hook_on_a_value_inside() -> None:
    found = check(WithHooks, [(6, 16)], one_step)
    assert min(found.halves) > 0 and found.ran()


class Squared(torch.autograd.Function):
    """A product with a derivative of the user's own, which holds two more products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.relu(x @ weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        masked = gradients[0] * (x @ weight > 0)
        return torch.tanh(masked @ weight.t()), x.t() @ masked


def test_a_function_with_its_own_backward() -> None:
    class Uses(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.second(Squared.apply(x, self.first.weight.t())))

    found = check(Uses, [(6, 16)], one_step)
    assert min(found.halves) > 0 and found.ran()


def test_a_module_without_any_product_is_inductors() -> None:
    class Elementwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.norm(x)) * 2

    found = check(Elementwise, [(6, 16)], one_step)
    assert len(found.plans) == found.steps
    assert found.halves == (0, 0) and not found.runs
