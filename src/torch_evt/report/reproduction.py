"""Scripts that reproduce alone what `verify` found, and what such a script calls.

A region's script holds the nodes that the region replaced as a function, and beside it their
operands. It builds the region from them again, places it, runs it, and holds kernel against tree
and tree against nodes: so it fails while any of the steps from nodes to kernel is wrong, and passes
once it is mended. A graph's script holds what Dynamo captured, and verifies it as a whole.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_evt.dump import folder_for
from torch_evt.graphs import rename
from torch_evt.joint import recompose
from torch_evt.mainloops import for_target
from torch_evt.partition import place
from torch_evt.partition.candidates import Rules, build
from torch_evt.partition.early import compares
from torch_evt.partition.region import Region
from torch_evt.replaced import PlacedRegion, concrete, nodes_of, placed
from torch_evt.report import region_nodes
from torch_evt.runtime import dispatch
from torch_evt.runtime.check import Fault, Run, compact, listening
from torch_evt.tree.text import parse, to_text

SCRIPT = "reproduce.py"
TENSORS = "tensors.pt"


class NoScript(Exception):
    """A graph that cannot be written as a script."""


def write_region(root: str, region: PlacedRegion, run: Run, faults: Sequence[Fault]) -> Path:
    """Write a script for one wrong run of a region into a new folder below `root`; the folder.

    Raises NoScript, NoSize or OSError where it cannot.
    """
    module, shapes = concrete(region, run.inputs)
    operands = region_nodes.operands_of(region, module, shapes, run)
    device = run.inputs[0].device
    for (name, tensor), shape, dtype in zip(operands.items(), shapes, _dtypes(region), strict=True):
        if tensor is None:  # the kernel never had it, so any value will do
            operands[name] = _any_tensor(shape, dtype, device)
    names = {
        "region": list(region.nodes.region),
        "anchor": region.nodes.anchor,
        "calls": [n.name for n in module.graph.nodes if n.op == "call_function"],
        "device_kind": region.rules.device_kind,
        "exact_rounding": region.rules.exact_rounding,
    }
    saved = {
        "operands": [_copy(t) for t in operands.values() if t is not None],
        "inputs": [_copy(t) for t in run.inputs],
        "sizes": list(run.sizes),
    }
    heading = [f"The region {run.name} is wrong.", "", *map(str, faults)]
    call = f"check_region(Graph(), HERE, TREE, {_listed(names)})"
    text = _source(heading, module.graph, "check_region", f"TREE = {to_text(run.tree)!r}\n", call)
    return _write(root, run.name, text, saved)


def write_graph(
    root: str,
    name: str,
    graph: fx.Graph,
    inputs: Sequence[Any],
    heading: Sequence[str],
    options: Mapping[str, Any],
    seed: int,
) -> Path:
    """Write a script that verifies a whole graph as Dynamo captured it; the folder.

    Raises NoScript or OSError where it cannot.
    """
    if any(node.op in ("get_attr", "call_module", "call_method") for node in graph.nodes):
        held = {n.op for n in graph.nodes} - {"placeholder", "call_function", "output"}
        if held != {"call_method"}:
            raise NoScript(f"the graph holds {', '.join(sorted(held))}")
    saved = {"inputs": [_leaf(value) for value in inputs]}
    call = f"check_graph(Graph(), HERE, {dict(options)!r}, seed={seed})"
    text = _source([*heading], graph, "check_graph", "", call)
    return _write(root, name, text, saved)


def check_region(
    graph: Callable[..., Any],
    folder: Path,
    tree: str,
    *,
    region: Sequence[str],
    anchor: str,
    calls: Sequence[str],
    device_kind: str,
    exact_rounding: bool,
) -> int:
    """Build, place, run and check a region again; prints what is wrong. 1 where something is.

    graph: computes the nodes. folder: holds the tensors. tree: the text of the tree that was wrong;
    where the compiler no longer builds a region from the nodes, its kernel alone is checked.
    region, anchor: names of the region's nodes; calls: names of all calls in the graph, in order.
    """
    saved = torch.load(folder / TENSORS, weights_only=True)
    module = make_fx(graph, tracing_mode="fake")(*saved["operands"])
    made = [n for n in module.graph.nodes if n.op == "call_function"]
    for node, name in zip(made, calls, strict=True):
        rename(node, name)
    rules = Rules(
        labels=dict.fromkeys(module.graph.nodes, "inference"),
        device_kind=device_kind,
        exact_rounding=exact_rounding,
    )
    masks = {n.name for n in module.graph.nodes if compares(n)}
    recompose.apply(module.graph, exact_rounding=exact_rounding, apart=masks.intersection(region))
    found = _rebuilt(module.graph, region, anchor, rules)
    runs: list[Run] = []
    faults: list[Fault] = []
    with listening(runs.append):
        if found is None:
            print("the compiler builds no region from these nodes now: its old tree is checked")
            dispatch.run(
                dispatch.write_spec(parse(tree), name="alone"), saved["inputs"], saved["sizes"]
            )
        else:
            nodes = nodes_of(found, {})
            kernel = place.place(module.graph, found, {}, name="alone")
            record = placed(kernel, found, nodes, {}, name="alone", half="inference", rules=rules)
            fx.Interpreter(module).run(*saved["operands"])
            faults += region_nodes.faults_of(record, runs[0])
    faults = [*runs[0].faults, *faults]
    return _said(faults, to_text(runs[0].tree))


def check_graph(
    graph: torch.nn.Module, folder: Path, options: Mapping[str, Any], *, seed: int
) -> int:
    """Verify a whole graph on the saved inputs; prints the verdict. 1 where something is wrong."""
    from torch_evt import backend
    from torch_evt.report.verify import verify

    inputs = torch.load(folder / TENSORS, weights_only=True)["inputs"]
    found = verify(
        graph,
        *inputs,
        loss=_weighted,
        options=options,
        seed=seed,
        write=False,
        backend=backend.evt,
    )
    print(found)
    return 0 if found.passed else 1


def _rebuilt(graph: fx.Graph, names: Sequence[str], anchor: str, rules: Rules) -> Region | None:
    named = {node.name: node for node in graph.nodes}
    nodes = [named.get(name) for name in names]
    loop = for_target(named[anchor].target) if anchor in named else None
    if loop is None or any(node is None for node in nodes):
        return None
    found = build(named[anchor], loop, nodes, rules)  # type: ignore[arg-type]
    return found if isinstance(found, Region) else None


def _said(faults: Sequence[Fault], tree: str) -> int:
    print(tree)
    for fault in faults:
        print(fault)
    print("the region is wrong" if faults else "the region is right")
    return 1 if faults else 0


def _weighted(output: Any) -> Tensor:
    """A scalar that every differentiable result has a gradient of its own in."""
    total: Tensor | None = None
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            places = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32)
            weights = torch.cos(places).view(leaf.shape)
            part = (leaf * weights.to(leaf.dtype)).sum()
            total = part if total is None else total + part
    return torch.zeros(()) if total is None else total


def _dtypes(region: PlacedRegion) -> list[torch.dtype]:
    values = (n.meta.get("val") for n in region.nodes.graph.nodes if n.op == "placeholder")
    return [value.dtype for value in values if isinstance(value, Tensor)]


def _any_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    made = torch.randn(shape, generator=generator, device=device)
    return made > 0 if dtype == torch.bool else made.to(dtype)


def _copy(tensor: Tensor) -> Tensor:
    return (
        compact(tensor.detach()).cpu() if tensor.device.type != "cpu" else compact(tensor.detach())
    )


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _copy(value).requires_grad_(value.requires_grad)


def _source(heading: Sequence[str], graph: fx.Graph, check: str, extra: str, call: str) -> str:
    code = graph.python_code("self")
    body = "\n".join("    " + line for line in code.src.strip().splitlines())
    said = "\n".join(heading).replace("\\", "\\\\").replace('"""', "'''")
    text = f'''"""{said}

Exits with 1 while that is so, with 0 once it is mended. Needs torch and torch_evt only.
"""

import sys
from pathlib import Path

{_imports(code.globals)}
import torch_evt.backend  # registers the operators
from torch_evt.report.reproduction import {check}

HERE = Path(__file__).parent
{extra}

class Graph(torch.nn.Module):
{body}


if __name__ == "__main__":
    sys.exit({call})
'''
    try:
        compile(text, SCRIPT, "exec")
    except SyntaxError as error:
        raise NoScript(f"the graph's code does not stand alone: {error}") from error
    return text


def _imports(names: Mapping[str, Any]) -> str:
    """Import lines for what a graph's code refers to. Raises NoScript for what has no name."""
    lines = ["import torch", "from math import inf, nan"]
    for name, value in sorted(names.items()):
        if name in ("torch", "inf", "nan"):
            continue
        if isinstance(value, types.ModuleType):
            lines.append(f"import {value.__name__} as {name}")
            continue
        if value is type(None):
            lines.append(f"{name} = type(None)")
            continue
        module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if not module or not qualified.isidentifier():
            raise NoScript(f"its code refers to {value!r}, which cannot be imported")
        lines.append(f"from {module} import {qualified} as {name}")
    return "\n".join(lines)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in names.items())


def _write(root: str, name: str, text: str, saved: Mapping[str, Any]) -> Path:
    folder = folder_for(root, name)
    (folder / SCRIPT).write_text(text, encoding="utf-8")
    torch.save(dict(saved), folder / TENSORS)
    return folder
