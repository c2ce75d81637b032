"""How long planning takes: from AOTAutograd's joint graph to the plan, and where the time goes.

    python benchmarks/planning.py [--cases 1000-equal,bert-large-24] [--repeats 1]

Joint training graphs of about 1,000 and 10,000 nodes, once of equal layers and once of layers that
all differ in width, and BERT-large with 12, 24 and 48 layers: transformer blocks with dropout and
their loss under bf16 autocast, on fake tensors, with attention as one node. The graphs are traced
by AOTAutograd alone: Dynamo and Inductor's own passes on the joint graph are left out, which take
longer than all that is measured here and would only fold a few constants.

What is timed is `pipeline.partition`, which is all that the backend adds to Inductor. Planning is
what of it leads from the graph to the plan: rewrites, the plan itself, checking it again on both
halves, and its description. Placing the regions afterwards, and min-cut, which is PyTorch's, are
shown beside it and do not count. Ends with 1 if a case is beyond its limit.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from torch_evt import devices, options, pipeline
from torch_evt.graphs import copy_of
from torch_evt.options import Options
from torch_evt.partition.describe import versions
from torch_evt.partition.plan import GraphPlan
from torch_evt.report.bench import device_name
from torch_evt.report.opaque_attention import attention
from torch_evt.torch_compat import compile_seconds, decomposition_table
from torch_evt.workloads import bert_large
from torch_evt.workloads.layers import cross_entropy

RESULTS = Path(__file__).parent / "results"
MIN_CUT = "min_cut_rematerialization_partition"
PLACING = [f"evt.{half}.{step}" for half in ("forward", "backward") for step in ("place", "expand")]


@dataclass(frozen=True)
class Case:
    """widths: of each layer of a stack; None for BERT-large with `layers` layers.
    limit_s: seconds that planning may take, None for any."""

    layers: int
    widths: tuple[int, ...] | None
    limit_s: float | None = None


def _equal(layers: int, limit_s: float) -> Case:
    return Case(layers, (1024,) * layers, limit_s)


def _different(layers: int, limit_s: float) -> Case:
    return Case(layers, tuple(512 + 64 * i for i in range(layers)), limit_s)


CASES: Mapping[str, Case] = {
    "1000-equal": _equal(4, 3.0),
    "1000-different": _different(4, 3.0),
    "10000-equal": _equal(40, 30.0),
    "10000-different": _different(38, 30.0),
    "bert-large-12": Case(12, None),
    "bert-large-24": Case(24, None),
    "bert-large-48": Case(48, None),
}


class Stack(nn.Module):
    """BERT's blocks of the given widths, a product between two that differ, a head, and its loss.

    (x [batch, length, first width], mask: bool [batch, length], labels: int64 [batch, length]) ->
    scalar.
    """

    def __init__(self, widths: Sequence[int], vocabulary: int, batch: int, length: int) -> None:
        super().__init__()
        sizes = [bert_large.Size(1, width, 8, vocabulary, batch, length) for width in widths]
        self.blocks = nn.ModuleList(bert_large.Block(size) for size in sizes)
        self.between = nn.ModuleList(
            nn.Identity() if before == after else nn.Linear(before, after)
            for before, after in zip(widths[:1] + widths[:-1], widths, strict=True)
        )
        self.head = nn.Linear(widths[-1], vocabulary)

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        for between, block in zip(self.between, self.blocks, strict=True):
            x = block(between(x), mask)
        return cross_entropy(self.head(x), labels)


@dataclass(frozen=True)
class Joint:
    """What AOTAutograd gives its partitioner."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    kwargs: dict[str, Any]


class _CapturedError(Exception):
    """Ends AOTAutograd where it would cut the graph."""


