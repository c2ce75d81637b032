"""The plan: what was fused, what was not and why, what is saved, at which modelled cost.

Plain frozen data without tensors or graph nodes, so that it can be printed, compared, broadcast and
written as JSON. Names are those of the nodes after canonicalise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Half = Literal["forward", "backward", "inference"]


@dataclass(frozen=True)
class Alternative:
    """A candidate that lost. tree: its text; modelled_us: its modelled time in microseconds."""

    tree: str
    modelled_us: float


@dataclass(frozen=True)
class RegionPlan:
    """One chosen region, which becomes one kernel.

    nodes: every graph node it computes, in order, anchor included. stored: the nodes whose values
    it leaves in memory, in the order of the kernel's outputs. shape: (l, m, n, k) as text, "s0" for
    a symbolic size. modelled_us: the kernel; replaced_us: what Inductor would run in its place.
    measured_us: None until a tuner measured it.
    """

    name: str
    half: Half
    anchor: str
    mainloop: str
    tree: str
    shape: tuple[str, ...]
    nodes: tuple[str, ...]
    stored: tuple[str, ...]
    modelled_us: float
    replaced_us: float
    measured_us: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    fuses: tuple[str, ...] = ()
    """What it holds in the field's words, for people: ("bias", "gelu_tanh", "2 stores")."""


@dataclass(frozen=True)
class Unfused:
    """An anchor that stays with Inductor, or a node next to one, and why.

    modelled_us, replaced_us: the best candidate's time and Inductor's, where there was a candidate.
    """

    node: str
    half: Half
    reason: str
    code: str
    modelled_us: float | None = None
    replaced_us: float | None = None


@dataclass(frozen=True)
class Saved:
    """A tensor kept from forward to backward. bytes: None where its size is symbolic."""

    tensor: str
    bytes: int | None


@dataclass(frozen=True)
class GraphPlan:
    """The plan of one graph: a joint graph (both halves) or an inference graph."""

    id: str
    solver: str
    optimal: bool
    objective_us: float
    regions: tuple[RegionPlan, ...]
    unfused: tuple[Unfused, ...]
    saved: tuple[Saved, ...] = ()
    saved_bytes: int | None = None
    inductor_saved_bytes: int | None = None
    placed: bool = False
    """Whether the regions were put into the graph, or only planned (for an absent target)."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything `explain` found. captured_on: the device of the traced tensors; target: the device
    that it was priced for; versions: name -> version of what decides the plan."""

    captured_on: str
    target: str
    versions: dict[str, str]
    graphs: tuple[GraphPlan, ...]
    notes: tuple[str, ...] = field(default=())


def group_regions(regions: Iterable[RegionPlan]) -> list[list[RegionPlan]]:
    """Regions with equal half, main loop, tree and shape together, in order of first appearance."""
    groups: dict[tuple[object, ...], list[RegionPlan]] = defaultdict(list)
    for region in regions:
        groups[region.half, region.mainloop, region.tree, region.shape].append(region)
    return list(groups.values())


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return sum(values) / len(values)
