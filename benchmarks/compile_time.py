"""How long compiling takes, against Inductor alone: the target is within 1.3x of Inductor's.

    python benchmarks/compile_time.py [--workloads mlp,gpt2-medium] [--device cuda] [--modes M,N]

Every figure is the median of three processes, each with an empty cache folder, after a small graph
that pays for the first compilation (`torch_evt.report.bench_process`). The modes take turns. What
is measured is written to results/ after every workload, so that a run can be broken off: without
--workloads the next one measures what the file lacks. Ends with 1 if a ratio is beyond the limit
or a mode failed.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from torch_evt import workloads
from torch_evt.errors import EvtError
from torch_evt.partition.describe import versions
from torch_evt.report.bench import device_name
from torch_evt.report.bench_process import COMPILE, Answer, Request, in_fresh_process
from torch_evt.report.bench_subject import DEVICES, DTYPES, Subject, subject

LIMIT = 1.3
MODES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "inductor": ("inductor", {}),
    "evt": ("evt", {}),
    "evt-always": ("evt", {"evt.place": "always"}),
}
"""Name here -> mode of `bench` and evt's options."""

RESULTS = Path(__file__).parent / "results"


def _is_pass(name: str) -> bool:
    """Whether a stage is one of our passes, "evt.<graph>.<pass>", and not a part of one."""
    return name.startswith("evt.") and name.count(".") == 2


def by_stage(stages: Mapping[str, float], compile_s: float) -> dict[str, float]:
    """Seconds of each stage, which add up to compile_s.

    stages: PyTorch's own times by its names, where one holds those inside it, and ours as
    "evt.<graph>.<pass>". A stage that did not run has no entry.
    """

    def spent(*names: str) -> float:
        return sum(stages.get(name, 0.0) for name in names)

    passes = {name: seconds for name, seconds in stages.items() if _is_pass(name)}
    frames = spent("_compile.compile_inner")
    aot = spent("create_aot_dispatcher_function")
    joint = spent("_recursive_joint_graph_passes")
    min_cut = spent("min_cut_rematerialization_partition")
    # our partitioner calls min-cut; without it Inductor does
    partitioner = max(spent("Partitioner"), min_cut)
    forward = spent("compile_fx.<locals>.fw_compiler_base")
    backward = spent("compile_fx.<locals>.bw_compiler")
    found = {
        "dynamo": frames - aot,
        "aot": aot - joint - partitioner - forward,
        "inductor's joint passes": joint,
        **passes,
        "evt, the rest": partitioner - min_cut - sum(passes.values()),
        "min-cut": min_cut,
        "inductor": forward + backward,
        "first run": compile_s - frames - backward,
    }
    return {name: seconds for name, seconds in found.items() if seconds}


def of_evt(stages: Mapping[str, float]) -> float:
    """The seconds among `by_stage`'s that are ours."""
    return sum(seconds for name, seconds in stages.items() if name.startswith("evt"))


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """One mode's entry: the median, every sample, and the stages of the median's process."""
    problems = [problem for answer in answers for problem in answer.problems]
    known = [answer for answer in answers if answer.compile_s is not None]
    if problems or not known:
        return {"compile_s": None, "samples_s": [], "stages": {}, "problems": problems}
    samples = [answer.compile_s for answer in known]
    middle = statistics.median_low(samples)
    chosen = next(answer for answer in known if answer.compile_s == middle)
    return {
        "compile_s": middle,
        "samples_s": samples,
        "stages": by_stage(chosen.stages, middle),
        "problems": [],
    }


