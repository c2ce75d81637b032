"""Random small training graphs are right, and reach every part of the compiler.

A failure prints the smallest program that still fails; it runs as it is. To look for more:
python -m tests.random_graphs --help
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from random_graphs import checking
from random_graphs.__main__ import smaller
from random_graphs.checking import Noise, Outcome, Wrong, check
from random_graphs.program import Leaf, Program, Statement
from random_graphs.reducing import keeping, parts
from random_graphs.statistics import kinds, report
from random_graphs.strategies import generate
from torch_evt.runtime import counters
from torch_evt.tree import evaluate
from torch_evt.tree.functions import FUNCTIONS

CHUNKS, LONG_CHUNKS = 4, 10
OFTEN = {
    *("half forward", "half backward", "not batched", "several sinks"),
    *("operand A k", "operand A m", "operand B k", "operand B n"),
    *("store n", "reduce sum over rows", "load tile", "load row", "load column", "load bool"),
    *("load float32", "load bfloat16", "function add", "function sub", "function mul"),
    "function where",
}
"""Kinds of things (`statistics.kinds`) that any 50 programs hold between them."""
EVER = OFTEN | {
    *("batched", "reduce sum over columns", "load scalar", "load float16", "cast bfloat16"),
    *("load by div", "load by mod", "recomputed outside", "reduce max over rows"),
    *("function div", "function neg", "function exp", "function tanh", "function sigmoid"),
    *("function relu", "function relu_backward", "function silu", "function silu_grad"),
    *("function gelu_tanh", "function gelu_tanh_grad", "function gelu_erf_grad", "function abs"),
    *("function erf", "function lt", "function rsqrt", "function reciprocal"),
}
"""Kinds that any 200 programs hold between them."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    counters.reset()


def run(numbers: list[int]) -> list[Outcome]:
    """Check the programs of these numbers; fails with the smallest form of the first wrong one."""
    outcomes = []
    for number in numbers:
        try:
            outcomes.append(check(generate(number)))
        except Wrong:
            pytest.fail(f"program {number}: {smaller(number, {}, 120)}", pytrace=False)
    discarded = [outcome for outcome in outcomes if outcome.discarded]
    assert len(discarded) <= len(outcomes) // 20, report(outcomes)
    assert sum(bool(o.by_noise) for o in outcomes) <= len(outcomes) // 6, report(outcomes)
    assert sum(bool(o.by_seeds) for o in outcomes) <= len(outcomes) // 25, report(outcomes)
    placed = sum(bool(outcome.regions) for outcome in outcomes)
    assert placed > 0.6 * len(outcomes), report(outcomes)
    return outcomes


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_graphs_are_right(chunk: int) -> None:
    outcomes = run([1000 * chunk + i for i in range(200 // CHUNKS)])
    seen: Counter[str] = Counter(kind for outcome in outcomes for kind in kinds(outcome))
    assert seen.keys() >= OFTEN, f"{OFTEN - seen.keys()}\n{report(outcomes)}"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(LONG_CHUNKS))
def test_many_random_graphs_are_right_and_hold_every_kind(chunk: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"chunk {chunk}: seed {seed}")
    source = random.Random(seed)
    outcomes = run([source.randrange(2**24) for _ in range(2000 // LONG_CHUNKS)])
    seen = {kind for outcome in outcomes for kind in kinds(outcome)}
    assert seen >= EVER, f"seed {seed}: {EVER - seen}\n{report(outcomes)}"


SMALL = Program(
    sizes=((12, 5),),
    dtype="float32",
    parameters=(Leaf("p0", (24, 16), "torch.randn(24, 16) / 4", requires_grad=True),),
    buffers=(),
    inputs=(Leaf("x0", ("b", 16), "torch.randn(b, 16)", requires_grad=True),),
    statements=(
        Statement("v0", "F.linear(x0, self.p0)"),
        Statement("v1", "torch.tanh(v0)", stand_in="v0"),
        Statement("v2", "v1 * v0", stand_in="v1"),
    ),
    inside=("v2.square().mean()",),
    outside=(("v1", "v1.sum()"),),
)


def test_a_small_program_is_right_and_has_a_region() -> None:
    outcome = check(SMALL)
    assert outcome.regions and outcome.discarded is None
    assert not outcome.by_noise and not outcome.by_seeds
    assert {"function tanh", "store n", "half forward"} <= kinds(outcome)


def test_a_formula_that_is_slightly_off_is_seen() -> None:
    tanh = FUNCTIONS["tanh"]
    wrong = replace(tanh, formula=lambda x: torch.tanh(x) * 1.00001)
    with (
        mock.patch.object(evaluate, "FUNCTIONS", {**FUNCTIONS, "tanh": wrong}),
        pytest.raises(Wrong, match=r"output(.|\n)*class Model"),
    ):
        check(SMALL)


def test_a_region_that_does_not_run_is_seen() -> None:
    with (
        mock.patch("random_graphs.checking.counters.region_runs", Counter()),
        pytest.raises(Wrong, match="planned"),
    ):
        check(SMALL)


@pytest.mark.parametrize(
    ("half", "factor", "seeds", "right"),
    [
        ("bfloat16", 1.6, {1}, True),
        ("bfloat16", 1.6, None, False),
        ("bfloat16", 6.0, {1}, False),
        (None, 60.0, {1}, False),
    ],
    ids=["once in half", "steady in half", "widely in half", "once in fp32"],
)
def test_a_miss_in_half_precision_is_judged_over_seeds(
    half: str | None, factor: float, seeds: set[int] | None, right: bool
) -> None:
    """Steps that are `factor` times as far off as eager's on these seeds; None: on all."""
    original = checking._compiled

    def moved(program: Program, make: Any, given: Any, options: Any, *rest: Any) -> Any:
        steps = original(program, make, given, options, *rest)
        if options["evt.place"] == "never":
            return steps
        for i, seed in enumerate(given):
            if seeds is None or seed in seeds:
                eager, exact = checking._step(make, seed), checking._exact(make, seed)
                steps[i] = {n: (e + factor * (eager[n] - e)).to(eager[n]) for n, e in exact.items()}
        return steps

    program = replace(SMALL, autocast=half, half=half)
    with (
        mock.patch.object(checking, "_compiled", moved),
        mock.patch.object(checking, "NOISY_RUNS", 0),
        mock.patch.object(
            checking, "_failed_over_seeds", wraps=checking._failed_over_seeds
        ) as over_seeds,
        nullcontext() if right else pytest.raises(Wrong, match="grad:"),
    ):
        assert check(program).by_seeds
    assert over_seeds.called == (half is not None)


def test_noise_moves_every_result_by_its_last_bit_and_no_view() -> None:
    x = torch.randn(64)
    with Noise():
        y, seen = x * 2, x.view(8, 8)
    distance = (y - x * 2).abs() / (x * 2).abs()
    assert 0 < float(distance.max()) < 2**-22
    assert torch.equal(seen, x.view(8, 8))


@pytest.mark.parametrize("seed", range(40))
def test_a_program_with_parts_left_out_still_runs(seed: int) -> None:
    whole = generate(seed)
    assert generate(seed).source() == whole.source()
    source = random.Random(seed)
    for share in (0.9, 0.5, 0.0):
        program = keeping(whole, [source.random() < share for _ in range(parts(whole))])
        assert len(program.statements) <= len(whole.statements)
        model, inputs, loss = program.load()["make"](0)
        loss(model(*inputs)).backward()
        compile(program.script(), "script", "exec")
