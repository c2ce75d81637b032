"""The plan by the program on real graphs: what it saves, computes again, fuses, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.partition.planning import joint, prepared, rules_of
from tests.tracing import trace
from torch import Tensor, fx

from torch_evt.devices import Device, device
from torch_evt.partition import greedy
from torch_evt.partition.kernels import Saving
from torch_evt.partition.optimise import Optimum, optimise
from torch_evt.tree.text import to_text

H200 = device("h200")
SMALL = dataclasses.replace(
    H200,
    memory_bandwidth=H200.memory_bandwidth / 1000,
    peak_flops={kind: flops / 1000 for kind, flops in H200.peak_flops.items()},
    l2_bytes=0,
)
"""Small products cost here what large ones cost there."""
FREE = Saving()
NODES = 1000


def planned(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    saving: Saving = FREE,
    target: Device = SMALL,
    **limits: Any,
) -> tuple[fx.Graph, Optimum]:
    module, _, outputs = joint(function, inputs)
    graph = prepared(module).graph
    rules = rules_of(graph, forward_outputs=outputs, **limits)
    return graph, optimise(graph, target, rules, outputs, saving, nodes=NODES)


def trees(optimum: Optimum) -> list[str]:
    return [to_text(chosen.priced.region.tree) for chosen in optimum.choice.chosen]


def saved_bytes(optimum: Optimum) -> int:
    assert optimum.saved is not None
    return sum(n.meta["val"].nbytes for n in optimum.saved)


def ffn(x: Tensor, w: Tensor, bias: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (F.gelu(torch.addmm(bias, x, w), approximate="tanh") @ v,)


def ffn_inputs(rows: int = 512, width: int = 64) -> list[Tensor]:
    shapes = ((rows, width), (width, 4 * width), (4 * width,), (4 * width, width))
    return [torch.empty(s, dtype=torch.bfloat16).normal_() for s in shapes]


def test_an_ffn_becomes_two_regions_and_saves_one_activation() -> None:
    _, optimum = planned(ffn, ffn_inputs())
    forward, backward = trees(optimum)
    assert "gelu_tanh(" in forward and forward.count("store(") == 2
    assert "gelu_tanh_grad(" in backward and "reduce(1: bf16, sum, rows" in backward
    assert optimum.solver == "highs" and optimum.optimal
    assert optimum.greedy_us is not None and optimum.objective_us is not None
    assert optimum.objective_us <= optimum.greedy_us


def test_every_node_runs_once_and_what_is_read_is_there() -> None:
    graph, optimum = planned(ffn, ffn_inputs())
    assert optimum.kernels is not None and optimum.saved is not None
    number = {node: i for i, node in enumerate(graph.nodes)}
    covered = [v for k in optimum.kernels for v in k.candidate.covers]
    assert len(covered) == len(set(covered))
    products = {number[n] for n in graph.nodes if n.target is torch.ops.aten.mm.default}
    assert products <= set(covered)
    stored = {(v, k.candidate.half) for k in optimum.kernels for v in k.candidate.stores}
    for kernel in optimum.kernels:
        for value in kernel.candidate.reads:
            node = list(graph.nodes)[value]
            there = (value, kernel.candidate.half) in stored or node in optimum.saved
            assert node.op == "placeholder" or there, node
    assert all((number[node], "forward") in stored for node in optimum.saved)


def normalised(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """A norm in fp32 of bf16 values: backward needs fp32 values that bf16 ones can make again."""
    hidden = (x @ w).float()
    mean = hidden.mean(-1, keepdim=True)
    rstd = (hidden.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    return (((hidden - mean) * rstd).to(torch.bfloat16) * scale,)


def normalised_inputs() -> list[Tensor]:
    shapes = ((512, 64), (64, 256), (256,))
    return [torch.empty(s, dtype=torch.bfloat16).normal_() for s in shapes]


def test_recomputing_wins_where_what_it_reads_is_smaller() -> None:
    _, optimum = planned(normalised, normalised_inputs())
    assert optimum.saved is not None
    assert all(
        n.meta["val"].dtype == torch.bfloat16 or n.meta["val"].numel() == 512 for n in optimum.saved
    ), optimum.saved


def two_sources(x: Tensor, w: Tensor, a: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Its gradient needs the result alone; making that again would read two tensors."""
    return (torch.tanh(x @ w + x @ v) * a,)


def two_sources_inputs() -> list[Tensor]:
    return [torch.randn(s) for s in ((256, 64), (64, 192), (256, 192), (64, 192))]


def test_saving_wins_where_recomputing_reads_more() -> None:
    _, optimum = planned(two_sources, two_sources_inputs())
    assert optimum.saved is not None
    assert "tanh" in {n.name for n in optimum.saved}


