"""Common subexpressions: equal values become one, random ones and results never."""

from __future__ import annotations

import torch
from tests.tracing import assert_same, run, targets, trace
from torch import Tensor

from torch_evt.graphs import copy_of, output_values, signature, verify
from torch_evt.joint import common_subexpressions

aten = torch.ops.aten


def test_equal_values_are_computed_once_and_unequal_ones_are_not() -> None:
    def f(x: Tensor) -> Tensor:
        same = torch.tanh(x * 2) + torch.tanh(x * 2)
        return same + torch.tanh(x * 3) + x.sum(0) + x.sum(0, keepdim=True)

    x = torch.randn(6, 8)
    module = trace(f, x)
    ours = copy_of(module)
    before = signature(ours.graph)
    assert common_subexpressions.apply(ours.graph) == 2
    verify(ours.graph, before, "common_subexpressions")
    assert targets(ours).count(aten.tanh.default) == 2
    assert targets(ours).count(aten.sum.dim_IntList) == 2
    assert_same(run(ours, x), run(module, x))


def test_random_values_stay_apart() -> None:
    x = torch.randn(6, 8)
    ours = trace(lambda x: torch.rand_like(x) + torch.rand_like(x), x)
    drawn = targets(ours)
    assert common_subexpressions.apply(ours.graph) == 0
    assert targets(ours) == drawn


def test_names_and_values_of_what_stays_carry_over() -> None:
    x = torch.randn(6, 8)
    ours = trace(lambda x: (x.exp() + x.exp(), x.exp()), x)
    names = [n.name for n in output_values(ours.graph)]
    inputs = [n.name for n in ours.graph.nodes if n.op == "placeholder"]
    common_subexpressions.apply(ours.graph)
    assert [n.name for n in ours.graph.nodes if n.op == "placeholder"] == inputs
    assert [n.name for n in output_values(ours.graph)][0] == names[0]
    assert all("val" in n.meta for n in ours.graph.nodes if n.op != "output")
