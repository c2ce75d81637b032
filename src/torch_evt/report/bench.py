"""bench: how long a training step takes with the backend, beside eager and Inductor.

All modes are timed in one process, interleaved (`bench_timing`). Compile times, memory and gradient
errors are measured in processes of their own (`bench_process`), before anything is timed here.
As JSON, a contract:

    {"workload", "size", "dtype", "device", "versions": {}, "date" (ISO 8601), "cuda_graphs",
     "modes": {"eager|inductor|max-autotune|evt": {"fwdbwd_ms", "step_ms", "spread_ms",
        "compile_cold_s", "compile_warm_s", "peak_bytes",
        "grad_error" (worst e_mode / max(e_eager, u))}},
     "speedup": {mode: its fwdbwd_ms / evt's}}

What is not known is null. `benchmarks/README.md` says what each field means.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_evt import backend
from torch_evt.emit import emitter_for
from torch_evt.errors import BenchError, OptionError
from torch_evt.partition.describe import versions
from torch_evt.report import bench_subject, bench_timing
from torch_evt.report.bench_process import (
    COMPILE,
    GRADIENTS,
    PEAK,
    Answer,
    Request,
    in_fresh_process,
    sentence,
)
from torch_evt.report.bench_subject import Mode, Step, Subject
from torch_evt.report.bench_timing import Run, Samples
from torch_evt.report.progress import Progress, silent
from torch_evt.runtime import counters
from torch_evt.torch_compat import cache_folder_set

AGAINST = ("eager", "inductor")
EVT = "evt"
SAID_EVERY = 5
"""Samples of which one is told to who waits."""
NOISY = 0.1
"""A spread above this share of the median is worth a warning."""


@dataclass(frozen=True)
class ModeResult:
    """The contract's numbers of one mode, None where unknown.

    fwdbwd_ms: forward + backward, the median. spread_ms: the distance of its quartiles. step_ms:
    forward + backward + fused AdamW. compile_cold_s, compile_warm_s: what the first calls take
    beyond later ones in a new process, with an empty cache folder and with the one that the first
    process left. peak_bytes: of a forward and backward, on a GPU. grad_error: worst
    e_mode / max(e_eager, u).
    """

    fwdbwd_ms: float | None = None
    step_ms: float | None = None
    spread_ms: float | None = None
    compile_cold_s: float | None = None
    compile_warm_s: float | None = None
    peak_bytes: int | None = None
    grad_error: float | None = None


@dataclass(frozen=True)
class Bench:
    """What was measured; `to_json` leaves out what only people need.

    problems: by mode, sentences on what failed or is wrong. notes: why something is unknown of
    every mode alike. regions: how many regions one step of evt ran; None where evt did not run.
    reference: whether they ran as plain PyTorch.
    """

    workload: str
    size: str | None
    dtype: str
    device: str
    versions: Mapping[str, str]
    date: str
    cuda_graphs: bool
    modes: Mapping[str, ModeResult]
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    regions: int | None = None
    reference: bool = False

    @property
    def speedup(self) -> dict[str, float | None]:
        """Each other mode's forward + backward over evt's: above 1, evt is the faster one."""
        ours = self.modes[EVT].fwdbwd_ms
        return {
            name: result.fwdbwd_ms / ours if result.fwdbwd_ms and ours else None
            for name, result in self.modes.items()
            if name != EVT
        }

    @property
    def sound(self) -> bool:
        """Whether nothing went wrong in evt's own mode."""
        return not self.problems.get(EVT)


