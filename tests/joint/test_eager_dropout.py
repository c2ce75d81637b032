"""Eager dropout: a mask of its own with eager's very numbers, or no change at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.tracing import assert_same, guards, node, relative_error, run, strides, targets, trace
from torch import Tensor, fx

from torch_evt.graphs import copy_of, signature, verify
from torch_evt.joint import eager_dropout
from torch_evt.runtime.random_masks import EAGER_KEEP_MASK
from torch_evt.torch_compat import inductor_config

aten = torch.ops.aten
DROPOUT = aten.native_dropout.default


@pytest.fixture(autouse=True)
def eager_numbers() -> Iterator[None]:
    """As the backend sets it under `rng=eager`: otherwise dropout is decomposed when traced."""
    with inductor_config().patch(fallback_random=True):
        yield


def rewritten(module: fx.GraphModule, count: int) -> fx.GraphModule:
    """A rewritten copy, in which that many dropouts became masks."""
    ours = copy_of(module)
    before = signature(ours.graph)
    assert eager_dropout.apply(ours.graph) == count
    verify(ours.graph, before, "eager_dropout")
    assert targets(ours).count(EAGER_KEEP_MASK) == count
    assert targets(ours).count(DROPOUT) == targets(module).count(DROPOUT) - count
    return ours


def seeded(module: fx.GraphModule, *inputs: Any, seed: int = 5) -> list[Any]:
    torch.manual_seed(seed)
    return run(module, *inputs)


def drop(x: Tensor, p: Any = 0.4, train: Any = True) -> tuple[Tensor, Tensor]:
    return aten.native_dropout(x, p, train)  # type: ignore[no-any-return]


def three(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a, first = drop(x, 0.25)
    b, second = drop(torch.tanh(a) @ y, 0.5)
    c, third = drop(b + 1, 0.1)
    return a, first, b, second, c, third


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_several_dropouts_draw_the_masks_that_eager_draws(dtype: torch.dtype) -> None:
    inputs = [torch.randn(40, 30).to(dtype), torch.randn(30, 20).to(dtype)]
    module = trace(three, *inputs)
    ours = seeded(rewritten(module, 3), *inputs)
    torch.manual_seed(5)
    eager = three(*inputs)
    for i in (1, 3, 5):
        assert ours[i].dtype == torch.bool
        assert torch.equal(ours[i], eager[i])
        assert 0 < ours[i].sum() < ours[i].numel()
    for i in (0, 2, 4):
        assert relative_error(ours[i], eager[i]) < 2 * torch.finfo(dtype).eps
        assert ours[i].dtype == dtype and strides(ours[i]) == strides(eager[i])
    other = seeded(rewritten(module, 3), *inputs, seed=6)
    assert not torch.equal(ours[1], other[1])


def test_the_order_of_draws_is_a_chain_of_data() -> None:
    inputs = [torch.randn(4, 3), torch.randn(3, 2)]
    ours = rewritten(trace(three, *inputs), 3)
    masks = [n for n in ours.graph.nodes if n.target is EAGER_KEEP_MASK]
    assert [mask.args[2] for mask in masks] == [None, masks[0], masks[1]]


def test_an_independent_dropout_still_comes_second() -> None:
    """Two dropouts that need nothing of each other: whoever sorts the graph keeps their order."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return drop(x)[0], drop(y)[0]

    inputs = [torch.randn(8, 9), torch.randn(5, 6)]
    module = trace(f, *inputs)
    ours = rewritten(module, 2)
    first, second = (n for n in ours.graph.nodes if n.target is EAGER_KEEP_MASK)
    assert second.args[2] is first
    assert_same([t != 0 for t in seeded(ours, *inputs)], [t != 0 for t in seeded(module, *inputs)])


def test_a_mask_that_only_backward_reads_is_the_same_one() -> None:
    def f(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            result, _ = drop(leaf, 0.3)
        return result.detach(), torch.autograd.grad(result, leaf, g)[0]

    inputs = [torch.randn(20, 30), torch.randn(20, 30)]
    module = trace(f, *inputs)
    ours = rewritten(module, 1)
    for our, their in zip(seeded(ours, *inputs), seeded(module, *inputs), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=0)
        assert torch.equal(our == 0, their == 0)


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x: (*drop(x), torch.rand_like(x)), "another random operation"),
        (lambda x: (*drop(x), torch.bernoulli(torch.sigmoid(x))), "another random operation"),
        (lambda x: drop(x, 0.0), "nothing is dropped"),
        (lambda x: drop(x, 1.0), "everything is dropped"),
        (lambda x: drop(x, 0.4, False), "evaluation"),
        (lambda x: drop(x, 0.4, None), "evaluation unsaid"),
        (lambda x: drop(x.t()), "not contiguous"),
        (lambda x: drop(x[:, ::2]), "not contiguous"),
        (lambda x: (*drop(x), *drop(x.t())), "one of two is not contiguous"),
        (lambda x: drop(x.double()), "fp64"),
    ],
)
def test_what_cannot_be_rewritten_stays_whole(
    f: Callable[[Tensor], tuple[Tensor, ...]], why: str
) -> None:
    x = torch.randn(6, 8)
    module = trace(f, x)
    calls = targets(module)
    if why == "evaluation" and DROPOUT not in calls:
        return  # traced away
    ours = rewritten(module, 0)
    assert targets(ours) == calls
    assert_same(seeded(ours, x), seeded(module, x))


def test_under_a_checkpoint_it_stays() -> None:
    x = torch.randn(6, 8)
    module = trace(lambda x: drop(x), x)
    node(module, aten.native_dropout.default).meta["recompute"] = 1
    rewritten(module, 0)
    del node(module, aten.native_dropout.default).meta["recompute"]
    rewritten(module, 1)


def test_attention_counts_as_random_only_with_dropout() -> None:
    def f(x: Tensor, p: float) -> tuple[Tensor, ...]:
        q = x.view(1, 2, 6, 8)
        attended = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, p)[0]
        return (*drop(x), attended)

    x = torch.randn(1, 12, 8)
    rewritten(trace(lambda x: f(x, 0.0), x), 1)
    module = trace(lambda x: f(x, 0.0), x)
    attention = node(module, aten._scaled_dot_product_flash_attention_for_cpu.default)
    attention.args = (*attention.args[:3], 0.1)
    rewritten(module, 0)


def test_names_and_halves_carry_over() -> None:
    x = torch.randn(6, 8)
    module = trace(lambda x: drop(x), x)
    results = {n.args[1]: n for n in module.graph.nodes if "getitem" in str(n.target)}
    for n in results.values():
        n.meta["partitioner_tag"] = "is_forward"
    ours = rewritten(module, 1)
    output = next(n for n in ours.graph.nodes if n.op == "output")
    assert [n.name for n in output.args[0]] == [results[0].name, results[1].name]
    tagged = [n for n in ours.graph.nodes if n.op == "call_function"]
    assert {n.meta.get("partitioner_tag") for n in tagged} == {"is_forward"}


def test_symbolic_sizes_draw_the_same_numbers_for_every_size() -> None:
    x = torch.randn(6, 8)
    module = trace(lambda x: drop(x * 2, 0.5), x, mode="symbolic")
    before = guards(module)
    ours = rewritten(module, 1)
    assert guards(module) == before
    for shape in ((6, 8), (5, 31)):
        given = torch.randn(shape)
        mine, theirs = seeded(ours, given), seeded(module, given)
        assert torch.equal(mine[1], theirs[1])
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=0)
