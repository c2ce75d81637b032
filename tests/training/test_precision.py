"""Half precision: models in it, autocast around and inside the compiled model, loss scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.runs import Block, Layers, check, left_by, one_step, weighted
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional as F

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


class Inside(Block):
    dtype = torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            return super().forward(x)


class NormInFp32(Block):
    """The usual half-precision model: the norm computes in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (p.to(torch.float32) for p in (self.norm.weight, self.norm.bias))
        normed = F.layer_norm(x.to(torch.float32), (16,), weight, bias)
        return x + self.down(F.gelu(self.up(normed.to(x.dtype))))


@HALF
def test_a_model_in_half_precision(dtype: torch.dtype) -> None:
    found = check(Block, [(6, 16)], one_step, dtype=dtype, seeds=(0, 1, 2))
    assert found.halves == (2, 2) and found.ran()
    assert f"A: {NAMES[dtype]}" in found.trees


@HALF
def test_norms_in_fp32_within_a_model_in_half_precision(dtype: torch.dtype) -> None:
    found = check(NormInFp32, [(24, 16)], one_step, dtype=dtype)
    assert min(found.halves) > 0 and found.ran()


@HALF
def test_autocast_around_the_compiled_model(dtype: torch.dtype) -> None:
    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled = wrap(model)
        with torch.autocast("cpu", dtype=dtype):
            output = compiled(*inputs)
        loss = weighted(output)
        loss.backward()
        return left_by(model, inputs, output, loss)

    found = check(Block, [(6, 16)], step, computed_in=dtype)
    assert found.halves == (2, 2) and found.ran()
    assert f"A: {NAMES[dtype]}" in found.trees and "A: f32" not in found.trees


@HALF
def test_autocast_inside_the_compiled_model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inside, "dtype", dtype)
    found = check(Inside, [(6, 16)], one_step, computed_in=dtype)
    assert found.halves == (2, 2) and found.ran()
    assert f"A: {NAMES[dtype]}" in found.trees and "A: f32" not in found.trees


def test_a_compiled_model_called_with_and_without_autocast() -> None:
    """Each way is a graph of its own; neither gives the other's result."""

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled = wrap(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = compiled(*inputs)
        wide = compiled(*inputs)
        (weighted(narrow) + weighted(wide)).backward()
        return left_by(model, inputs, {"narrow": narrow, "wide": wide})

    found = check(Layers, [(6, 16)], step, computed_in=torch.bfloat16)
    assert "A: bf16" in found.trees and "A: f32" in found.trees
    assert len(found.plans) == 2 * found.steps and found.ran()


def test_an_overflow_halves_the_scale_and_leaves_the_parameters() -> None:
    enough, too_much = 2.0**4, 2.0**24
    scales: list[list[float]] = []

    def step(model: nn.Module, inputs: Any, wrap: Any) -> dict[str, Tensor]:
        compiled = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        parameters = dict(model.named_parameters())
        start = {name: p.detach().clone() for name, p in parameters.items()}

        def train(scaler: GradScaler) -> float:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = compiled(*inputs)
            scaler.scale(weighted(output)).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            return float(scaler.get_scale())

        if inputs[0].dtype == torch.float64:  # nothing overflows there, and nothing is scaled
            plain = GradScaler("cpu", enabled=False)
            train(plain), train(plain)
        else:
            seen = [train(GradScaler("cpu", init_scale=too_much))]
            for name, parameter in parameters.items():
                assert torch.equal(parameter, start[name]), name
                assert parameter.grad is not None and not parameter.grad.isfinite().all(), name
            scaler = GradScaler("cpu", init_scale=enough)
            scales.append([*seen, train(scaler), train(scaler)])
        return {f"update:{name}": p.detach() - start[name] for name, p in parameters.items()}

    found = check(Block, [(6, 16)], step, computed_in=torch.float16)
    assert found.halves == (2, 2) and found.ran(3, 3)
    assert scales == [[too_much / 2, enough, enough]] * 4  # ours and eager's, for two seeds
