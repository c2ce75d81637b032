"""verify: one real training step, checked region by region, then as a whole.

The step runs with caches off and every region placed where the device has no emitter. Each region
is checked as it runs, on the tensors that it was really given, and nothing of it is kept but
digests, so no more than one region's operands are held at a time beside the step itself:

  1. its outputs against its tree in fp64 (`runtime.check`), NaN in every output before;
  2. its tree against the graph nodes that it replaced, both in fp64 (`report.region_nodes`);
  3. its operands against what they were where they came from (`report.operands`).

Then every tensor of the step is held against eager and fp64 eager by the error standard.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from torch_evt import backend, pipeline
from torch_evt.comparison import UNIT, Comparison, compare
from torch_evt.emit import emitter_for
from torch_evt.errors import VerifyError
from torch_evt.options import split
from torch_evt.partition.describe import versions
from torch_evt.partition.plan import GraphPlan, RegionPlan
from torch_evt.replaced import NoSize, PlacedRegion
from torch_evt.report import region_nodes, reproduction
from torch_evt.report.explain import Loss
from torch_evt.report.operands import Operands
from torch_evt.report.progress import Progress, silent
from torch_evt.report.step import Step, Tensors, devices_of, tensors_of
from torch_evt.report.verification import RegionVerdict, Verification, listed
from torch_evt.runtime.check import Fault, Run, listening
from torch_evt.testing import Fp64Arithmetic, fp64_copy
from torch_evt.torch_compat import caches_disabled, compile_id
from torch_evt.tree.text import to_text

Backend = Callable[..., Callable[..., Any]]


def verify(
    model: Callable[..., Any],
    *inputs: Any,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    folder: str | None = None,
    write: bool = True,
    backend: Backend = backend.evt,
    progress: Progress = silent,
) -> Verification:
    """Run one step with the backend and check everything in it.

    model: a module or a function. inputs, kwargs: of one call, real tensors. loss: as for
    `explain`: makes a scalar of the output; None takes a scalar output, `output.loss` or
    `output["loss"]`, and where there is none, or gradients are off, the forward pass alone is
    verified. options: as for torch.compile; `evt.place` is "always" unless given or the device has
    an emitter, `evt.rng` is "eager" unless given, `evt.verify` is set. seed: of the random numbers.
    dtype: that the step computes in, which sets the error standard's u; None: the coarsest of
    parameters, inputs, autocast and regions. folder: where a reproduction of the first fault is
    written; None: a new temporary folder; write=False: nowhere. backend: what compiles. progress:
    called with what is being done.

    Nothing of the caller's changes: model and inputs are copied. Raises OptionError for a wrong
    option and VerifyError for a model that cannot be copied, or that raises.
    """
    merged = _merged(options, model, inputs, kwargs)
    step = Step.of(model, inputs, dict(kwargs or {}), loss, seed)
    progress("running the step in eager")
    eager = step.run(step.copied(), "eager")
    audit = _Audit(merged, seed, folder if write else None, write, progress)
    progress("compiling the step, and running it")
    ours = audit.run(step, merged, backend)
    notes = [*step.notes, *audit.notes]
    progress("running the step in fp64 eager, and comparing")
    comparison = _against_fp64(step, ours, eager, merged, dtype, audit, notes)
    verdicts = audit.verdicts()
    found = Verification(
        regions=verdicts,
        step=comparison,
        device=devices_of(model, inputs, kwargs)[0].type,
        versions=versions(),
        folder=audit.folder,
        notes=tuple(notes),
        nan=tuple(step.holding(torch.isnan)),
    )
    if not found.passed and audit.folder is None and write:
        found = _with_graph_script(found, audit, step)
    return found


def _merged(
    options: Mapping[str, Any] | None, model: Any, inputs: Any, kwargs: Any
) -> dict[str, Any]:
    """The options of the step. Raises OptionError for wrong ones."""
    if options is not None:
        backend.check_options(options)
    given = dict(options or {})
    split(given)
    if all(emitter_for(device) is None for device in devices_of(model, inputs, kwargs)):
        given.setdefault("evt.place", "always")
    given.setdefault("evt.rng", "eager")
    return {**given, "evt.verify": True}


@dataclass
class _Found:
    """What is known of one region so far."""

    run: Run
    runs: int = 0
    compared: bool = False
    faults: list[Fault] = field(default_factory=list)


@dataclass
class _Captured:
    """A graph as Dynamo captured it, with the inputs of its first call."""

    id: str
    graph: fx.Graph
    inputs: tuple[Any, ...] | None = None


class _Audit:
    """Runs the compiled step and takes every run of a region as it comes."""

    def __init__(
        self,
        options: Mapping[str, Any],
        seed: int,
        folder: str | None,
        write: bool,
        progress: Progress,
    ) -> None:
        self.options = {k: v for k, v in options.items() if k != "evt.verify"}
        self.seed = seed
        self.root = folder
        self.write = write
        self.progress = progress
        self.folder: str | None = None
        self.notes: list[str] = []
        self.plans: list[GraphPlan] = []
        self.placed: dict[str, PlacedRegion] = {}
        self.found: dict[str, _Found] = {}
        self.graphs: list[_Captured] = []
        self.operands = Operands()

    def run(self, step: Step, options: Mapping[str, Any], compile_with: Backend) -> Tensors | None:
        """The compiled step's tensors; None where it raised after a region was found wrong."""

        def capturing(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            captured = _Captured(compile_id(), copy.deepcopy(module.graph))
            self.graphs.append(captured)
            compiled = compile_with(module, inputs, options=options)

            def called(*args: Any) -> Any:
                if captured.inputs is None:
                    captured.inputs = args
                return compiled(*args)

            return called

        model = step.copied()
        compiled = torch.compile(step.function(model), backend=capturing)
        try:
            with (
                caches_disabled(),
                pipeline.observed(self.plans.append),
                pipeline.watched(self._place),
                listening(self._take),
            ):
                ours = step.run(model, "compiled", compiled)
        except VerifyError as error:
            if not any(found.faults for found in self.found.values()):
                raise VerifyError(
                    f"{error}; {len(self.found)} regions ran before that, all of them right. "
                    "options={'evt.place': 'never'} shows whether Inductor alone raises too"
                ) from error
            self.notes.append(str(error))
            return None
        self.notes += [f"graph {plan.id}: {note}" for plan in self.plans for note in plan.notes]
        if not self.placed:
            self.notes.append("no region was placed: the step was compiled by Inductor alone")
        return ours

    def _place(self, region: PlacedRegion) -> None:
        self.placed[region.name] = region

    def _take(self, run: Run) -> None:
        """Check one run of a region; called on the thread that runs it."""
        graph, half, anchor = run.name.split(" ")
        self.progress(f"checking the region at {anchor} ({half} of graph {graph})")
        region = self.placed[run.name]
        found = self.found.setdefault(run.name, _Found(replace(run, inputs=(), results=())))
        found.runs += 1
        moved = self.operands.faults_of(region, run)
        wrong = list(run.faults)
        try:
            wrong += region_nodes.faults_of(region, run)
            found.compared = True
        except NoSize as error:
            self.notes.append(f"{run.name} was not held against its nodes: {error}")
        new = [*moved, *wrong]
        if wrong and self.folder is None and self.write:
            self._write(region, run, new)
        found.faults += [f for f in new if str(f) not in {str(known) for known in found.faults}]

    def _write(self, region: PlacedRegion, run: Run, faults: list[Fault]) -> None:
        try:
            self.folder = str(reproduction.write_region(self.new_root(), region, run, faults))
        except (reproduction.NoScript, NoSize, OSError) as error:
            self.notes.append(f"{run.name} could not be written as a script: {error}")

    def new_root(self) -> str:
        """Where to write."""
        if self.root is None:
            self.root = tempfile.mkdtemp(prefix="torch_evt_verify_")
        return self.root

    def verdicts(self) -> tuple[RegionVerdict, ...]:
        """Every placed region, in the order in which they first ran."""
        plans = {
            f"{plan.id.split(' ')[0]} {region.half} {region.anchor}": region
            for plan in self.plans
            for region in plan.regions
        }
        ran = [_verdict(self.placed[n], plans.get(n), found) for n, found in self.found.items()]
        rest = [n for n in self.placed if n not in self.found]
        return (*ran, *(_verdict(self.placed[name], plans.get(name), None) for name in rest))


def _verdict(region: PlacedRegion, plan: RegionPlan | None, found: _Found | None) -> RegionVerdict:
    graph, half, anchor = region.name.split(" ")
    return RegionVerdict(
        name=plan.name if plan else anchor,
        graph=graph,
        half=half,
        anchor=anchor,
        nodes=region.node_names,
        tree=to_text(found.run.tree) if found else plan.tree if plan else "",
        runs=found.runs if found else 0,
        compared=found.compared if found else False,
        faults=tuple(found.faults) if found else (),
    )


def _against_fp64(
    step: Step,
    ours: Tensors | None,
    eager: Tensors,
    options: Mapping[str, Any],
    dtype: torch.dtype | None,
    audit: _Audit,
    notes: list[str],
) -> Comparison | None:
    """The whole step by the error standard; None, with a note, where it cannot be compared."""
    if ours is None:
        return None
    if (
        options["evt.rng"] != "eager"
        or devices_of(step.model, step.inputs, step.kwargs)[0].type != "cpu"
    ):
        other = replace(step, seed=step.seed + 1)
        again = other.run(step.copied(), "eager")
        if any(not torch.equal(again[name], t) for name, t in eager.items()):
            notes.append(
                "the step draws random numbers that fp64 eager does not draw, so it was not "
                "compared as a whole; switch dropout off, or on a CPU leave evt.rng at eager"
            )
            return None
    double = fp64_copy(step.copied())
    try:
        with Fp64Arithmetic():  # type: ignore[no-untyped-call]
            exact = step.run(double, "fp64", dtype=torch.float64)
    except VerifyError as error:
        notes.append(f"the step was not compared as a whole: {error}")
        return None
    return compare(ours, eager, exact, dtype or _coarsest(step, audit), seed=step.seed)


def _coarsest(step: Step, audit: _Audit) -> torch.dtype:
    """The floating dtype with the largest u among all that the step is known to compute in."""
    tensors = tensors_of(step.model, step.inputs, step.kwargs)
    found = {t.dtype for t in tensors}
    found |= {t.dtype for region in audit.placed.values() for t in region.traced}
    for device in {t.device.type for t in tensors}:
        if torch.is_autocast_enabled(device):
            found.add(torch.get_autocast_dtype(device))
    return max((d for d in found if d in UNIT), key=UNIT.__getitem__, default=torch.float32)


def _with_graph_script(found: Verification, audit: _Audit, step: Step) -> Verification:
    """Add a script of the whole graph, where no single region can show what is wrong."""
    first = found.first_wrong
    graphs = [g for g in audit.graphs if first is None or g.id == first.graph]
    notes = [*found.notes]
    folder: str | None = None
    if first is None and found.step is not None:
        infinite = step.holding(torch.isinf)
        rules = {tensor.rule for tensor in found.step.tensors if not tensor.passed}
        if (found.nan or infinite) and rules == {"non-finite"}:
            notes.append(
                "every region is right, and where tensors are wrong, NaN or infinity stands in "
                f"another place. The inputs hold them: {listed([*found.nan, *infinite])}. The "
                "order of operations decides then what becomes NaN: verify again without them"
            )
        else:
            notes.append("every region is right, so the fault is outside of them: " + _elsewhere())
    if len(graphs) != 1 or graphs[0].inputs is None:
        notes.append(f"the step has {len(audit.graphs)} graphs; verify its parts one by one")
    else:
        wrong = [] if first is None else [str(first), *map(str, first.faults)]
        failed = [] if found.step is None else [str(t) for t in found.step.tensors if not t.passed]
        heading = ["A step of this graph is wrong.", "", *wrong, *failed]
        try:
            folder = str(
                reproduction.write_graph(
                    audit.new_root(),
                    f"graph_{graphs[0].id}",
                    graphs[0].graph,
                    graphs[0].inputs,
                    heading,
                    audit.options,
                    audit.seed,
                )
            )
        except (reproduction.NoScript, OSError) as error:
            notes.append(f"no script could be written: {error}")
    return replace(found, folder=folder, notes=tuple(notes))


def _elsewhere() -> str:
    return (
        "a rewrite of the graph, the cut into halves or Inductor. With options={'evt.place': "
        "'never'} verify says whether Inductor alone is wrong too; with evt.dump every stage can "
        "be run and compared"
    )
