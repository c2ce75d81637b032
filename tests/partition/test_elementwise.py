"""Every operation that an epilogue holds computes there what it computes outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.partition.planning import largest, prepared, regions
from tests.tracing import relative_error, run, targets, trace
from torch import Tensor

from torch_evt.partition import place
from torch_evt.partition.elementwise import (
    constant,
    function_names,
    function_of,
    is_arithmetic,
    is_elementwise,
)
from torch_evt.runtime.ops import is_region

aten = torch.ops.aten

# z: the product; t, u: other tiles, u positive; b: a bool tile; i: an int64 tile
HELD: dict[str, Callable[..., Any]] = {
    "add": lambda z, t, u, b, i: z + t,
    "add scalar": lambda z, t, u, b, i: z + 1,
    "add with a factor": lambda z, t, u, b, i: torch.add(t, z, alpha=-0.5),
    "sub": lambda z, t, u, b, i: t - z,
    "sub from a number": lambda z, t, u, b, i: 2 - z,
    "sub with a factor": lambda z, t, u, b, i: torch.sub(z, t, alpha=3),
    "mul": lambda z, t, u, b, i: z * t,
    "mul by a number": lambda z, t, u, b, i: z * 0.3,
    "mul by a bool": lambda z, t, u, b, i: z * b,
    "div": lambda z, t, u, b, i: z / u,
    "div of a number": lambda z, t, u, b, i: 1.5 / (z * z + 1),
    "div by a number": lambda z, t, u, b, i: z / 3,
    "neg": lambda z, t, u, b, i: -z,
    "abs": lambda z, t, u, b, i: z.abs(),
    "exp": lambda z, t, u, b, i: z.exp(),
    "expm1": lambda z, t, u, b, i: z.expm1(),
    "log": lambda z, t, u, b, i: (z * z + 0.1).log(),
    "log1p": lambda z, t, u, b, i: (z * z).log1p(),
    "sign": lambda z, t, u, b, i: torch.where(b, z, 0.0).sign() * t,
    "clamp": lambda z, t, u, b, i: z.clamp(-1, 0.5),
    "clamp below": lambda z, t, u, b, i: z.clamp(min=0.2),
    "clamp integers": lambda z, t, u, b, i: torch.where(i.clamp(-1, 1) == 1, z, t),
    "sqrt": lambda z, t, u, b, i: z.abs().sqrt(),
    "rsqrt": lambda z, t, u, b, i: (z * z + 0.1).rsqrt(),
    "reciprocal": lambda z, t, u, b, i: (z * z + 0.1).reciprocal(),
    "tanh": lambda z, t, u, b, i: z.tanh(),
    "sigmoid": lambda z, t, u, b, i: z.sigmoid(),
    "erf": lambda z, t, u, b, i: z.erf(),
    "relu": lambda z, t, u, b, i: z.relu(),
    "maximum": lambda z, t, u, b, i: torch.maximum(z, t),
    "minimum": lambda z, t, u, b, i: torch.minimum(z, t),
    "where": lambda z, t, u, b, i: torch.where(b, z, t),
    "where with numbers": lambda z, t, u, b, i: torch.where(z > 0.5, z, -1e4),
    "gelu_erf": lambda z, t, u, b, i: F.gelu(z),
    "gelu_tanh": lambda z, t, u, b, i: F.gelu(z, approximate="tanh"),
    "silu": lambda z, t, u, b, i: F.silu(z),
    "gelu_erf_backward": lambda z, t, u, b, i: aten.gelu_backward(z, t),
    "gelu_tanh_backward": lambda z, t, u, b, i: aten.gelu_backward(z, t, approximate="tanh"),
    "silu_backward": lambda z, t, u, b, i: aten.silu_backward(z, t),
    "relu_backward": lambda z, t, u, b, i: aten.threshold_backward(z, t, 0),
    "square": lambda z, t, u, b, i: z**2,
    "cube": lambda z, t, u, b, i: z**3,
    "first power": lambda z, t, u, b, i: z**1.0 + 1,
    "seventh power": lambda z, t, u, b, i: z**7,
    "power of a root": lambda z, t, u, b, i: z.abs() ** 2.5,
    "inverse power": lambda z, t, u, b, i: (z * z + 0.5) ** -1.5,
    "inverse square": lambda z, t, u, b, i: (z * z + 0.5) ** -2,
    "root": lambda z, t, u, b, i: (z * z + 0.1) ** 0.5,
    "inverse root": lambda z, t, u, b, i: (z * z + 0.1) ** -0.5,
    "inverse": lambda z, t, u, b, i: (z * z + 0.1) ** -1.0,
    "eq": lambda z, t, u, b, i: torch.where(i == 1, z, 0.0),
    "ne": lambda z, t, u, b, i: torch.where(i != i.abs(), z, 0.0),
    "lt": lambda z, t, u, b, i: (z < t, z + 1),
    "le": lambda z, t, u, b, i: (z <= 0.2, z + 1),
    "gt": lambda z, t, u, b, i: (z > t, z + 1),
    "ge": lambda z, t, u, b, i: (z >= 0.2, z + 1),
    "logical and": lambda z, t, u, b, i: torch.where(b & (z > 0), z, 1.0),
    "logical or": lambda z, t, u, b, i: torch.where(b | (z > 0), z, 1.0),
    "logical not": lambda z, t, u, b, i: torch.where(~b, z, 1.0),
    "logical functions": lambda z, t, u, b, i: torch.where(
        torch.logical_and(b, torch.logical_not(torch.logical_or(z > 1, b))), z, t
    ),
    "cast down and up": lambda z, t, u, b, i: z.bfloat16().float() * 2,
    "cast to bool's number": lambda z, t, u, b, i: z * b.float(),
}


def inputs() -> list[Tensor]:
    m, k, n = 12, 8, 16
    return [
        torch.randn(m, k),
        torch.randn(k, n) / k**0.5,
        torch.randn(m, n),
        torch.rand(m, n) + 0.5,
        torch.rand(m, n) > 0.4,
        torch.randint(-2, 3, (m, n)),
    ]


def of_product(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, t, u, b, i: function(x @ w, t, u, b, i)


@pytest.mark.parametrize("name", HELD)
def test_an_epilogue_holds_it_and_computes_the_same(name: str) -> None:
    given = inputs()
    module = trace(of_product(HELD[name]), *given)
    ready = prepared(module)
    calls = [n for n in ready.graph.nodes if n.op == "call_function" and is_elementwise(n)]
    region = largest(ready.graph)
    assert calls and any(is_arithmetic(n) for n in calls)
    behind = {n for n in calls if any(s in region.nodes for s in n.all_input_nodes)}
    assert behind and behind <= set(region.nodes)
    place.place(ready.graph, region, {}, poison=True)
    assert any(is_region(target) for target in targets(ready))
    for our, their in zip(run(ready, *given), run(module, *given), strict=True):
        assert our.dtype == their.dtype
        assert relative_error(our, their) < 2e-6


NOT_HELD: dict[str, Callable[..., Any]] = {
    "sin": lambda z, t, u, b, i: z.sin(),
    "another power": lambda z, t, u, b, i: z.abs() ** 1.7,
    "a large power": lambda z, t, u, b, i: z**9,
    "the zeroth power": lambda z, t, u, b, i: z**0,
    "a power of a tensor": lambda z, t, u, b, i: u**z,
    "rounding division": lambda z, t, u, b, i: torch.div(z, u, rounding_mode="floor"),
    "clamp": lambda z, t, u, b, i: torch.clamp(z, -1, 1).sin(),
    "gather": lambda z, t, u, b, i: z.gather(1, i.abs()),
    "softmax": lambda z, t, u, b, i: z.cumsum(0),
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_an_epilogue_does_not_hold_stays_outside(name: str) -> None:
    given = inputs()
    ready = prepared(trace(of_product(NOT_HELD[name]), *given))
    last = [n for n in ready.graph.nodes if n.op == "call_function"][-1]
    assert all(last not in region.nodes for region in regions(ready.graph))


def test_bitwise_operations_on_integers_are_not_logical_ones() -> None:
    def f(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return torch.where((i & (i + 1)) == 0, x @ w, 0.0)

    given = [torch.randn(12, 8), torch.randn(8, 16), torch.randint(0, 9, (12, 16))]
    module = trace(f, *given)
    ready = prepared(module)
    for region in regions(ready.graph):
        assert not any(n.target is aten.bitwise_and.Tensor for n in region.nodes)
    region = largest(ready.graph)
    place.place(ready.graph, region, {}, poison=True)
    assert relative_error(run(ready, *given)[0], run(module, *given)[0]) < 2e-6


def test_large_integers_are_compared_exactly() -> None:
    """2^24 + 1 is no fp32 number: an epilogue must not see it as 2^24."""

    def f(x: Tensor, w: Tensor, i: Tensor) -> Tensor:
        return torch.where(i == 2**24, x @ w, 0.0)

    i = torch.randint(2**24 - 2, 2**24 + 3, (12, 16))
    given = [torch.randn(12, 8), torch.randn(8, 16), i]
    module = trace(f, *given)
    ready = prepared(module)
    place.place(ready.graph, largest(ready.graph), {}, poison=True)
    assert relative_error(run(ready, *given)[0], run(module, *given)[0]) < 2e-6


def test_names_are_those_that_can_be_disabled() -> None:
    names = function_names()
    assert names == sorted(set(names))
    found = set()
    for function in HELD.values():
        graph = prepared(trace(of_product(function), *inputs())).graph
        found |= {name for n in graph.nodes if (name := function_of(n)) is not None}
    assert found <= set(names)
    derivatives = {name for name in names if name.endswith("_grad")}
    assert derivatives >= {"gelu_erf_grad", "gelu_tanh_grad", "silu_grad"}


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda x: torch.full((), 2.5), 2.5),
        (lambda x: torch.full((), 3, dtype=torch.int64), 3),
        (lambda x: torch.full((), 3, dtype=torch.float32), 3.0),
        (lambda x: torch.full((), True), True),
        (lambda x: aten.scalar_tensor(0.5), 0.5),
        (lambda x: torch.full((2,), 2.5), None),
        (lambda x: x + 1, None),
    ],
)
def test_constants_keep_their_type(make: Callable[[Tensor], Tensor], value: Any) -> None:
    module = trace(lambda x: make(x), torch.randn(2))
    made = [n for n in module.graph.nodes if n.op == "call_function"][-1]
    found = constant(made)
    if value is None:
        assert found is None
    else:
        assert found is not None and found.value == value
        assert type(found.value) is type(value)


def test_numbers_are_constants_and_other_things_are_not() -> None:
    for number in (1, 1.0, True):
        found = constant(number)
        assert found is not None and type(found.value) is type(number)
    assert constant("text") is None and constant(None) is None