def bench(
    what: str,
    *,
    against: Sequence[str] = AGAINST,
    size: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    cuda_graphs: bool | None = None,
    repeats: int = 20,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    compile_time: bool = True,
    check: bool = True,
    progress: Progress | None = None,
) -> Bench:
    """Measure a workload, or "module:function", with backend="evt" and in the modes `against`.

    against: of eager, inductor, max-autotune. size, dtype (fp32, bf16, fp16), device (cpu, cuda):
    of a workload; by default tiny, fp32, and the GPU where there is one. cuda_graphs: capture every
    mode as a CUDA graph, or none; by default yes on a GPU. repeats: samples of each mode. seed: of
    weights, inputs and dropout. options: evt's, as for torch.compile. compile_time, check: False
    leaves out the compile times or the gradient errors, each of which starts processes. progress:
    called with what is being done.

    A mode that fails has None for what it could not do, and the reason in `problems`; the others
    are measured all the same. Raises OptionError, TargetError or BenchError for arguments that
    cannot be, and what the model raises in eager.
    """
    say = progress or silent
    names = list(dict.fromkeys([*against, EVT]))
    options = dict(options or {})
    modes = {name: bench_subject.mode(name, options) for name in names}
    backend.check_options(options)
    if repeats < 1:
        raise OptionError(f"repeats must be at least 1, not {repeats}")
    subject = bench_subject.subject(what, size, dtype, device, seed)
    say(f"running {what} once in eager")
    step, inputs = _made(subject)
    where = bench_subject.device_of(step, inputs)
    graphs = where.type == "cuda" if cuda_graphs is None else cuda_graphs
    if graphs and where.type != "cuda":
        raise BenchError(f"CUDA graphs need a CUDA GPU, and {what} runs on the {where.type}")
    optimizer = _check_step(step, inputs, capturable=graphs)

    with tempfile.TemporaryDirectory(prefix="torch_evt_bench_") as folder:
        folders = {name: os.path.join(folder, name) for name in names}
        answers = {}
        for name in names:
            request = Request(subject, name, options, ())
            wanted = (compile_time and modes[name].backend is not None, check)
            answers[name] = _in_processes(request, folders[name], where, wanted, say)
        prepared = {}
        for name in names:
            say(f"compiling {name}")
            context = cache_folder_set(folders[name]) if compile_time else nullcontext()
            with context:
                prepared[name] = _prepare(modes[name], step, inputs, optimizer)
        runs = _runs(prepared, graphs, say)

        def begun(sample: int) -> None:
            if sample % SAID_EVERY == 1:
                say(f"timing {', '.join(names)}: sample {sample} of {repeats}")

        samples = bench_timing.interleaved(runs, repeats, where, begun)

    results, problems = {}, {}
    for name in names:
        results[name], found = _result(name, answers[name], prepared[name], samples)
        if found:
            problems[name] = found
    ours = prepared[EVT]
    return Bench(
        workload=what,
        size=subject.size,
        dtype=subject.dtype or bench_subject.dtype_name(bench_subject.dtype_of(step, inputs)),
        device=device_name(where),
        versions=versions(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        cuda_graphs=graphs,
        modes=results,
        problems=problems,
        notes=_notes(optimizer, [warm for _, warm in answers.values()], results),
        regions=ours.regions if "fwdbwd" in ours.runs else None,
        reference=emitter_for(where) is None,
    )


def to_json(result: Bench) -> dict[str, Any]:
    """The contract's fields, as `json.dumps` takes them."""
    return {
        "workload": result.workload,
        "size": result.size,
        "dtype": result.dtype,
        "device": result.device,
        "versions": dict(result.versions),
        "date": result.date,
        "cuda_graphs": result.cuda_graphs,
        "modes": {name: dataclasses.asdict(mode) for name, mode in result.modes.items()},
        "speedup": result.speedup,
    }


def to_json_text(result: Bench) -> str:
    """The same as text, indented."""
    return json.dumps(to_json(result), indent=2, allow_nan=False) + "\n"


def device_name(device: torch.device) -> str:
    """The GPU's product name, or the CPU's with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        name = found[1] if found else name
    return f"{name}, {torch.get_num_threads()} threads"


@dataclass
class _Prepared:
    """A mode that has compiled: its runs, by "fwdbwd" and "step"; regions that one step ran."""

    runs: dict[str, Run] = field(default_factory=dict)
    regions: int = 0
    problems: list[str] = field(default_factory=list)


def _made(subject: Subject) -> tuple[Step, tuple[Any, ...]]:
    model, inputs, loss = subject.make()
    return Step(model, loss), inputs


def _check_step(
    step: nn.Module, inputs: tuple[Any, ...], capturable: bool
) -> torch.optim.Optimizer | str:
    """Run the step in eager and prepare its optimizer; a sentence where that cannot be used.

    Raises BenchError if it is no training step.
    """
    loss = step(*inputs)
    if loss.numel() != 1:
        raise BenchError(f"the loss must be a scalar, not of shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        raise BenchError("nothing in the model needs a gradient, and bench measures training")
    torch.autograd.backward(loss)
    gradients = [p.grad for p in step.parameters() if p.grad is not None]
    if not all(bool(g.isfinite().all()) for g in gradients):
        return "step_ms is unknown: the gradients are not finite in eager"
    try:
        optimizer = bench_timing.fused_adamw(step, capturable)
        optimizer.step()
    except Exception as error:
        return f"step_ms is unknown: fused AdamW does not run in eager: {sentence(error)}"
    optimizer.zero_grad()
    return optimizer


def _in_processes(
    request: Request,
    folder: str,
    device: torch.device,
    wanted: tuple[bool, bool],
    say: Progress,
) -> tuple[Answer, Answer]:
    """(cold, warm): what a process with an empty cache folder found, and one after it."""
    compile_time, check = wanted
    cold = warm = Answer()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if compile_time:
        say(f"compiling {request.mode} in a new process with an empty cache")
        cold = in_fresh_process(dataclasses.replace(request, measures=(COMPILE,)), folder)
        if cold.problems:
            return cold, Answer()
    measures = [COMPILE] * compile_time + [PEAK] * (device.type == "cuda") + [GRADIENTS] * check
    if measures:
        say(f"measuring {request.mode} in a new process")
        warm = in_fresh_process(dataclasses.replace(request, measures=tuple(measures)), folder)
    return cold, warm


def _prepare(
    mode: Mode,
    step: nn.Module,
    inputs: tuple[Any, ...],
    optimizer: torch.optim.Optimizer | str,
) -> _Prepared:
    """Compile a mode and call it until it has settled."""
    prepared = _Prepared()
    limit = torch._dynamo.config.recompile_limit
    # modules within the step that Dynamo compiles by themselves are compiled once for each mode
    with torch._dynamo.config.patch(recompile_limit=limit * len(bench_subject.MODES)):
        run = bench_timing.forward_backward(step, inputs, mode.compiled(step))
        try:
            bench_timing.warmed_up(run)
            before = sum(counters.region_runs.values())
            run()
            prepared.regions = sum(counters.region_runs.values()) - before
        except Exception as error:
            prepared.problems.append(f"does not run: {sentence(error)}")
            return prepared
        prepared.runs["fwdbwd"] = run
        if isinstance(optimizer, torch.optim.Optimizer):
            prepared.runs["step"] = bench_timing.with_optimizer(run, optimizer)
    return prepared


def _notes(
    optimizer: torch.optim.Optimizer | str,
    answers: Sequence[Answer],
    results: Mapping[str, ModeResult],
) -> tuple[str, ...]:
    """What is unknown of every mode, each once, and whether the times can be relied on."""
    notes = [optimizer] if isinstance(optimizer, str) else []
    notes += [note for answer in answers for note in answer.notes]
    noisy = [
        name
        for name, mode in results.items()
        if mode.fwdbwd_ms and mode.spread_ms and mode.spread_ms > NOISY * mode.fwdbwd_ms
    ]
    if noisy:
        notes.append(
            f"the times of {', '.join(noisy)} spread by more than {NOISY:.0%} of the median: "
            "repeat it on an idle machine, or with more repeats"
        )
    return tuple(dict.fromkeys(notes))


def _runs(prepared: Mapping[str, _Prepared], graphs: bool, say: Progress) -> dict[str, Run]:
    """Everything to be timed, by "mode/what"; captured as CUDA graphs if asked for."""
    runs = {}
    pool = torch.cuda.graph_pool_handle() if graphs else None
    for name, mode in prepared.items():
        for what, run in mode.runs.items():
            if graphs:
                say(f"capturing {name}")
                try:
                    run = bench_timing.captured(run, pool)
                except Exception as error:
                    mode.problems.append(f"its {what} cannot be captured: {sentence(error)}")
                    continue
            runs[f"{name}/{what}"] = run
    return runs


def _result(
    name: str,
    answers: tuple[Answer, Answer],
    prepared: _Prepared,
    samples: Mapping[str, Samples | Exception],
) -> tuple[ModeResult, tuple[str, ...]]:
    cold, warm = answers
    problems = [*prepared.problems, *cold.problems, *warm.problems]
    timed: dict[str, Samples] = {}
    for what in ("fwdbwd", "step"):
        found = samples.get(f"{name}/{what}")
        if isinstance(found, Samples):
            timed[what] = found
        elif found is not None:
            problems.append(f"its {what} stopped running: {sentence(found)}")
    fwdbwd, step = timed.get("fwdbwd"), timed.get("step")
    return ModeResult(
        fwdbwd_ms=fwdbwd.median if fwdbwd else None,
        step_ms=step.median if step else None,
        spread_ms=fwdbwd.spread if fwdbwd else None,
        compile_cold_s=cold.compile_s,
        compile_warm_s=warm.compile_s,
        peak_bytes=warm.peak_bytes,
        grad_error=warm.grad_error,
    ), tuple(dict.fromkeys(problems))