def traced(case: Case, *, batch: int = 32, length: int = 512, vocabulary: int = 30528) -> Joint:
    """The joint graph of a training step of the case."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask = torch.ones(batch, length, dtype=torch.bool)
        labels = torch.zeros(batch, length, dtype=torch.int64)
        if case.widths is not None:
            model: nn.Module = Stack(case.widths, vocabulary, batch, length)
            inputs = (torch.randn(batch, length, case.widths[0]), mask, labels)
        else:
            paper = bert_large.SIZES["paper"]
            size = bert_large.Size(case.layers, paper.width, paper.heads, vocabulary, batch, length)
            model = bert_large.Bert(size)
            pairs = torch.zeros(batch, dtype=torch.int64)
            inputs = (labels, labels, mask, labels, pairs)
        return _captured(model, inputs, is_bert=case.widths is None)


def _captured(model: nn.Module, inputs: tuple[Tensor, ...], *, is_bert: bool) -> Joint:
    names, values = zip(*model.named_parameters(), strict=True)
    found: list[Joint] = []

    def step(*arguments: Tensor) -> Tensor:
        given, parameters = arguments[: len(inputs)], arguments[len(inputs) :]
        replaced = dict(zip(names, parameters, strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            if not is_bert:
                return torch.func.functional_call(model, replaced, given)  # type: ignore[no-any-return]
            output = torch.func.functional_call(model, replaced, given[:3])
            return bert_large.pretraining_loss(output, *given[3:])

    def capture(module: fx.GraphModule, arguments: Sequence[Any], **kwargs: Any) -> Any:
        found.append(Joint(module, arguments, kwargs))
        raise _CapturedError

    compiled = aot_function(
        step,
        fw_compiler=lambda module, _: module,
        partition_fn=capture,
        decompositions=decomposition_table(),
    )
    as_one_node = mock.patch.object(F, "scaled_dot_product_attention", attention)
    with as_one_node, contextlib.suppress(_CapturedError):
        compiled(*inputs, *values)
    return found[0]


def planned(joint: Joint, given: Options) -> tuple[GraphPlan, float, dict[str, float]]:
    """The plan of a joint graph, what it took in seconds, and the seconds of every stage: min-cut
    by PyTorch's name, ours as "evt.<graph>.<pass>", parts of a pass as "evt.<graph>.<pass>.<part>".
    """
    plans: list[GraphPlan] = []
    module = copy_of(joint.module)  # min-cut changes the graph that it gets
    gc.collect()
    before = compile_seconds()
    start = time.perf_counter()
    with pipeline.observed(plans.append):
        pipeline.partition(module, joint.inputs, given, None, dict(joint.kwargs))
    seconds = time.perf_counter() - start
    after = compile_seconds()
    stages = {name: after[name] - before.get(name, 0.0) for name in after}
    shown = {n: s for n, s in stages.items() if s > 0 and (n == MIN_CUT or n.startswith("evt."))}
    return plans[0], seconds, shown


def summary(samples: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, Any]:
    """A case's times from (seconds, stages) of each repeat: the median of planning alone, every
    sample of it, and the stages of the median."""
    placing = [sum(stages.get(name, 0.0) for name in PLACING) for _, stages in samples]
    cuts = [stages.get(MIN_CUT, 0.0) for _, stages in samples]
    planning = [s - p - c for (s, _), p, c in zip(samples, placing, cuts, strict=True)]
    middle = planning.index(statistics.median_low(planning))
    stages = {n: s for n, s in samples[middle][1].items() if n not in (MIN_CUT, *PLACING)}
    passes = sum(seconds for name, seconds in stages.items() if name.count(".") == 2)
    return {
        "planning_s": planning[middle],
        "samples_s": planning,
        "placing_s": placing[middle],
        "min_cut_s": cuts[middle],
        "stages": {**stages, "evt, the rest": planning[middle] - passes},
    }


def measure(case: Case, given: Options, repeats: int) -> dict[str, Any]:
    """A case's entry."""
    load = os.getloadavg()[0]
    start = time.perf_counter()
    joint = traced(case)
    trace = time.perf_counter() - start
    runs = [planned(joint, given) for _ in range(repeats)]
    plan = runs[0][0]
    return {
        "load_before": load,
        "layers": case.layers,
        "nodes": sum(node.op == "call_function" for node in joint.module.graph.nodes),
        "limit_s": case.limit_s,
        "trace_s": trace,
        **summary([(seconds, stages) for _, seconds, stages in runs]),
        "solver": plan.solver,
        "optimal": plan.optimal,
        "objective_us": plan.objective_us,
        "regions": len(plan.regions),
        "unfused": len(plan.unfused),
    }


