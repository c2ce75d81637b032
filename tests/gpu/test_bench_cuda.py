"""bench on a GPU: CUDA graphs for all modes or none, memory, times by events."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from torch_evt.report import bench_timing
from torch_evt.report.bench import bench
from torch_evt.report.bench_subject import Step
from torch_evt.workloads import get

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("workload", ["mlp", "gpt2-medium"])
def test_every_mode_is_timed_with_graphs_or_without(workload: str, graphs: bool) -> None:
    result = bench(workload, device="cuda", cuda_graphs=graphs, repeats=3, compile_time=False)
    assert result.cuda_graphs is graphs and not result.problems, result.problems
    assert result.device == torch.cuda.get_device_name()
    for mode in result.modes.values():
        assert mode.fwdbwd_ms and mode.step_ms and mode.fwdbwd_ms < 1.5 * mode.step_ms
        assert mode.peak_bytes and mode.peak_bytes > 2**16
        assert mode.grad_error is not None and mode.grad_error <= 1.5


def test_graphs_of_one_pool_compute_what_the_calls_compute() -> None:
    """Two graphs of a shared pool, replayed in turns, each leave the right gradients."""
    seed = random.randrange(1000)
    model, inputs, loss = get("mlp").make(seed=seed, device="cuda")
    step = Step(model, loss)
    run = bench_timing.forward_backward(step, inputs, step)
    run()
    expected = [p.grad.clone() for p in step.parameters() if p.grad is not None]
    pool = torch.cuda.graph_pool_handle()
    graphs: list[Any] = []
    for _ in range(2):
        replay = bench_timing.captured(run, pool)
        graphs.append((replay, [p.grad for p in step.parameters()]))
    for replay, gradients in [*graphs, *graphs]:
        for gradient in gradients:
            gradient.zero_()
        replay()
        torch.cuda.synchronize()
        for found, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(found, right)


def test_seconds_wait_for_the_device() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    device = torch.device("cuda")

    def run() -> None:
        for _ in range(20):
            torch.mm(x, x)

    run()
    many, one = bench_timing.seconds(run, 10, device), bench_timing.seconds(run, 1, device)
    assert many > 5 * one > 0.001
