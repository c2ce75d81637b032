"""The compiler, from top to bottom: what happens to a graph, in order.

Training (`partition`): the joint graph is canonicalised, recomposed and planned; the rewritten
graph is cut in halves by min-cut; on each half the planned regions are checked again and placed,
or, where min-cut decided otherwise, chosen anew. Inference (`transform_inference`): the same on the
one graph. Between any two passes a verifier checks the graph.

A graph in which nothing is placed goes on as AOTAutograd made it, and so does one in which a pass
fails, unless `evt.strict` asks for the exception.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from torch_evt import devices, passes
from torch_evt.devices import Device
from torch_evt.emit import emitter_for
from torch_evt.graphs import (
    copy_of,
    module_of,
    output_node,
    output_values,
    renumbered,
    replace_contents,
    tensor_of,
)
from torch_evt.joint import canonicalise, common_subexpressions, eager_dropout, recompose
from torch_evt.options import Options
from torch_evt.partition import candidates, describe, place
from torch_evt.partition.candidates import Rules
from torch_evt.partition.greedy import Choice, choose, waits_for_itself
from torch_evt.partition.halves import label_all, label_joint
from torch_evt.partition.plan import GraphPlan, Half, RegionPlan, Unfused
from torch_evt.partition.region import Region
from torch_evt.passes import Pass, State, describing, falling_back, new_folder, write_dump
from torch_evt.torch_compat import Partitioner, compile_id, run_partitioner
from torch_evt.tree.text import to_text

log = logging.getLogger("torch_evt")

_TRAINING_HALF = "torch_evt_training_half"


def _canonicalise(state: State) -> None:
    canonicalise.apply(state.module.graph)


def _eager_dropout(state: State) -> None:
    if state.options.rng == "eager":
        eager_dropout.apply(state.module.graph)


def _merge_equal(state: State) -> None:
    common_subexpressions.apply(state.module.graph)


def _recompose(state: State) -> None:
    recompose.apply(state.module.graph, exact_rounding=state.options.precision == "eager")


def _plan(state: State) -> None:
    graph = state.module.graph
    if state.half is None:
        state.labels = label_joint(graph, state.num_forward_outputs)
    else:
        state.labels = label_all(graph, state.half)
    state.choice = choose(graph, state.device, _rules(state))


def _recheck(state: State) -> None:
    """Find the planned regions again on a real half; choose anew where one does not stand."""
    assert state.half is not None
    graph = state.module.graph
    state.labels = label_all(graph, state.half)
    rules = _rules(state)
    kept = _planned_regions(graph, state.planned, rules)
    if kept is None:
        state.notes.append(f"{state.half}: min-cut decided otherwise, so it was planned anew")
        kept = []
    state.choice = choose(graph, state.device, rules, fixed=kept)


def _place(state: State) -> None:
    placed = []
    replaced: dict[fx.Node, fx.Node] = {}
    for chosen in state.choice.chosen:
        try:
            kernel = place.place(
                state.module.graph, chosen.priced.region, replaced, poison=state.options.poison
            )
        except place.CannotPlace as error:
            state.notes.append(f"{chosen.priced.region.anchor.name}: {error}")
            continue
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
PLAN = Pass("plan", _plan)
RECHECK = Pass("recheck", _recheck)
PLACE = Pass("place", _place)
EXPAND = Pass("expand", _expand)

JOINT: tuple[Pass, ...] = (
    CANONICALISE,
    EAGER_DROPOUT,
    COMMON_SUBEXPRESSIONS,
    RECOMPOSE,
    PLAN,
)
BEFORE_CUT: tuple[Pass, ...] = (EXPAND,)
HALF: tuple[Pass, ...] = (CANONICALISE, RECOMPOSE, RECHECK, PLACE, EXPAND)
INFERENCE: tuple[Pass, ...] = (CANONICALISE, EAGER_DROPOUT, RECOMPOSE, PLAN)
PLACE_INFERENCE: tuple[Pass, ...] = (PLACE, EXPAND)


Observer = Callable[[GraphPlan], None]
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("torch_evt_observers", default=())


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer` with the plan of every graph that is compiled inside the block."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


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
    placing = _placing(joint.graph, options)
    if not (placing or _wanted(options)):
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
        _report(_training_plan(state, halves, forward, inputs, other, kwargs, joint))
    return forward, backward


def mark_training_half(module: fx.GraphModule) -> None:
    """Leave a mark on a half, which `is_training_half` finds before code generation."""
    output_node(module.graph).meta[_TRAINING_HALF] = True


def is_training_half(graph: fx.Graph) -> bool:
    """Whether a graph is half of a training graph (torch 2.11 does not say it)."""
    return _TRAINING_HALF in output_node(graph).meta


def transform_inference(graph: fx.Graph, options: Options) -> None:
    """Place regions in an inference graph, in place; it stays as it is where none is placed."""
    placing = _placing(graph, options)
    if not (placing or _wanted(options)):
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
        _report(_inference_plan(state))


def _halves(
    joint: State, inputs: Sequence[Any], other: Partitioner | None, kwargs: dict[str, Any]
) -> tuple[State, ...]:
    labels, choice = joint.labels, joint.choice
    planned = describe.regions_of(choice, labels)
    passes.run(BEFORE_CUT, joint)
    to_cut, names = renumbered(joint.module)
    planned = tuple(describe.renamed(region, names) for region in planned)
    cut = run_partitioner(to_cut, inputs, other, dict(kwargs))
    states = []
    both: tuple[Half, Half] = ("forward", "backward")
    for name, module in zip(both, cut, strict=True):
        state = State(
            module,
            joint.options,
            joint.device,
            half=name,
            planned=tuple(region for region in planned if region.half == name),
            folder=joint.folder,
        )
        write_dump(state, "cut", 0.0)
        passes.run(HALF, state)
        module.recompile()
        states.append(state)
    return tuple(states)


def _planned_regions(
    graph: fx.Graph, planned: Sequence[RegionPlan], rules: Rules
) -> list[Region] | None:
    """The planned regions in a half, each with its planned tree; None where one fails."""
    named = {node.name: node for node in graph.nodes}
    loops = dict(candidates.anchors(graph))
    found: list[Region] = []
    for plan in planned:
        nodes = [named.get(name) for name in plan.nodes]
        anchor = named.get(plan.anchor)
        if anchor not in loops or any(node is None for node in nodes):
            return None
        built = (
            candidates.build(anchor, loops[anchor], nodes, rules, recompute=recompute)  # type: ignore[arg-type]
            for recompute in (False, True)
        )
        same = [r for r in built if isinstance(r, Region) and to_text(r.tree) == plan.tree]
        if not same or waits_for_itself(same[0], found):
            return None
        found.append(same[0])
    return found


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


def _placing(graph: fx.Graph, options: Options) -> bool:
    """Whether regions may be placed: there is an emitter, or the reference is asked for."""
    if options.place != "auto":
        return options.place == "always"
    found = {t.device for n in graph.nodes if (t := tensor_of(n)) is not None}
    return any(emitter_for(device) is not None for device in found)


def _wanted(options: Options) -> bool:
    """Whether somebody wants to see the plan although nothing is placed."""
    return bool(_observers.get()) or options.dump is not None or log.isEnabledFor(logging.DEBUG)


def _target(options: Options) -> Device:
    return devices.device(options.target or devices.default_target())


def _report(plan: GraphPlan) -> None:
    for region in plan.regions:
        log.debug(
            "%s %s (%s): %.1f us instead of %.1f us: %s",
            region.half,
            region.anchor,
            "placed" if plan.placed else "planned",
            region.modelled_us,
            region.replaced_us,
            region.tree,
        )
    for unfused in plan.unfused:
        log.debug("%s %s is left to Inductor: %s", unfused.half, unfused.node, unfused.reason)
    for note in plan.notes:
        log.info("%s: %s", plan.id, note)
    for observer in _observers.get():
        observer(plan)


def _inference_plan(state: State) -> GraphPlan:
    regions = describe.regions_of(state.choice, state.labels)
    return GraphPlan(
        id=f"{compile_id()} inference",
        solver="greedy",
        optimal=False,
        objective_us=_objective(regions, unfused := _unfused(state)),
        regions=regions,
        unfused=unfused,
        placed=bool(state.kernels),
        notes=tuple(state.notes),
    )


def _training_plan(
    joint: State,
    halves: tuple[State, ...],
    forward: fx.GraphModule,
    inputs: Sequence[Any],
    other: Partitioner | None,
    kwargs: dict[str, Any],
    original: fx.GraphModule,
) -> GraphPlan:
    regions: tuple[RegionPlan, ...] = ()
    unfused: tuple[Unfused, ...] = ()
    notes = list(joint.notes)
    for state in halves or (joint,):
        regions += describe.regions_of(state.choice, state.labels, first_number=len(regions))
        unfused += _unfused(state)
        if state is not joint:
            notes += state.notes
    saved = describe.saved_of(
        v
        for v in output_values(forward.graph)[joint.num_forward_outputs :]
        if isinstance(v, fx.Node)
    )
    inductor_bytes: int | None = None
    if _observers.get():
        plain = forward
        if any(half.kernels for half in halves):
            plain, _ = run_partitioner(original, inputs, other, dict(kwargs))
        inductor_bytes = _saved_bytes(plain, joint.num_forward_outputs)
    return GraphPlan(
        id=f"{compile_id()} joint",
        solver="greedy",
        optimal=False,
        objective_us=_objective(regions, unfused),
        regions=regions,
        unfused=unfused,
        saved=saved,
        saved_bytes=_saved_bytes(forward, joint.num_forward_outputs),
        inductor_saved_bytes=inductor_bytes,
        placed=any(half.kernels for half in halves),
        notes=tuple(notes),
    )


def _unfused(state: State) -> tuple[Unfused, ...]:
    return describe.unfused_of(state.choice, state.labels, state.device)


def _objective(regions: Sequence[RegionPlan], unfused: Sequence[Unfused]) -> float:
    """Modelled microseconds of all products, fused or not."""
    return sum(r.modelled_us for r in regions) + sum(u.replaced_us or 0.0 for u in unfused)


def _saved_bytes(forward: fx.GraphModule, num_forward_outputs: int) -> int | None:
    """Bytes kept for backward beyond the graph's inputs; None where a size is symbolic."""
    total = 0
    for value in output_values(forward.graph)[num_forward_outputs:]:
        tensor = tensor_of(value)
        if tensor is None or value.op == "placeholder":
            continue
        size = describe.tensor_bytes(tensor)
        if size is None:
            return None
        total += size
    return total
