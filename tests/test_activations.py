"""Activations between two linear layers: each is fused forward, and its derivative backward.

The first product's epilogue adds the bias and computes the activation; where the derivative needs
more than the activation's result, it leaves that too. The second product's data gradient holds the
derivative, computed from what was left, and sums its columns for the bias.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interpreted import PLACE, interpreted
from torch_evt import pipeline
from torch_evt.partition.plan import GraphPlan
from torch_evt.runtime import counters
from torch_evt.testing import check_model


@dataclass(frozen=True)
class Case:
    """forward, backward: what the two kernels do in fp32, dtypes and layouts left out."""

    name: str
    function: Callable[[Tensor], Tensor]
    forward: str
    backward: str


CASES = [
    Case(
        "tanh",
        torch.tanh,
        "store(0, tanh(acc0 + row(0)))",
        "v0 = tile(0); v1 = acc0 * (1.0 - v0 * v0); store(0, v1); reduce(1, sum, rows, v1)",
    ),
    Case(
        "sigmoid",
        torch.sigmoid,
        "store(0, sigmoid(acc0 + row(0)))",
        "v0 = tile(0); v1 = acc0 * (v0 * (1.0 - v0)); store(0, v1); reduce(1, sum, rows, v1)",
    ),
    Case(
        "relu",
        F.relu,
        "store(0, relu(acc0 + row(0)))",
        "v0 = relu_backward(acc0, tile(0)); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "gelu",
        F.gelu,
        "v0 = acc0 + row(0); store(0, v0); store(1, gelu_erf(v0))",
        "v0 = acc0 * gelu_erf_grad(tile(0)); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "gelu, tanh",
        lambda z: F.gelu(z, approximate="tanh"),
        "v0 = acc0 + row(0); store(0, v0); store(1, gelu_tanh(v0))",
        "v0 = acc0 * gelu_tanh_grad(tile(0)); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "silu",
        F.silu,
        "v0 = acc0 + row(0); store(0, v0); store(1, silu(v0))",
        "v0 = acc0 * silu_grad(tile(0)); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "softplus",
        F.softplus,
        "v0 = acc0 + row(0); store(0, v0); store(1, where(gt(v0, 20.0), v0, log1p(exp(v0))))",
        "v0 = tile(0); v1 = exp(v0); v2 = where(gt(v0, 20.0), acc0, acc0 * v1 / (v1 + 1.0)); "
        "store(0, v2); reduce(1, sum, rows, v2)",
    ),
    Case(
        "squared relu",
        lambda z: F.relu(z).square(),
        "v0 = relu(acc0 + row(0)); store(0, v0); store(1, v0 * v0)",
        "v0 = tile(0); v1 = relu_backward(acc0 * (v0 * 2.0), v0); store(0, v1); "
        "reduce(1, sum, rows, v1)",
    ),
    Case(
        "quick gelu",
        lambda z: z * torch.sigmoid(1.702 * z),
        "v0 = acc0 + row(0); store(0, v0); store(1, v0 * sigmoid(v0 * 1.702))",
        "v0 = tile(0); v1 = sigmoid(v0 * 1.702); "
        "v2 = acc0 * v1 + acc0 * v0 * (v1 * (1.0 - v1)) * 1.702; store(0, v2); "
        "reduce(1, sum, rows, v2)",
    ),
    Case(
        "leaky relu",
        lambda z: F.leaky_relu(z, 0.1),
        "v0 = acc0 + row(0); v1 = gt(v0, 0.0); store(0: bool n 16, v1); "
        "store(1, where(v1, v0, v0 * 0.1))",
        "v0 = where(tile(0: bool n 16), acc0, acc0 * 0.1); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "elu",
        F.elu,
        "v0 = acc0 + row(0); store(0, v0); store(1, where(gt(v0, 0.0), v0, expm1(v0)))",
        "v0 = tile(0); v1 = where(le(v0, 0.0), acc0 * exp(v0), acc0); store(0, v1); "
        "reduce(1, sum, rows, v1)",
    ),
    Case(
        "selu",
        F.selu,
        "v0 = acc0 + row(0); store(0, v0); "
        "store(1, where(gt(v0, 0.0), v0 * 1.0507009873554805, expm1(v0) * "
        "1.7580993408473766))",
        "v0 = tile(0); "
        "v1 = where(le(v0, 0.0), acc0 * 1.7580993408473766 * exp(v0), acc0 * "
        "1.0507009873554805); "
        "store(0, v1); reduce(1, sum, rows, v1)",
    ),
    Case(
        "hardtanh",
        F.hardtanh,
        "v0 = acc0 + row(0); store(0, minimum(maximum(v0, -1.0), 1.0)); "
        "store(1: bool n 16, logical_or(le(v0, -1.0), ge(v0, 1.0)))",
        "v0 = where(tile(0: bool n 16), 0.0, acc0); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "relu6",
        F.relu6,
        "v0 = acc0 + row(0); store(0, minimum(maximum(v0, 0.0), 6.0)); "
        "store(1: bool n 16, logical_or(le(v0, 0.0), ge(v0, 6.0)))",
        "v0 = where(tile(0: bool n 16), 0.0, acc0); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "clamp",
        lambda z: z.clamp(-0.5, 1),
        "v0 = acc0 + row(0); store(0, minimum(maximum(v0, -0.5), 1.0)); "
        "store(1: bool n 16, logical_and(ge(v0, -0.5), le(v0, 1.0)))",
        "v0 = where(tile(0: bool n 16), acc0, 0.0); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "clamp below",
        lambda z: z.clamp(min=-0.25),
        "v0 = acc0 + row(0); store(0, maximum(v0, -0.25)); store(1: bool n 16, ge(v0, -0.25))",
        "v0 = where(tile(0: bool n 16), acc0, 0.0); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "exp",
        torch.exp,
        "store(0, exp(acc0 + row(0)))",
        "v0 = acc0 * tile(0); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "expm1",
        torch.expm1,
        "store(0, expm1(acc0 + row(0)))",
        "v0 = acc0 * (tile(0) + 1.0); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "log",
        lambda z: torch.log(z * z + 1),
        "v0 = acc0 + row(0); store(0, v0); store(1, log(v0 * v0 + 1.0))",
        "v0 = tile(0); v1 = acc0 / (v0 * v0 + 1.0) * v0; v2 = v1 + v1; store(0, v2); "
        "reduce(1, sum, rows, v2)",
    ),
    Case(
        "log1p",
        lambda z: torch.log1p(z * z),
        "v0 = acc0 + row(0); store(0, v0); store(1, log1p(v0 * v0))",
        "v0 = tile(0); v1 = acc0 / (v0 * v0 + 1.0) * v0; v2 = v1 + v1; store(0, v2); "
        "reduce(1, sum, rows, v2)",
    ),
    Case(
        "erf",
        torch.erf,
        "v0 = acc0 + row(0); store(0, v0); store(1, erf(v0))",
        "v0 = tile(0); v1 = exp(neg(v0 * v0)) * 1.1283791670955126 * acc0; store(0, v1); "
        "reduce(1, sum, rows, v1)",
    ),
    Case(
        "rsqrt",
        lambda z: torch.rsqrt(z * z + 1),
        "v0 = acc0 + row(0); store(0, v0); store(1, rsqrt(v0 * v0 + 1.0))",
        "v0 = tile(0); v1 = acc0 * -0.5 * (v0 * v0 * v0) * tile(1); v2 = v1 + v1; "
        "store(0, v2); reduce(1, sum, rows, v2)",
    ),
    Case(
        "sqrt",
        lambda z: torch.sqrt(z * z + 1),
        "v0 = acc0 + row(0); store(0, v0); store(1, sqrt(v0 * v0 + 1.0))",
        "v0 = acc0 / (tile(0) * 2.0) * tile(1); v1 = v0 + v0; store(0, v1); "
        "reduce(1, sum, rows, v1)",
    ),
    Case(
        "reciprocal",
        lambda z: 1 / (z * z + 1),
        "v0 = acc0 + row(0); store(0, v0); store(1, reciprocal(v0 * v0 + 1.0))",
        "v0 = tile(0); v1 = neg(acc0) * (v0 * v0) * tile(1); v2 = v1 + v1; store(0, v2); "
        "reduce(1, sum, rows, v2)",
    ),
    Case(
        "square",
        torch.square,
        "v0 = acc0 + row(0); store(0, v0); store(1, v0 * v0)",
        "v0 = acc0 * (tile(0) * 2.0); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "cube",
        lambda z: z**3,
        "v0 = acc0 + row(0); store(0, v0); store(1, v0 * v0 * v0)",
        "v0 = tile(0); v1 = acc0 * (v0 * v0 * 3.0); store(0, v1); reduce(1, sum, rows, v1)",
    ),
    Case(
        "power of a root",
        lambda z: (z * z + 1) ** 1.5,
        "v0 = acc0 + row(0); store(0, v0); v1 = v0 * v0 + 1.0; store(1, v1 * sqrt(v1))",
        "v0 = tile(0); v1 = acc0 * (sqrt(v0 * v0 + 1.0) * 1.5) * v0; v2 = v1 + v1; "
        "store(0, v2); reduce(1, sum, rows, v2)",
    ),
    Case(
        "abs",
        torch.abs,
        "v0 = acc0 + row(0); store(0, v0); store(1, abs(v0))",
        "v0 = tile(0); v1 = acc0 * where(gt(v0, 0.0), 1.0, where(lt(v0, 0.0), -1.0, 0.0)); "
        "store(0, v1); reduce(1, sum, rows, v1)",
    ),
    Case(
        "where",
        lambda z: torch.where(z > 0.25, z, 0.1 * z),
        "v0 = acc0 + row(0); v1 = gt(v0, 0.25); store(0: bool n 16, v1); "
        "store(1, where(v1, v0, v0 * 0.1))",
        "v0 = tile(0: bool n 16); v1 = where(v0, acc0, 0.0) + where(v0, 0.0, acc0) * 0.1; "
        "store(0, v1); reduce(1, sum, rows, v1)",
    ),
    Case(
        "comparison",
        lambda z: z * (z > 0.1),
        "v0 = acc0 + row(0); v1 = gt(v0, 0.1); store(0: bool n 16, v1); store(1, v0 * v1)",
        "v0 = acc0 * tile(0: bool n 16); store(0, v0); reduce(1, sum, rows, v0)",
    ),
    Case(
        "mish",
        F.mish,
        "v0 = acc0 + row(0); store(0, v0); "
        "store(1, v0 * tanh(where(gt(v0, 20.0), v0, log1p(exp(v0)))))",
        "v0 = tile(0); v1 = tanh(where(gt(v0, 20.0), v0, log1p(exp(v0)))); "
        "v2 = acc0 * (v1 + v0 * sigmoid(v0) * (1.0 - v1 * v1)); store(0, v2); "
        "reduce(1, sum, rows, v2)",
    ),
    Case(
        "hardswish",
        F.hardswish,
        "v0 = acc0 + row(0); store(0, v0); "
        "store(1, v0 * minimum(maximum(v0 + 3.0, 0.0), 6.0) / 6.0)",
        "v0 = tile(0); "
        "v1 = where(le(v0, -3.0), 0.0, where(lt(v0, 3.0), acc0 * (v0 / 3.0 + 0.5), acc0)); "
        "store(0, v1); reduce(1, sum, rows, v1)",
    ),
    Case(
        "hardsigmoid",
        F.hardsigmoid,
        "v0 = acc0 + row(0); store(0, minimum(maximum(v0 + 3.0, 0.0), 6.0) / 6.0); "
        "store(1: bool n 16, logical_and(gt(v0, -3.0), lt(v0, 3.0)))",
        "v0 = where(tile(0: bool n 16), acc0 * 0.16666666666666666, 0.0); store(0, v0); "
        "reduce(1, sum, rows, v0)",
    ),
    Case(
        "softsign",
        F.softsign,
        "v0 = acc0 + row(0); store(0, v0); store(1, v0 / (abs(v0) + 1.0))",
        "v0 = tile(0); v1 = abs(v0) + 1.0; "
        "v2 = acc0 / v1 + neg(acc0) * (tile(1) / v1) * where(gt(v0, 0.0), 1.0, where(lt(v0, "
        "0.0), -1.0, 0.0)); "
        "store(0, v2); reduce(1, sum, rows, v2)",
    ),
    Case(
        "threshold",
        lambda z: F.threshold(z, 0.1, 0.0),
        "v0 = acc0 + row(0); v1 = le(v0, 0.1); store(0: bool n 16, v1); "
        "store(1, where(v1, 0.0, v0))",
        "v0 = where(tile(0: bool n 16), 0.0, acc0); store(0, v0); reduce(1, sum, rows, v0)",
    ),
]


class Layers(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.second = nn.Linear(48, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def weighted(result: Tensor) -> Tensor:
    weights = 1 + torch.cos(torch.arange(result.numel())).view(result.shape) / 2
    return (result.float().square() * weights).sum()


def trained(
    function: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    *,
    frozen: bool = False,
    options: Mapping[str, Any] = PLACE,
) -> tuple[dict[str, list[str]], GraphPlan]:
    """A step, checked by the error standard: the kernels of each half, and the plan.

    frozen: whether the second layer is, so that backward does not read what it was given.
    """
    torch._dynamo.reset()
    counters.reset()
    plans: list[GraphPlan] = []

    def make(seed: int) -> tuple[nn.Module, tuple[Tensor], Callable[[Tensor], Tensor]]:
        torch.manual_seed(seed)
        x = torch.randn(24, 32).to(dtype).requires_grad_()
        layers = Layers(function).to(dtype)
        layers.second.requires_grad_(not frozen)
        return layers, (x,), weighted

    with pipeline.observed(plans.append):
        check_model(
            make,
            dtype=dtype,
            backend=interpreted,
            options=options,
            seeds=(0,),  # type: ignore[arg-type]
        ).raise_if_failed()
    (plan,) = plans
    assert plan.placed and len(counters.region_runs) == len({r.tree for r in plan.regions})
    trees: dict[str, list[str]] = {"forward": [], "backward": []}
    for region in plan.regions:
        text = region.tree.split(" -> ", 1)[1]
        trees[region.half].append(re.sub(r": (f32|bf16)( n 16)?", "", text))
    return trees, plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_activation_is_fused_in_both_halves(case: Case) -> None:
    trees, plan = trained(case.function, torch.float32)
    assert trees == {"forward": [case.forward], "backward": [case.backward]}
    assert plan.saved_bytes == plan.inductor_saved_bytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_half_precision_the_kernels_read_and_leave_as_much(case: Case) -> None:
    trees, _ = trained(case.function, torch.bfloat16)
    ((forward,), (backward,)) = trees["forward"], trees["backward"]
    for text, wanted in ((forward, case.forward), (backward, case.backward)):
        for word in ("store(", "reduce(", "tile(", "row("):
            assert text.count(word) == wanted.count(word), text
        functions = re.findall(r"(\w+)\(", wanted)
        assert set(functions) <= set(re.findall(r"(\w+)\(", text)), text


MASKS = {
    "roll": (lambda h: F.relu(h).roll(1, -1), False),
    "sort": (lambda h: F.relu(h).sort(-1).values, False),
    "pooled": (lambda h: F.max_pool1d(F.relu(h), 3, 1, 1), False),
    "frozen": (F.relu, True),
    "dropped": (lambda h: F.dropout(F.relu(h), 0.25), False),
}


@pytest.mark.parametrize("solver_nodes", [0, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MASKS)
def test_of_a_relu_that_backward_reads_nowhere_else_a_mask_is_saved(
    name: str, dtype: torch.dtype, solver_nodes: int
) -> None:
    function, frozen = MASKS[name]
    options = {**PLACE, "evt.solver_nodes": solver_nodes, "evt.rng": "eager"}
    trees, plan = trained(function, dtype, frozen=frozen, options=options)
    assert plan.saved_bytes == plan.inductor_saved_bytes
    if solver_nodes:
        (forward,) = trees["forward"]
        assert "le(" in forward
