"""The compiler, from top to bottom: what happens to a graph, in order.

Training (`partition`): the joint graph is canonicalised, recomposed and planned; the rewritten
graph is cut in halves by min-cut; on each half the planned regions are checked again and placed,
or, where min-cut decided otherwise, chosen anew. Inference (`transform_inference`): the same on the
one graph. Between any two passes a verifier checks the graph.

A graph in which nothing is placed goes on as AOTAutograd made it, and so does one in which a pass
fails, unless `evt.strict` asks for the exception. Only values that have another dtype than the
graph says are mended in every graph (`joint.declared_dtypes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from torch_evt import decisions, devices, passes, recheck, replaced, summary
from torch_evt.decisions import observed as observed
from torch_evt.devices import Device
from torch_evt.emit import emitter_for
from torch_evt.graphs import (
    copy_of,
    module_of,
    output_node,
    renumbered,
    replace_contents,
    tensor_of,
)
from torch_evt.joint import (
    algebra,
    canonicalise,
    common_subexpressions,
    declared_dtypes,
    eager_dropout,
    recompose,
    reduction_elimination,
)
from torch_evt.options import Options
from torch_evt.partition import cut, describe, place
from torch_evt.partition.candidates import Rules
from torch_evt.partition.early import masks_apart
from torch_evt.partition.greedy import Choice
from torch_evt.partition.halves import label_all, label_joint
from torch_evt.partition.kernels import Saving
from torch_evt.partition.maxima import mark_compared
from torch_evt.partition.optimise import optimise
from torch_evt.partition.plan import Half
from torch_evt.passes import (
    Pass,
    State,
    collecting_later,
    describing,
    falling_back,
    new_folder,
    write_dump,
    write_plan,
)
from torch_evt.recheck import Expected
from torch_evt.replaced import PlacedRegion
from torch_evt.torch_compat import Partitioner, compile_id, has_memory_budget, run_partitioner

_TRAINING_HALF = "torch_evt_training_half"


def _canonicalise(state: State) -> None:
    canonicalise.apply(state.module.graph)


def _eager_dropout(state: State) -> None:
    if state.options.rng == "eager":
        eager_dropout.apply(state.module.graph)


def _merge_equal(state: State) -> None:
    common_subexpressions.apply(state.module.graph)


def _recompose(state: State) -> None:
    graph, exact = state.module.graph, state.options.precision == "eager"
    if state.half is None:
        state.apart = masks_apart(graph, state.num_forward_outputs)
    recompose.apply(graph, exact_rounding=exact, apart=state.apart)


def _eliminate_reductions(state: State) -> None:
    graph, exact = state.module.graph, state.options.precision == "eager"
    if reduction_elimination.apply(graph, exact_rounding=exact):
        common_subexpressions.apply(graph)


def _algebra(state: State) -> None:
    graph = state.module.graph
    if state.options.precision == "fused" and algebra.apply(graph):
        common_subexpressions.apply(graph)


def _plan(state: State) -> None:
    graph = state.module.graph
    mark_compared(graph)
    if state.half is None:
        state.labels = label_joint(graph, state.num_forward_outputs)
    else:
        state.labels = label_all(graph, state.half)
    nodes = state.options.solver_nodes
    if nodes and state.half is None and has_memory_budget():
        nodes = 0
        state.notes.append(
            "activation_memory_budget is set: min-cut decides what is saved, and then each half is "
            "planned; evt.memory_budget would leave both to one plan"
        )
    state.optimum = optimise(
        graph,
        state.device,
        _rules(state),
        state.num_forward_outputs,
        _saving(state),
        nodes=nodes,
    )
    state.choice = state.optimum.choice
    state.notes += state.optimum.notes


def _recheck(state: State) -> None:
    """Find the planned regions again on a real half; choose anew where one does not stand."""
    assert state.expected is not None
    state.labels = label_all(state.module.graph, state.expected.half)
    found = recheck.find(
        state.module.graph,
        state.expected,
        state.device,
        _rules(state),
        solver_nodes=state.options.solver_nodes,
    )
    state.choice, state.optimum = found.choice, found.optimum
    state.notes += [found.note] if found.note else []


def _place(state: State) -> None:
    placed = []
    done: dict[fx.Node, fx.Node] = {}
    half = state.half or "inference"
    for chosen in state.choice.chosen:
        region = chosen.priced.region
        name = f"{compile_id()} {half} {region.anchor.name}"
        nodes = replaced.nodes_of(region, done) if _watchers.get() else None
        try:
            kernel = place.place(
                state.module.graph,
                region,
                done,
                poison=state.options.poison,
                name=name if state.options.verify else None,
            )
        except place.CannotPlace as error:
            state.notes.append(f"{region.anchor.name}: {error}")
            continue
        if nodes is not None:
            record = replaced.placed(
                kernel, region, nodes, done, name=name, half=half, rules=_rules(state)
            )
            for watcher in _watchers.get():
                watcher(record)
        placed.append((chosen, kernel))
    state.module.graph.eliminate_dead_code()
    # What only replaced nodes read is gone: views, and the unused bias of addmm(..., beta=0),
    # which may have been a product or a region itself.
    alive = set(state.module.graph.nodes)
    placed = [(chosen, kernel) for chosen, kernel in placed if kernel in alive]
    state.kernels += [kernel for _, kernel in placed]
    left = tuple(left for left in state.choice.left if left.anchor in alive)
    state.choice = Choice(tuple(chosen for chosen, _ in placed), left)


def _expand(state: State) -> None:
    recompose.expand(state.module.graph)


CANONICALISE = Pass("canonicalise", _canonicalise)
EAGER_DROPOUT = Pass("eager_dropout", _eager_dropout)
COMMON_SUBEXPRESSIONS = Pass("common_subexpressions", _merge_equal)
RECOMPOSE = Pass("recompose", _recompose)
REDUCTION_ELIMINATION = Pass("reduction_elimination", _eliminate_reductions)
ALGEBRA = Pass("algebra", _algebra)
PLAN = Pass("plan", _plan)
RECHECK = Pass("recheck", _recheck)
PLACE = Pass("place", _place)
EXPAND = Pass("expand", _expand)

JOINT: tuple[Pass, ...] = (
    CANONICALISE,
    EAGER_DROPOUT,
    COMMON_SUBEXPRESSIONS,
    RECOMPOSE,
    REDUCTION_ELIMINATION,
    ALGEBRA,
    PLAN,
)
BEFORE_CUT: tuple[Pass, ...] = (EXPAND,)
HALF: tuple[Pass, ...] = (CANONICALISE, RECOMPOSE, RECHECK, PLACE, EXPAND)
INFERENCE: tuple[Pass, ...] = (
    CANONICALISE,
    EAGER_DROPOUT,
    RECOMPOSE,
    REDUCTION_ELIMINATION,
    ALGEBRA,
    PLAN,
)
PLACE_INFERENCE: tuple[Pass, ...] = (PLACE, EXPAND)


Watcher = Callable[[PlacedRegion], None]
_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("torch_evt_watchers", default=())


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` with the record of every region that is placed inside the block."""
    token = _watchers.set((*_watchers.get(), watcher))
    try:
        yield
    finally:
        _watchers.reset(token)


