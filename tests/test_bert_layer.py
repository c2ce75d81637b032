"""One layer of BERT-large at the paper's width: what its plan is, and what changes it.

The golden text holds every region and every product without one, each with the modelled time of
itself and of what would run in its place, and the alternatives that lost. To write it anew:
EVT_UPDATE_GOLDEN=1 pytest tests/test_bert_layer.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_evt import devices, explain, workloads
from torch_evt.devices import Device
from torch_evt.partition.plan import GraphPlan, RegionPlan
from torch_evt.workloads import bert_large

GOLDEN = Path(__file__).parent / "golden" / "bert_layer_plan.txt"
H200 = devices.DEVICES["h200"]


def planned(monkeypatch: pytest.MonkeyPatch, device: Device = H200) -> GraphPlan:
    """The plan of a training step in bf16 for a device."""
    torch._dynamo.reset()
    layer = replace(bert_large.SIZES["paper"], layers=1, vocabulary=512)
    monkeypatch.setattr(bert_large, "SIZES", MappingProxyType({"paper": layer}))
    known = MappingProxyType({**devices.DEVICES, device.name: device})
    monkeypatch.setattr(devices, "DEVICES", known)
    with FakeTensorMode():
        model, inputs, loss = workloads.get("bert-large", "paper").make(0, dtype=torch.bfloat16)
    options = {"evt.place": "always", "evt.target": device.name}
    (plan,) = explain(model, *inputs, loss=loss, options=options).graphs
    return plan


def lines(plan: GraphPlan) -> Iterator[str]:
    for r in plan.regions:
        assert r.modelled_us is not None and r.replaced_us is not None
        yield f"{r.half} {' x '.join(r.shape)}: {r.modelled_us:.1f} us for {r.replaced_us:.1f} us"
        yield f"  {r.tree}"
        for a in r.alternatives:
            yield f"  lost, {a.modelled_us:.1f} us: {a.tree}"
    for u in plan.unfused:
        best = "" if u.modelled_us is None else f", the best region {u.modelled_us:.1f} us"
        yield f"{u.half} {u.node}: {u.replaced_us or 0:.1f} us{best} ({u.reason})"


def with_all(regions: tuple[RegionPlan, ...], half: str, *parts: str) -> list[RegionPlan]:
    return [r for r in regions if r.half == half and all(part in r.tree for part in parts)]


def test_the_plan_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(monkeypatch)
    assert plan.solver == "highs" and plan.optimal and plan.notes == ()
    text = "\n".join(lines(plan)) + "\n"
    if os.environ.get("EVT_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    (up,) = with_all(plan.regions, "forward", "gelu_tanh(")
    assert up.tree.count("store(") == 2  # the pre-activation as well
    (down,) = with_all(plan.regions, "backward", "gelu_tanh_grad(", "reduce(1: bf16, sum, rows")
    assert up.shape[2] == down.shape[2] == "4096"
    for region in plan.regions:
        assert region.modelled_us < region.replaced_us  # type: ignore[operator]
    for left in plan.unfused:
        assert left.reason and left.replaced_us


def test_a_quarter_of_the_bandwidth_changes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of a layer norm is fused where its fp32 intermediate costs little to write."""
    fast = replace(H200, memory_bandwidth=H200.memory_bandwidth * 4)
    quarter, whole = (planned(monkeypatch, device).regions for device in (H200, fast))
    assert not with_all(quarter, "backward", "reduce(2: f32, sum, columns")
    assert len(with_all(whole, "backward", "reduce(2: f32, sum, columns")) == 2


def test_where_memory_and_launches_cost_nothing_nothing_is_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(monkeypatch, replace(H200, memory_bandwidth=math.inf, launch_us=0.0))
    assert plan.regions == ()


def test_where_memory_costs_nothing_a_region_saves_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned(monkeypatch, replace(H200, memory_bandwidth=math.inf))
    for region in plan.regions:
        assert region.modelled_us is not None and region.replaced_us is not None
        launches = (region.replaced_us - region.modelled_us) / H200.launch_us
        assert launches == pytest.approx(round(launches), abs=0.01) and launches > 0.99
