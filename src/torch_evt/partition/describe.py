"""From chosen regions to the plain data of a plan."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import fx

from torch_evt.devices import Device
from torch_evt.graphs import expression, tensor_of
from torch_evt.partition.elementwise import function_of
from torch_evt.partition.greedy import Choice, Chosen, Left
from torch_evt.partition.halves import Label
from torch_evt.partition.plan import Alternative, Half, RegionPlan, Saved, Unfused
from torch_evt.partition.price import product_us
from torch_evt.partition.region import Region
from torch_evt.tree.ir import (
    Cast,
    Compute,
    Load,
    LoadKind,
    Reduce,
    Store,
    postorder,
    roots,
)
from torch_evt.tree.text import to_text
from torch_evt.version import __version__

aten = torch.ops.aten


def regions_of(
    choice: Choice, labels: Mapping[fx.Node, Label], first_number: int = 0
) -> tuple[RegionPlan, ...]:
    """The plan's entries of the chosen regions, numbered from `first_number`."""
    return tuple(
        _region_plan(chosen, _half(labels[chosen.priced.region.anchor]), first_number + i)
        for i, chosen in enumerate(choice.chosen)
    )


def renamed(region: RegionPlan, names: Mapping[str, str]) -> RegionPlan:
    """A plan's entry after its graph's nodes got new names. An expanded node keeps its name."""
    return replace(
        region,
        anchor=names[region.anchor],
        nodes=tuple(names[name] for name in region.nodes),
        stored=tuple(names[name] for name in region.stored),
        kept=tuple(names[name] for name in region.kept),
    )


def unfused_of(
    choice: Choice, labels: Mapping[fx.Node, Label], device: Device
) -> tuple[Unfused, ...]:
    """The plan's entries of the anchors that stay with Inductor."""
    return tuple(_unfused(left, _half(labels[left.anchor]), device) for left in choice.left)


def saved_of(nodes: Iterable[fx.Node]) -> tuple[Saved, ...]:
    """The tensors among saved values, with their bytes (None where symbolic)."""
    return tuple(
        Saved(node.name, tensor_bytes(tensor))
        for node in nodes
        if (tensor := tensor_of(node)) is not None
    )


def tensor_bytes(tensor: torch.Tensor) -> int | None:
    """Bytes of a tensor's elements; None where a size is symbolic."""
    total = tensor.element_size()
    for size in tensor.shape:
        if not isinstance(size, int):
            return None
        total *= size
    return total


def _half(label: Label) -> Half:
    return "forward" if label == "either" else label


def _alternatives(chosen: Chosen) -> tuple[Alternative, ...]:
    """The two best losers whose trees differ from the chosen one."""
    own = to_text(chosen.priced.region.tree)
    found: dict[str, float] = {}
    for loser in chosen.losers:
        tree = to_text(loser.region.tree)
        if tree != own:
            found.setdefault(tree, loser.modelled_us)
        if len(found) == 2:
            break
    return tuple(Alternative(tree, us) for tree, us in found.items())


def _region_plan(chosen: Chosen, half: Half, number: int) -> RegionPlan:
    region = chosen.priced.region
    return RegionPlan(
        name=f"region{number}",
        half=half,
        anchor=region.anchor.name,
        mainloop=region.mainloop.name,
        tree=to_text(region.tree),
        shape=_shape(region),
        nodes=tuple(node.name for node in region.nodes),
        stored=tuple(output.nodes[0].name for output in region.outputs),
        modelled_us=chosen.priced.modelled_us,
        replaced_us=chosen.priced.replaced_us,
        kept=tuple(node.name for node in region.nodes if node in region.kept),
        alternatives=_alternatives(chosen),
        fuses=_fuses(region),
    )


def _shape(region: Region) -> tuple[str, ...]:
    left = tensor_of(region.inputs[0].node)
    assert left is not None
    space = region.space
    sizes = (1 if space.l is None else space.l, space.m, space.n, left.shape[-1])
    return tuple(str(expression(size)) for size in sizes)


def _fuses(region: Region) -> tuple[str, ...]:
    """What a region holds, in the field's words; never empty."""
    words: list[str] = []
    loads = [v for v in postorder(roots(region.tree)) if isinstance(v, Load)]
    functions = [function_of(n) for n in region.nodes]
    added = _added(region)
    has_bias = region.anchor.target in (aten.addmm.default, aten.baddbmm.default)
    if has_bias or "row" in added:
        words.append("bias")
    if any(v.dtype == torch.bool for v in loads):
        words.append("mask")
    words += [f for f in functions if f is not None and f not in ("add", "mul", "where")]
    if "mask" not in words and ("mul" in functions or "where" in functions):
        words.append("scale")
    if "tile" in added:
        words.append("residual")
    stores = sum(isinstance(s, Store) for s in region.tree.sinks)
    if stores > 1:
        words.append(f"{stores} stores")
    words += [f"{s.op} over {s.over}" for s in region.tree.sinks if isinstance(s, Reduce)]
    return tuple(dict.fromkeys(words or [f for f in functions if f is not None]))


def _added(region: Region) -> set[LoadKind]:
    """The kinds of what the tree loads and adds as it is, or after a cast."""
    kinds: set[LoadKind] = set()
    for value in postorder(roots(region.tree)):
        if isinstance(value, Compute) and value.function == "add":
            for term in value.arguments:
                while isinstance(term, Cast):
                    term = term.value
                if isinstance(term, Load):
                    kinds.add(term.kind)
    return kinds


def _unfused(left: Left, half: Half, device: Device) -> Unfused:
    text = left.reason.text
    if left.blocker is not None and left.best is None:
        operation = str(left.blocker.target).removesuffix(".default")
        text = f"{text}: {operation}"
    return Unfused(
        node=left.anchor.name,
        half=half,
        reason=text,
        code=left.reason.code,
        modelled_us=left.best.modelled_us if left.best else None,
        replaced_us=left.best.replaced_us if left.best else product_us(left.anchor, device),
    )


def versions() -> dict[str, str]:
    """The versions of what decides a plan, by name."""
    return {
        "torch_evt": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
