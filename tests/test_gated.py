"""Gated forms, down(act(gate(x)) * up(x)): the up product's epilogue loads the stored gate, and the
data gradient of the down product leaves both gradients, of the stored gate and up, in one kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from interpreted import PLACE, interpreted
from torch_evt import explain, pipeline
from torch_evt.partition.plan import GraphPlan, RegionPlan
from torch_evt.testing import check_model

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
}
HALVES = (torch.bfloat16, torch.float16)


class Gated(nn.Module):
    """gate_first: the order of the two factors. autocast: the dtype to cast to inside."""

    def __init__(
        self,
        activation: str,
        sizes: tuple[int, int] = (32, 48),
        *,
        bias: bool = False,
        gate_first: bool = True,
        autocast: torch.dtype | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        width, hidden = sizes
        self.gate = nn.Linear(width, hidden, bias=bias, dtype=dtype)
        self.up = nn.Linear(width, hidden, bias=bias, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=bias, dtype=dtype)
        self.activation = ACTIVATIONS[activation]
        self.gate_first = gate_first
        self.autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            gate, up = self.gate(x), self.up(x)
            return self.down(self.product(self.activation(gate), up))

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * up if self.gate_first else up * gate


class Chunked(nn.Module):
    """Gate and up projection from one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(32, 96), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def weighted(result: Tensor) -> Tensor:
    weights = 1 + torch.cos(torch.arange(result.numel())).view(result.shape) / 2
    return (result.float().square() * weights).sum()


def trained(
    make_model: Callable[[], nn.Module], dtype: torch.dtype, standard: torch.dtype | None = None
) -> GraphPlan:
    """One checked step's plan. dtype: of weights and inputs; standard: of the error standard."""
    torch._dynamo.reset()
    plans: list[GraphPlan] = []

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return make_model().to(dtype), (torch.randn(24, 32).to(dtype).requires_grad_(),), weighted

    with pipeline.observed(plans.append):
        check_model(
            make,
            dtype=standard or dtype,
            backend=interpreted,  # type: ignore[arg-type]
            options=PLACE,
            seeds=(0,),
        ).raise_if_failed()
    (plan,) = plans
    return plan


def of_half(plan: GraphPlan, half: str) -> list[RegionPlan]:
    return [region for region in plan.regions if region.half == half]


def assert_gated(plan: GraphPlan, activation: str, *, bias: bool) -> None:
    (forward,) = of_half(plan, "forward")
    assert forward.tree.count("store(") == 2 and forward.tree.count("tile(") == 1
    if activation != "relu":  # whose gradient needs its result alone: that is stored, once
        assert f"{activation}(tile(" in forward.tree, "the gate is loaded, not the up projection"
    (backward,) = [r for r in of_half(plan, "backward") if "_grad(" in r.tree or "relu_" in r.tree]
    assert backward.tree.count("store(") == 2
    assert backward.tree.count("tile(") == 2, "the stored gate and up, each once"
    assert backward.tree.count("sum, rows") == (2 if bias else 0)
    assert plan.saved_bytes == plan.inductor_saved_bytes


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gate_first", [False, True], ids=["up first", "gate first"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_both_orders_of_the_factors(activation: str, gate_first: bool, bias: bool) -> None:
    plan = trained(lambda: Gated(activation, bias=bias, gate_first=gate_first), torch.float32)
    assert_gated(plan, activation, bias=bias)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision(activation: str, dtype: torch.dtype) -> None:
    plan = trained(lambda: Gated(activation, bias=True), dtype)
    assert_gated(plan, activation, bias=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_autocast(activation: str, dtype: torch.dtype) -> None:
    plan = trained(lambda: Gated(activation, autocast=dtype), torch.float32, dtype)
    assert_gated(plan, activation, bias=False)


def test_one_linear_layer_for_both_stays_with_inductor() -> None:
    """Its two halves are views of one product; the gradients go back into the halves of one."""
    plan = trained(Chunked, torch.float32)
    assert [(r.half, "silu" in r.tree) for r in plan.regions if "silu" in r.tree] == []
    assert any("split" in u.reason for u in plan.unfused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["fused", "eager"])
def test_trees_of_one_swiglu_layer(dtype: torch.dtype, precision: str) -> None:
    """At the width of a model of a billion parameters; made anew as tests/test_golden.py says."""
    torch._dynamo.reset()
    with FakeTensorMode():
        model = Gated("silu", (2048, 8192), dtype=dtype)
        x = torch.randn(8192, 2048, dtype=dtype)
    options = {"evt.place": "always", "evt.target": "h200", "evt.precision": precision}
    plan = explain(model, x, loss=lambda y: y.float().square().sum(), options=options)
    regions = [region for graph in plan.graphs for region in graph.regions]
    text = "".join(f"{r.half} {' x '.join(r.shape)}\n  {r.tree}\n" for r in regions)
    name = f"swiglu_layer_{str(dtype).removeprefix('torch.')}_{precision}.txt"
    golden = Path(__file__).parent / "golden" / name
    if os.environ.get("EVT_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
