"""benchmarks/planning.py: real joint graphs, times that add up, and limits that are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import planning
from benchmarks.planning import MIN_CUT, Case, planned, summary, traced
from click.testing import CliRunner, Result

from torch_evt import options
from torch_evt.graphs import output_values

aten = torch.ops.aten
SMALL: Mapping[str, Any] = {"batch": 2, "length": 16, "vocabulary": 64}
OPTIONS, _ = options.split({"evt.target": "h200", "evt.place": "always", "evt.strict": True})


def test_a_stack_is_planned_as_a_training_step_of_all_its_layers() -> None:
    joint = traced(Case(2, (64, 96)), **SMALL)
    calls = [n for n in joint.module.graph.nodes if n.op == "call_function"]
    names = [str(n.target) for n in calls]
    assert names.count("torch_evt.attention.default") == 2
    assert names.count("torch_evt.attention_backward.default") == 2
    products = [n for n in calls if n.target in (aten.mm.default, aten.addmm.default)]
    # 6 products a layer, one between, the head; two gradients of each
    assert len(products) == 3 * (2 * 6 + 1 + 1) - 3  # the input of q, k and v needs none
    assert {n.args[-1].meta["val"].dtype for n in products} == {torch.bfloat16}
    assert joint.kwargs["num_fwd_outputs"] == 1
    results = [v.meta["val"].shape for v in output_values(joint.module.graph) if v is not None]
    assert results[0] == () and (96, 64) in results
    plan, seconds, stages = planned(joint, OPTIONS)
    assert plan.placed and {region.half for region in plan.regions} == {"forward", "backward"}
    assert {"evt.joint.plan", "evt.backward.recheck", MIN_CUT} <= set(stages)
    assert 0 < sum(s for name, s in stages.items() if name.count(".") != 3) < seconds
    again, _, _ = planned(joint, OPTIONS)
    assert (again.regions, again.saved) == (plan.regions, plan.saved)


@pytest.mark.slow
def test_bert_large_has_all_its_layers_and_its_own_loss() -> None:
    joint = traced(Case(3, None), **SMALL)
    names = [str(n.target) for n in joint.module.graph.nodes]
    assert names.count("torch_evt.attention.default") == 3
    shapes = [v.meta["val"].shape for v in output_values(joint.module.graph) if v is not None]
    assert (4096, 1024) in shapes and (64, 1024) in shapes and (2, 1024) in shapes


def test_the_median_of_planning_alone_and_stages_that_add_up() -> None:
    repeats = [
        (9.0, {MIN_CUT: 7.0, "evt.joint.plan": 1.0, "evt.joint.plan.solve": 0.5}),
        (9.0, {MIN_CUT: 2.0, "evt.joint.plan": 4.0, "evt.joint.plan.solve": 3.0}),
        (9.0, {MIN_CUT: 5.0, "evt.joint.plan": 2.0, "evt.joint.plan.solve": 1.5}),
    ]
    for place, (_, stages) in zip((0.25, 0.5, 0.75), repeats, strict=True):
        stages["evt.forward.place"] = stages["evt.backward.expand"] = place / 2
    entry = summary(repeats)
    assert (entry["planning_s"], entry["placing_s"], entry["min_cut_s"]) == (3.25, 0.75, 5.0)
    assert entry["samples_s"] == [1.75, 6.5, 3.25]
    assert entry["stages"] == {
        "evt.joint.plan": 2.0,
        "evt.joint.plan.solve": 1.5,
        "evt, the rest": 1.25,
    }


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Stands in for the measurement: what each case takes."""
    takes = {"1000-equal": 2.9, "10000-equal": 29.0, "bert-large-48": 400.0}

    def measure(case: Case, given: object, repeats: int) -> dict[str, Any]:
        (name,) = (name for name, known in planning.CASES.items() if known is case)
        numbers = {"layers": case.layers, "nodes": 1000, "regions": 12, "limit_s": case.limit_s}
        return {**numbers, **summary([(takes[name] + 1.0, {MIN_CUT: 1.0, "evt.joint.plan": 0.5})])}

    monkeypatch.setattr(planning, "measure", measure)
    monkeypatch.setattr(planning, "_warm_up", lambda given: None)
    return takes


def _run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(planning.main, [*arguments, "--output", str(path)])


def test_what_was_measured_is_shown_and_written(seconds: dict[str, float], tmp_path: Path) -> None:
    done = _run(tmp_path / "a.json", "--cases", ",".join(seconds), "--target", "b200")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert found["target"] == "b200" and found["versions"]["torch"] and found["device"]
    assert {n: e["planning_s"] for n, e in found["cases"].items()} == pytest.approx(seconds)
    assert [e["limit_s"] for e in found["cases"].values()] == [3.0, 30.0, None]
    assert "2.90" in done.output and "joint.plan 0.50 s" in done.output


@pytest.mark.parametrize(("case", "limit"), [("1000-equal", 3.0), ("10000-equal", 30.0)])
def test_it_ends_with_1_beyond_a_limit(
    seconds: dict[str, float], tmp_path: Path, case: str, limit: float
) -> None:
    seconds[case] = limit + 0.01
    assert _run(tmp_path / "a.json", "--cases", ",".join(seconds)).exit_code == 1


def test_an_unknown_case_is_an_error_that_names_the_known(tmp_path: Path) -> None:
    done = _run(tmp_path / "a.json", "--cases", "1000-equal,100-equal")
    assert done.exit_code == 1 and "'100-equal'" in done.output and "10000-equal" in done.output
    assert not (tmp_path / "a.json").exists()


def test_every_kind_of_graph_has_a_case_and_the_widths_differ() -> None:
    assert [case.limit_s for case in planning.CASES.values()] == [3, 3, 30, 30, None, None, None]
    for name, case in planning.CASES.items():
        if name.endswith("different"):
            assert case.widths is not None and len(set(case.widths)) == case.layers
        if name.endswith("-equal"):
            assert case.widths is not None and len(set(case.widths)) == 1