def within_limits(result: Mapping[str, Any]) -> bool:
    """Whether every case that has a limit kept it."""
    return all(
        entry["limit_s"] is None or entry["planning_s"] <= entry["limit_s"]
        for entry in result["cases"].values()
    )


def table(result: Mapping[str, Any]) -> Table:
    """One row a case."""
    title = f"planning, target {result['target']}, {result['device']}"
    found = Table(title=title, box=SIMPLE_HEAD)
    found.add_column("case", no_wrap=True)
    for column in ("nodes", "s", "limit", "plan", "recheck", "rest", "place", "cut"):
        found.add_column(column, justify="right", no_wrap=True)
    found.caption = "s: from graph to plan; place, cut (min-cut): not counted"
    for name, entry in result["cases"].items():
        stages, limit = entry["stages"], entry["limit_s"]
        plan = stages.get("evt.joint.plan", 0.0)
        again = sum(stages.get(f"evt.{half}.recheck", 0.0) for half in ("forward", "backward"))
        over = limit is not None and entry["planning_s"] > limit
        found.add_row(
            name,
            str(entry["nodes"]),
            f"{entry['planning_s']:.2f}",
            "" if limit is None else f"{limit:g}",
            *(f"{seconds:.2f}" for seconds in (plan, again, entry["planning_s"] - plan - again)),
            *(f"{entry[key]:.2f}" for key in ("placing_s", "min_cut_s")),
            style="red" if over else None,
        )
    return found


def details(result: Mapping[str, Any]) -> list[str]:
    """A line for every case: where the time went, parts of a pass behind it."""
    lines = []
    for name, entry in result["cases"].items():
        ranked = sorted(entry["stages"].items(), key=lambda item: -item[1])
        shown = [f"{stage.removeprefix('evt.')} {s:.2f} s" for stage, s in ranked if s >= 0.01]
        lines.append(f"{name}: {', '.join(shown[:10])}")
    return lines


def _warm_up(given: Options) -> None:
    planned(traced(Case(1, (64,)), batch=2, length=8, vocabulary=64), given)


@click.command()
@click.option("--cases", "chosen", help="Names with commas between; default: all.")
@click.option("--target", type=click.Choice(list(devices.DEVICES)), default="h200")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False))
def main(chosen: str | None, target: str, repeats: int, output: Path | None) -> None:
    """Measure how long planning takes, by case and stage."""
    console = Console()
    now = datetime.datetime.now(datetime.timezone.utc)
    names = chosen.split(",") if chosen else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise click.ClickException(f"unknown case {unknown[0]!r}; known: {', '.join(CASES)}")
    given, _ = options.split({"evt.target": target, "evt.place": "always", "evt.strict": True})
    _warm_up(given)
    result: dict[str, Any] = {
        "what": "planning",
        "date": now.isoformat(timespec="seconds"),
        "device": device_name(torch.device("cpu")),
        "versions": versions(),
        "target": target,
        "repeats": repeats,
        "cases": {},
    }
    path = output or RESULTS / f"{now:%Y-%m-%d}-cpu-planning.json"
    for name in names:
        entry = result["cases"][name] = measure(CASES[name], given, repeats)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        console.print(f"{name}: {entry['nodes']} nodes, {entry['planning_s']:.2f} s", markup=False)
    console.print(table(result))
    for line in details(result):
        console.print(line, markup=False, highlight=False)
    sys.exit(not within_limits(result))


if __name__ == "__main__":
    main()
