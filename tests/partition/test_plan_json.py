"""The plan's JSON keeps its contract: exactly these keys, these types, nothing lost."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from torch_evt.partition.plan import Plan
from torch_evt.partition.plan_json import to_json, to_json_text

Plans = Callable[..., Plan]

MAYBE_NUMBER = (float, int, type(None))
SCHEMA: dict[str, Any] = {
    "schema": int,
    "captured_on": str,
    "target": str,
    "versions": dict,
    "graphs": [
        {
            "id": str,
            "solver": {
                "name": str,
                "optimal": bool,
                "objective_us": MAYBE_NUMBER,
                "greedy_us": MAYBE_NUMBER,
            },
            "regions": [
                {
                    "name": str,
                    "half": str,
                    "anchor": str,
                    "mainloop": str,
                    "tree": str,
                    "count": int,
                    "instances": [[str]],
                    "modelled_us": MAYBE_NUMBER,
                    "measured_us": MAYBE_NUMBER,
                    "replaced_us": MAYBE_NUMBER,
                    "alternatives": [{"tree": str, "modelled_us": MAYBE_NUMBER}],
                }
            ],
            "unfused": [
                {
                    "node": str,
                    "half": str,
                    "reason": str,
                    "modelled_us": MAYBE_NUMBER,
                    "replaced_us": MAYBE_NUMBER,
                }
            ],
            "saved": [{"tensor": str, "bytes": (int, type(None))}],
            "saved_bytes": (int, type(None)),
            "inductor_saved_bytes": (int, type(None)),
        }
    ],
}


def _check(value: Any, schema: Any, where: str = "plan") -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        assert set(value) == set(schema), where
        for key, inner in schema.items():
            _check(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for i, item in enumerate(value):
            _check(item, schema[0], f"{where}[{i}]")
    else:
        assert isinstance(value, schema), where


def test_a_plan_has_exactly_the_keys_and_types_of_the_contract(random_plan: Plans) -> None:
    for layers in (0, 1, 3):
        value = json.loads(to_json_text(random_plan(0, layers)))
        _check(value, SCHEMA)
        assert value["schema"] == 1
        assert all(isinstance(v, str) for v in value["versions"].values())


def test_equal_trees_and_shapes_are_one_entry_that_keeps_every_instance(
    random_plan: Plans,
) -> None:
    plan = random_plan(1)
    forward, backward = to_json(plan)["graphs"][0]["regions"]
    assert (forward["half"], backward["half"]) == ("forward", "backward")
    for entry in (forward, backward):
        regions = [r for r in plan.graphs[0].regions if r.half == entry["half"]]
        assert entry["count"] == len(regions) == 3
        assert entry["instances"] == [list(r.nodes) for r in regions]
        assert math.isclose(3 * entry["modelled_us"], sum(r.modelled_us for r in regions))
        assert math.isclose(3 * entry["replaced_us"], sum(r.replaced_us for r in regions))
        assert entry["measured_us"] is None
        assert entry["tree"] == regions[0].tree and entry["anchor"] == regions[0].anchor


def test_what_is_measured_for_some_instances_is_their_mean(random_plan: Plans) -> None:
    plan = random_plan(2)
    graph = plan.graphs[0]
    times = {"forward_0": 4.0, "forward_2": 8.0}
    regions = tuple(dataclasses.replace(r, measured_us=times.get(r.name)) for r in graph.regions)
    changed = dataclasses.replace(plan, graphs=(dataclasses.replace(graph, regions=regions),))
    forward, backward = to_json(changed)["graphs"][0]["regions"]
    assert forward["measured_us"] == 6.0 and backward["measured_us"] is None


def test_another_shape_is_another_entry(random_plan: Plans) -> None:
    plan = random_plan(3)
    graph = plan.graphs[0]
    first = dataclasses.replace(graph.regions[0], shape=("1", "s0", "512", "128"))
    graph = dataclasses.replace(graph, regions=(first, *graph.regions[1:]))
    entries = to_json(dataclasses.replace(plan, graphs=(graph,)))["graphs"][0]["regions"]
    assert [entry["count"] for entry in entries] == [1, 3, 2]


def test_values_that_are_unknown_or_not_finite_are_null(random_plan: Plans) -> None:
    plan = random_plan(4)
    graph = dataclasses.replace(
        plan.graphs[0],
        objective_us=math.inf,
        saved_bytes=None,
        saved=(dataclasses.replace(plan.graphs[0].saved[0], bytes=None),),
        unfused=(dataclasses.replace(plan.graphs[0].unfused[0], modelled_us=math.nan),),
    )
    value = json.loads(to_json_text(dataclasses.replace(plan, graphs=(graph,))))["graphs"][0]
    _check([value], SCHEMA["graphs"])
    assert value["solver"]["objective_us"] is None
    assert value["unfused"][0]["modelled_us"] is None
    assert value["saved"][0]["bytes"] is None and value["saved_bytes"] is None


def test_equal_plans_give_equal_text_and_others_other_text(random_plan: Plans) -> None:
    assert to_json_text(random_plan(5)) == to_json_text(random_plan(5))
    assert to_json_text(random_plan(5)) != to_json_text(random_plan(6))
