"""What `bench` measures in processes of their own: compile times, memory, gradient errors.

A process is given its request as JSON and answers in a file: `python -m
torch_evt.report.bench_process REQUEST ANSWER`. Before anything is timed it compiles a small graph
with Inductor, which pays for what only the first compilation of a process and of a cache folder
needs: imports, workers, and the C++ headers that Inductor compiles beforehand.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_evt import testing
from torch_evt.report import bench_subject
from torch_evt.report.bench_subject import Mode, Step, Subject
from torch_evt.report.bench_timing import WARM_UPS, Run, forward_backward, seconds
from torch_evt.torch_compat import compile_seconds

COMPILE, PEAK, GRADIENTS = "compile", "peak", "gradients"
"""What a request can ask for."""


@dataclass(frozen=True)
class Request:
    """Measure `measures` of a subject in one mode; options are evt's."""

    subject: Subject
    mode: str
    options: Mapping[str, Any]
    measures: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What was measured; None where it was not asked for or could not be.

    compile_s: what the first calls took beyond later ones. stages: seconds by stage of compiling,
    PyTorch's names; one holds what is inside it. peak_bytes: of one forward and backward after
    compiling. grad_error: worst e / max(e_eager, u) of the gradients.
    problems: sentences on what went wrong in this mode. notes: why something is unknown.
    """

    compile_s: float | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    grad_error: float | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def in_fresh_process(request: Request, cache_folder: str) -> Answer:
    """The answer of a new process that caches what it compiles in `cache_folder`."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        text = json.dumps(dataclasses.asdict(request))
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache_folder,
            "TRITON_CACHE_DIR": os.path.join(cache_folder, "triton"),
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }
        done = subprocess.run(
            [sys.executable, "-m", "torch_evt.report.bench_process", text, str(answer)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0 or not answer.exists():
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            return Answer(problems=(f"the process ended with {done.returncode}: {said[-1]}",))
        values = json.loads(answer.read_text(encoding="utf-8"))
    lists = {name: tuple(values[name]) for name in ("problems", "notes")}
    return Answer(**{**values, **lists})


def measure(request: Request) -> Answer:
    """What a process does with a request. What goes wrong in one measure leaves the others."""
    mode = bench_subject.mode(request.mode, request.options)
    model, inputs, loss = request.subject.make()
    step = Step(model, loss)
    device = bench_subject.device_of(step, inputs)
    answer: dict[str, Any] = {"problems": ()}
    if mode.backend is not None:
        compile_something(device)
    run = forward_backward(step, inputs, mode.compiled(step))
    for name, function in ((COMPILE, _compiling), (PEAK, _peak)):
        if name in request.measures:
            try:
                answer.update(function(run, device))
            except Exception as error:
                return Answer(**{**answer, "problems": (sentence(error),)})
    if GRADIENTS in request.measures:
        for leaf in step.parameters():
            leaf.grad = None
        try:
            answer.update(gradient_error(mode, request.subject))
        except Exception as error:
            answer["problems"] = (f"its gradients were not compared: {sentence(error)}",)
    return Answer(**answer)


def compile_something(device: torch.device) -> None:
    """Compile a small graph with Inductor, forward and backward, so that nothing of what only the
    first compilation needs is left."""
    x = torch.randn(8, 8, device=device, requires_grad=True)
    compiled = torch.compile(lambda t: (t.sin() @ t).sum(), backend="inductor")
    torch.autograd.backward(compiled(x))


def sentence(error: BaseException) -> str:
    """An exception on one line: its type and its first line, with the next one if that only leads
    up to it, as "backend='inductor' raised:" does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}:"
    while lines and said.endswith(":"):
        said = f"{said} {lines.pop(0)}"
    return said.removesuffix(":")


def _compiling(run: Run, device: torch.device) -> dict[str, Any]:
    """Time the first calls, which compile, beside as many later ones."""
    before = compile_seconds()
    first = [seconds(run, 1, device) for _ in range(WARM_UPS)]
    stages = {
        name: spent - before.get(name, 0.0)
        for name, spent in compile_seconds().items()
        if spent > before.get(name, 0.0)
    }
    later = statistics.median(seconds(run, 1, device) for _ in range(WARM_UPS))
    compile_s = max(0.0, sum(first) - WARM_UPS * later)
    return {"compile_s": compile_s, "stages": stages}


def _peak(run: Run, device: torch.device) -> dict[str, Any]:
    """The most that PyTorch's allocator held during a call; nothing is known of that on a CPU."""
    if device.type != "cuda":
        return {}
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return {"peak_bytes": torch.cuda.max_memory_allocated(device)}


def gradient_error(mode: Mode, subject: Subject) -> dict[str, Any]:
    """The fields of an answer that the error standard decides.

    The mode is compiled anew so that dropout draws eager's numbers. On a GPU those depend on the
    dtype, so modules of dropout are switched off there.
    """
    model, inputs, loss = subject.make()
    step = Step(model, loss)
    dtype = bench_subject.dtype_of(step, inputs)
    if dtype not in testing.UNIT:
        return {"notes": (f"grad_error is unknown: the error standard has no unit for {dtype}",)}
    if bench_subject.device_of(step, inputs).type == "cuda":
        _switch_off_dropout(model)
        if _is_random(step, inputs):
            note = (
                "grad_error is unknown: the model draws random numbers outside of dropout modules, "
                "and on a GPU those differ in fp64"
            )
            return {"notes": (note,)}

    def make(_: int) -> tuple[nn.Module, tuple[Any, ...], None]:
        return Step(copy.deepcopy(model), loss), inputs, None

    # the errors of eager itself stand beside those of any compiled step
    comparison = testing.check_model(
        make,
        dtype=dtype,
        seeds=(subject.seed,),
        backend=mode.backend or "eager",  # type: ignore[arg-type]
        options=mode.options,
    )
    gradients = [t for t in comparison.tensors if t.name.startswith("grad:")]
    if not gradients:
        return {"notes": ("grad_error is unknown: the step has no gradients to compare",)}
    if mode.backend is None:
        return {"grad_error": max(_eager_ratio(t, testing.UNIT[dtype]) for t in gradients)}
    failed = [str(t) for t in comparison.tensors if not t.passed]
    problems = tuple(f"fails the error standard: {said}" for said in failed[:1])
    worst = max(t.ratio for t in gradients)
    return {"grad_error": worst if math.isfinite(worst) else None, "problems": problems}


def _eager_ratio(tensor: testing.TensorComparison, unit: float) -> float:
    """e_eager / max(e_eager, u); 0 where the tensor's error is not relative."""
    return min(1.0, tensor.eager.l2 / unit) if tensor.rule == "relative" else 0.0


def _switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _is_random(step: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether the loss depends on the random state."""
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(copy.deepcopy(step)(*inputs).double())
    return not torch.equal(*losses)


def main(arguments: Sequence[str]) -> None:
    """Answer the request in the first argument in the file that the second one names."""
    request, path = arguments
    values = json.loads(request)
    values["subject"] = Subject(**values["subject"])
    answer = measure(Request(**{**values, "measures": tuple(values["measures"])}))
    Path(path).write_text(json.dumps(dataclasses.asdict(answer)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
