"""Prints, as JSON text, the plans of small workloads; a seed moves every object in memory."""

import random
import sys

import torch

source = random.Random(int(sys.argv[1]))
ballast = [bytearray(source.randrange(1, 4000)) for _ in range(20_000)]
del ballast[:: source.randrange(2, 5)]  # objects that come later fill the holes

from torch_evt import explain, workloads  # noqa: E402
from torch_evt.partition.plan_json import to_json_text  # noqa: E402

for name in sys.argv[2:]:
    model, inputs, loss = workloads.get(name, "tiny").make(0, dtype=torch.bfloat16)
    options = {"evt.place": "always", "evt.target": "h200"}
    print(to_json_text(explain(model, *inputs, loss=loss, options=options)))
