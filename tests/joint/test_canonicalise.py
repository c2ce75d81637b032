"""Canonicalise: every rewrite fires where it may, only there, and changes no result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tracing import Mode, assert_same, guards, run, targets, trace
from torch import Tensor, fx

from torch_evt.graphs import copy_of, is_contiguous, signature, tensor_of, verify
from torch_evt.joint import canonicalise

aten = torch.ops.aten
VIEW, PERMUTE, EXPAND = aten.view.default, aten.permute.default, aten.expand.default
CONVERT = torch.ops.prims.convert_element_type.default


def handmade(
    build: Callable[[fx.Graph, fx.Node], Any], x: Tensor, mode: Mode = "fake"
) -> fx.GraphModule:
    """A graph of operations that tracing would not leave; ends in a negation."""
    module = trace(lambda x: x, x, mode=mode)
    output = next(n for n in module.graph.nodes if n.op == "output")
    (source,) = (n for n in module.graph.nodes if n.op == "placeholder")
    with module.graph.inserting_before(output):
        result = build(module.graph, source)
        end = call(module.graph, aten.neg.default, result)
    output.args = (end,)
    module.recompile()
    return module


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call with its traced value."""
    made = graph.call_function(target, args, kwargs)
    given = fx.node.map_arg(args, lambda n: n.meta["val"])
    made.meta["val"] = target(*given, **kwargs)
    return made


def rewritten(module: fx.GraphModule, *inputs: Any) -> fx.GraphModule:
    """A canonical copy, checked to give the very same results."""
    ours = copy_of(module)
    before = signature(ours.graph)
    canonicalise.apply(ours.graph)
    verify(ours.graph, before, "canonicalise")
    assert_same(run(ours, *inputs), run(module, *inputs))
    return ours


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


REWRITES = [
    ("view of view", lambda g, n: call(g, VIEW, call(g, VIEW, n, [12, 2]), [4, 6]), [VIEW]),
    ("view to its own shape", lambda g, n: call(g, VIEW, n, [3, 8]), []),
    ("expand to its own shape", lambda g, n: call(g, EXPAND, n, [3, 8]), []),
    ("convert to its own dtype", lambda g, n: call(g, CONVERT, n, torch.float32), []),
    (
        "permute of permute",
        lambda g, n: call(g, PERMUTE, call(g, PERMUTE, call(g, VIEW, n, [2, 3, 4]), [1, 2, 0]),
                          [0, 2, 1]),
        [VIEW, PERMUTE],
    ),
    ("permute and back", lambda g, n: call(g, PERMUTE, call(g, PERMUTE, n, [1, 0]), [1, 0]), []),
    ("identity permute", lambda g, n: call(g, PERMUTE, n, [0, 1]), []),
    ("negative dimensions", lambda g, n: call(g, PERMUTE, n, [0, -1]), []),
    ("t", lambda g, n: call(g, aten.t.default, n), [PERMUTE]),
    ("transpose", lambda g, n: call(g, aten.transpose.int, n, -1, 0), [PERMUTE]),
    ("reshape", lambda g, n: call(g, aten.reshape.default, n, [4, 6]), [VIEW]),
    ("unsafe view", lambda g, n: call(g, aten._unsafe_view.default, n, [4, 6]), [VIEW]),
    ("unsqueeze", lambda g, n: call(g, aten.unsqueeze.default, n, 1), [VIEW]),
    ("squeeze", lambda g, n: call(g, aten.squeeze.dim, call(g, VIEW, n, [3, 1, 8]), 1), []),
    (
        "chain of reshapes",
        lambda g, n: call(g, aten.reshape.default, call(g, aten._unsafe_view.default, n, [24]),
                          [2, 12]),
        [VIEW],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("build", "left"), [r[1:] for r in REWRITES], ids=[r[0] for r in REWRITES])
def test_a_rewrite_fires(build: Any, left: list[Any]) -> None:
    given_ = x(3, 8)
    module = handmade(build, given_)
    ours = rewritten(module, given_)
    assert targets(ours) == [*left, aten.neg.default]


STAY = [
    ("convert to another dtype", lambda g, n: call(g, CONVERT, n, torch.bfloat16)),
    ("expand that broadcasts", lambda g, n: call(g, EXPAND, call(g, VIEW, n, [1, 24]), [2, 24])),
    ("view to another shape", lambda g, n: call(g, VIEW, n, [4, 6])),
    ("permute", lambda g, n: call(g, PERMUTE, n, [1, 0])),
    (
        "reshape of a permute, which copies",
        lambda g, n: call(g, aten.reshape.default, call(g, PERMUTE, n, [1, 0]), [24]),
    ),
    (
        "squeeze of a permute",
        lambda g, n: call(
            g, aten.squeeze.dim, call(g, PERMUTE, call(g, VIEW, n, [2, 1, 12]), [2, 1, 0]), 1
        ),
    ),
    (
        "view of a view of a broadcast",
        lambda g, n: call(g, VIEW, call(g, VIEW, call(g, EXPAND, call(g, VIEW, n, [1, 24]),
                                                      [2, 24]), [2, 4, 6]), [2, 24]),
    ),
]  # fmt: skip


@pytest.mark.parametrize("build", [s[1] for s in STAY], ids=[s[0] for s in STAY])
def test_what_is_illegal_stays(build: Any) -> None:
    given_ = x(3, 8)
    module = handmade(build, given_)
    assert targets(rewritten(module, given_)) == targets(module)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float16])
