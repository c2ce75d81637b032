"""The cost model: bytes and flops of examples computed by hand, and Inductor's groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.partition.planning import joint, prepared, regions, rules_of
from tests.tracing import guards, trace
from torch import Tensor, fx

from torch_evt import devices
from torch_evt.partition.halves import label_all
from torch_evt.partition.price import InductorModel, bytes_of, product_us, region_us
from torch_evt.partition.region import Region

aten = torch.ops.aten
PLAIN = dataclasses.replace(
    devices.device("h200"),
    memory_bandwidth=1e12,
    peak_flops={"f32": 1e12, "bf16": 4e12},
    sustained={"memory": 0.5, "flops": 0.25},
    launch_us=2.0,
    l2_bytes=0,
)
"""0.5e6 bytes, 0.25e6 fp32 flops or 1e6 bf16 flops a microsecond; two to start a kernel."""
BYTES, FLOPS = 0.5e6, 0.25e6
LAUNCH = 2.0


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def ready(function: Callable[..., Any], *shapes: tuple[int, ...], **kwargs: Any) -> fx.GraphModule:
    dtype = kwargs.pop("dtype", torch.float32)
    return prepared(trace(function, *(torch.randn(s).to(dtype) for s in shapes), **kwargs))


def with_nodes(graph: fx.Graph, *names: str, kept: tuple[str, ...] = ()) -> Region:
    """The candidate with these nodes."""
    return next(
        region
        for region in regions(graph)
        if [n.name for n in region.nodes] == list(names)
        and sorted(n.name for n in region.kept) == sorted(kept)
    )


def model_of(graph: fx.Graph, device: devices.Device = PLAIN) -> InductorModel:
    return InductorModel(graph, device, label_all(graph, "inference"))


M, K, N = 64, 32, 16
TILE = M * N * 4
OPERANDS = (M * K + K * N) * 4


def test_a_product_takes_the_larger_of_its_flops_and_its_bytes() -> None:
    graph = ready(lambda x, w: x @ w, (M, K), (K, N)).graph
    product = next(n for n in graph.nodes if n.target is aten.mm.default)
    flops, moved = 2 * M * K * N, OPERANDS + TILE
    assert flops / FLOPS > moved / BYTES
    assert product_us(product, PLAIN) == near(flops / FLOPS + LAUNCH)
    slow = dataclasses.replace(PLAIN, memory_bandwidth=1e10)
    assert product_us(product, slow) == near(moved / (BYTES / 100) + LAUNCH)


def test_a_batched_product_in_half_precision() -> None:
    graph = ready(torch.bmm, (3, M, K), (3, K, N), dtype=torch.bfloat16).graph
    product = next(n for n in graph.nodes if n.target is aten.bmm.default)
    moved = 3 * (M * K + K * N + M * N) * 2
    compute = 2 * 3 * M * K * N / 1e6
    assert product_us(product, PLAIN) == near(max(compute, moved / BYTES) + LAUNCH)


def test_tf32_is_priced_only_where_it_is_allowed() -> None:
    graph = ready(lambda x, w: x @ w, (M, K), (K, N)).graph
    product = next(n for n in graph.nodes if n.target is aten.mm.default)
    device = dataclasses.replace(PLAIN, peak_flops={"f32": 1e12, "tf32": 2e12})
    exact = product_us(product, device)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert exact - product_us(product, device) == near(2 * M * K * N / FLOPS / 2)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_broadcast_is_in_memory_once() -> None:
    assert bytes_of(torch.empty(3, 4).expand(5, 3, 4)) == 12 * 4
    assert bytes_of(torch.empty(4, dtype=torch.bool)) == 4
    assert bytes_of(torch.empty(())) == 4
    assert bytes_of(None) == 0


def test_a_region_pays_its_first_store_with_the_product_and_streams_the_rest() -> None:
    def f(x: Tensor, w: Tensor, bias: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        z = torch.addmm(bias, x, w)
        y = torch.relu(z) + other
        return z, y, y.sum(0)

    graph = ready(f, (M, K), (K, N), (N,), (M, N)).graph
    region = with_nodes(graph, "addmm", "relu", "add", "sum_1")
    compute = 2 * M * K * N / FLOPS
    extra = N * 4 + TILE + TILE + N * 4  # bias, other, the second store, the sums
    assert region_us(region, PLAIN) == near(compute + LAUNCH + extra / BYTES)


def test_what_inductor_would_run_is_the_product_and_one_kernel() -> None:
    def f(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(x @ w) * other

    graph = ready(f, (M, K), (K, N), (M, N)).graph
    region = with_nodes(graph, "mm", "tanh", "mul")
    pointwise = (TILE + TILE + TILE) / BYTES + LAUNCH  # product and other read, result written
    wanted = 2 * M * K * N / FLOPS + LAUNCH + pointwise
    assert model_of(graph).replaced_us(region) == near(wanted)


def test_what_was_just_written_is_read_from_the_cache_where_it_fits() -> None:
    graph = ready(lambda x, w: torch.tanh(x @ w), (M, K), (K, N)).graph
    region = with_nodes(graph, "mm", "tanh")
    for l2, read in ((2 * TILE, TILE / 3), (2 * TILE - 2, TILE)):
        device = dataclasses.replace(PLAIN, l2_bytes=l2)
        wanted = product_us(region.anchor, device) + (read + TILE) / BYTES + LAUNCH
        assert model_of(graph, device).replaced_us(region) == near(wanted)


def test_a_kernel_that_runs_anyway_is_not_credited_with_its_launch() -> None:
    """The softmax reads a tile and writes a tile, whether or not the product scales."""
    graph = ready(lambda x, w: torch.softmax(x @ w * 2, 1), (M, K), (K, N)).graph
    region = with_nodes(graph, "mm", "mul")
    assert model_of(graph).replaced_us(region) == near(product_us(region.anchor, PLAIN))


def test_a_value_that_must_now_be_stored_is_charged() -> None:
    """`shared` stayed inside one kernel; once the region reads it, that kernel must write it."""

    def f(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        shared, product = torch.exp(y), x @ w
        return torch.tanh(product) * shared, (shared * product).sum(1)

    graph = ready(f, (M, K), (K, N), (M, N)).graph
    region = with_nodes(graph, "mm", "tanh", "mul")
    model = model_of(graph)
    assert groups(graph, model) == [["exp", "tanh", "mul", "mul_1", "sum_1"]]
    before = (TILE + TILE + TILE + M * 4) / BYTES + LAUNCH  # y, product; result, sums
    after = (TILE + TILE + TILE + M * 4) / BYTES + LAUNCH  # y, product; exp, sums
    assert model.replaced_us(region) == near(product_us(region.anchor, PLAIN) + before - after)


def test_regions_chosen_before_take_their_nodes_out_of_the_kernels() -> None:
    def f(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(x @ w) + torch.sigmoid(y @ v)

    graph = ready(f, (M, K), (K, N), (M, K), (K, N)).graph
    first = with_nodes(graph, "mm", "tanh")
    second = with_nodes(graph, "mm_1", "sigmoid")
    model = model_of(graph)
    alone = model.replaced_us(first)
    beside = model.replaced_us(first, dict.fromkeys(second.nodes))
    # either way tanh's tile is read as often as the product's was: nothing is saved
    assert alone == near(product_us(first.anchor, PLAIN))
    assert beside == near(product_us(first.anchor, PLAIN))
    everything = with_nodes(graph, "mm", "tanh", "sigmoid", "add")
    assert model.replaced_us(everything) == near(
        product_us(first.anchor, PLAIN) + 3 * TILE / BYTES + LAUNCH
    )


def node_named(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.name == name)


def groups(graph: fx.Graph, model: InductorModel) -> list[list[str]]:
    """The names of each group's nodes, in the order of the graph."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    distinct = {id(g): g for g in model.groups.values()}.values()
    named = [[n.name for n in sorted(g.nodes, key=order.__getitem__)] for g in distinct]
    return sorted(named, key=lambda names: order[node_named(graph, names[0])])


