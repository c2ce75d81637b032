"""`evt demo`: trains a small GPT on real text with backend="evt" and holds it against eager.

Everything printed is computed in the run. Every region is placed (`evt.place=always`) and run by
the reference where the machine has no emitter, so the demo shows that training is the same, not
that it is fast. `run` returns non-zero if a gradient fails the error standard, if a region did not
run as often as the plan says or the plan has fewer than expected, or if the loss curves part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from torch_evt import testing, workloads
from torch_evt.partition.plan import Plan
from torch_evt.report.explain import explain
from torch_evt.report.progress import Progress, shown, silent
from torch_evt.report.render import render
from torch_evt.runtime import counters
from torch_evt.torch_compat import fresh_cache

STEPS = 50
CURVE_STEPS = 20
SAID_EVERY = 10
CURVE_TOLERANCE = 1e-3
LEARNING_RATE = 1e-3
OPTIONS: dict[str, Any] = {"evt.place": "always", "evt.rng": "eager", "evt.strict": True}
EXPECTED_REGIONS = {"forward": 4, "backward": 5}
"""The fewest regions in each half of the demo's GPT: fewer would mean that fusing broke."""


class Step(nn.Module):
    """A workload's model and loss as one module, so that both are compiled: inputs -> scalar."""

    def __init__(self, workload: workloads.Workload, model: nn.Module) -> None:
        super().__init__()
        self.workload = workload
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.workload.step(self.model, inputs)


