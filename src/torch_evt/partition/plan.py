"""The plan: what was fused, what was not and why, what is saved, at which modelled cost.

Plain frozen data without tensors or graph nodes, so that it can be printed, compared, broadcast and
written as JSON. Names are those of the nodes after canonicalise.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Half = Literal["forward", "backward", "inference"]


@dataclass(frozen=True)
class Alternative:
    """A candidate that lost. tree: its text; modelled_us: its modelled time in microseconds, which
    may be less than the chosen region's where it leaves more to others."""

    tree: str
    modelled_us: float


@dataclass(frozen=True)
class RegionPlan:
    """One chosen region, which becomes one kernel.

    nodes: every graph node it computes, in order, anchor included. kept: those of them that are
    computed elsewhere as well, so that it does not store them. stored: the nodes whose values it
    leaves in memory, in the order of the kernel's outputs. shape: (l, m, n, k) as text, "s0" for
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
    kept: tuple[str, ...] = ()
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
    """Modelled microseconds of all kernels; by the greedy plan, of all products, fused or not."""
    regions: tuple[RegionPlan, ...]
    unfused: tuple[Unfused, ...]
    saved: tuple[Saved, ...] = ()
    saved_bytes: int | None = None
    inductor_saved_bytes: int | None = None
    placed: bool = False
    """Whether the regions were put into the graph, or only planned (for an absent target)."""
    greedy_us: float | None = None
    """The greedy plan's objective, where the program found another."""
    notes: tuple[str, ...] = ()
    from_cache: bool = False
    """Whether the graph was not compiled now: it is the plan of when it was."""


@dataclass(frozen=True)
class Plan:
    """Everything `explain` found. captured_on: the device of the traced tensors; target: the device
    that it was priced for; versions: name -> version of what decides the plan."""

    captured_on: str
    target: str
    versions: dict[str, str]
    graphs: tuple[GraphPlan, ...]
    notes: tuple[str, ...] = field(default=())


def to_data(plan: GraphPlan) -> dict[str, Any]:
    """All of a graph's plan as lists, dicts and plain values; `from_data` reads it back."""
    return asdict(plan)


def from_data(data: Mapping[str, Any]) -> GraphPlan:
    """The plan that `to_data` wrote. Raises KeyError or TypeError for what it did not write."""
    regions = []
    for region in data["regions"]:
        lists = {
            name: tuple(region[name]) for name in ("shape", "nodes", "stored", "kept", "fuses")
        }
        others = tuple(Alternative(**other) for other in region["alternatives"])
        regions.append(RegionPlan(**{**region, **lists, "alternatives": others}))
    parts = {
        "regions": tuple(regions),
        "unfused": tuple(Unfused(**entry) for entry in data["unfused"]),
        "saved": tuple(Saved(**entry) for entry in data["saved"]),
        "notes": tuple(data["notes"]),
    }
    return GraphPlan(**{**data, **parts})


def digest(plan: GraphPlan) -> str:
    """Eight hexadecimal digits that are equal for equal decisions, so that ranks can be compared.

    What differs between two compilations of the same graph has no part in it.
    """
    data = to_data(plan)
    for name in ("id", "inductor_saved_bytes", "from_cache"):
        del data[name]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8]


def group_regions(regions: Iterable[RegionPlan]) -> list[list[RegionPlan]]:
    """Regions with equal half, main loop, tree and shape together, in order of first appearance."""
    groups: dict[tuple[object, ...], list[RegionPlan]] = defaultdict(list)
    for region in regions:
        groups[region.half, region.mainloop, region.tree, region.shape].append(region)
    return list(groups.values())


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return sum(values) / len(values)
