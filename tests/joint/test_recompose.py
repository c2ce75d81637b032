"""Recompose: chains of primitives become one named node, near misses do not, and back again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tracing import assert_same, node, relative_error, run, targets, trace
from torch import Tensor, fx

from torch_evt.graphs import copy_of, signature, verify
from torch_evt.joint import recompose
from torch_evt.joint.recompose import EXPANSION, patterns
from torch_evt.runtime.named_functions import NAMED

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default

Activation = Callable[[Tensor], Tensor]
FORWARD: dict[str, Activation] = {
    "gelu_erf": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": lambda x: F.silu(x),
}
NAMES = [*FORWARD, *(f"{name}_backward" for name in FORWARD), "relu_backward"]


def function_of(name: str) -> Callable[..., Tensor]:
    """(x) -> the activation, or (g, x) -> its gradient by autograd; of relu, (g, relu(x))."""
    if name in FORWARD:
        return FORWARD[name]
    if name == "relu_backward":
        return lambda g, y: aten.threshold_backward(g, y, 0)

    def gradient(g: Tensor, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            result = FORWARD[name.removesuffix("_backward")](leaf)
        return torch.autograd.grad(result, leaf, g)[0]

    return gradient


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(6, 10).to(dtype) for _ in range(1 if name in FORWARD else 2)]


def chain(name: str, dtype: torch.dtype = torch.float32) -> tuple[fx.GraphModule, list[Tensor]]:
    inputs = inputs_of(name, dtype)
    return trace(function_of(name), *inputs), inputs


def recomposed(module: fx.GraphModule, **options: Any) -> fx.GraphModule:
    ours = copy_of(module)
    before = signature(ours.graph)
    count = recompose.apply(ours.graph, **options)
    verify(ours.graph, before, "recompose")
    assert count == len(named(ours))
    return ours


def named(module: fx.GraphModule) -> list[str]:
    """The functions that a graph's nodes are, in order."""
    names = {op: name for name, op in NAMED.items()}
    return [names[target] for target in targets(module) if target in names]


def operations(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "call_function"]


def primitives(name: str) -> Iterator[tuple[fx.GraphModule, list[Tensor], fx.Node]]:
    """For each operation of a chain, a fresh graph of the chain with that operation's node."""
    first, inputs = chain(name)
    for i in range(len(operations(first))):
        module = copy_of(first)
        yield module, inputs, operations(module)[i]