def test_converts_of_every_dtype_go_only_where_they_do_nothing(dtype: torch.dtype) -> None:
    def build(graph: fx.Graph, n: fx.Node) -> fx.Node:
        there = call(graph, CONVERT, n, dtype)
        again = call(graph, CONVERT, there, dtype)
        return call(graph, CONVERT, again, torch.float32)

    given_ = torch.randn(3, 8) * 3
    ours = rewritten(handmade(build, given_), given_)
    assert targets(ours) == [CONVERT, CONVERT, aten.neg.default]


def test_a_returned_node_keeps_its_node() -> None:
    given_ = x(3, 8)
    module = trace(lambda x: (x.neg(), x.abs().view(24)), given_)
    output = next(n for n in module.graph.nodes if n.op == "output")
    negated = next(n for n in module.graph.nodes if n.target is aten.neg.default)
    with module.graph.inserting_before(output):
        same = call(module.graph, VIEW, negated, [3, 8])
    output.args = ((same, *output.args[0][1:]),)
    module.recompile()
    ours = rewritten(module, given_)
    returned = next(n for n in ours.graph.nodes if n.op == "output").args[0]
    assert [n.name for n in returned] == [same.name, "view"]
    assert targets(ours) == targets(module)


def test_symbolic_views_are_shortened_without_a_guard() -> None:
    def f(x: Tensor) -> Tensor:
        b, s, n = x.shape
        return x.view(b * s, n).view(b, s, n).neg()

    given_ = x(3, 5, 8)
    module = trace(f, given_, mode="symbolic")
    before = guards(module)
    assert targets(module).count(VIEW) == 2
    ours = rewritten(module, given_)
    assert targets(ours).count(VIEW) == 0
    assert guards(module) == before
    other = x(4, 7, 8)
    assert_same(run(ours, other), run(module, other))


def test_a_second_run_changes_nothing() -> None:
    given_ = x(3, 8)
    module = handmade(REWRITES[4][1], given_)
    assert canonicalise.apply(module.graph) > 0
    assert canonicalise.apply(module.graph) == 0


@dataclass(frozen=True)
class Chain:
    """shape and order in memory of the input; steps: lines of Python on `v`."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    steps: tuple[str, ...]

    def __call__(self, v: Tensor) -> tuple[Tensor, ...]:
        space: dict[str, Any] = {"torch": torch, "v": v}
        exec("\n".join(self.steps), space)
        return space["v"], torch.tanh(space["v"])


@st.composite
def chains(draw: Any) -> Chain:
    """Up to eight views, copies and casts in a row, each legal for torch."""
    sizes = st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=4)
    shape = tuple(draw(sizes))
    order = tuple(draw(st.permutations(range(len(shape)))))
    with torch.no_grad():
        value = torch.empty([shape[d] for d in order]).permute(
            [order.index(d) for d in range(len(shape))]
        )
    steps: list[str] = []
    for _ in range(draw(st.integers(1, 8))):
        rank = value.dim()
        dims = st.integers(-rank, rank - 1)
        kind = draw(st.sampled_from(("reshape", "permute", "transpose", "t", "expand", "squeeze",
                                     "unsqueeze", "clone", "same", "to", "split")))  # fmt: skip
        if kind == "reshape":
            step = f"v.reshape({draw(st.sampled_from(_factorings(value.numel())))})"
        elif kind == "split" and rank:
            step = f"v.unflatten(-1, (1, {value.shape[-1]}))"
        elif kind == "permute" and rank:
            step = f"v.permute({list(draw(st.permutations(range(rank))))})"
        elif kind == "transpose" and rank:
            step = f"v.transpose({draw(dims)}, {draw(dims)})"
        elif kind == "t" and rank <= 2:
            step = "v.t()"
        elif kind == "expand" and value.numel() < 200:
            ones = [draw(st.sampled_from((1, 2))) if s == 1 else s for s in value.shape]
            step = f"v.expand({ones})"
        elif kind == "squeeze" and rank:
            step = draw(st.sampled_from((f"v.squeeze({draw(dims)})", "v.squeeze()")))
        elif kind == "unsqueeze" and rank < 5:
            step = f"v.unsqueeze({draw(st.integers(0, rank))})"
        elif kind == "clone":
            step = draw(st.sampled_from(("v.clone()", "v.contiguous()", "v.neg()")))
        elif kind == "to":
            step = f"v.to({draw(st.sampled_from(('torch.float32', 'torch.bfloat16')))})"
        else:
            step = "v.expand(v.shape).view(v.shape)"
        space = {"torch": torch, "v": value}
        exec(f"v = {step}", space)
        value = space["v"]  # type: ignore[assignment]
        steps.append(f"v = {step}")
    return Chain(shape, order, tuple(steps))


def _factorings(number: int) -> list[list[int]]:
    """Some shapes of that many elements."""
    found = [[number], [1, number], [number, 1]]
    for a in (2, 3, 4):
        if number % a == 0:
            found += [[a, number // a], [number // a, a], [number // a, 1, a]]
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(chains(), st.integers(0, 2**16))
def test_random_chains_keep_results_shapes_and_strides(chain: Chain, seed: int) -> None:
    torch.manual_seed(seed)
    laid = torch.randn([chain.shape[d] for d in chain.order])
    given_ = laid.permute([chain.order.index(d) for d in range(len(chain.shape))])
    module = trace(chain, given_)
    ours = rewritten(module, given_)  # compares results, shapes and strides
    for n in ours.graph.nodes:
        assert n.target not in (aten.t.default, aten.transpose.int)
        if n.target is not VIEW or n.args[0].target is not VIEW:
            continue
        root = tensor_of(n.args[0].args[0])
        assert root is not None and not is_contiguous(root)  # else one view would do
