"""Processes of their own: what they answer, and what is said when they cannot."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from interpreted import PLACE
from report.benching import Quick, quick, refusing
from torch_evt.report import bench_process, bench_subject
from torch_evt.report.bench_process import COMPILE, GRADIENTS, Request, in_fresh_process, measure
from torch_evt.report.bench_subject import Step, Subject

__all__ = ["quick"]

CPU = torch.device("cpu")


def _mlp(seed: int = 0) -> Subject:
    return Subject("mlp", "tiny", "fp32", "cpu", seed)


def test_a_process_gives_the_same_answer_as_this_one(tmp_path: Path) -> None:
    request = Request(_mlp(random.randrange(1000)), "eager", {}, (GRADIENTS,))
    answer = in_fresh_process(request, str(tmp_path))
    assert answer.problems == () and answer == measure(request)
    assert 0 < (answer.grad_error or 0) <= 1


def test_a_process_that_dies_is_a_problem_with_what_it_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os, sys\nprint('to stderr', file=sys.stderr, flush=True)\nos._exit(7)\n"
    (tmp_path / "dying_model.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    subject = Subject("dying_model:make", None, None, None)
    answer = in_fresh_process(Request(subject, "eager", {}, (GRADIENTS,)), str(tmp_path))
    assert answer.problems == ("the process ended with 7: to stderr",)
    assert answer.compile_s is None and answer.grad_error is None


def test_compiling_is_what_the_first_calls_take_beyond_later_ones() -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        time.sleep({1: 0.25, 2: 0.1}.get(calls, 0.02))

    found = bench_process._compiling(run, CPU)
    assert found["compile_s"] > 0.29 and found["stages"] == {}


def test_the_stages_of_a_compilation_hold_our_passes_and_min_cut(quick: Quick) -> None:
    measure(Request(_mlp(), "evt", PLACE, (COMPILE,)))  # what came before is not counted
    torch._dynamo.reset()
    begin = time.perf_counter()
    answer = measure(Request(_mlp(), "evt", PLACE, (COMPILE,)))
    most = time.perf_counter() - begin
    ours = {name: s for name, s in answer.stages.items() if name.startswith("evt.")}
    assert {"evt.joint.plan", "evt.forward.place", "evt.backward.place"} <= set(ours)
    assert answer.stages["min_cut_rematerialization_partition"] > 0
    assert sum(ours.values()) < answer.stages["Partitioner"] < most
    assert answer.compile_s and answer.stages["Partitioner"] < answer.compile_s <= most


def test_a_compiler_that_fails_is_a_problem_in_one_line(quick: Quick) -> None:
    quick.backends["inductor"] = refusing
    answer = measure(Request(_mlp(), "inductor", {}, (COMPILE, GRADIENTS)))
    (problem,) = answer.problems
    assert "no compiler today" in problem and "\n" not in problem
    assert answer.compile_s is None


def test_the_gradient_errors_are_the_same_every_time(quick: Quick) -> None:
    seed = random.randrange(1000)
    answers = []
    for _ in range(2):
        torch._dynamo.reset()
        answers.append(measure(Request(_mlp(seed), "evt", PLACE, (GRADIENTS,))))
    assert answers[0] == answers[1] and answers[0].grad_error


def test_equal_seeds_make_equal_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(3, 3), (torch.randn(2, 3),), lambda y: y.sum()\n"
    )
    (tmp_path / "random_model.py").write_text(source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def made(what: str, seed: int) -> list[Any]:
        workload = ("tiny", "fp32", "cpu") if what == "mlp" else (None, None, None)
        model, inputs, _ = Subject(what, *workload, seed).make()
        return [*model.parameters(), *inputs]

    for what in ("mlp", "random_model:make"):
        one, same, other = made(what, 4), made(what, 4), made(what, 5)
        assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_dropout_modules_can_be_switched_off_and_other_randomness_is_noticed() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.randn(4)

    x = (torch.randn(3, 4),)
    dropout = Step(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.sum)
    assert bench_process._is_random(dropout, x)
    bench_process._switch_off_dropout(dropout)
    assert not bench_process._is_random(dropout, x)
    noisy = Step(Noisy(4, 4), torch.sum)
    bench_process._switch_off_dropout(noisy)
    assert bench_process._is_random(noisy, x)


def test_the_dtype_is_that_of_most_elements() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8).bfloat16())
    step = Step(model, None)
    assert bench_subject.dtype_of(step, ()) is torch.bfloat16
    inputs = (torch.arange(3), torch.randn(3).half())
    assert bench_subject.dtype_of(Step(nn.ReLU(), None), inputs) is torch.float16


def test_max_autotune_is_without_cuda_graphs_of_its_own_and_options_are_evts_alone() -> None:
    autotune = bench_subject.mode("max-autotune", {"evt.place": "never"})
    assert autotune.backend == "inductor" and autotune.options["max_autotune"] is True
    assert "triton.cudagraphs" not in autotune.options and "evt.place" not in autotune.options
    assert bench_subject.mode("evt", {"evt.place": "never"}).options == {"evt.place": "never"}
    assert bench_subject.mode("inductor", {"evt.place": "never"}).options == {}