def test_there_is_a_pattern_for_each_of_the_seven() -> None:
    assert sorted(pattern.name for pattern in patterns()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_from_torch_becomes_one_node_and_keeps_its_name(name: str) -> None:
    module, inputs = chain(name)
    ours = recomposed(module)
    assert targets(ours) == [NAMED[name]]
    results = [
        next(n for n in m.graph.nodes if n.op == "output").args[0].name for m in (ours, module)
    ]
    assert results[0] == results[1]
    assert relative_error(run(ours, *inputs)[0], run(module, *inputs)[0]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_a_half_precision_chain_is_found_between_its_casts(name: str, dtype: torch.dtype) -> None:
    module, inputs = chain(name, dtype)
    for exact_rounding in (False, True):
        ours = recomposed(module, exact_rounding=exact_rounding and name != "relu_backward")
        assert named(ours) == [name]
        assert set(targets(ours)) <= {NAMED[name], CONVERT}
        assert relative_error(run(ours, *inputs)[0], run(module, *inputs)[0]) < 1e-3


@pytest.mark.parametrize("which", ["all", "even", "odd"])
@pytest.mark.parametrize("name", NAMES)
def test_operands_of_additions_and_products_may_be_exchanged(name: str, which: str) -> None:
    module, inputs = chain(name)
    wanted = run(module, *inputs)
    both = [
        n
        for n in module.graph.nodes
        if n.target in (aten.mul.Tensor, aten.add.Tensor) and isinstance(n.args[1], fx.Node)
    ]
    for i, n in enumerate(both):
        if which == "all" or (i % 2 == 0) == (which == "even"):
            n.args = (n.args[1], n.args[0])
    ours = recomposed(module)
    assert targets(ours) == [NAMED[name]]
    assert relative_error(run(ours, *inputs)[0], wanted[0]) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_another_constant_is_no_match(name: str) -> None:
    tried = 0
    for module, inputs, operation in primitives(name):
        arguments = operation.args
        for position, argument in enumerate(arguments):
            if not isinstance(argument, (int, float)):
                continue
            other = argument * 1.001 if argument else 0.001
            operation.args = (*arguments[:position], other, *arguments[position + 1 :])
            wanted = run(module, *inputs)
            ours = recomposed(module)
            assert name not in named(ours), operation.format_node()
            assert relative_error(run(ours, *inputs)[0], wanted[0]) < 1e-5
            operation.args = arguments
            tried += 1
    assert tried >= 1


@pytest.mark.parametrize("name", NAMES)
def test_another_tensor_in_one_place_is_no_match(name: str) -> None:
    module, _ = chain(name)
    x = [n for n in module.graph.nodes if n.op == "placeholder"][-1]
    if len(x.users) < 2:  # relu_backward reads everything once
        assert name == "relu_backward"
        return
    for i in range(len(x.users)):
        module, inputs = chain(name)
        x = [n for n in module.graph.nodes if n.op == "placeholder"][-1]
        with module.graph.inserting_after(x):
            other = module.graph.placeholder("other")
        other.meta["val"] = x.meta["val"]
        list(x.users)[i].replace_input_with(x, other)
        module.recompile()
        given = [*inputs, torch.randn(6, 10)]
        ours = recomposed(module)
        assert name not in named(ours)
        assert relative_error(run(ours, *given)[0], run(module, *given)[0]) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_another_operation_in_one_place_is_no_match(name: str) -> None:
    for module, _, operation in primitives(name):
        other = {aten.mul.Tensor: aten.add.Tensor, aten.add.Tensor: aten.mul.Tensor}
        if operation.target not in other:
            continue
        operation.target = other[operation.target]
        assert name not in named(recomposed(module))


@pytest.mark.parametrize("name", NAMES)
def test_double_precision_is_left_alone(name: str) -> None:
    module, inputs = chain(name, torch.float64)
    ours = recomposed(module)
    assert named(ours) == []
    assert_same(run(ours, *inputs), run(module, *inputs))


@pytest.mark.parametrize("tag", ["recompute", "ac_graph_id"])
@pytest.mark.parametrize("name", NAMES)
def test_a_chain_across_checkpoints_is_left_alone(name: str, tag: str) -> None:
    for module, _, operation in primitives(name):
        for n in module.graph.nodes:
            n.meta[tag] = 1
        assert named(recomposed(module)) == [name]
        operation.meta[tag] = 2
        constant = operation.meta["val"].dim() == 0  # belongs to no segment
        assert (name in named(recomposed(module))) == constant


@pytest.mark.parametrize("name", NAMES)
def test_a_recomposed_node_keeps_its_tags(name: str) -> None:
    module, _ = chain(name)
    for n in module.graph.nodes:
        n.meta.update(recompute=3, partitioner_tag="is_backward", stack_trace="line 7")
    ours = node(recomposed(module), NAMED[name])
    assert ours.meta["recompute"] == 3
    assert ours.meta["partitioner_tag"] == "is_backward"
    assert ours.meta["stack_trace"] == "line 7"


@pytest.mark.parametrize("name", [n for n in NAMES if n != "relu_backward"])
def test_a_cast_inside_the_chain_is_no_match(name: str) -> None:
    for module, inputs, operation in primitives(name):
        user = next(iter(operation.users))
        if user.op == "output":
            continue
        with module.graph.inserting_after(operation):
            down = module.graph.call_function(CONVERT, (operation, torch.bfloat16))
        with module.graph.inserting_after(down):
            up = module.graph.call_function(CONVERT, (down, torch.float32))
        down.meta["val"] = operation.meta["val"].bfloat16()
        up.meta["val"] = operation.meta["val"]
        user.replace_input_with(operation, up)
        wanted = run(module, *inputs)
        ours = recomposed(module)
        assert name not in named(ours), operation
        assert relative_error(run(ours, *inputs)[0], wanted[0]) < 1e-6


def test_a_chain_in_half_precision_is_left_alone_only_where_every_rounding_counts() -> None:
    def by_hand(x: Tensor) -> Tensor:
        return x * 0.5 * (torch.erf(x * 0.7071067811865476) + 1)

    x = torch.randn(6, 10).bfloat16()
    module = trace(by_hand, x)
    assert named(recomposed(module)) == ["gelu_erf"]
    kept = recomposed(module, exact_rounding=True)
    assert named(kept) == []
    assert_same(run(kept, x), run(module, x))


def test_inputs_of_two_dtypes_are_no_match() -> None:
    """The named node would have the dtype of its first argument."""

    def masked(g: Tensor, y: Tensor) -> Tensor:
        return torch.where(y <= 0, 0.0, g)

    g, y = torch.randn(6, 10), torch.randn(6, 10)
    assert named(recomposed(trace(masked, g, y))) == ["relu_backward"]
    assert named(recomposed(trace(masked, g, y.bfloat16()))) == []
    assert named(recomposed(trace(masked, g.bfloat16(), y))) == []


def test_a_broadcast_inside_the_chain_is_no_match() -> None:
    def scaled(x: Tensor, y: Tensor) -> Tensor:
        return x * 0.5 * (torch.erf(y * 0.7071067811865476) + 1)

    x = torch.randn(6, 10)
    assert named(recomposed(trace(lambda x: scaled(x, x), x))) == ["gelu_erf"]
    assert named(recomposed(trace(lambda x: scaled(x, x[0]), x))) == []


def test_what_others_read_of_a_chain_stays() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        inner = torch.erf(x * 0.7071067811865476)
        return x * 0.5 * (inner + 1), inner

    x = torch.randn(6, 10)
    module = trace(f, x)
    ours = recomposed(module)
    assert named(ours) == ["gelu_erf"]
    assert aten.erf.default in targets(ours)
    for our, their in zip(run(ours, x), run(module, x), strict=True):
        assert relative_error(our, their) < 1e-6


def several(g: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        a = F.silu(F.gelu(leaf, approximate="tanh")) * F.relu(leaf) + F.gelu(leaf)
    return a.detach(), torch.autograd.grad(a, leaf, g)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_chains_in_one_graph_are_all_found(dtype: torch.dtype) -> None:
    inputs = [torch.randn(6, 10).to(dtype) for _ in range(2)]
    module = trace(several, *inputs)
    ours = recomposed(module)
    assert sorted(named(ours)) == sorted(NAMES)
    limit = 1e-6 if dtype == torch.float32 else 1e-2
    for our, their in zip(run(ours, *inputs), run(module, *inputs), strict=True):
        assert relative_error(our, their) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*NAMES, "several"])
def test_expanding_gives_the_chain_back_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    if name == "several":
        inputs = [torch.randn(6, 10).to(dtype) for _ in range(2)]
        module = trace(several, *inputs)
    else:
        module, inputs = chain(name, dtype)
    ours = recomposed(module)
    count = len(named(ours))
    assert count > 0
    assert recompose.expand(ours.graph) == count
    assert named(ours) == []
    assert not any(EXPANSION in n.meta for n in ours.graph.nodes)
    ours.graph.lint()
    assert_same(run(ours, *inputs), run(module, *inputs))
    ends = [
        [n.name for n in m.graph.nodes if any(user.op == "output" for user in n.users)]
        for m in (ours, module)
    ]
    assert ends[0] == ends[1]
    assert sorted(map(str, targets(ours))) == sorted(map(str, targets(module)))


def test_expanding_marks_the_chain_as_backward_where_the_node_was() -> None:
    module, _ = chain("gelu_tanh_backward")
    ours = recomposed(module)
    node(ours, NAMED["gelu_tanh_backward"]).meta["partitioner_tag"] = "is_backward"
    recompose.expand(ours.graph)
    tags = {n.meta.get("partitioner_tag") for n in ours.graph.nodes if n.op == "call_function"}
    assert tags == {"is_backward"}


def test_symbolic_sizes_match_too() -> None:
    x = torch.randn(6, 10)
    module = trace(lambda x: F.gelu(x * 2), x, mode="symbolic")
    ours = recomposed(module)
    assert named(ours) == ["gelu_erf"]
    other = torch.randn(3, 4)
    assert relative_error(run(ours, other)[0], run(module, other)[0]) < 1e-6


def test_a_graph_without_what_a_pattern_contains_need_not_be_searched_for_it() -> None:
    sources = {source.name: source for source in recompose._SOURCES}
    for pattern in recompose.patterns():
        targets = {node.target for node in pattern.graph.nodes}
        assert sources[pattern.name].contains & targets
    assert [p.name for p in recompose.patterns({aten.where.self})] == ["relu_backward"]
    assert recompose.patterns(set()) == ()
