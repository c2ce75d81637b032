"""Many small models, each trained one step: right by the error standard, and fused as expected.

The graphs run without Inductor's code generation (`interpreted`), so that the many are quick.
"""

from __future__ import annotations

from collections.abc import Callable
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
from torch_evt.testing import check_model, compare, fp64_copy


@dataclass(frozen=True)
class Case:
    """forward(model, x): uses model.linear, model.other, ...; regions: (forward, backward)."""

    name: str
    forward: Callable[[Any, Tensor], Tensor]
    regions: tuple[int, int]
    shape: tuple[int, ...] = (12, 32)
    holds: str = ""
    """Text that one of the trees must contain."""


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 24)
        self.other = nn.Linear(24, 16)
        self.same = nn.Linear(width, 24)
        self.square = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.scale = nn.Parameter(torch.randn(24))
        self.table = nn.Parameter(torch.randn(5, 24))
        self.norm = nn.LayerNorm(24)
        self.register_buffer("mask", torch.rand(12, 24) > 0.3)
        self.body = forward
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def weighted(result: Tensor) -> Tensor:
    """A scalar, outside the compiled function, in which every element counts differently, nothing
    cancels and no few elements are most of it (its relative error would be a matter of luck)."""
    steps = torch.arange(result.numel(), device=result.device)
    weights = 1 + torch.cos(steps).view(result.shape) / 2
    return ((1 + result.float().square()).sqrt() * weights).sum()


def heads(m: Model, x: Tensor) -> Tensor:
    """Attention written out: batched products with a scale and a broadcast mask."""
    q = x.view(2, 6, 4, 8).transpose(1, 2)
    scores = q @ q.transpose(-1, -2) * 0.3 + m.mask[:2, :6].view(2, 1, 1, 6).to(x.dtype)
    return scores