@collecting_later()
def partition(
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    other: Partitioner | None,
    kwargs: dict[str, Any],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into a forward and a backward graph, with regions placed in both.

    other: a partitioner to use in place of min-cut. kwargs: what Inductor gives its partitioner.
    """
    decisions.started()
    declared_dtypes.apply(joint.graph)
    unplaced = why_unplaced(options, _devices(joint.graph))
    placing = unplaced is None
    if unplaced is not None and not decisions.wanted(options):
        decisions.unplanned("joint", unplaced)
        return run_partitioner(joint, inputs, other, kwargs)
    device = _target(options)
    state = State(
        copy_of(joint), options, device, num_forward_outputs=int(kwargs["num_fwd_outputs"])
    )
    halves: tuple[State, ...] = ()
    with falling_back(state):
        state.folder = new_folder(options, "joint")
        write_dump(state, "captured", 0.0)
        passes.run(JOINT, state)
        if placing and state.choice.chosen:
            halves = _halves(state, inputs, other, kwargs)
    if any(half.kernels for half in halves):
        forward, backward = (half.module for half in halves)
    else:
        forward, backward = run_partitioner(joint, inputs, other, kwargs)
    with describing(options):
        plan = summary.training_plan(state, halves, forward, inputs, other, kwargs, joint)
        decisions.report(plan)
        write_plan(state, plan)
    return forward, backward


def mark_training_half(module: fx.GraphModule) -> None:
    """Leave a mark on a half, which `is_training_half` finds before code generation."""
    output_node(module.graph).meta[_TRAINING_HALF] = True


def is_training_half(graph: fx.Graph) -> bool:
    """Whether a graph is half of a training graph (torch 2.11 does not say it)."""
    return _TRAINING_HALF in output_node(graph).meta


@collecting_later()
def transform_inference(graph: fx.Graph, options: Options) -> None:
    """Place regions in an inference graph, in place; it stays as it is where none is placed."""
    decisions.started()
    declared_dtypes.apply(graph)
    unplaced = why_unplaced(options, _devices(graph))
    placing = unplaced is None
    if unplaced is not None and not decisions.wanted(options):
        decisions.unplanned("inference", unplaced)
        return
    owner = graph.owning_module or torch.nn.Module()
    module = module_of(owner, graph)
    state = State(module, options, _target(options), half="inference")
    with falling_back(state):
        state.folder = new_folder(options, "inference")
        write_dump(state, "captured", 0.0)
        passes.run(INFERENCE, state)
        if placing and state.choice.chosen:
            passes.run(PLACE_INFERENCE, state)
            if state.kernels:
                replace_contents(graph, state.module.graph)
    with describing(options):
        plan = summary.inference_plan(state)
        decisions.report(plan)
        write_plan(state, plan)


def _halves(
    joint: State, inputs: Sequence[Any], other: Partitioner | None, kwargs: dict[str, Any]
) -> tuple[State, ...]:
    """The halves of a planned joint graph, with the regions placed in them."""
    choice = joint.choice
    planned = describe.regions_of(choice, joint.labels)
    labels_by_name = {node.name: label for node, label in joint.labels.items()}
    passes.run(BEFORE_CUT, joint)
    to_cut, names = renumbered(joint.module)
    labels = {names[old]: label for old, label in labels_by_name.items() if old in names}
    halves, as_planned = _cut(joint, to_cut, names, inputs, other, kwargs)
    states = []
    both: tuple[Half, Half] = ("forward", "backward")
    for half, module in zip(both, halves, strict=True):
        expected = Expected(
            half,
            tuple(
                (describe.renamed(region, names), chosen)
                for region, chosen in zip(planned, choice.chosen, strict=True)
                if region.half == half
            ),
            tuple(
                (names[left.anchor.name], left)
                for left in choice.left
                if joint.labels[left.anchor] in (half, "either") and left.anchor.name in names
            ),
            labels,
            as_planned,
        )
        state = State(
            module,
            joint.options,
            joint.device,
            half=half,
            expected=expected,
            apart=frozenset(names[name] for name in joint.apart if name in names),
            folder=joint.folder,
        )
        write_dump(state, "cut", 0.0)
        passes.run(HALF, state)
        module.recompile()
        states.append(state)
    return tuple(states)


def _cut(
    joint: State,
    to_cut: fx.GraphModule,
    names: Mapping[str, str],
    inputs: Sequence[Any],
    other: Partitioner | None,
    kwargs: dict[str, Any],
) -> tuple[tuple[fx.GraphModule, fx.GraphModule], bool]:
    """The halves, and whether what is saved is what the plan says."""
    saved = joint.optimum.saved if joint.optimum is not None else None
    if saved is None or other is not None:
        return run_partitioner(to_cut, inputs, other, dict(kwargs)), False
    wanted = {names[node.name] for node in saved}
    marked = copy_of(to_cut)
    problem = cut.mark(marked.graph, wanted, joint.num_forward_outputs)
    if problem is None:
        try:
            halves = run_partitioner(marked, inputs, other, dict(kwargs))
        except Exception as error:  # torch's own: a value that it cannot save, say
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        else:
            forward = halves[0].graph
            for half in halves:
                cut.unmark(half.graph)
            more = sorted(cut.not_planned(forward, wanted, joint.num_forward_outputs))
            if not more:
                return halves, True
            problem = f"{more[0]} is saved as well"
    joint.notes.append(f"min-cut decides what is saved: {problem}")
    return run_partitioner(to_cut, inputs, other, dict(kwargs)), False


def _saving(state: State) -> Saving:
    must, must_not = cut.users_marks(state.module.graph)
    return Saving(state.options.save_weight, state.options.memory_budget, must, must_not)


def _rules(state: State) -> Rules:
    return Rules(
        labels=state.labels,
        device_kind=state.device.kind,
        exact_rounding=state.options.precision == "eager",
        disabled=state.options.disable,
    )


def names() -> list[str]:
    """The names of all passes, as `evt.disable` takes them."""
    every = (*JOINT, *BEFORE_CUT, *HALF, *INFERENCE, *PLACE_INFERENCE)
    return list(dict.fromkeys(step.name for step in every))


def why_unplaced(options: Options, found: Iterable[torch.device]) -> str | None:
    """Why no region may be placed in a graph with tensors on these devices; None where one may: a
    device has an emitter, or the reference is asked for."""
    if options.place == "always":
        return None
    if options.place == "never":
        return "evt.place is never"
    devices_found = sorted(found, key=str)
    if any(emitter_for(device) is not None for device in devices_found):
        return None
    kinds = dict.fromkeys(device.type for device in devices_found)
    return f"there is no emitter for {' or '.join(kinds) or 'a graph without tensors'}"


def _devices(graph: fx.Graph) -> set[torch.device]:
    return {t.device for n in graph.nodes if (t := tensor_of(n)) is not None}


def _target(options: Options) -> Device:
    return devices.device(options.target or devices.default_target())
