"""The example of life-of-a-linear-layer.md: one layer on its way through the compiler, as text.

    python docs/linear_layer.py     prints every block of that document

The model is traced on fake tensors, so that this takes seconds and needs no GPU.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_evt import devices, dump
from torch_evt.graphs import copy_of
from torch_evt.joint import canonicalise, common_subexpressions, recompose
from torch_evt.partition.candidates import Rules, anchors, grow, order_of
from torch_evt.partition.halves import label_joint
from torch_evt.partition.plan import Plan
from torch_evt.partition.price import InductorModel, product_us, region_us
from torch_evt.report.explain import explain
from torch_evt.report.render import to_text
from torch_evt.torch_compat import CustomPartitionerFn, run_partitioner

TARGET = "h200"
ROWS = (16, 256)
"""The batch and the length of the text: 4096 rows."""


def make(rows: Sequence[int] = ROWS) -> tuple[nn.Module, tuple[Tensor], Callable[[Any], Any]]:
    """The model, its input, and no loss: the compiled function ends with the model's output."""
    torch.manual_seed(0)
    layers = (nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768, bias=False))
    model = nn.Sequential(*layers).to(torch.bfloat16)
    return model, (torch.randn(*rows, 768, dtype=torch.bfloat16),), lambda output: output


class _Catch(CustomPartitionerFn):
    """Min-cut that keeps the joint graph which AOTAutograd hands it."""

    def __init__(self) -> None:
        self.joint = fx.GraphModule({}, fx.Graph())
        self.num_forward_outputs = 0

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.joint = copy_of(gm)
        self.num_forward_outputs = int(kwargs["num_fwd_outputs"])
        return run_partitioner(gm, joint_inputs, None, kwargs)

    def uuid(self) -> None:
        """None: nothing that this partitioner made is cached."""


def blocks() -> dict[str, str]:
    """Every generated block of the document by its name."""
    caught = _Catch()
    _explain({"evt.place": "never", "custom_partitioner_fn": caught})
    with tempfile.TemporaryDirectory() as folder:
        plan = _explain({"evt.place": "always", "evt.strict": True, "evt.dump": folder})
        stages = {
            path.stem.partition("_")[2]: _operations(path.read_text(encoding="utf-8"))
            for path in Path(folder).glob("*/*.py")
        }
    (graph,) = plan.graphs
    forward, backward = (
        next(region.tree for region in graph.regions if region.half == half)
        for half in ("forward", "backward")
    )
    return {
        "joint": _operations(dump.source(caught.joint, "the joint graph")),
        "recomposed": stages["joint_recompose"],
        "candidates": _candidates(caught.joint, caught.num_forward_outputs),
        "price": _price(),
        "plan": _plan(plan),
        "forward": stages["forward_canonicalise"],
        "backward": stages["backward_canonicalise"],
        "forward tree": forward,
        "backward tree": backward,
        "forward placed": stages["forward_expand"],
        "backward placed": stages["backward_expand"],
    }


def _explain(options: Mapping[str, Any]) -> Plan:
    model, inputs, loss = make()
    return explain(model, *inputs, loss=loss, options={"evt.target": TARGET, **options})


def _operations(source: str) -> str:
    """The operations of a dumped graph, without what frees memory at the ends of its lines."""
    found = re.search(r"    def forward\(.*\n((?:        .*\n)+)", source)
    assert found is not None
    lines = (re.sub(r";  (\w+ = )+None$", "", line) for line in found[1].splitlines())
    return "\n".join(line.strip() for line in lines)


def _candidates(joint: fx.GraphModule, num_forward_outputs: int) -> str:
    """Every candidate of every anchor with its price, from the steps of the pipeline by hand."""
    graph = copy_of(joint).graph
    canonicalise.apply(graph)
    common_subexpressions.apply(graph)
    recompose.apply(graph)
    labels = label_joint(graph, num_forward_outputs)
    device = devices.device(TARGET)
    inductor = InductorModel(graph, device, labels)
    order = order_of(graph)
    lines = []
    for anchor, loop in anchors(graph):
        growth = grow(anchor, loop, order, Rules(labels, device.kind))
        plain = product_us(anchor, device)
        lines.append(f"{anchor.name} ({labels[anchor]}): the product alone {plain:.1f} us")
        if not growth.regions:
            lines.append(f"    no candidate: {growth.reason}")
        for region in growth.regions:
            ours, theirs = region_us(region, device), inductor.replaced_us(region)
            lines.append(f"    {_names(region.nodes)}")
            kept = [node for node in region.nodes if node in region.kept]
            stored = _names([output.nodes[0] for output in region.outputs])
            again = f"; computed again outside: {_names(kept)}" if kept else ""
            lines.append(f"        stored: {stored}{again}")
            lines.append(f"        {ours:.1f} us instead of {theirs:.1f} us")
    return "\n".join(lines)


def _price() -> str:
    """What the price of the first region is made of (`partition/price.py`)."""
    device = devices.device(TARGET)
    m, n, k = ROWS[0] * ROWS[1], 3072, 768
    item = torch.bfloat16.itemsize
    flops, speed = 2.0 * m * n * k, device.flops_per_us(torch.bfloat16)
    operands, tile, bandwidth = (m * k + k * n) * item, m * n * item, device.bytes_per_us()
    product = max(flops / speed, (operands + tile) / bandwidth) + device.launch_us
    epilogue = (tile + n * item) / bandwidth
    rows = [
        (f"{flops / 1e9:.1f} Gflop at {speed / 1e6:.0f} Tflop/s", flops / speed),
        (
            f"{(operands + tile) / 1e6:.1f} MB (operands, first store) at "
            f"{bandwidth / 1e6:.2f} TB/s",
            (operands + tile) / bandwidth,
        ),
        ("the larger of the two and a launch: the product", product),
        (f"{(tile + n * item) / 1e6:.1f} MB (bias, second store)", epilogue),
        ("the region", product + epilogue),
    ]
    return "\n".join(f"{what:<52} {us:5.1f} us" for what, us in rows)


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(node.name for node in nodes)


def _plan(plan: Plan) -> str:
    """What `evt explain` prints, from the first graph on, without the number of the compilation."""
    (graph,) = plan.graphs
    text = to_text(dataclasses.replace(plan, graphs=(dataclasses.replace(graph, id="joint"),)))
    return text[text.index("graph joint") :].rstrip()


if __name__ == "__main__":
    for name, text in blocks().items():
        print(f"--- {name}\n{text}\n")
