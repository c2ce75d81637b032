"""Sums that are known: the gradients of losses, broadcasts; and the sums that must stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tracing import (
    assert_same,
    node,
    relative_error,
    run,
    trace,
)
from torch import Tensor, fx

from interpreted import PLACE, interpreted
from steps import change, original
from torch_evt import pipeline
from torch_evt.graphs import copy_of, is_one, signature, verify
from torch_evt.joint import canonicalise, common_subexpressions, reduction_elimination
from torch_evt.passes import State

aten = torch.ops.aten
SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 5e-4}
ROWS, CLASSES = 24, 10

Loss = Callable[[Tensor, Tensor], Tensor]


def weights(x: Tensor) -> Tensor:
    return torch.linspace(0.25, 2.0, CLASSES).to(x.dtype)


def by_hand(x: Tensor, t: Tensor) -> Tensor:
    """Cross-entropy written with a comparison, scaled by a row, ignoring what is no class."""
    hot = t[:, None] == torch.arange(CLASSES)
    picked = torch.where(hot, F.log_softmax(x, -1), 0.0).sum(-1)
    return -(picked * torch.linspace(0.5, 1.5, ROWS).to(x.dtype)).sum()


# name -> the loss, and how many sums over the classes its forward pass has
LOSSES: dict[str, tuple[Loss, int]] = {
    "mean": (lambda x, t: F.cross_entropy(x, t), 1),
    "sum": (lambda x, t: F.cross_entropy(x, t, reduction="sum"), 1),
    "none": (lambda x, t: F.cross_entropy(x, t, reduction="none"), 1),
    "ignore_index": (lambda x, t: F.cross_entropy(x, t, ignore_index=3), 1),
    "negative log-likelihood": (lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), 1),
    "class weights": (lambda x, t: F.cross_entropy(x, t, weight=weights(x)), 1),
    "label smoothing": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), 2),
    "smoothing and weights": (
        lambda x, t: F.cross_entropy(x, t, weight=weights(x), label_smoothing=0.2),
        2,
    ),
    "two batch dimensions": (
        lambda x, t: F.cross_entropy(x.view(4, 6, CLASSES).transpose(1, 2), t.view(4, 6)),
        1,
    ),
    "by hand": (by_hand, 2),
}


def given(dtype: torch.dtype, ignored: int = 3) -> tuple[Tensor, Tensor]:
    x = (torch.randn(ROWS, CLASSES) * 3).to(dtype)
    t = torch.randint(0, CLASSES, (ROWS,))
    t[torch.randperm(ROWS)[:ignored]] = -100
    return x, t


def with_gradient(loss: Loss) -> Callable[..., Any]:
    """(x, t, g) -> the loss and the gradient of x, for a tangent g."""

    def function(x: Tensor, t: Tensor, g: Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            result = loss(leaf, t)
        return result, torch.autograd.grad(result, leaf, g)[0]

    return function


def rewritten(module: fx.GraphModule, **options: Any) -> fx.GraphModule:
    ours = copy_of(module)
    canonicalise.apply(ours.graph)
    common_subexpressions.apply(ours.graph)
    before, sums = signature(ours.graph), large_sums(ours)
    count = reduction_elimination.apply(ours.graph, **options)
    verify(ours.graph, before, "reduction_elimination")
    assert (count > 0) == (large_sums(ours) < sums)
    for n in ours.graph.nodes:
        if n.op == "call_function":
            assert "val" in n.meta
    return ours


def large_sums(module: fx.GraphModule) -> int:
    """How many sums read a value for each row and class."""
    shapes = [n.args[0].meta["val"].shape for n in module.graph.nodes if n.target in SUMS]
    return sum(
        any(isinstance(size, int) and size == CLASSES for size in shape)
        and sum(not is_one(size) for size in shape) > 1
        for shape in shapes
    )


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The numbers of large sums before and after the pass, of each graph compiled from now on."""
    counts: list[tuple[int, int]] = []
    run_pass = original("JOINT", "reduction_elimination")

    def counting(state: State) -> None:
        before = large_sums(state.module)
        run_pass(state)
        counts.append((before, large_sums(state.module)))

    change(monkeypatch, "JOINT", "reduction_elimination", counting)
    return counts