def chain(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    hidden = torch.sigmoid(x @ w)
    return (torch.exp(hidden) @ v, torch.tanh(hidden) @ u)


def chain_inputs() -> list[Tensor]:
    return [torch.randn(s) for s in ((256, 64), (64, 192), (192, 64), (192, 64))]


def test_a_budget_binds_and_costs_time() -> None:
    _, free = planned(chain, chain_inputs())
    budget = saved_bytes(free) - 1
    _, tight = planned(chain, chain_inputs(), Saving(budget=budget))
    assert saved_bytes(tight) <= budget
    assert free.objective_us is not None and tight.objective_us is not None
    assert tight.objective_us > free.objective_us
    assert not tight.notes


def test_a_budget_that_cannot_be_met_says_how_much_is_needed() -> None:
    _, optimum = planned(chain, chain_inputs(), Saving(budget=10))
    (note,) = optimum.notes
    assert "evt.memory_budget=10 cannot be met" in note
    assert optimum.objective_us is not None and optimum.kernels is not None
    assert optimum.objective_us == pytest.approx(sum(k.candidate.cost_us for k in optimum.kernels))
    assert f" {saved_bytes(optimum)} bytes" in note


def test_a_price_of_saving_saves_less() -> None:
    _, free = planned(chain, chain_inputs())
    _, dear = planned(chain, chain_inputs(), Saving(weight=1.0))
    assert saved_bytes(dear) < saved_bytes(free)


def test_the_users_marks_are_kept() -> None:
    module, _, outputs = joint(chain, chain_inputs())
    graph = prepared(module).graph
    rules = rules_of(graph, forward_outputs=outputs)

    def saved(saving: Saving) -> set[str]:
        optimum = optimise(graph, SMALL, rules, outputs, saving, nodes=NODES)
        assert optimum.saved is not None
        return {n.name for n in optimum.saved}

    named = {n.name: n for n in graph.nodes}
    assert "exp" in saved(Saving())
    assert "exp" not in saved(Saving(must_not=frozenset({named["exp"]})))
    assert "sigmoid" not in saved(Saving())
    assert "sigmoid" in saved(Saving(must=frozenset({named["sigmoid"]})))


def residuals(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Sums of three products: greedy takes the first gain that it sees."""
    a, b, c = weights
    return (torch.tanh(x @ a + x @ b + x @ c), torch.relu(x @ a + x @ b))


def residuals_inputs() -> list[Tensor]:
    return [torch.randn(256, 64), *(torch.randn(64, 192) for _ in range(3))]


def test_greedy_is_strictly_worse_somewhere() -> None:
    worse = []
    for function, inputs in (
        (ffn, ffn_inputs()),
        (normalised, normalised_inputs()),
        (residuals, residuals_inputs()),
        (chain, chain_inputs()),
    ):
        _, optimum = planned(function, inputs)
        assert optimum.objective_us is not None and optimum.greedy_us is not None
        assert optimum.objective_us <= optimum.greedy_us + 1e-6
        worse.append(optimum.objective_us < optimum.greedy_us - 0.1)
    assert any(worse)


def test_without_the_program_it_is_the_greedy_plan() -> None:
    module, _, outputs = joint(ffn, ffn_inputs())
    graph = prepared(module).graph
    optimum = optimise(
        graph, SMALL, rules_of(graph, forward_outputs=outputs), outputs, Saving(), nodes=0
    )
    alone = greedy.choose(graph, SMALL, rules_of(graph, forward_outputs=outputs))
    assert optimum.solver == "greedy" and optimum.saved is None
    assert trees(optimum) == [to_text(c.priced.region.tree) for c in alone.chosen]


def test_bandwidth_changes_the_plan() -> None:
    quarter = dataclasses.replace(SMALL, memory_bandwidth=SMALL.memory_bandwidth / 4)
    free = dataclasses.replace(SMALL, memory_bandwidth=float("inf"), launch_us=0.0)
    fast, slow, none = (
        planned(residuals, residuals_inputs(), target=d)[1] for d in (SMALL, quarter, free)
    )
    assert trees(fast) != trees(slow) or fast.saved != slow.saved
    assert len(trees(slow)) >= len(trees(fast)) > 0
    assert trees(none) == []


def test_equal_graphs_have_equal_plans() -> None:
    plans = [planned(residuals, residuals_inputs()) for _ in range(2)]
    assert len({tuple(trees(optimum)) for _, optimum in plans}) == 1
    assert len({tuple(sorted(n.name for n in optimum.saved or ())) for _, optimum in plans}) == 1


def test_inference_has_one_half() -> None:
    module = trace(lambda x, w, b: (torch.relu(torch.addmm(b, x, w)),), *ffn_inputs()[:3])
    graph = prepared(module).graph
    optimum = optimise(graph, SMALL, rules_of(graph), 0, Saving(), nodes=NODES)
    (tree,) = trees(optimum)
    assert "relu(" in tree
    assert optimum.saved == frozenset()


@pytest.mark.parametrize("function", [ffn, residuals, chain], ids=lambda f: f.__name__)
def test_a_chosen_regions_gain_is_what_the_plan_would_lose(function: Callable[..., Any]) -> None:
    """Both prices of a region: its own, and what would run in its place all else equal."""
    inputs = {ffn: ffn_inputs, residuals: residuals_inputs, chain: chain_inputs}[function]()
    _, optimum = planned(function, inputs)
    assert optimum.choice.chosen
    for chosen in optimum.choice.chosen:
        assert chosen.priced.gain_us > 0


def test_the_objective_is_the_sum_of_the_kernels() -> None:
    _, optimum = planned(ffn, ffn_inputs())
    assert optimum.kernels is not None and optimum.objective_us is not None
    total = sum(kernel.candidate.cost_us for kernel in optimum.kernels)
    assert optimum.objective_us == pytest.approx(total)