CASES = [
    Case("linear alone", lambda m, x: m.linear(x), (0, 0)),
    Case("relu", lambda m, x: F.relu(m.linear(x)), (1, 0), holds="relu("),
    Case("gelu erf", lambda m, x: F.gelu(m.linear(x)), (1, 0), holds="gelu_erf("),
    Case(
        "two layers with gelu",
        lambda m, x: m.other(F.gelu(m.linear(x), approximate="tanh")),
        (1, 1),
        holds="gelu_tanh_grad(",
    ),
    Case(
        "two layers with relu",
        lambda m, x: m.other(F.relu(m.linear(x))),
        (1, 1),
        holds="relu_backward(",
    ),
    Case(
        "two layers with silu",
        lambda m, x: m.other(F.silu(m.linear(x))),
        (1, 1),
        holds="silu_grad(",
    ),
    Case("three dimensions", lambda m, x: m.other(F.gelu(m.linear(x))), (1, 1), (3, 4, 32)),
    Case("four dimensions", lambda m, x: m.other(F.gelu(m.linear(x))), (1, 1), (2, 3, 2, 32)),
    Case("one dimension", lambda m, x: m.other(F.gelu(m.linear(x))), (1, 1), (32,)),
    Case("one row", lambda m, x: m.other(F.gelu(m.linear(x))), (1, 1), (1, 32)),
    Case("one column", lambda m, x: torch.tanh(x @ m.square[:, :1]), (1, 0)),
    Case("square", lambda m, x: torch.tanh(x @ m.square + x), (1, 1), (32, 32)),
    Case("ragged", lambda m, x: m.other(F.gelu(m.linear(x))), (1, 1), (7, 5, 32)),
    Case("residual", lambda m, x: m.same(x) + F.relu(m.linear(x)), (1, 1)),
    Case("mask", lambda m, x: F.relu(m.linear(x)) * m.mask, (1, 0), holds="bool"),
    Case("column scale", lambda m, x: torch.tanh(m.linear(x)) * m.scale, (1, 0)),
    Case(
        "row scale",
        lambda m, x: torch.tanh(m.linear(x)) * x[..., :1],
        (1, 1),
        holds="column(",
    ),
    Case(
        "position table",
        lambda m, x: torch.tanh(m.linear(x) + m.table),
        (1, 0),
        (3, 5, 32),
        holds="m mod s0",
    ),
    Case(
        "per batch",
        lambda m, x: torch.tanh(m.linear(x) + m.table[:3].unsqueeze(1)),
        (1, 0),
        (3, 5, 32),
        holds="m div s0",
    ),
    Case(
        "scalar tensor", lambda m, x: torch.tanh(m.linear(x)) * m.scale[3], (1, 0), holds="scalar("
    ),
    Case("column sums", lambda m, x: m.linear(x).exp().sum(0), (1, 0), holds="rows"),
    Case("row sums", lambda m, x: m.linear(x).sigmoid().sum(1), (1, 0), holds="columns"),
    Case("row maxima", lambda m, x: m.linear(x).amax(1), (0, 0)),
    Case("maxima of a function", lambda m, x: torch.tanh(m.linear(x)).amax(1), (0, 0)),
    Case("transposed", lambda m, x: torch.tanh(m.linear(x)).t().contiguous(), (1, 0), holds=" m "),
    Case("transposed view", lambda m, x: torch.tanh(m.linear(x)).t(), (1, 0)),
    Case("transposed operands", lambda m, x: torch.tanh(m.square.t() @ x.t()), (1, 0), (12, 32)),
    Case("batched", lambda m, x: torch.tanh(x @ x.transpose(1, 2)), (1, 1), (3, 6, 32)),
    Case("attention scores", heads, (1, 0), (2, 6, 32)),
    Case(
        "baddbmm",
        lambda m, x: torch.tanh(torch.baddbmm(x, x, m.square.expand(3, 32, 32), beta=0.5, alpha=2)),
        (1, 1),
        (3, 6, 32),
    ),
    Case(
        "addmm with factors",
        lambda m, x: torch.tanh(torch.addmm(x, x, m.square, beta=0.5, alpha=-2.0)),
        (1, 2),
    ),
    Case("used twice", lambda m, x: F.gelu(h := m.linear(x)) + h, (1, 0)),
    Case("shared input", lambda m, x: F.gelu(m.linear(x)) * F.silu(m.same(x)), (1, 1)),
    Case("norm behind", lambda m, x: m.other(m.norm(m.linear(x))), (0, 1), holds="columns"),
    Case("dropout", lambda m, x: m.other(F.dropout(F.gelu(m.linear(x)), 0.3)), (1, 1)),
    Case("division", lambda m, x: m.linear(x) / (1 + m.same(x) ** 2), (1, 1)),
    Case("where", lambda m, x: torch.where(m.mask, m.linear(x), -1e4), (1, 0)),
    Case("comparison", lambda m, x: m.linear(x) * (m.linear(x) > 0.1), (1, 0)),
    Case("in place", lambda m, x: m.other(m.linear(x).mul_(2).relu_()), (1, 1)),
    Case("broadcast gradient", lambda m, x: F.gelu(m.linear(x)).sum() * m.scale, (0, 0)),
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.reset()


def make(case: Case, dtype: torch.dtype, seed: int) -> tuple[nn.Module, tuple[Tensor], Any]:
    torch.manual_seed(seed)
    model = Model(case.forward, 32).to(dtype)
    return model, (torch.randn(case.shape).to(dtype).requires_grad_(),), weighted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_is_right_and_fused(case: Case, dtype: torch.dtype) -> None:
    plans: list[GraphPlan] = []
    with pipeline.observed(plans.append):
        verdict = check_model(
            lambda seed: make(case, dtype, seed),
            dtype=dtype,
            backend=interpreted,  # type: ignore[arg-type]
            options={**PLACE, "evt.rng": "eager"},
            seeds=(0, 1),
        )
    verdict.raise_if_failed()
    regions = [region for plan in plans if plan.placed for region in plan.regions]
    halves = [region.half for region in regions]
    left = [
        f"{u.node}: {u.reason} {u.modelled_us} {u.replaced_us}" for p in plans for u in p.unfused
    ]
    assert (halves.count("forward"), halves.count("backward")) == case.regions, left
    assert len(counters.region_runs) == len({region.tree for region in regions})
    assert not case.holds or any(case.holds in region.tree for region in regions)


@pytest.mark.parametrize(
    ("forward", "holds"),
    [
        (lambda m, x: F.gelu(m.linear(x)), "gelu_erf("),
        (lambda m, x: m.linear(x).amax(1), "max, columns"),
        (lambda m, x: m.linear(x).amax(0), "max, rows"),
        (lambda m, x: torch.tanh(m.linear(x)).t().contiguous(), " m "),
        (lambda m, x: (m.linear(x) > 0.5) & m.mask, "bool"),
        (lambda m, x: torch.tanh(m.linear(x).double()).float(), None),
        (lambda m, x: torch.tanh((x * 3).int() @ torch.ones(32, 4, dtype=torch.int32)), None),
    ],
    ids=["gelu", "row maxima", "column maxima", "transposed", "bool", "fp64", "integers"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_inference_is_right_and_fused(
    forward: Callable[[Any, Tensor], Tensor], holds: str | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    model = Model(forward, 32).to(dtype)
    x = torch.randn(12, 32).to(dtype)
    plans: list[GraphPlan] = []
    with torch.no_grad(), pipeline.observed(plans.append):
        ours = torch.compile(model, backend=interpreted, options=PLACE)(x)
        exact = fp64_copy(model)(x.double())
        compare({"y": ours}, {"y": model(x)}, {"y": exact}, dtype).raise_if_failed()
    trees = [region.tree for plan in plans for region in plan.regions if plan.placed]
    assert [holds in tree for tree in trees] == [True] if holds else not trees
    assert len(counters.region_runs) == len(trees)


def test_equal_outputs_are_two_tensors() -> None:
    """As in eager: writing into one must not change the other."""
    torch.manual_seed(1)

    def twice(m: Any, x: Tensor) -> Any:
        h = m.linear(x)
        return F.relu(h), F.relu(h)

    model = Model(twice, 32)
    x = torch.randn(12, 32)
    with torch.no_grad():
        a, b = torch.compile(model, backend=interpreted, options=PLACE)(x)
    assert counters.region_runs
    a.fill_(7.0)
    torch.testing.assert_close(b, F.relu(model.linear(x)).detach())


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (x @ m.square + m.square[0]).mean(),
        lambda m, x: (x @ m.square + m.square[0]).var(0),
        lambda m, x: (x @ m.square) * torch.arange(32),
        lambda m, x: torch.where(torch.arange(32) > 5, x @ m.square, torch.arange(32)),
        lambda m, x: (x @ m.square) > torch.arange(32),
        lambda m, x: (x @ m.square).clamp(-0.1, 0.1).floor(),
    ],
    ids=["row", "row and variance", "times int", "where int", "against int", "clamp"],
)
def test_odd_neighbours_do_no_harm(forward: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(2)
    model, x = Model(forward, 32), torch.randn(12, 32)
    with torch.no_grad():
        ours = torch.compile(model, backend=interpreted, options=PLACE)(x)
        torch.testing.assert_close(ours, model(x))


@pytest.mark.parametrize("options", [PLACE, {}], ids=["placing", "placing nothing"])
def test_a_softmax_of_a_quotient_rounded_from_float64(options: dict[str, Any]) -> None:
    """Inductor's softmax pattern makes the loss float64, and its gradients 0 or NaN."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)
            self.scale = nn.Parameter(torch.tensor(1.3), requires_grad=False)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            h = self.linear(x).double()
            h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + 1e-2).sqrt()
            return F.cross_entropy(h.float(), target) + self.scale * x.square().sum()

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        inputs = (torch.randn(4, 8, requires_grad=True), torch.randint(8, (4,)))
        return Normalised(), inputs, lambda loss: loss

    check_model(
        make, dtype=torch.float32, seeds=[0, 1], backend=interpreted, options=options
    ).raise_if_failed()
    assert bool(counters.region_runs) == bool(options)
