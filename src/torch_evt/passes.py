"""Running passes: one after the other, a verifier behind each, and what happens when one fails."""

from __future__ import annotations

import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from torch_evt import dump
from torch_evt.devices import Device
from torch_evt.errors import PassError
from torch_evt.graphs import signature, tensor_of, verify
from torch_evt.options import Options
from torch_evt.partition.describe import versions
from torch_evt.partition.greedy import Choice
from torch_evt.partition.halves import Label
from torch_evt.partition.optimise import Optimum
from torch_evt.partition.plan import GraphPlan, Half, Plan
from torch_evt.recheck import Expected
from torch_evt.torch_compat import compile_id, timed

log = logging.getLogger("torch_evt")


@dataclass
class State:
    """What the passes of one graph share.

    module: the graph being rewritten. labels: each node's half. expected: what the joint plan
    expects of a half. apart: names of nodes that `recompose` leaves be. optimum, choice: what was
    decided here, and the regions chosen. kernels: the operators placed.
    """

    module: fx.GraphModule
    options: Options
    device: Device
    half: Half | None = None
    num_forward_outputs: int = 0
    expected: Expected | None = None
    apart: frozenset[str] = frozenset()
    labels: dict[fx.Node, Label] = field(default_factory=dict)
    optimum: Optimum | None = None
    choice: Choice = Choice((), ())
    kernels: list[fx.Node] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None


@dataclass(frozen=True)
class Pass:
    """A named step. `evt.disable` leaves it out by its name."""

    name: str
    run: Callable[[State], None]


@contextmanager
def collecting_later() -> Iterator[None]:
    """No collection of garbage inside: the graphs of a large model are a million objects, which
    are all in use, and Python would look at each of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run(passes: tuple[Pass, ...], state: State) -> None:
    """Run passes with a verifier behind each; PassError names the one that failed."""
    for step in passes:
        if step.name in state.options.disable:
            continue
        kind = state.half or "joint"
        start = time.perf_counter()
        try:
            with timed(f"evt.{kind}.{step.name}"):
                before = signature(state.module.graph)
                step.run(state)
                verify(state.module.graph, before, step.name)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise PassError(f"pass {step.name} failed on a {kind} graph ({said})") from error
        seconds = time.perf_counter() - start
        log.debug("%s %s: %.1f ms", kind, step.name, seconds * 1e3)
        write_dump(state, step.name, seconds)


def write_dump(state: State, stage: str, seconds: float) -> None:
    if state.folder is None:
        return
    try:
        dump.write_stage(state.folder, f"{state.half or 'joint'}_{stage}", state.module, seconds)
    except OSError as failure:
        log.warning("evt.dump: nothing more is written, for %s", failure)
        state.folder = None


def write_plan(state: State, plan: GraphPlan) -> None:
    """Add the plan to the graph's dump, if there is one."""
    if state.folder is None:
        return
    found = (tensor_of(node) for node in state.module.graph.nodes)
    device = next((tensor.device.type for tensor in found if tensor is not None), "cpu")
    try:
        dump.write_plan(state.folder, Plan(device, state.device.name, versions(), (plan,)))
    except OSError as failure:
        log.warning("evt.dump: the plan is not written, for %s", failure)


@contextmanager
def falling_back(state: State) -> Iterator[None]:
    """Leave the graph to Inductor when one of our passes fails, unless strict."""
    try:
        yield
    except Exception as error:
        if state.options.strict:
            raise
        state.kernels = []
        state.choice, state.optimum = Choice((), ()), None
        log.warning(
            "%s. This graph is compiled by Inductor alone.%s Set evt.strict to see the exception.",
            error,
            _kept_graph(state),
            exc_info=log.isEnabledFor(logging.DEBUG),
        )
        state.notes.append(f"{error}; this graph was left to Inductor")


def _kept_graph(state: State) -> str:
    """Write the graph that a pass failed on; a sentence that says where it is."""
    try:
        if state.folder is None:
            root = tempfile.mkdtemp(prefix="torch_evt_")
            state.folder = dump.folder_for(root, f"{compile_id()}_failed")
        return f" The graph is in {dump.write_stage(state.folder, 'failed', state.module, 0.0)}."
    except Exception as failure:
        return f" The graph could not be written ({failure})."


def new_folder(options: Options, kind: str) -> Path | None:
    """A new folder for a graph's dump; None where none is asked for or none can be made."""
    if options.dump is None:
        return None
    try:
        return dump.folder_for(options.dump, f"{compile_id()}_{kind}")
    except OSError as failure:
        log.warning("evt.dump: nothing is written, for %s", failure)
        return None


@contextmanager
def describing(options: Options) -> Iterator[None]:
    """A plan that cannot be described must not stop a compilation, unless strict."""
    try:
        yield
    except Exception as error:
        if options.strict:
            raise
        log.warning("the plan could not be described (%r); compiling goes on", error)
