"""A plan as JSON: the contract that other programs read.

    {"schema": 1, "captured_on", "target", "versions", "graphs": [{
        "id", "solver": {"name", "optimal", "objective_us", "greedy_us"},
        "regions": [{"name", "half": "forward|backward|inference", "anchor", "mainloop", "tree",
                     "count", "instances": [[node names]], "modelled_us", "measured_us",
                     "replaced_us", "alternatives": [{"tree", "modelled_us"}]}],
        "unfused": [{"node", "half", "reason", "modelled_us", "replaced_us"}],
        "saved": [{"tensor", "bytes"}], "saved_bytes", "inductor_saved_bytes"}]}

Times are microseconds of one kernel. `regions` has one entry for each distinct tree and shape of a
half: `name`, `anchor` and `alternatives` are those of its first instance, times the mean over all.
What is not known, or not finite, is null. A change that breaks a reader raises `schema`.
"""

from __future__ import annotations

import json
import math
from typing import Any

from torch_evt.partition.plan import GraphPlan, Plan, RegionPlan, group_regions, mean

SCHEMA = 1


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as dictionaries, lists, strings and numbers that `json.dumps` takes as they are."""
    return {
        "schema": SCHEMA,
        "captured_on": plan.captured_on,
        "target": plan.target,
        "versions": dict(plan.versions),
        "graphs": [_graph(graph) for graph in plan.graphs],
    }


def to_json_text(plan: Plan) -> str:
    """The same as text, indented, the same for equal plans."""
    return json.dumps(to_json(plan), indent=2, allow_nan=False) + "\n"


def _graph(graph: GraphPlan) -> dict[str, Any]:
    return {
        "id": graph.id,
        "solver": {
            "name": graph.solver,
            "optimal": graph.optimal,
            "objective_us": _number(graph.objective_us),
            "greedy_us": _number(graph.greedy_us),
        },
        "regions": [_region(group) for group in group_regions(graph.regions)],
        "unfused": [
            {
                "node": entry.node,
                "half": entry.half,
                "reason": entry.reason,
                "modelled_us": _number(entry.modelled_us),
                "replaced_us": _number(entry.replaced_us),
            }
            for entry in graph.unfused
        ],
        "saved": [{"tensor": entry.tensor, "bytes": entry.bytes} for entry in graph.saved],
        "saved_bytes": graph.saved_bytes,
        "inductor_saved_bytes": graph.inductor_saved_bytes,
    }


def _region(group: list[RegionPlan]) -> dict[str, Any]:
    first = group[0]
    measured = [r.measured_us for r in group if r.measured_us is not None]
    return {
        "name": first.name,
        "half": first.half,
        "anchor": first.anchor,
        "mainloop": first.mainloop,
        "tree": first.tree,
        "count": len(group),
        "instances": [list(region.nodes) for region in group],
        "modelled_us": _number(mean([r.modelled_us for r in group])),
        "measured_us": _number(mean(measured)) if measured else None,
        "replaced_us": _number(mean([r.replaced_us for r in group])),
        "alternatives": [
            {"tree": other.tree, "modelled_us": _number(other.modelled_us)}
            for other in first.alternatives
        ],
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
