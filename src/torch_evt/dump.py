"""Writing graphs as Python that runs: one file a stage, headed by the pass and its time; and the
plan of each graph, as JSON and as the text of its trees.

Each file holds the graph as a function and, below it, a call of that function on random tensors of
the traced shapes, strides and dtypes, so that a stage can be run, profiled or cut down alone. With
--inputs FILE it runs on a saved list of inputs; --results FILE saves the list of results.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torch_evt.partition.plan import Plan
from torch_evt.partition.plan_json import to_json_text
from torch_evt.torch_compat import size_hint


def folder_for(root: str, graph_id: str) -> Path:
    """A new folder for one graph below `root`; an existing one of that name is never reused."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", graph_id) or "graph"
    for number in range(10_000):
        folder = Path(root) / (name if number == 0 else f"{name}.{number}")
        try:
            folder.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            continue
        return folder
    raise OSError(f"{root} holds too many dumps of {name}; empty it")


def write_stage(folder: Path, stage: str, module: fx.GraphModule, seconds: float) -> Path:
    """Write a graph after the pass that `stage` names; returns the file."""
    number = len(list(folder.glob("*.py")))
    path = folder / f"{number:02d}_{stage}.py"
    path.write_text(source(module, f"{stage}, {seconds * 1e3:.1f} ms"))
    return path


def write_plan(folder: Path, plan: Plan) -> None:
    """Write the plan of one graph: plan.json, as `partition.plan_json` has it, and trees.txt."""
    (folder / "plan.json").write_text(to_json_text(plan), encoding="utf-8")
    blocks = [
        f"# {region.name}, {region.half}: {', '.join(region.nodes)}\n{region.tree}\n"
        for graph in plan.graphs
        for region in graph.regions
    ]
    (folder / "trees.txt").write_text("\n".join(blocks), encoding="utf-8")


def source(module: fx.GraphModule, title: str) -> str:
    """A graph as a Python file that can be imported or run."""
    plain = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            plain.output(torch.fx.node.map_arg(tuple(_leaves(node.args[0])), lambda n: env[n]))
            continue
        env[node] = plain.node_copy(node, lambda n: env[n])
        if node.op == "get_attr":
            attributes[str(node.target)] = _attribute(module, str(node.target))
    code = plain.python_code("self")
    counted = sum(node.op == "call_function" for node in module.graph.nodes)
    inputs = ",\n        ".join(
        _random(node.meta.get("val")) for node in plain.nodes if node.op == "placeholder"
    )
    setup = "\n".join(
        f"        self.{name} = {_random(value)}"
        for name, value in attributes.items()
        if isinstance(value, torch.Tensor) and "." not in name
    )
    body = "\n".join("    " + line for line in code.src.strip().splitlines())
    return f'''"""{title}: {counted} operations."""

import argparse
from math import inf, nan

import torch
from torch import device

import torch_evt.backend  # registers the operators


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
{setup or "        pass"}

{body}


def _extent(shape, strides):
    """Elements of storage that a strided tensor spans."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)


def inputs():
    """Random tensors of the traced shapes, strides and dtypes."""
    torch.manual_seed(0)
    return (
        {inputs},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", help="a list that torch.save wrote; by default random ones")
    parser.add_argument("--results", help="a file to write the results to")
    arguments, _ = parser.parse_known_args()
    saved = arguments.inputs
    given = inputs() if saved is None else torch.load(saved, weights_only=True)
    results = Graph()(*given)
    for i, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            print(i, tuple(result.shape), result.dtype, float(result.double().norm()))
        else:
            print(i, result)
    if arguments.results is not None:
        torch.save(list(results), arguments.results)
'''


def _leaves(value: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(value))


def _attribute(module: fx.GraphModule, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _random(value: Any) -> str:
    """An expression that makes a random value like the traced one."""
    if isinstance(value, torch.SymInt):
        return str(size_hint(value))
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, (int, float, bool)) else "None"
    shape = tuple(size_hint(s) if isinstance(s, torch.SymInt) else s for s in value.shape)
    strides = tuple(size_hint(s) if isinstance(s, torch.SymInt) else s for s in value.stride())
    where = f"dtype={value.dtype}, device={str(value.device)!r}"
    if value.dtype.is_floating_point or value.dtype.is_complex:
        made = f"torch.randn(_extent({shape}, {strides}), {where})"
    elif value.dtype == torch.bool:
        made = f"torch.rand(_extent({shape}, {strides}), device={str(value.device)!r}) > 0.5"
    else:
        made = f"torch.randint(0, 2, (_extent({shape}, {strides}),), {where})"
    return f"torch.as_strided({made}, {shape}, {strides})"
