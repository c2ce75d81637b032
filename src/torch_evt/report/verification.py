"""What `verify` found: as data, as tables, as JSON.

    {"schema": 1, "passed", "device", "versions", "regions": [{"region", "graph", "half", "anchor",
        "nodes": [names], "tree", "runs", "compared_with_nodes", "passed",
        "faults": [{"kind", "where", "text", "index", "error", "limit"}]}],
     "tensors": [{"name", "passed", "rule", "error", "eager_error", "limit"}] or null,
     "first_wrong": a region's name or null, "folder": of the reproduction or null, "notes": [],
     "nan": [which parameters and inputs hold NaN]}

Errors are relative, in the L2 norm. What is not known, or not finite, is null.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_evt.comparison import Comparison
from torch_evt.runtime.check import Fault

SCHEMA = 1
SHOWN = 6


@dataclass(frozen=True)
class RegionVerdict:
    """The verdict on one region. name, half, anchor, nodes: as the plan of `graph` has them. runs:
    how often it ran in the step. compared: whether its tree was held against its nodes."""

    name: str
    graph: str
    half: str
    anchor: str
    nodes: tuple[str, ...]
    tree: str
    runs: int
    compared: bool
    faults: tuple[Fault, ...]

    @property
    def passed(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        return f"{self.name} ({self.half} of graph {self.graph}, at {self.anchor})"


@dataclass(frozen=True)
class Verification:
    """What `verify` found. regions: in the order in which they first ran; those that did not run
    come last. step: all tensors of the step against fp64; None where they could not be compared,
    and a note says why. folder: holds `reproduce.py`, where something failed. nan: the parameters,
    buffers and inputs that held NaN before the step, in words."""

    regions: tuple[RegionVerdict, ...]
    step: Comparison | None
    device: str
    versions: Mapping[str, str]
    folder: str | None = None
    notes: tuple[str, ...] = ()
    nan: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every region and every tensor is right."""
        return all(r.passed for r in self.regions) and (self.step is None or self.step.passed)

    @property
    def first_wrong(self) -> RegionVerdict | None:
        """The first wrong region in the order of execution."""
        return next((region for region in self.regions if not region.passed), None)

    def __str__(self) -> str:
        return to_text(self)

    def raise_if_failed(self) -> None:
        """Raise AssertionError with all that is wrong."""
        if not self.passed:
            raise AssertionError(to_text(self))


def render(found: Verification) -> RenderableType:
    """The whole verdict as a rich renderable."""
    parts: list[RenderableType] = []
    if found.regions:
        parts.append(_regions(found))
    if found.step is not None and not found.step.passed:
        parts.append(_tensors(found.step))
    parts.extend(Text(f"note: {note}", style="yellow") for note in found.notes)
    parts.extend(_conclusion(found))
    return Group(*parts)


def to_text(found: Verification, width: int = 100) -> str:
    """The same as plain text, `width` characters wide."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(render(found))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def to_json_text(found: Verification) -> str:
    """The verdict as JSON, indented."""
    return json.dumps(to_json(found), indent=2, allow_nan=False) + "\n"


def to_json(found: Verification) -> dict[str, Any]:
    """The verdict as dictionaries, lists, strings and numbers."""
    first = found.first_wrong
    return {
        "schema": SCHEMA,
        "passed": found.passed,
        "device": found.device,
        "versions": dict(found.versions),
        "regions": [_region_json(region) for region in found.regions],
        "tensors": None
        if found.step is None
        else [
            {
                "name": tensor.name,
                "passed": tensor.passed,
                "rule": tensor.rule,
                "error": _number(tensor.ours.l2),
                "eager_error": _number(tensor.eager.l2),
                "limit": _number(tensor.limit.l2),
            }
            for tensor in found.step.tensors
        ],
        "first_wrong": None if first is None else first.name,
        "folder": found.folder,
        "notes": list(found.notes),
        "nan": list(found.nan),
    }


def _region_json(region: RegionVerdict) -> dict[str, Any]:
    return {
        "region": region.name,
        "graph": region.graph,
        "half": region.half,
        "anchor": region.anchor,
        "nodes": list(region.nodes),
        "tree": region.tree,
        "runs": region.runs,
        "compared_with_nodes": region.compared,
        "passed": region.passed,
        "faults": [
            {
                "kind": fault.kind,
                "where": fault.where,
                "text": fault.text,
                "index": None if fault.index is None else list(fault.index),
                "error": None if fault.verdict is None else _number(fault.verdict.ours.l2),
                "limit": None if fault.verdict is None else _number(fault.verdict.limit.l2),
            }
            for fault in region.faults
        ],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _regions(found: Verification) -> Table:
    table = Table(title="regions", title_justify="left", title_style="bold", show_lines=True)
    table.add_column("region", no_wrap=True)
    table.add_column("half", no_wrap=True)
    table.add_column("runs", justify="right")
    table.add_column("what one kernel holds, and what is wrong", overflow="fold", ratio=1)
    table.add_column("", no_wrap=True)
    for region in found.regions:
        said = Text(f"{region.graph}: {', '.join(region.nodes)}")
        for fault in region.faults:
            said.append(f"\n{fault}", style="red")
        if region.faults:
            said.append(f"\n{region.tree}", style="dim")
        verdict = ("ok", "green") if region.passed else ("WRONG", "bold red")
        if region.passed and not region.runs:
            verdict = ("not run", "yellow")
        table.add_row(
            Text(region.name), region.half, str(region.runs), said, Text(verdict[0], verdict[1])
        )
    return table


def _tensors(step: Comparison) -> Table:
    table = Table(title="tensors that fail", title_justify="left", title_style="bold")
    for name in ("tensor", "error", "eager's", "limit", "rule"):
        table.add_column(name, overflow="fold")
    for tensor in step.tensors:
        if not tensor.passed:
            rule = f"{tensor.rule}: {tensor.detail}" if tensor.detail else tensor.rule
            numbers = (str(tensor.ours), str(tensor.eager), str(tensor.limit))
            table.add_row(Text(tensor.name), *numbers, Text(rule))
    return table


def _conclusion(found: Verification) -> list[RenderableType]:
    lines = _verdict(found)
    if found.nan:
        said = f"the inputs hold NaN: {listed(found.nan)}. What it reaches is NaN in eager too and "
        said += "was compared as such, not as numbers: verify again without it"
        lines.insert(0, Text(said, style="bold yellow"))
    return lines


def listed(names: Sequence[str]) -> str:
    """The first few, with commas, and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _verdict(found: Verification) -> list[RenderableType]:
    ran = sum(region.runs > 0 for region in found.regions)
    tensors = 0 if found.step is None else len(found.step.tensors)
    if found.passed:
        if not ran:
            return [Text(f"no region ran, so none was checked; {tensors} tensors are right")]
        what = f"all {ran} regions" + ("" if found.step is None else f" and {tensors} tensors")
        return [Text(f"{what} are right", style="bold green")]
    lines: list[RenderableType] = []
    first = found.first_wrong
    wrong = sum(not region.passed for region in found.regions)
    failed = [] if found.step is None else [t.name for t in found.step.tensors if not t.passed]
    if first is not None:
        said = f"{wrong} of {ran} regions are wrong; the first is {first}: {first.faults[0]}"
        lines.append(Text(said, style="bold red"))
    if failed:
        said = f"{len(failed)} of {tensors} tensors of the step are wrong: {listed(failed)}"
        lines.append(Text(said, style="bold red"))
    if found.folder is not None:
        lines.append(Text(f"python {found.folder}/reproduce.py shows it alone", style="bold"))
    return lines
