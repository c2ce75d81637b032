"""Timing: the order of samples, what a sample is, and that nothing trained changes."""

from __future__ import annotations

import gc
import random
import statistics
from typing import Any

import pytest
import torch

from torch_evt.report import bench_timing
from torch_evt.report.bench_subject import Step
from torch_evt.report.bench_timing import Samples, interleaved
from torch_evt.workloads import get

CPU = torch.device("cpu")


def test_every_round_runs_each_once_and_starts_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def seconds(run: Any, calls: int, device: Any) -> float:
        run()
        return 1.0

    monkeypatch.setattr(bench_timing, "seconds", seconds)
    names = ["a", "b", "c"]
    runs = {name: lambda name=name: order.append(name) for name in names}
    found = interleaved(runs, 4, CPU)
    timed = order[len(names) * bench_timing.TRIALS :]
    assert ["".join(timed[i : i + 3]) for i in range(0, 12, 3)] == ["abc", "bca", "cab", "abc"]
    assert found == {name: Samples((1000.0,) * 4) for name in names}


def test_a_sample_is_the_mean_of_enough_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def seconds(run: Any, calls: int, device: Any) -> float:
        asked.append(calls)
        return 0.003 * calls

    monkeypatch.setattr(bench_timing, "seconds", seconds)
    monkeypatch.setattr(bench_timing, "SAMPLE_S", 0.02)
    found = interleaved({"a": lambda: None}, 2, CPU)
    assert asked == [1] * bench_timing.TRIALS + [7, 7]
    assert found["a"].ms == pytest.approx((3.0, 3.0))  # type: ignore[union-attr]


def test_a_disturbed_call_changes_no_sample_and_all_samples_have_as_many_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("quick", "slow", "disturbed")
    asked: dict[str, list[int]] = {name: [] for name in names}

    def seconds(run: Any, calls: int, device: Any) -> float:
        name = run()
        asked[name].append(calls)
        if name == "disturbed" and len(asked[name]) == 1:
            return 0.5
        return (0.004 if name == "slow" else 0.001) * calls

    monkeypatch.setattr(bench_timing, "seconds", seconds)
    monkeypatch.setattr(bench_timing, "SAMPLE_S", 0.02)
    interleaved({name: lambda name=name: name for name in names}, 3, CPU)
    assert all(calls == [1] * bench_timing.TRIALS + [20] * 3 for calls in asked.values())


@pytest.mark.parametrize("stops_at", [2, 500])
def test_a_run_that_stops_running_leaves_the_others_alone(
    stops_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench_timing, "seconds", lambda run, calls, device: [run() for _ in range(calls)] and 1e-4
    )
    calls = {"good": 0, "bad": 0}

    def good() -> None:
        calls["good"] += 1

    def bad() -> None:
        calls["bad"] += 1
        if calls["bad"] == stops_at:
            raise RuntimeError("out of memory")

    found = interleaved({"bad": bad, "good": good}, 3, CPU)
    assert isinstance(found["bad"], RuntimeError) and calls["bad"] == stops_at
    assert isinstance(found["good"], Samples) and len(found["good"].ms) == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before(enabled: bool) -> None:
    during: list[bool] = []
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        frozen = gc.get_freeze_count()
        interleaved({"a": lambda: during.append(gc.isenabled())}, 1, CPU)
        assert gc.isenabled() == enabled and gc.get_freeze_count() <= frozen
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(during)


def test_median_and_spread() -> None:
    ms = tuple(random.uniform(1, 2) for _ in range(9))
    ordered = sorted(ms)
    assert Samples(ms).median == statistics.median(ms)
    assert Samples(ms).spread == pytest.approx(ordered[6] - ordered[2])
    assert Samples((3.0,)).spread == 0.0


def test_a_run_leaves_the_gradients_of_one_step_however_often_it_is_called() -> None:
    model, inputs, loss = get("mlp").make(seed=random.randrange(1000))
    step = Step(model, loss)
    torch.autograd.backward(step(*inputs))
    expected = [p.grad.clone() for p in step.parameters() if p.grad is not None]
    run = bench_timing.forward_backward(step, inputs, step)
    bench_timing.warmed_up(run)
    found = [p.grad for p in step.parameters()]
    assert len(expected) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]


def test_steps_with_the_optimizer_do_its_work_and_leave_the_weights() -> None:
    model, inputs, loss = get("mlp").make(seed=random.randrange(1000))
    step = Step(model, loss)
    before = [p.detach().clone() for p in step.parameters()]
    optimizer = bench_timing.fused_adamw(step, capturable=False)
    whole = bench_timing.with_optimizer(
        bench_timing.forward_backward(step, inputs, step), optimizer
    )
    bench_timing.warmed_up(whole)
    assert all(torch.equal(a, b) for a, b in zip(step.parameters(), before, strict=True))
    states = list(optimizer.state.values())
    assert len(states) == 2 and optimizer.defaults["fused"]
    assert all(s["step"] == bench_timing.WARM_UPS and s["exp_avg"].any() for s in states)
