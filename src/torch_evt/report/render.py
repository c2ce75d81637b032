"""A plan as tables for people: what was fused, what was not and why, what is saved.

Regions that have the same tree, shape and half are one row with a count; nodes left to Inductor for
the same reason are one row too. All times are microseconds.
"""

from __future__ import annotations

import io
from collections import defaultdict

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torch_evt.partition.plan import (
    GraphPlan,
    Half,
    Plan,
    RegionPlan,
    Unfused,
    group_regions,
    mean,
)

HALVES: tuple[Half, ...] = ("forward", "backward", "inference")


def render(plan: Plan) -> RenderableType:
    """The whole plan as a rich renderable."""
    parts: list[RenderableType] = [_header(plan)]
    parts.extend(Text(f"note: {note}", style="yellow") for note in plan.notes)
    for graph in plan.graphs:
        parts.append(Text())
        parts.extend(_graph(graph))
    if not plan.graphs:
        parts.append(Text("nothing was compiled, so there is no graph to explain", style="yellow"))
    return Group(*parts)


def to_text(plan: Plan, width: int = 100) -> str:
    """The same as plain text, `width` characters wide."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(render(plan))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def microseconds(value: float | None) -> str:
    """Three digits, or "-" where nothing is known."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(count: int | None) -> str:
    """A number of bytes with its unit; "unknown" for a symbolic one."""
    if count is None:
        return "unknown"
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def _header(plan: Plan) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("target", Text(plan.target))
    table.add_row("traced on", Text(plan.captured_on))
    table.add_row("versions", Text(", ".join(f"{k} {v}" for k, v in plan.versions.items())))
    for solver in dict.fromkeys(f"{g.solver}{_optimal(g)}" for g in plan.graphs):
        table.add_row("solver", Text(solver))
    return table


def _against_greedy(graph: GraphPlan) -> str:
    if graph.greedy_us is None:
        return ""
    return f" (the greedy plan: {microseconds(graph.greedy_us)} us)"


def _optimal(graph: GraphPlan) -> str:
    return ", optimal over the candidates" if graph.optimal else ""


def _graph(graph: GraphPlan) -> list[RenderableType]:
    planned = graph.solver != "none"
    state = "regions placed" if graph.placed else f"{'planned, ' * planned}nothing placed"
    modelled = f"; modelled {microseconds(graph.objective_us)} us" if planned else ", not planned"
    parts: list[RenderableType] = [
        Text.assemble(
            (f"graph {graph.id}", "bold"),
            f": {len(graph.regions)} regions, {state}{modelled}{_against_greedy(graph)}",
        )
    ]
    parts.extend(Text(f"  note: {note}", style="yellow") for note in graph.notes)
    for half in HALVES:
        regions = [r for r in graph.regions if r.half == half]
        unfused = [u for u in graph.unfused if u.half == half]
        if regions:
            parts.append(_indented(_regions(half, regions)))
        elif unfused:
            parts.append(_indented(Text(f"{half}: nothing fused", style="bold")))
        if unfused:
            parts.append(_indented(_unfused(half, unfused)))
    parts.append(_indented(_saved(graph)))
    return parts


def _indented(inner: RenderableType) -> RenderableType:
    return Padding(inner, (0, 0, 0, 2))


def _regions(half: Half, regions: list[RegionPlan]) -> Table:
    table = Table(
        title=f"{half}: fused",
        title_justify="left",
        title_style="bold",
        show_footer=True,
        show_lines=True,
    )
    table.add_column("region", "total", no_wrap=True)
    table.add_column("n", str(len(regions)), justify="right")
    table.add_column("what one kernel holds", overflow="fold", ratio=1)
    total = sum(r.modelled_us for r in regions)
    instead = sum(r.replaced_us for r in regions)
    table.add_column("us", microseconds(total), justify="right", no_wrap=True)
    measured = any(r.measured_us is not None for r in regions)
    if measured:
        table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("if left", microseconds(instead), justify="right", no_wrap=True)
    table.add_column("gain", _gain(total, instead), justify="right", no_wrap=True)
    for group in group_regions(regions):
        first = group[0]
        modelled = mean([r.modelled_us for r in group])
        replaced = mean([r.replaced_us for r in group])
        known = [r.measured_us for r in group if r.measured_us is not None]
        # Text, not str: names, reasons and trees may hold square brackets, rich's markup
        row: list[str | Text] = [
            Text(first.name),
            str(len(group)),
            _what(first),
            microseconds(modelled),
        ]
        if measured:
            row.append(microseconds(mean(known) if known else None))
        table.add_row(*row, microseconds(replaced), _gain(modelled, replaced))
    table.caption = (
        "us: modelled for one kernel; if left: what Inductor would run in its place; "
        "lost: the best other candidates; what they leave to other kernels is not in their time"
    )
    table.caption_justify = "left"
    return table


def _what(region: RegionPlan) -> Text:
    shape = " x ".join(region.shape)
    fuses = ", ".join(region.fuses) or "nothing beside the product"
    lost = "".join(
        f"\nlost, {microseconds(other.modelled_us)}: {other.tree}" for other in region.alternatives
    )
    return Text.assemble(
        (fuses, "bold"),
        f"\n{region.anchor}, {region.mainloop} {shape}\n",
        region.tree,
        (lost, "dim"),
    )


def _gain(modelled: float, replaced: float) -> str:
    return f"{replaced / modelled:.2f}x" if modelled > 0 else "-"


def _unfused(half: Half, unfused: list[Unfused]) -> Table:
    groups: dict[tuple[str, str], list[Unfused]] = defaultdict(list)
    for entry in unfused:
        groups[entry.code, entry.reason].append(entry)
    table = Table(title=f"{half}: not fused", title_justify="left", title_style="bold")
    table.add_column("why", overflow="fold", ratio=3)
    table.add_column("n", justify="right")
    table.add_column("nodes", overflow="fold", ratio=2)
    table.add_column("us", justify="right", no_wrap=True)
    table.add_column("if left", justify="right", no_wrap=True)
    for (_, reason), entries in groups.items():
        names = [entry.node for entry in entries]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        candidates = [e.modelled_us for e in entries if e.modelled_us is not None]
        replaced = [e.replaced_us for e in entries if e.replaced_us is not None]
        table.add_row(
            Text(reason),
            str(len(entries)),
            Text(shown),
            microseconds(mean(candidates) if candidates else None),
            microseconds(mean(replaced) if replaced else None),
        )
    table.caption = "us: the best region; if left: Inductor's kernel; means over the nodes"
    table.caption_justify = "left"
    return table


def _saved(graph: GraphPlan) -> Text:
    if not graph.saved and graph.saved_bytes is None:
        return Text("saved for backward: nothing")
    inductor = graph.inductor_saved_bytes
    text = f"saved for backward: {size(graph.saved_bytes)} in {len(graph.saved)} tensors"
    if inductor is not None:
        text += f"; Inductor alone would save {size(inductor)}"
    return Text(text)
