"""Inference, function transforms, gradients taken inside what is compiled, double backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.runs import BACKENDS, Block, Layers, check, left_by, one_step, weighted
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap

from interpreted import PLACE, interpreted
from torch_evt.runtime import counters


def named(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"grad:{name}": tensor for name, tensor in gradients.items()}


def parameters(model: nn.Module, requires_grad: bool = False) -> dict[str, Tensor]:
    return {
        name: p.detach().clone().requires_grad_(requires_grad)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Any) -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        x = inputs[0].detach()
        with mode():
            output = wrap(model.eval())(x)
            assert output.is_inference() is (mode is torch.inference_mode)
            return {"output:": output.clone()}

    found = check(Block, [(6, 16)], step)
    assert {region.half for region in found.regions} == {"inference"}
    assert found.halves == (2, 0) and found.ran()


def test_training_and_inference_take_turns() -> None:
    """An evaluation between two steps changes neither."""

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled = wrap(model)
        first = compiled(*inputs)
        weighted(first).backward()
        with torch.no_grad():
            between = compiled(*inputs)
        second = compiled(*inputs)
        weighted(second).backward()
        return left_by(model, inputs, (first, between, second))

    found = check(Layers, [(6, 16)], step)
    halves = [region.half for region in found.plans[0].regions + found.plans[1].regions]
    assert halves.count("forward") == halves.count("inference") == 2
    assert halves.count("backward") == 1
    assert sum(found.runs.values()) == found.steps * (2 * 3 + 2)


def test_a_part_under_no_grad() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.block = Layers(), Block(12)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.frozen(x)
            return self.block(features)

    found = check(Partly, [(6, 16)], one_step)
    assert min(found.halves) > 0 and found.ran()
    assert not [name for name in found.tensors if name.startswith("grad:frozen")]


def test_functional_call() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        given = parameters(model, requires_grad=True)

        def train(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return weighted(functional_call(model, values, (x,)))

        loss = wrap(train)(given, *inputs)
        loss.backward()
        gradients = {name: p.grad for name, p in given.items() if p.grad is not None}
        assert len(gradients) == 4
        return {"loss:": loss, "grad:x": inputs[0].grad, **named(gradients)}

    found = check(Layers, [(6, 16)], step)
    assert min(found.halves) > 0 and found.ran()


@pytest.mark.parametrize("kind", ["grad", "vjp"])
def test_a_gradient_by_torch_func(kind: str) -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        x = inputs[0].detach()

        def loss(values: dict[str, Tensor]) -> Tensor:
            return weighted(functional_call(model, values, (x,)))

        def gradients(values: dict[str, Tensor]) -> dict[str, Tensor]:
            if kind == "grad":
                return grad(loss)(values)  # type: ignore[no-any-return]
            value, backward = vjp(loss, values)
            return backward(torch.ones_like(value))[0]  # type: ignore[no-any-return]

        return named(wrap(gradients)(parameters(model)))

    found = check(Layers, [(6, 16)], step)
    assert found.halves[0] >= 2 and found.ran()
    assert "gelu_erf" in found.trees


def test_a_gradient_for_each_sample() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return weighted(functional_call(model, values, (x,)))

        def samples(values: dict[str, Tensor], x: Tensor) -> Any:
            return vmap(grad(loss), (None, 0))(values, x)

        return named(wrap(samples)(parameters(model), inputs[0].detach()))

    found = check(Layers, [(4, 5, 16)], step)
    assert found.halves[0] > 0 and found.ran()


def test_several_models_at_once_by_vmap() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        given = {
            name: torch.stack([p, 1.5 * p, -p]).requires_grad_()
            for name, p in parameters(model).items()
        }

        def all_of_them(values: dict[str, Tensor], x: Tensor) -> Any:
            return vmap(lambda one: functional_call(model, one, (x,)))(values)

        output = wrap(all_of_them)(given, *inputs)
        weighted(output).backward()
        gradients = {name: p.grad for name, p in given.items() if p.grad is not None}
        return {"output:": output, "grad:x": inputs[0].grad, **named(gradients)}

    found = check(Layers, [(6, 16)], step)
    assert found.halves == (0, 1) and found.ran()  # forward: a bias alone gains nothing


def test_a_derivative_in_one_direction() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        given = parameters(model)

        def derivative(x: Tensor, direction: Tensor) -> Any:
            return jvp(lambda x: functional_call(model, given, (x,)), (x,), (direction,))

        output, tangent = wrap(derivative)(*(x.detach() for x in inputs))
        return {"output:value": output, "output:tangent": tangent}

    found = check(Layers, [(6, 16)] * 2, step)
    assert found.halves[0] > 0 and found.ran()


def test_a_hessian() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        given = parameters(model)

        def second(x: Tensor) -> Any:
            return hessian(lambda x: weighted(functional_call(model, given, (x,))))(x)

        return {"output:": wrap(second)(inputs[0].detach())}

    found = check(Layers, [(2, 16)], step, seeds=(0,))
    assert found.halves[0] > 0 and found.ran()


@pytest.mark.parametrize("traced", [False, True], ids=["graph break", "traced"])
@pytest.mark.parametrize("how", ["autograd.grad", "backward"])
def test_a_whole_step_inside(how: str, traced: bool) -> None:
    """PyTorch takes the gradient outside of the graph, or, where asked to, traces it with it."""

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        given = dict(model.named_parameters())

        def train(x: Tensor) -> Any:
            loss = weighted(model(x))
            if how == "backward":
                loss.backward()
                return loss.detach()
            return loss.detach(), *torch.autograd.grad(loss, list(given.values()))

        if how == "backward":
            return left_by(model, inputs, (), wrap(train)(*inputs))
        loss, *gradients = wrap(train)(*inputs)
        return {"loss:": loss, **named(dict(zip(given, gradients, strict=True)))}

    with torch._dynamo.config.patch(trace_autograd_ops=traced):
        found = check(Layers, [(6, 16)], step)
    halves = {region.half for region in found.regions}
    assert halves == ({"inference"} if traced else {"forward", "backward"})
    assert sum(plan.placed for plan in found.plans) == found.steps and found.ran()


@BACKENDS
def test_compiled_autograd(backend: Any) -> None:
    """The backward graph is traced again with our regions in it, and compiled as a whole."""

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled = wrap(model)
        output = compiled(*inputs)
        loss = weighted(output)
        if compiled is model:
            loss.backward()
        else:
            with torch._dynamo.compiled_autograd._enable(wrap):
                loss.backward()
        return left_by(model, inputs, output, loss)

    found = check(Layers, [(6, 16)], step, backend=backend, seeds=(0,))
    assert found.halves == (2, 1) and found.ran()
    assert len(found.plans) == 2


def test_double_backward_is_refused_as_by_inductor() -> None:
    """create_graph alone is allowed; only going through the gradient again is refused."""

    def refusals(backend: Any, options: dict[str, Any]) -> list[str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Layers(), torch.randn(6, 16, requires_grad=True)
        output = torch.compile(model, backend=backend, options=options)(x)
        (first,) = torch.autograd.grad(weighted(output), x, create_graph=True)
        said = []
        for scalar in (first.sum(), first[0, 0]):
            with pytest.raises(RuntimeError) as error:
                torch.autograd.grad(scalar, x, retain_graph=True)
            said.append(str(error.value))
        return said

    counters.reset()
    ours = refusals(interpreted, dict(PLACE))
    assert sum(counters.region_runs.values()) == 3
    assert ours == refusals("inductor", {})
    assert all("does not currently support double backward" in said for said in ours)


def test_detect_anomaly_finds_nothing_wrong() -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        with torch.autograd.set_detect_anomaly(True):
            return one_step(model, inputs, wrap)

    found = check(Block, [(6, 16)], step, seeds=(0,))
    assert found.halves == (2, 2) and found.ran()
