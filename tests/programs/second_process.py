"""Trains the tiny mlp one step and prints, as JSON, what the caches and the planner did."""

import json
import sys

import torch
from torch._dynamo.utils import counters

from torch_evt import pipeline, workloads

planned = 0
optimise = pipeline.optimise


def counting(*args, **kwargs):
    global planned
    planned += 1
    return optimise(*args, **kwargs)


pipeline.optimise = counting
model, inputs, loss = workloads.get("mlp", "tiny").make(0, dtype=torch.float32)
options = {"evt.place": "always", "evt.strict": True, **json.loads(sys.argv[1])}
compiled = torch.compile(model, backend="evt", options=options)
scalar = loss(compiled(*inputs))
scalar.backward()
from torch_evt.runtime.counters import region_runs  # noqa: E402

print(
    json.dumps(
        {
            "planned": planned,
            "aot": dict(counters["aot_autograd"]),
            "inductor": {k: v for k, v in counters["inductor"].items() if "fxgraph" in k},
            "regions": sum(region_runs.values()),
            "loss": scalar.item(),
            "gradient": sum(p.grad.double().abs().sum().item() for p in model.parameters()),
        }
    )
)
