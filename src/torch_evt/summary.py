"""The plan of a compiled graph, as plain data, from what its passes left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from torch_evt import decisions
from torch_evt.graphs import output_values, tensor_of
from torch_evt.partition import describe
from torch_evt.partition.optimise import Optimum
from torch_evt.partition.plan import GraphPlan, RegionPlan, Unfused
from torch_evt.passes import State
from torch_evt.torch_compat import Partitioner, compile_id, run_partitioner


def inference_plan(state: State) -> GraphPlan:
    """The plan of an inference graph after its passes."""
    regions, unfused = describe.regions_of(state.choice, state.labels), _unfused(state)
    return GraphPlan(
        id=f"{compile_id()} inference",
        solver=_solver(state.optimum),
        optimal=_is_optimal(state.optimum),
        objective_us=_objective(state.optimum, regions, unfused),
        greedy_us=state.optimum.greedy_us if state.optimum else None,
        regions=regions,
        unfused=unfused,
        placed=bool(state.kernels),
        notes=tuple(state.notes),
    )


def training_plan(
    joint: State,
    halves: tuple[State, ...],
    forward: fx.GraphModule,
    inputs: Sequence[Any],
    other: Partitioner | None,
    kwargs: dict[str, Any],
    original: fx.GraphModule,
) -> GraphPlan:
    """The plan of a joint graph after the passes on it and on its halves (none: nothing placed).

    forward: the forward graph that is compiled. inputs, other, kwargs: what the partitioner got.
    original: the joint graph as it came, cut once more to see what Inductor alone would save, where
    somebody looks.
    """
    regions: tuple[RegionPlan, ...] = ()
    unfused: tuple[Unfused, ...] = ()
    notes = list(joint.notes)
    for state in halves or (joint,):
        regions += describe.regions_of(state.choice, state.labels, first_number=len(regions))
        unfused += _unfused(state)
        if state is not joint:
            notes += state.notes
    optimum = joint.optimum
    if not halves and joint.choice.chosen and optimum is not None and optimum.saved is not None:
        kept = sorted(optimum.saved, key=lambda node: node.name)  # nothing is placed, so planned
    else:
        kept = [
            v
            for v in output_values(forward.graph)[joint.num_forward_outputs :]
            if isinstance(v, fx.Node)
        ]
    inductor_bytes: int | None = None
    if decisions.has_observers() or joint.options.dump is not None:
        plain = forward
        if any(half.kernels for half in halves):
            plain, _ = run_partitioner(original, inputs, other, dict(kwargs))
        inductor_bytes = _bytes(output_values(plain.graph)[joint.num_forward_outputs :])
    return GraphPlan(
        id=f"{compile_id()} joint",
        solver=_solver(optimum),
        optimal=_is_optimal(optimum),
        objective_us=_objective(optimum, regions, unfused),
        greedy_us=optimum.greedy_us if optimum else None,
        regions=regions,
        unfused=unfused,
        saved=describe.saved_of(kept),
        saved_bytes=_bytes(kept),
        inductor_saved_bytes=inductor_bytes,
        placed=any(half.kernels for half in halves),
        notes=tuple(notes),
    )


def _unfused(state: State) -> tuple[Unfused, ...]:
    return describe.unfused_of(state.choice, state.labels, state.device)


def _solver(optimum: Optimum | None) -> str:
    return optimum.solver if optimum is not None else "none"


def _is_optimal(optimum: Optimum | None) -> bool:
    return optimum is not None and optimum.optimal


def _objective(
    optimum: Optimum | None, regions: Sequence[RegionPlan], unfused: Sequence[Unfused]
) -> float:
    """Modelled microseconds of all kernels; by the greedy plan, of all products, fused or not."""
    if optimum is not None and optimum.objective_us is not None:
        return optimum.objective_us
    return sum(r.modelled_us for r in regions) + sum(u.replaced_us or 0.0 for u in unfused)


def _bytes(saved: Iterable[Any]) -> int | None:
    """Bytes kept for backward beyond the graph's inputs; None where a size is symbolic."""
    total = 0
    for value in saved:
        tensor = tensor_of(value)
        if tensor is None or value.op == "placeholder":
            continue
        size = describe.tensor_bytes(tensor)
        if size is None:
            return None
        total += size
    return total