def grouped(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[list[str]]:
    graph = ready(function, *shapes).graph
    return groups(graph, model_of(graph))


def test_a_pointwise_chain_is_one_kernel() -> None:
    assert grouped(lambda x: torch.tanh(x).exp() * x + 1, (M, N)) == [["tanh", "exp", "mul", "add"]]


def test_a_product_ends_a_kernel() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.exp(x) @ w)

    assert grouped(f, (M, K), (K, N)) == [["exp"], ["tanh"]]


def test_a_sum_over_the_last_axis_joins_its_kernel() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.exp(x)
        return y / y.sum(1, keepdim=True)

    assert grouped(f, (M, N)) == [["exp", "sum_1", "div"]]


def test_a_column_sum_of_a_stored_value_is_a_kernel_of_its_own() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.exp(x)
        return y, y.sum(0)

    assert grouped(f, (M, N)) == [["exp"], ["sum_1"]]


def test_a_column_sum_that_alone_needs_its_input_takes_it_in() -> None:
    assert grouped(lambda x: torch.exp(x).sum(0), (M, N)) == [["exp", "sum_1"]]


def test_what_reads_a_column_sum_waits_for_it() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x.sum(0)) + 1

    assert grouped(f, (M, N)) == [["sum_1"], ["tanh", "add"]]


def test_forward_and_backward_never_share_a_kernel() -> None:
    module, _, outputs = joint(lambda x: (torch.tanh(x) * torch.exp(x),), [torch.randn(M, N)])
    graph = prepared(module).graph
    labels = rules_of(graph, forward_outputs=outputs).labels
    model = InductorModel(graph, PLAIN, labels)
    found = [{labels[node_named(graph, name)] for name in names} for names in groups(graph, model)]
    assert len(found) >= 2
    assert {"forward"} in found
    for halves in found:
        assert halves == {"forward"} or "forward" not in halves


def test_symbolic_sizes_are_priced_by_hints_without_a_guard() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    static = ready(f, (M, K), (K, N)).graph
    module = ready(f, (M, K), (K, N), mode="symbolic")
    before = guards(module)
    prices = [
        (region_us(region, PLAIN), model_of(graph).replaced_us(region))
        for graph in (static, module.graph)
        for region in (with_nodes(graph, "mm", "tanh"),)
    ]
    assert prices[0] == prices[1]
    assert guards(module) == before