@dataclass(frozen=True)
class Training:
    """The loss of every step, and the seconds that every step took."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def warm_s(self) -> float:
        """The median step without the first two, which compile and warm up."""
        return statistics.median(self.seconds[2:])

    @property
    def compile_s(self) -> float:
        """What the first step took beyond a warm one."""
        return self.seconds[0] - self.warm_s


def train(
    step: nn.Module,
    batches: Sequence[tuple[Tensor, ...]],
    call: Callable[..., Tensor],
    progress: Progress = silent,
) -> Training:
    """Train `step` with AdamW on the batches by calling `call` on each; dropout seeded by step.

    progress: called with the number of every tenth step.
    """
    optimizer = torch.optim.AdamW(step.parameters(), lr=LEARNING_RATE)
    losses, seconds = [], []
    for number, batch in enumerate(batches):
        if number % SAID_EVERY == 0:
            progress(f"step {number + 1} of {len(batches)}")
        torch.manual_seed(number)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = call(*batch)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return Training(tuple(losses), tuple(seconds))


def curve_difference(ours: Sequence[float], eager: Sequence[float]) -> float:
    """The largest relative difference of two loss curves; inf where either is not finite."""
    return max(
        abs(a - b) / abs(b) if torch.isfinite(torch.tensor([a, b])).all() else float("inf")
        for a, b in zip(ours, eager, strict=True)
    )


def missing_regions(plan: Plan, runs: Mapping[str, int], steps: int) -> list[str]:
    """What is wrong with the number of regions planned and run, as sentences; empty if nothing."""
    wrong = []
    regions = [region for graph in plan.graphs for region in graph.regions]
    for half, fewest in EXPECTED_REGIONS.items():
        found = sum(region.half == half for region in regions)
        if found < fewest:
            wrong.append(f"{found} regions in {half}, expected at least {fewest}")
    for tree in dict.fromkeys(region.tree for region in regions):
        expected = steps * sum(region.tree == tree for region in regions)
        if runs.get(tree, 0) != expected:
            wrong.append(f"ran {runs.get(tree, 0)} times instead of {expected}: {tree}")
    return wrong


def run() -> int:
    """Run the demo, print what it finds, return the exit code."""
    console = Console(markup=False)  # trees and names may hold square brackets
    begin = time.perf_counter()
    workload = workloads.get("gpt2-medium", "small")
    batches = [workload.inputs(seed=seed) for seed in range(STEPS)]

    def make(seed: int) -> tuple[nn.Module, tuple[Any, ...], None]:
        model, inputs, _ = workload.make(seed=seed)
        return Step(workload, model), inputs, None

    console.rule("eager")
    step, _, _ = make(0)
    with shown("eager: ") as progress:
        eager = train(step, batches, step, progress)
    console.print(_summary(eager))

    console.rule("Inductor")
    with shown("Inductor: ") as progress:
        progress("loading the compiler")
        _compile_something()
    step, _, _ = make(0)
    with fresh_cache(), shown("Inductor: ") as progress:
        torch._dynamo.reset()
        # the same random numbers as below, so that both compile the same work
        same: dict[str, Any] = {"fallback_random": True}
        compiled = torch.compile(step, backend="inductor", options=same)
        inductor = train(step, batches[:6], compiled, progress)
    console.print(
        f"warm step {1e3 * inductor.warm_s:.1f} ms, compiled in {inductor.compile_s:.1f} s"
    )

    with fresh_cache():
        console.rule('backend="evt"')
        torch._dynamo.reset()
        step, _, _ = make(0)
        counters.reset()
        compiled = torch.compile(step, backend="evt", options=OPTIONS)
        with shown("evt: ") as progress:
            ours = train(step, batches, compiled, progress)
        runs = dict(counters.region_runs)
        console.print(_summary(ours))

        console.rule("the plan")
        step, inputs, _ = make(0)
        with shown() as progress:
            progress("planning")
            plan = explain(step, *inputs, options=OPTIONS)
        console.print(render(plan))

        console.rule("gradients against fp64 eager")
        torch._dynamo.reset()
        with shown() as progress:
            progress("comparing steps with eager and fp64 eager")
            comparison = testing.check_model(make, dtype=torch.float32, options=OPTIONS)

    failures = missing_regions(plan, runs, STEPS)
    console.print(_gradients(comparison))
    if not comparison.passed:
        failures.append(f"fails the error standard: {comparison.worst}")
    console.rule("loss curves")
    for number in range(0, STEPS, 7):
        console.print(
            f"step {number:2}: eager {eager.losses[number]:.6f}, evt {ours.losses[number]:.6f}"
        )
    apart = curve_difference(ours.losses[:CURVE_STEPS], eager.losses[:CURVE_STEPS])
    console.print(
        f"largest relative difference in the first {CURVE_STEPS} steps: {apart:.1e} "
        f"(allowed: {CURVE_TOLERANCE:.0e})"
    )
    if not apart <= CURVE_TOLERANCE:
        failures.append(f"the loss curves part by {apart:.1e}")
    console.rule("compile time")
    console.print(
        f"evt {ours.compile_s:.1f} s, Inductor {inductor.compile_s:.1f} s: "
        f"{ours.compile_s / inductor.compile_s:.2f}x"
    )
    console.rule()
    for failure in failures:
        console.print(f"FAILED: {failure}", style="bold red")
    console.print(
        f"{sum(runs.values())} region runs in {STEPS} steps; "
        f"{'failed' if failures else 'all passed'} in {time.perf_counter() - begin:.0f} s"
    )
    return int(bool(failures))


def _compile_something() -> None:
    """Pay once for what the first compilation of a process loads, before anything is timed."""
    x = torch.randn(8, 8, requires_grad=True)
    torch.compile(lambda t: t.sin().sum(), backend="inductor")(x).backward()


def _summary(training: Training) -> str:
    return (
        f"loss {training.losses[0]:.4f} -> {training.losses[-1]:.4f} in {len(training.losses)} "
        f"steps; warm step {1e3 * training.warm_s:.1f} ms"
    )


def _gradients(comparison: testing.Comparison) -> str:
    gradients = [t for t in comparison.tensors if t.name.startswith("grad:")]
    worst = max(gradients, key=lambda tensor: (not tensor.passed, tensor.share))
    return (
        f"{len(gradients)} gradients; worst {worst.name}: evt {worst.ours}, eager {worst.eager}, "
        f"limit {worst.limit}"
    )