def ratios(modes: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Every other mode's median over Inductor's; None where one is unknown."""
    base = modes["inductor"]["compile_s"]
    return {
        name: entry["compile_s"] / base if base and entry["compile_s"] is not None else None
        for name, entry in modes.items()
        if name != "inductor"
    }


def measure(made: Subject, modes: Sequence[str], repeats: int, console: Console) -> dict[str, Any]:
    """A workload's entry: the modes, `repeats` processes each, taking turns."""
    load = os.getloadavg()[0]
    answers: dict[str, list[Answer]] = {mode: [] for mode in modes}
    for number in range(repeats):
        for mode in modes:
            backend, options = MODES[mode]
            request = Request(made, backend, options, (COMPILE,))
            with tempfile.TemporaryDirectory() as folder:
                answer = in_fresh_process(request, folder)
            answers[mode].append(answer)
            said = "; ".join(answer.problems) or f"{answer.compile_s:.1f} s"
            console.print(f"{made.what}, {mode}, {number + 1} of {repeats}: {said}", markup=False)
    found = {mode: summary(all_of_it) for mode, all_of_it in answers.items()}
    return {"load_before": load, "modes": found, "ratio": ratios(found)}


def within_limit(result: Mapping[str, Any]) -> bool:
    """Whether all that was measured is known and within the limit."""
    found = [ratio for entry in result["workloads"].values() for ratio in entry["ratio"].values()]
    return bool(found) and all(ratio is not None and ratio <= LIMIT for ratio in found)


def table(result: Mapping[str, Any]) -> Table:
    """One row a workload and mode."""
    found = Table(title=f"compile time, {result['size']}, {result['dtype']}, {result['device']}")
    found.add_column("workload", no_wrap=True)
    found.add_column("mode", no_wrap=True)
    for column in ("s", "ratio", "trace", "evt", "min-cut", "inductor", "run"):
        found.add_column(column, justify="right")
    found.caption = "s: medians; ratio: to inductor; trace: Dynamo, AOTAutograd and joint passes"
    for workload, entry in result["workloads"].items():
        for mode, values in entry["modes"].items():
            if values["compile_s"] is None:
                found.add_row(workload, mode, "-")
                continue
            stages, ratio = values["stages"], entry["ratio"].get(mode)
            traced = ("dynamo", "aot", "inductor's joint passes")
            seconds = (
                sum(stages.get(name, 0.0) for name in traced),
                of_evt(stages),
                *(stages.get(name, 0.0) for name in ("min-cut", "inductor", "first run")),
            )
            found.add_row(
                workload,
                mode,
                f"{values['compile_s']:.1f}",
                "" if ratio is None else f"{ratio:.2f}",
                *(f"{s:.2f}" for s in seconds),
            )
    return found


def details(result: Mapping[str, Any]) -> list[str]:
    """A line for every mode: what failed, or where our own passes spent their time."""
    lines = []
    for workload, entry in result["workloads"].items():
        for mode, values in entry["modes"].items():
            ours = sorted((s, n) for n, s in values["stages"].items() if n.startswith("evt"))
            shown = [f"{name} {s:.2f} s" for s, name in reversed(ours) if s >= 0.01]
            said = values["problems"] or [", ".join(shown[:5])]
            lines += [f"{workload}, {mode}: {text}" for text in said if text]
    return lines


def opened(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """The result that a file holds, to be continued, or a new one.

    Raises click.ClickException where the file's was measured under other conditions.
    """
    if not path.exists():
        return {**head, "workloads": {}}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in head.items():
        if name != "date" and result.get(name) != value:
            raise click.ClickException(
                f"{path} was measured with another {name} ({result.get(name)}, now {value}); "
                "name another file with --output"
            )
    return result


@click.command()
@click.option("--workloads", "chosen", help="Names with commas between; default: what is missing.")
@click.option("--size", default="small", show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="fp32", show_default=True)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--modes", default=",".join(MODES), show_default=True, help="inductor among them.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False))
def main(
    chosen: str | None,
    size: str,
    dtype: str,
    device: str,
    repeats: int,
    modes: str,
    output: Path | None,
) -> None:
    """Measure compile times against Inductor's, per stage."""
    console = Console()
    now = datetime.datetime.now(datetime.timezone.utc)
    path = output or RESULTS / f"{now:%Y-%m-%d}-{device}-compile-time.json"
    names = chosen.split(",") if chosen else list(workloads.names())
    wanted = modes.split(",")
    if "inductor" not in wanted or not MODES.keys() >= set(wanted):
        raise click.ClickException(f"--modes takes inductor and some of {', '.join(MODES)}")
    try:
        subjects = {name: subject(name, size, dtype, device, seed=0) for name in names}
    except EvtError as error:
        raise click.ClickException(str(error)) from error
    head = {
        "what": "compile time",
        "date": now.isoformat(timespec="seconds"),
        "device": device_name(torch.device(device)),
        "versions": versions(),
        "size": size,
        "dtype": dtype,
        "repeats": repeats,
        "limit": LIMIT,
    }
    result = opened(path, head)
    for name in names:
        if chosen or name not in result["workloads"]:
            entry = measure(subjects[name], wanted, repeats, console)
            result["workloads"][name] = {"date": head["date"], **entry}
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(table(result))
    for line in details(result):
        console.print(line, markup=False, highlight=False)
    sys.exit(not within_limit(result))


if __name__ == "__main__":
    main()
