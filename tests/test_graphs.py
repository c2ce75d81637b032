"""Helpers on graphs: copies, order, signatures, sizes that are compared without a guard."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tracing import assert_same, guards, node, run, targets, trace
from torch import Tensor, fx

from torch_evt.errors import PassError
from torch_evt.graphs import (
    contiguous_stride,
    copy_of,
    expression,
    is_contiguous,
    is_one,
    module_of,
    number_of,
    output_node,
    output_values,
    product,
    rename,
    renumbered,
    replace_contents,
    same_size,
    same_sizes,
    signature,
    size_nodes,
    sort_topologically,
    tensor_of,
    verify,
)

aten = torch.ops.aten


def example() -> tuple[fx.GraphModule, list[Tensor]]:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = torch.tanh(x) * y
        return a + 1, a.sum(0), x.t()

    inputs = [torch.randn(3, 4), torch.randn(3, 4)]
    return trace(f, *inputs), inputs


def names(module: fx.GraphModule) -> list[str]:
    return [n.name for n in module.graph.nodes]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), max_size=4))
def test_contiguous_strides_are_those_of_torch(shape: list[int]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=4), st.randoms())
def test_contiguity_is_that_of_torch(shape: list[int], source: random.Random) -> None:
    order = list(range(len(shape)))
    source.shuffle(order)
    for tensor in (torch.empty(shape).permute(order), torch.empty(shape).expand(2, *shape)):
        assert is_contiguous(tensor) == tensor.is_contiguous()


def symbolic() -> tuple[fx.GraphModule, Any, Any]:
    def f(x: Tensor) -> Tensor:
        b, s, n = x.shape
        return x.view(b * s, n).tanh().view(s * b, n)

    module = trace(f, torch.randn(3, 5, 8), mode="symbolic")
    b, s, _ = next(n for n in module.graph.nodes if n.op == "placeholder").meta["val"].shape
    return module, b, s


def test_sizes_are_compared_by_what_they_are_without_a_guard() -> None:
    module, b, s = symbolic()
    before = guards(module)
    assert same_size(b, b) and not same_size(b, s)
    assert same_size(b * s, s * b) and same_size(b * 2, b + b)
    assert same_size((b + 1) * s, b * s + s)
    assert not same_size(b, 3) and not same_size(3, b)  # its hint, but not its value
    assert not is_one(b) and is_one(1) and not is_one(0)
    assert same_sizes((b, 4), (b, 4)) and not same_sizes((b, 4), (b, 5))
    assert not same_sizes((b,), (b, s))
    assert expression(b * s) == expression(b) * expression(s)
    assert expression(7) == sympy.Integer(7)
    assert same_size(product((b, 2, s)), 2 * s * b)
    assert product(()) == 1 and product((2, 3, 4)) == 24
    assert same_sizes(contiguous_stride((b, s, 4)), (s * 4, 4, 1))
    assert guards(module) == before


def test_contiguity_of_symbolic_sizes_adds_no_guard() -> None:
    module, _, _ = symbolic()
    (x,) = (n.meta["val"] for n in module.graph.nodes if n.op == "placeholder")
    before = guards(module)
    assert is_contiguous(x) and not is_contiguous(x.transpose(0, 1))
    assert guards(module) == before


def test_the_nodes_of_sizes_are_found_by_expression() -> None:
    module, b, s = symbolic()
    found = size_nodes(module.graph)
    assert found[expression(b)].target is aten.sym_size.int
    assert expression(found[expression(b * s)].meta["val"]) == expression(b * s)
    assert expression(b + s) not in found


def test_a_tensor_is_only_what_one_node_traced() -> None:
    module, _ = example()
    tanh = node(module, aten.tanh.default)
    assert tensor_of(tanh) is tanh.meta["val"]
    assert tensor_of(output_node(module.graph)) is None
    assert tensor_of(3) is None and tensor_of(None) is None


def test_a_copy_has_the_same_names_values_and_results_and_its_own_nodes() -> None:
    module, inputs = example()
    rename(node(module, aten.tanh.default), "sum")  # a name that fx itself would not give
    before = str(module.graph)
    for copied in (copy_of(module), module_of(torch.nn.Module(), module.graph)):
        assert names(copied) == names(module)
        assert not set(copied.graph.nodes) & set(module.graph.nodes)
        for ours, theirs in zip(copied.graph.nodes, module.graph.nodes, strict=True):
            assert ours.meta.get("val") is theirs.meta.get("val")
        assert_same(run(copied, *inputs), run(module, *inputs))
        copied.graph.erase_node(output_node(copied.graph))
        copied.graph.eliminate_dead_code()
        assert str(module.graph) == before
    assert module.graph.owning_module is module


def test_a_copy_keeps_attributes_and_metadata() -> None:
    module, _ = example()
    module.register_buffer("table", torch.randn(3, 4))
    tanh = node(module, aten.tanh.default)
    with module.graph.inserting_before(tanh):
        tanh.args = (module.graph.get_attr("table"),)
    module.meta["key"] = "value"
    copied = copy_of(module)
    assert copied.table is module.table  # nothing is copied but the graph
    assert copied.meta == {"key": "value"}
    copied.meta["other"] = 1
    assert "other" not in module.meta


def test_a_renumbered_copy_says_who_became_whom_and_keeps_its_names_when_copied() -> None:
    module, inputs = example()
    rename(node(module, aten.tanh.default), "mul")  # as after an expansion: a name out of order
    rename(node(module, aten.mul.Tensor), "tanh_7")
    copied, renamed = renumbered(module)
    assert list(renamed) == names(module) and list(renamed.values()) == names(copied)
    assert_same(run(copied, *inputs), run(module, *inputs))
    again, same = renumbered(copied)
    assert all(old == new for old, new in same.items())
    assert names(again) == names(copied)


def test_contents_are_replaced_in_place() -> None:
    module, inputs = example()
    wanted, _ = example()
    with wanted.graph.inserting_before(output_node(wanted.graph)):
        results = output_values(wanted.graph)
        extra = wanted.graph.call_function(aten.neg.default, (results[0],))
    extra.meta["val"] = results[0].meta["val"]
    output_node(wanted.graph).args = ((extra, *results[1:]),)
    rename(extra, "named_by_hand")
    graph = module.graph
    replace_contents(graph, wanted.graph)
    assert module.graph is graph and names(module) == names(wanted)
    assert tensor_of(node(module, aten.neg.default)) is extra.meta["val"]
    assert_same(run(module, *inputs), run(wanted, *inputs))
    graph.lint()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.randoms())
def test_any_order_is_sorted_and_results_stay(source: random.Random) -> None:
    module, inputs = example()
    wanted = run(module, *inputs)
    movable = [n for n in module.graph.nodes if n.op == "call_function"]
    for _ in range(5):
        a, b = source.sample(movable, 2)
        a.append(b)
    sort_topologically(module.graph)
    module.graph.lint()
    kinds = [n.op for n in module.graph.nodes]
    assert kinds == sorted(kinds, key=["placeholder", "call_function", "output"].index)
    assert_same(run(module, *inputs), wanted)


def test_a_sorted_graph_is_left_in_its_order() -> None:
    module, _ = example()
    before = names(module)
    sort_topologically(module.graph)
    assert names(module) == before


def test_a_cycle_is_an_error_that_names_it() -> None:
    module, _ = example()
    tanh, mul = node(module, aten.tanh.default), node(module, aten.mul.Tensor)
    tanh.args = (mul,)
    with pytest.raises(PassError, match="cycle through tanh, mul"):
        sort_topologically(module.graph)


def test_outputs_are_found_flat() -> None:
    module, _ = example()
    output = output_node(module.graph)
    first, *others = output.args[0]
    output.args = ([first, {"rest": tuple(others)}, None, 3],)
    assert output_values(module.graph) == [first, *others, None, 3]
    assert output_node(module.graph) is output


def edited(edit: Callable[[fx.GraphModule], None]) -> None:
    """Verify an edited graph against what it was."""
    module, _ = example()
    before = signature(module.graph)
    edit(module)
    verify(module.graph, before, "an edit")


def result(module: fx.GraphModule, value: Tensor) -> None:
    """Let the first result have another traced value."""
    output_values(module.graph)[0].meta["val"] = value


def swapped_inputs(module: fx.GraphModule) -> None:
    first, second = (n for n in module.graph.nodes if n.op == "placeholder")
    first.name, second.name = second.name, first.name


def no_result(module: fx.GraphModule) -> None:
    output = output_node(module.graph)
    output.args = ((None, *output.args[0][1:]),)


def disordered(module: fx.GraphModule) -> None:
    node(module, aten.mul.Tensor).append(node(module, aten.tanh.default))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda m: result(m, torch.empty(3, 4).half()), "float32.*to.*float16"),
        (lambda m: result(m, torch.empty(4, 3)), r"\(3, 4\).*to.*\(4, 3\)"),
        (lambda m: result(m, torch.empty(4, 3).t()), r"\(4, 1\).*to.*\(1, 3\)"),
        (swapped_inputs, "input or result 0"),
        (no_result, "NoneType"),
        (disordered, "an edit left a malformed graph"),
    ],
    ids=["dtype", "shape", "stride", "inputs", "result", "order"],
)
def test_what_a_rewrite_must_not_change_is_noticed(
    edit: Callable[[fx.GraphModule], None], said: str
) -> None:
    with pytest.raises(PassError, match=said):
        edited(edit)


def test_what_a_rewrite_may_change_passes() -> None:
    edited(lambda m: None)
    edited(lambda m: result(m, torch.empty(3, 4)))
    edited(lambda m: rename(node(m, aten.tanh.default), "another"))
    module = trace(lambda x: x + 1, torch.randn(1, 4))
    before = signature(module.graph)
    result(module, torch.empty_strided((1, 4), (7, 1)))  # no element is addressed by it
    verify(module.graph, before, "an edit")
    assert targets(module) == [aten.add.Tensor]


def test_signatures_of_symbolic_graphs_compare_without_a_guard() -> None:
    module, _, _ = symbolic()
    before = guards(module)
    kept = signature(module.graph)
    verify(module.graph, kept, "nothing")
    assert guards(module) == before


def test_a_constant_made_of_a_symbolic_number_is_no_number() -> None:
    graph = fx.Graph()
    size = graph.placeholder("size")
    scalar = [graph.call_function(aten.scalar_tensor.default, (n,)) for n in (2, size)]
    full = [graph.call_function(aten.full.default, ([], n)) for n in (2.5, size)]
    assert [number_of(made) for made in (*scalar, *full)] == [2.0, None, 2.5, None]