def assert_as_good(ours: fx.GraphModule, theirs: fx.GraphModule, exact: Any, given: Any) -> None:
    """The error standard, against the function in fp64."""
    wide = [x.double() if x.is_floating_point() else x for x in given]
    for our, their, want in zip(run(ours, *given), run(theirs, *given), exact(*wide), strict=True):
        assert our.dtype == their.dtype
        assert torch.equal(our.isfinite(), their.isfinite())
        allowed = 1.5 * max(relative_error(their, want), UNIT[our.dtype])
        assert relative_error(our, want) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_the_sum_over_classes_leaves_the_gradient_of_a_loss(name: str, dtype: torch.dtype) -> None:
    loss, in_forward = LOSSES[name]
    function = with_gradient(loss)
    x, t = given(dtype)
    t = t.where(t >= 0, 3) if name == "ignore_index" else t
    g = torch.randn(loss(x, t).shape).to(dtype)
    module = trace(function, x, t, g)
    ours = rewritten(module)
    assert large_sums(ours) == in_forward
    assert_as_good(ours, module, function, (x, t, g))


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in ("by hand", "none")])
def test_a_loss_without_any_target_is_what_it_was(name: str) -> None:
    """NaN or 0, and a gradient of exact zeros where eager has them."""
    function = with_gradient(LOSSES[name][0])
    x, t = given(torch.float32, ignored=ROWS)
    if name == "ignore_index":
        t.fill_(3)
    module = trace(function, x, t, torch.tensor(1.5))
    ours = rewritten(module)
    given_ = (x, t, torch.randn(()))
    loss, gradient = run(ours, *given_)
    want_loss, want = run(module, *given_)
    assert torch.equal(gradient.isnan(), want.isnan())
    assert torch.equal(gradient.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(loss.isnan(), want_loss.isnan())


@pytest.mark.parametrize("name", LOSSES)
def test_in_a_compiled_step_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor spells a one-hot, and with the cut into halves behind."""
    torch._dynamo.reset()
    loss, in_forward = LOSSES[name]
    counts = counted(monkeypatch)
    x, t = given(torch.float32)
    t = t.where(t >= 0, 3) if name in ("ignore_index", "by hand") else t
    w = torch.randn(CLASSES, CLASSES)

    def step(function: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [v.detach().to(dtype).requires_grad_() for v in (x, w)]
        result = function(*leaves, t)
        result.sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]

    def model(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return loss(torch.tanh(x @ w), t)

    compiled = torch.compile(model, backend=interpreted, options=PLACE)
    ours, eager = step(compiled, torch.float32), step(model, torch.float32)
    for our, their, want in zip(ours, eager, step(model, torch.float64), strict=True):
        assert relative_error(our, want) <= 1.5 * max(relative_error(their, want), 1e-6)
    ((before, after),) = counts
    assert after == in_forward < before


def hot(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    compared = t[:, None] == torch.arange(CLASSES)
    return compared if dtype is None else compared.to(dtype)


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "comparison as a number": lambda v, t: (hot(t, torch.float32) * v).sum(1),
    "comparison as an integer": lambda v, t: (v * hot(t, torch.int64)).sum(1, keepdim=True),
    "comparison alone": lambda v, t: (hot(t, None) * v).sum(-1),
    "where": lambda v, t: torch.where(hot(t, None), 2.5, 0.0).mul(v).sum(1),
    "negative": lambda v, t: (-(hot(t, torch.float32) * v) / 3).sum(1),
    "exchanged": lambda v, t: (
        (torch.arange(CLASSES) == t[:, None]).float() * v.expand(ROWS, CLASSES)
    ).sum(1),
    "masked by a row": lambda v, t: torch.where(v > 0, hot(t, torch.float32) * v, 0.0).sum(1),
    "by a row of classes": lambda v, t: (hot(t, torch.float32) * weights(v)).sum(1),
    "by rows of both": lambda v, t: (hot(t, torch.float32) * weights(v) * v).sum(1),
    "over everything": lambda v, t: (hot(t, torch.float32) * v).sum(),
    "mean": lambda v, t: (hot(t, torch.float32) * v).mean(1),
    "classes first": lambda v, t: ((torch.arange(CLASSES)[:, None] == t).float() * v.t()).sum(0),
    "a value where it is": lambda v, t: torch.where(hot(t, None), v * 2, 0.0).sum(1),
    "scattered": lambda v, t: (
        torch.zeros(ROWS, CLASSES).scatter(1, t.clamp(0, 9)[:, None], 0.5) * v
    ).sum(1),
}


@pytest.mark.parametrize("name", PICKS)
def test_a_label_that_is_no_class_picks_nothing(name: str) -> None:
    v, t = torch.randn(ROWS, 1), torch.randint(-4, CLASSES + 4, (ROWS,))
    t[:3] = torch.tensor([-1, CLASSES, CLASSES - 1])
    module = trace(PICKS[name], v, t)
    ours = rewritten(module)
    assert large_sums(ours) == 0
    assert relative_error(run(ours, v, t)[0], run(module, v, t)[0]) < 1e-6


@pytest.mark.parametrize("name", ["comparison as a number", "where", "classes first", "exchanged"])
def test_picking_a_value_keeps_every_bit_and_is_done_under_exact_rounding(name: str) -> None:
    v, t = torch.randn(ROWS, 1) * 1e3, torch.randint(0, CLASSES, (ROWS,))
    module = trace(PICKS[name], v, t)
    ours = rewritten(module, exact_rounding=True)
    assert large_sums(ours) == 0
    assert_same(run(ours, v, t), run(module, v, t))


KNOWN: dict[str, Callable[..., Any]] = {
    "broadcast rows": lambda x, c: c.expand(ROWS, CLASSES).sum(1),
    "broadcast columns": lambda x, c: x[:1].expand(ROWS, CLASSES).sum(0, keepdim=True),
    "broadcast number": lambda x, c: c[0].expand(ROWS, CLASSES).sum(),
    "one of two axes": lambda x, c: c.expand(ROWS, CLASSES).sum((0, 1)),
    "mean": lambda x, c: (c.expand(ROWS, CLASSES) * 3).mean(1),
    "product of a row and a column": lambda x, c: (x[:1] * c).sum(1),
    "difference": lambda x, c: (c.expand(ROWS, CLASSES) - x[:1] * c).sum(-1),
    "masked": lambda x, c: torch.where(c > 0, x[:1] * c, 0.0).sum(1),
    "quotient": lambda x, c: -(x[:1] / (c * c + 1)).sum(1),
    "of a new axis": lambda x, c: c[:, 0].unsqueeze(1).expand(ROWS, CLASSES).sum(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_a_sum_over_an_axis_that_is_broadcast_reads_it_once(name: str, dtype: torch.dtype) -> None:
    def function(x: Tensor, c: Tensor) -> Tensor:
        return 2 * KNOWN[name](x, c)

    given_ = (torch.randn(ROWS, CLASSES).to(dtype), torch.randn(ROWS, 1).to(dtype))
    module = trace(function, *given_)
    ours = rewritten(module)
    assert large_sums(ours) == 0
    assert_as_good(ours, module, lambda x, c: (function(x, c),), given_)
    assert large_sums(rewritten(module, exact_rounding=True)) == 1


def test_half_sums_are_computed_in_fp32() -> None:
    """400 * 300 is no fp16 number, and its 300th part is."""
    x = torch.full((6, 1), 400.0).half() + torch.randn(6, 1).half()
    module = trace(lambda x: (x.expand(6, 300).mean(1), x.expand(6, 300).float().sum(1)), x)
    ours = copy_of(module)
    assert reduction_elimination.apply(ours.graph) == 2
    assert not any(n.target in SUMS for n in ours.graph.nodes)
    results = run(ours, x)
    assert all(result.isfinite().all() for result in results)
    assert relative_error(results[0], x[:, 0]) < 5e-4


KEPT: dict[str, Callable[..., Any]] = {
    "all of it": lambda x, c, t: x.sum(1),
    "a difference of which one part is not known": lambda x, c, t: (x - c).sum(1),
    "a one-hot times what depends on the axis": lambda x, c, t: (hot(t, x.dtype) * x).sum(1),
    "a one-hot over another axis": lambda x, c, t: (hot(t, x.dtype) * c).sum(0),
    "a label for each element": lambda x, c, t: ((x.long() == torch.arange(CLASSES)) * c).sum(1),
    "classes from one": lambda x, c, t: ((t[:, None] == torch.arange(1, CLASSES + 1)) * c).sum(1),
    "one elsewhere": lambda x, c, t: (torch.where(hot(t, None), 2.0, 1.0) * c).sum(1),
    "not zero elsewhere": lambda x, c, t: torch.where(hot(t, None), 2.0, x).sum(1),
    "a mask that depends on the axis": lambda x, c, t: torch.where(x > 0, c, 0.0).sum(1),
    "integers": lambda x, c, t: t[:, None].expand(ROWS, CLASSES).sum(1),
    "a size of one": lambda x, c, t: (c * 2).sum(1) + x.sum(1),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_known_stays(name: str) -> None:
    given_ = (torch.randn(ROWS, CLASSES), torch.randn(ROWS, 1), torch.randint(0, 10, (ROWS,)))
    module = trace(KEPT[name], *given_)
    sums = [n.name for n in module.graph.nodes if n.target in SUMS]
    ours = rewritten(module)
    assert [n.name for n in ours.graph.nodes if n.target in SUMS] == sums
    assert_same(run(ours, *given_), run(module, *given_))


@pytest.mark.parametrize("key", ["recompute", "ac_graph_id"])
def test_a_sum_does_not_reach_into_another_checkpoint(key: str) -> None:
    v, t = torch.randn(ROWS, 1), torch.randint(0, CLASSES, (ROWS,))
    module = trace(lambda v, t: (hot(t, torch.float32) * (v * 2)).sum(1) + 1, v, t)
    node(module, aten.mul.Tensor, 1).meta[key] = 1
    assert large_sums(rewritten(module)) == 1
    for n in module.graph.nodes:
        n.meta[key] = 1
    ours = rewritten(module)
    assert large_sums(ours) == 0
    made = [n for n in ours.graph.nodes if n.op == "call_function"]
    assert all(n.meta.get(key) == 1 for n in made)


def test_the_result_keeps_its_name_and_half() -> None:
    c = torch.randn(ROWS, 1)
    module = trace(lambda c: c.expand(ROWS, CLASSES).sum(1) * 2, c)
    total = node(module, aten.sum.dim_IntList)
    total.meta["partitioner_tag"] = "is_backward"
    ours = rewritten(module)
    found = next(n for n in ours.graph.nodes if n.name == total.name)
    assert found.target not in SUMS
    assert found.meta["partitioner_tag"] == "is_backward"


def test_a_picked_value_that_exists_is_not_returned_twice() -> None:
    """Two results of a graph are two tensors, even where they are equal."""

    def function(v: Tensor, t: Tensor, x: Tensor) -> Any:
        w = v * 3
        picked = (hot(t, w.dtype) * w).sum(1, keepdim=True)
        return w, picked, x.gather(1, t[:, None])

    inputs = torch.randn(ROWS, 1), torch.randint(0, CLASSES, (ROWS,)), torch.randn(ROWS, CLASSES)
    module = rewritten(trace(function, *inputs))
    first, second, _ = next(n for n in module.graph.nodes if n.op == "output").args[0]
    assert first is not second


@pytest.mark.parametrize(
    "name", [n for n in LOSSES if n not in ("two batch dimensions", "by hand")]
)
def test_the_number_of_rows_may_be_symbolic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counts = counted(monkeypatch)
    loss, in_forward = LOSSES[name]
    compiled = torch.compile(loss, backend=interpreted, options=PLACE)
    for rows in (ROWS, 7):
        x, t = torch.randn(rows, CLASSES), torch.randint(0, CLASSES, (rows,))
        for tensor in (x, t):
            torch._dynamo.mark_dynamic(tensor, 0)
        results = []
        for function in (compiled, loss):
            leaf = x.detach().requires_grad_()
            torch._dynamo.mark_dynamic(leaf, 0)
            with torch._dynamo.config.patch(error_on_recompile=rows != ROWS):
                result = function(leaf, t)
            (result * torch.linspace(1, 2, result.numel())).sum().backward()
            results.append((result.detach(), leaf.grad))
        for our, their in zip(*results, strict=True):
            assert relative_error(our, their) < 2e-6
    ((before, after),) = counts
    static = name not in ("class weights", "smoothing and weights")
    assert before > in_forward and (after == in_forward or not static)


def test_the_pass_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    assert {"reduction_elimination", "algebra"} <= set(pipeline.names())
    seen = []

    run_plan = original("JOINT", "plan")

    def looking(state: State) -> None:
        seen.append(large_sums(state.module))
        run_plan(state)

    change(monkeypatch, "JOINT", "plan", looking)
    x, t = given(torch.float32)
    w = torch.randn(CLASSES, CLASSES, requires_grad=True)
    for disabled in ([], ["reduction_elimination"]):
        torch._dynamo.reset()
        function = torch.compile(
            lambda x, w, t: F.cross_entropy(torch.tanh(x @ w), t),
            backend=interpreted,
            options={**PLACE, "evt.disable": disabled},
        )
        function(x, w, t).backward()
    assert seen == [1, 2]
