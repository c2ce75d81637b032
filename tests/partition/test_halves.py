"""Halves: what belongs to forward, what to backward, and what may be either."""

from __future__ import annotations

from typing import Any

import torch
from tests.partition.planning import joint
from tests.tracing import node, trace
from torch import Tensor

from torch_evt.partition.halves import label_all, label_joint

aten = torch.ops.aten


def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (torch.tanh(x @ w),)


def test_a_joint_graph_falls_apart_at_the_tangents() -> None:
    module, _, outputs = joint(f, [torch.randn(6, 5), torch.randn(5, 4)])
    labels = label_joint(module.graph, outputs)
    assert labels[node(module, aten.mm.default)] == "forward"
    assert labels[node(module, aten.tanh.default)] == "forward"
    for n in module.graph.nodes:
        if "tangents" in n.name:
            assert labels[n] == "backward"
    for index in (1, 2):  # the gradient products
        assert labels[node(module, aten.mm.default, index)] == "backward"
    # 1 - y * y needs no tangent, and forward does not need it
    assert labels[node(module, aten.sub.Tensor)] == "either"
    assert set(labels) == set(module.graph.nodes)


def test_what_a_user_output_needs_is_forward_whatever_else_reads_it() -> None:
    def g(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x @ w)
        return y, 1 - (y * y)

    module, _, outputs = joint(g, [torch.randn(6, 5), torch.randn(5, 4)])
    labels = label_joint(module.graph, outputs)
    assert labels[node(module, aten.sub.Tensor)] == "forward"


def test_every_input_of_backward_is_labelled_before_its_users() -> None:
    module, _, outputs = joint(f, [torch.randn(6, 5), torch.randn(5, 4)])
    labels = label_joint(module.graph, outputs)
    rank: dict[Any, int] = {"forward": 0, "either": 0, "backward": 1}
    for n in module.graph.nodes:
        for source in n.all_input_nodes:
            if n.op != "output":
                assert rank[labels[source]] <= rank[labels[n]]


def test_a_graph_that_is_one_half_has_one_label() -> None:
    module = trace(lambda x: x.tanh(), torch.randn(3))
    assert set(label_all(module.graph, "inference").values()) == {"inference"}
    assert set(label_all(module.graph, "backward")) == set(module.graph.nodes)
