"""Algebra: each rule where it holds, the same numbers or better ones, and where it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.tracing import assert_same, node, relative_error, run, targets, trace
from torch import Tensor, fx

from interpreted import PLACE, interpreted
from steps import change, original
from torch_evt.graphs import copy_of, signature, verify
from torch_evt.joint import algebra, canonicalise, common_subexpressions
from torch_evt.passes import State

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
ADD, SUB, MUL, NEG = aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default
SUM, MM, BMM, ABS = aten.sum.dim_IntList, aten.mm.default, aten.bmm.default, aten.abs.default
PERMUTE, VIEW = aten.permute.default, aten.view.default
UNIT = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 5e-4}

# Arguments: x, y full; r one value a column, c one a row, s one alone; w a square matrix
Function = Callable[..., Any]
M, N = 48, 64
DRAWS = 8


def given(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((M, N), (M, N), (1, N), (M, 1), (), (N, N))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def rewritten(module: fx.GraphModule) -> fx.GraphModule:
    ours = copy_of(module)
    canonicalise.apply(ours.graph)
    common_subexpressions.apply(ours.graph)
    before = signature(ours.graph)
    count = algebra.apply(ours.graph)
    verify(ours.graph, before, "algebra")
    assert all("val" in n.meta for n in ours.graph.nodes if n.op == "call_function")
    left = copy_of(ours)
    left.graph.eliminate_dead_code()
    assert len(left.graph.nodes) == len(ours.graph.nodes)
    assert count > 0 or targets(ours) == targets(prepared(module))
    return ours


def prepared(module: fx.GraphModule) -> fx.GraphModule:
    ours = copy_of(module)
    canonicalise.apply(ours.graph)
    common_subexpressions.apply(ours.graph)
    return ours


def of(function: Function) -> Function:
    return lambda x, y, r, c, s, w: function(x, y, r, c, s, w)


# name -> the function and the operations that are left of it
RULES: dict[str, tuple[Function, list[Any]]] = {
    "two factors": (lambda x, y, r, c, s, w: (x * 0.3 * 7).abs(), [MUL, ABS]),
    "a factor and a divisor": (lambda x, y, r, c, s, w: (x * 0.3 / 7).abs(), [MUL, ABS]),
    "a long chain": (lambda x, y, r, c, s, w: (-(-(x / 3) * 0.5) * 4 / 0.7).abs(), [MUL, ABS]),
    "numbers in front": (lambda x, y, r, c, s, w: 0.3 * (7 * x), [MUL]),
    "negation and factor": (lambda x, y, r, c, s, w: -(x * 0.3) + y, [MUL, ADD]),
    "times one": (lambda x, y, r, c, s, w: (x.neg() * 1).abs(), [NEG, ABS]),
    "by one": (lambda x, y, r, c, s, w: (x.neg() / 1.0).abs(), [NEG, ABS]),
    "less nothing": (lambda x, y, r, c, s, w: (x.neg() - 0.0).abs(), [NEG, ABS]),
    "first power": (lambda x, y, r, c, s, w: (x.neg() ** 1.0).abs(), [NEG, ABS]),
    "an input times one": (lambda x, y, r, c, s, w: (x * 1).abs(), [MUL, ABS]),
    "common column": (lambda x, y, r, c, s, w: x * c + y * c, [ADD, MUL]),
    "common row": (lambda x, y, r, c, s, w: r * x - y * r, [SUB, MUL]),
    "common scalar": (lambda x, y, r, c, s, w: (s * x + s * y).abs(), [ADD, MUL, ABS]),
    "common factor with a sign": (lambda x, y, r, c, s, w: x * c - y * -c, [ADD, MUL]),
    "negative first": (lambda x, y, r, c, s, w: x * -c + y * c, [SUB, MUL]),
    "constants on both sides": (
        lambda x, y, r, c, s, w: x * c * 0.5 + (y * 3) * c,
        [MUL, MUL, ADD, MUL],
    ),
    "two common factors": (lambda x, y, r, c, s, w: x * c * r + r * y * c, [ADD, MUL, MUL]),
    "three factors": (lambda x, y, r, c, s, w: x * y * c + c * x, [MUL, ADD, MUL]),
    "constant out of a sum": (
        lambda x, y, r, c, s, w: (x * 0.3).sum(0).abs(),
        [SUM, MUL, VIEW, ABS],
    ),
    "sign out of a sum": (
        lambda x, y, r, c, s, w: (-x).sum(1, keepdim=True).abs(),
        [SUM, MUL, ABS],
    ),
    "column out of a sum": (
        lambda x, y, r, c, s, w: (x * c).sum(1, keepdim=True) * 2 + c,
        [SUM, MUL, MUL, ADD],
    ),
    "row out of a sum": (
        lambda x, y, r, c, s, w: (r * x).sum(0, keepdim=True) + r,
        [SUM, MUL, ADD],
    ),
    "scalar out of a sum": (
        lambda x, y, r, c, s, w: (x * s).sum((0, 1)) + s,
        [SUM, MUL, VIEW, ADD],
    ),
    "all factors out of a sum": (
        lambda x, y, r, c, s, w: (x * s * 0.3 / 2).sum().abs(),
        [SUM, MUL, MUL, VIEW, ABS],
    ),
    "out of the left operand": (lambda x, y, r, c, s, w: ((x * 0.3) @ w).abs(), [MM, MUL, ABS]),
    "out of the right operand": (lambda x, y, r, c, s, w: (x @ (w * 0.3)).abs(), [MM, MUL, ABS]),
    "out of a transposed operand": (
        lambda x, y, r, c, s, w: (x @ (w * 0.3).t()).abs(),
        [PERMUTE, MM, MUL, ABS],
    ),
    "out of two products": (
        lambda x, y, r, c, s, w: torch.sign(x @ (h := w / 4)) * (y @ h).abs(),
        [MM, MUL, aten.sign.default, MM, MUL, ABS, MUL],
    ),
    "out of a batched product": (
        lambda x, y, r, c, s, w: torch.bmm(x.view(3, M // 3, N) * 0.3, w.expand(3, N, N)).abs(),
        [VIEW, aten.expand.default, BMM, MUL, ABS],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_leaves_these_operations_and_the_same_value(name: str) -> None:
    function, operations = RULES[name]
    inputs = given()
    module = trace(of(function), *inputs)
    ours = rewritten(module)
    found = [t for t in targets(ours) if t is not VIEW or VIEW in operations]
    assert sorted(map(str, found)) == sorted(map(str, operations))
    (our,), (their,) = run(ours, *inputs), run(module, *inputs)
    exact = function(*(x.double() for x in inputs))
    assert relative_error(our, exact) <= 1.5 * max(relative_error(their, exact), 1e-6)


KEPT: dict[str, Function] = {
    "one factor": lambda x, y, r, c, s, w: (x * 0.3).exp(),
    "plus nothing": lambda x, y, r, c, s, w: (x + 0.0).exp(),
    "less minus nothing": lambda x, y, r, c, s, w: (x - -0.0).exp(),
    "a returned identity": lambda x, y, r, c, s, w: x * 1,
    "an identity of another dtype": lambda x, y, r, c, s, w: (x.long() * 1.0).exp(),
    "a factor that somebody else reads": lambda x, y, r, c, s, w: ((h := x * 0.3) * 7, h),
    "integers": lambda x, y, r, c, s, w: x.long() * 3 * 5,
    "across a maximum": lambda x, y, r, c, s, w: ((x * 0.3).amax(1) * 2, torch.relu(y * 2) * 3),
    "across a clamp": lambda x, y, r, c, s, w: (x * 0.3).clamp(-1, 1) * 2,
    "across a cast": lambda x, y, r, c, s, w: (x * 0.3).bfloat16().float() * 2,
    "products across a cast": lambda x, y, r, c, s, w: (x * c).bfloat16() + (y * c).bfloat16(),
    "a sum across a cast": lambda x, y, r, c, s, w: (x * 0.3).bfloat16().float().sum(0).exp(),
    "a common factor as large": lambda x, y, r, c, s, w: x * y + w[:M] * y,
    "a factor that is a summand": lambda x, y, r, c, s, w: x * c + c,
    "products that somebody else reads": lambda x, y, r, c, s, w: ((h := x * c) + y * c, h),
    "another factor": lambda x, y, r, c, s, w: x * c + y * r,
    "the same product twice": lambda x, y, r, c, s, w: (h := x * c) + h,
    "a scaled sum": lambda x, y, r, c, s, w: torch.add(x * c, y * c, alpha=2),
    "a sum that is returned": lambda x, y, r, c, s, w: (x * 0.3).sum(0),
    "a sum for a product": lambda x, y, r, c, s, w: (x * 0.3).sum(0, keepdim=True) @ w,
    "a sum of what is read twice": lambda x, y, r, c, s, w: ((h := x * c).sum(1).exp(), h),
    "a factor that depends on the axis": lambda x, y, r, c, s, w: (x * c).sum(0).exp(),
    "a maximum": lambda x, y, r, c, s, w: (x * 0.3).amax(0).exp(),
    "a large factor in front of a sum": lambda x, y, r, c, s, w: (x * 1e9).sum(0).exp(),
    "a small factor in front of a sum": lambda x, y, r, c, s, w: (x * 1e-9).sum(0).exp(),
    "a returned product": lambda x, y, r, c, s, w: (x * 0.3) @ w,
    "a product for a product": lambda x, y, r, c, s, w: ((x * 0.3) @ w) @ w,
    "an operand made by a pointwise kernel": lambda x, y, r, c, s, w: ((x.exp() * 0.3) @ w).exp(),
    "an operand made by a product": lambda x, y, r, c, s, w: ((x @ w * 0.3) @ w).exp(),
    "an operand that others read": lambda x, y, r, c, s, w: (((h := x * 0.3) @ w).exp(), h.sin()),
    "a large factor of an operand": lambda x, y, r, c, s, w: ((x * 1e9) @ w).exp(),
    "a tensor as a factor of an operand": lambda x, y, r, c, s, w: ((x * s) @ w).exp(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_no_rule_holds_for_stays(name: str) -> None:
    inputs = given()
    module = trace(of(KEPT[name]), *inputs)
    ours = rewritten(module)
    assert targets(ours) == targets(prepared(module))
    assert_same(run(ours, *inputs), run(module, *inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, r, c, s, w: (((h := x @ w) * 0.3 @ w).exp(), h),
        lambda x, y, r, c, s, w: (x.cumsum(0) * 0.3 @ w).exp(),
        lambda x, y, r, c, s, w: (((h := x.exp()) * 0.3 @ w).exp(), h @ w),
    ],
    ids=["a result", "made by a kernel", "read by a product"],
)
def test_an_operand_that_is_in_memory_anyway_is_not_scaled_for_a_product(
    function: Function,
) -> None:
    module = trace(of(function), *given())
    before, after = ([*targets(m)] for m in (module, rewritten(module)))
    scaled = before.index(MUL)
    assert before[scaled : scaled + 2] == [MUL, MM]
    assert after[scaled : scaled + 2] == [MM, MUL]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
@pytest.mark.parametrize("name", RULES)
def test_numbers_of_any_size_stay_as_good(name: str, scale: float, dtype: torch.dtype) -> None:
    """The error standard over several draws at once, with inputs so large that fp16 overflows or
    vanishes on the way. On one draw a sum may nearly cancel, and either side may be lucky."""
    function = RULES[name][0]
    module = trace(of(function), *((x * scale).to(dtype) for x in given()))
    ours = rewritten(module)
    draws = []
    for _ in range(DRAWS):
        inputs = [(x * scale).to(dtype) for x in given()]
        (our,), (their,) = run(ours, *inputs), run(module, *inputs)
        exact = function(*(x.double() for x in inputs))
        assert our.dtype == their.dtype
        fine = their.isfinite()
        assert our.isfinite()[fine].all()
        draws.append([torch.where(fine, t, 0).double() for t in (our, their, exact)])
    ours_all, theirs_all, exact_all = (torch.stack(values) for values in zip(*draws, strict=True))
    error = relative_error(theirs_all, exact_all)
    assert relative_error(ours_all, exact_all) <= 1.5 * max(error, UNIT[dtype])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, r, c, s, w: x * c + y * c,
        lambda x, y, r, c, s, w: ((x * 2.0**-12) @ w).exp(),
        lambda x, y, r, c, s, w: (x * 2.0**-12).sum(0).exp(),
        lambda x, y, r, c, s, w: (x * 2.0**-12) * 2.0**-13,
        lambda x, y, r, c, s, w: (x * 2.0**12) * 2.0**12,
    ],
    ids=["common factor", "product", "sum", "small constants", "large constants"],
)
def test_in_fp16_nothing_is_done_that_could_overflow_sooner(function: Function) -> None:
    module = trace(of(function), *given(torch.float16))
    ours = rewritten(module)
    assert targets(ours) == targets(prepared(module))


def test_an_fp16_chain_no_longer_overflows_on_the_way() -> None:
    inputs = [x.half() * 300 for x in given()]
    module = trace(of(lambda x, y, r, c, s, w: (x * 1000.0) / 2000.0), *inputs)
    (our,), (their,) = run(rewritten(module), *inputs), run(module, *inputs)
    assert not their.isfinite().all() and our.isfinite().all()
    assert relative_error(our, inputs[0].double() / 2) < 1e-3


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (lambda x, y, r, c, s, w: x * c + y * c, MUL),
        (lambda x, y, r, c, s, w: x * 0.3 * 7, MUL),
        (lambda x, y, r, c, s, w: (x * 0.3).sum(0).exp(), MUL),
        (lambda x, y, r, c, s, w: ((x * 0.3) @ w).exp(), MUL),
    ],
    ids=["common factor", "fold", "sum", "product"],
)
@pytest.mark.parametrize("key", ["recompute", "ac_graph_id"])
def test_nodes_of_two_checkpoints_stay_apart(function: Function, first: Any, key: str) -> None:
    inputs = given()
    module = trace(of(function), *inputs)
    node(module, first).meta[key] = 1
    assert targets(rewritten(module)) == targets(prepared(module))
    for n in module.graph.nodes:
        n.meta[key] = 1
    ours = rewritten(module)
    assert targets(ours) != targets(prepared(module))
    calls = [n for n in ours.graph.nodes if n.op == "call_function"]
    assert all(n.meta.get(key) == 1 for n in calls)


def test_a_result_keeps_its_name_and_half() -> None:
    module = trace(of(lambda x, y, r, c, s, w: (x * c + y * c).exp()), *given())
    add = node(module, ADD)
    add.meta["partitioner_tag"] = "is_backward"
    found = next(n for n in rewritten(module).graph.nodes if n.name == add.name)
    assert found.target is MUL and found.meta["partitioner_tag"] == "is_backward"


@pytest.mark.parametrize("precision", ["fused", "eager"])
def test_the_gradient_of_a_cross_entropy_has_one_product_with_the_tangent(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p * t - y * t becomes (p - y) * t, and under eager precision it does not."""
    torch._dynamo.reset()
    seen: list[fx.GraphModule] = []
    run_plan = original("JOINT", "plan")

    def looking(state: State) -> None:
        seen.append(copy_of(state.module))
        run_plan(state)

    change(monkeypatch, "JOINT", "plan", looking)
    w = torch.randn(N, N, requires_grad=True)
    x, t = torch.randn(M, N), torch.randint(0, N, (M,))
    options = {**PLACE, "evt.precision": precision}
    compiled = torch.compile(
        lambda w: F.cross_entropy(x @ w, t), backend=interpreted, options=options
    )
    compiled(w).backward()
    (module,) = seen
    masked = [
        n
        for n in module.graph.nodes
        if n.target is aten.where.self
        and n.meta["val"].shape == (M, 1)
        and n.args[1].meta["val"].is_floating_point()
    ]
    products = [user for n in masked for user in n.users if user.meta["val"].shape == (M, N)]
    assert len(products) == (1 if precision == "fused" else 2) or precision == "eager"
    fused = [n.args[0].target for n in products if n.args[0].target in (ADD, SUB)]
    assert bool(fused) == (precision == "fused")
    gradient = w.grad
    wide = w.detach().double().requires_grad_()
    F.cross_entropy(x.double() @ wide, t).backward()
    assert gradient is not None and relative_error(gradient, wide.grad) < 1e-6  # type: ignore[arg-type]
