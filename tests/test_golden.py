"""Golden texts: the trees of one GPT-2 layer at the paper's width, priced for an H200.

A change of these texts is a change of what users run. Look at the difference, and if it is meant,
write the files anew: EVT_UPDATE_GOLDEN=1 pytest tests/test_golden.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_evt import explain, workloads
from torch_evt.workloads import gpt2_medium


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["fused", "eager"])
def test_trees_of_one_layer(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    layer = replace(gpt2_medium.SIZES["paper"], layers=1, vocabulary=512)
    monkeypatch.setattr(gpt2_medium, "SIZES", MappingProxyType({"paper": layer}))
    with FakeTensorMode():
        workload = workloads.get("gpt2-medium", "paper")
        model, inputs, loss = workload.make(0, dtype=getattr(torch, name))
    options = {"evt.place": "always", "evt.target": "h200", "evt.precision": precision}
    plan = explain(model, *inputs, loss=loss, options=options)
    lines = [
        f"{r.half} {' x '.join(r.shape)}\n  {r.tree}"
        for graph in plan.graphs
        for r in graph.regions
    ]
    text = "\n".join(lines) + "\n"
    golden = Path(__file__).parent / "golden" / f"gpt2_layer_{name}_{precision}.txt"
    if os.environ.get("EVT_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
