"""Describing: a plan's entries say what was chosen, in words and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.partition.planning import joint, prepared, rules_of
from tests.tracing import trace
from torch import Tensor

from torch_evt import devices
from torch_evt.graphs import renumbered
from torch_evt.partition import describe
from torch_evt.partition.greedy import choose
from torch_evt.partition.plan import RegionPlan, Unfused
from torch_evt.partition.price import product_us, region_us
from torch_evt.tree.text import parse, to_text

H200 = devices.device("h200")


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


def planned(
    function: Callable[..., Any], *inputs: Tensor, **kwargs: Any
) -> tuple[tuple[RegionPlan, ...], tuple[Unfused, ...]]:
    graph = prepared(trace(function, *inputs, **kwargs)).graph
    rules = rules_of(graph)
    choice = choose(graph, H200, rules)
    return (
        describe.regions_of(choice, rules.labels),
        describe.unfused_of(choice, rules.labels, H200),
    )


PRODUCT = (x(256, 64), x(64, 128))


def test_an_entry_holds_what_the_region_is() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        y = F.gelu(torch.addmm(c, a, b))
        return y, y.sum(0)

    graph = prepared(trace(f, *PRODUCT, x(128))).graph
    rules = rules_of(graph)
    choice = choose(graph, H200, rules)
    (entry,) = describe.regions_of(choice, rules.labels, first_number=4)
    region = choice.chosen[0].priced.region
    assert entry.name == "region4"
    assert (entry.half, entry.anchor, entry.mainloop) == ("inference", "addmm", "gemm")
    assert entry.shape == ("1", "256", "128", "64")
    assert entry.nodes == tuple(n.name for n in region.nodes)
    assert entry.stored == tuple(output.nodes[0].name for output in region.outputs)
    assert to_text(parse(entry.tree)) == entry.tree == to_text(region.tree)
    assert entry.modelled_us == region_us(region, H200)
    assert entry.replaced_us > entry.modelled_us
    assert entry.measured_us is None
    for alternative, loser in zip(entry.alternatives, choice.chosen[0].losers, strict=False):
        assert alternative.tree == to_text(loser.region.tree)
    assert len(entry.alternatives) <= 2


@pytest.mark.parametrize(
    ("function", "others", "words"),
    [
        (lambda a, b, c: F.gelu(torch.addmm(c, a, b)), (x(128),), ("bias", "gelu_erf")),
        (lambda a, b, c: torch.relu(a @ b + c), (x(128),), ("bias", "relu")),
        (lambda a, b, t: torch.tanh(a @ b) + t, (x(256, 128),), ("tanh", "residual")),
        (lambda a, b, t: torch.relu(a @ b) * t, (x(256, 128) > 0,), ("mask", "relu")),
        (lambda a, b: torch.tanh(a @ b * 0.5), (), ("tanh", "scale")),
        (lambda a, b: (z := a @ b, torch.relu(z)), (), ("relu", "2 stores")),
        (lambda a, b: torch.exp(a @ b).sum(0), (), ("exp", "sum over rows")),
        (lambda a, b: a @ b + 1, (), ("add",)),
        (lambda a, b, w: torch.tanh(a @ b) * w + 1, (x(128),), ("tanh", "scale")),
        (lambda a, b, t: torch.relu(a @ b) * t + 1, (x(256, 128),), ("relu", "scale")),
        (lambda a, b, t: a @ b * t, (x(256, 128),), ("scale",)),
    ],
)
def test_the_words_for_what_is_fused(
    function: Callable[..., Any], others: tuple[Tensor, ...], words: tuple[str, ...]
) -> None:
    ((entry,), _) = planned(function, *PRODUCT, *others)
    assert entry.fuses == words


def test_symbolic_sizes_are_named() -> None:
    ((entry,), _) = planned(lambda a, b: torch.relu(a @ b), *PRODUCT, mode="symbolic")
    assert entry.shape[0] == "1"
    assert all(size.startswith("s") for size in entry.shape[1:])


def test_a_batch_is_the_first_size() -> None:
    ((entry,), _) = planned(lambda a, b: torch.relu(a @ b), x(3, 256, 64), x(3, 64, 128))
    assert entry.shape == ("3", "256", "128", "64")


def test_an_unfused_product_says_why_and_what_it_costs() -> None:
    graph = prepared(trace(lambda a, b: torch.sin(a @ b), *PRODUCT)).graph
    rules = rules_of(graph)
    choice = choose(graph, H200, rules)
    (entry,) = describe.unfused_of(choice, rules.labels, H200)
    assert (entry.node, entry.half, entry.code) == ("mm", "inference", "not-fusible")
    assert entry.reason.endswith(": aten.sin")
    assert entry.modelled_us is None
    assert entry.replaced_us == product_us(choice.left[0].anchor, H200)


def test_an_unfused_product_with_a_candidate_tells_both_times() -> None:
    _, (entry,) = planned(lambda a, b: torch.softmax(a @ b * 2, 1), *PRODUCT)
    assert entry.code == "slower"
    assert entry.modelled_us is not None and entry.replaced_us is not None
    assert entry.modelled_us >= entry.replaced_us


def test_halves_of_a_joint_graph() -> None:
    def f(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return (F.gelu(a @ b, approximate="tanh") @ c,)

    module, _, outputs = joint(f, [*PRODUCT, x(128, 64)])
    graph = prepared(module).graph
    rules = rules_of(graph, forward_outputs=outputs)
    choice = choose(graph, H200, rules)
    entries = describe.regions_of(choice, rules.labels)
    unfused = describe.unfused_of(choice, rules.labels, H200)
    assert {entry.half for entry in entries} == {"forward", "backward"}
    assert [entry.name for entry in entries] == [f"region{i}" for i in range(len(entries))]
    assert len(entries) + len(unfused) == 6  # two products, and two gradients of each


def test_renaming_follows_the_graph() -> None:
    module = prepared(trace(lambda a, b: torch.tanh(a @ b).exp(), *PRODUCT))
    rules = rules_of(module.graph)
    (entry,) = describe.regions_of(choose(module.graph, H200, rules), rules.labels)
    names = {n.name: f"{n.name}_of_ours" for n in module.graph.nodes}
    moved = describe.renamed(entry, names)
    assert moved.anchor == "mm_of_ours"
    assert moved.nodes == ("mm_of_ours", "tanh_of_ours", "exp_of_ours")
    assert moved.stored == ("exp_of_ours",)
    assert moved.tree == entry.tree
    _, same = renumbered(module)
    assert describe.renamed(entry, same) == entry


def test_saved_tensors_have_their_bytes_where_they_are_known() -> None:
    def f(a: Tensor) -> tuple[Tensor, ...]:
        return a * 2, a.bfloat16() * 2

    module = trace(f, x(3, 5))
    nodes = [n for n in module.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert [saved.bytes for saved in describe.saved_of(nodes)] == [60, 30]
    assert [saved.tensor for saved in describe.saved_of(nodes)] == [n.name for n in nodes]
    symbolic = trace(f, x(3, 5), mode="symbolic")
    nodes = [n for n in symbolic.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert [saved.bytes for saved in describe.saved_of(nodes)] == [None, None]
    sizes = [n for n in symbolic.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    assert describe.saved_of(sizes) == ()
