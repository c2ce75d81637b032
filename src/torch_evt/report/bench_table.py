"""A measurement as a table for people."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_evt.report.bench import EVT, Bench
from torch_evt.report.render import size


def render(result: Bench) -> RenderableType:
    """The whole result as a rich renderable."""
    header = Table.grid(padding=(0, 2))
    header.add_column(style="bold")
    header.add_column()
    what = result.workload if result.size is None else f"{result.workload}, {result.size}"
    header.add_row("workload", Text(f"{what}, {result.dtype}"))
    header.add_row("device", Text(result.device + (", CUDA graphs" if result.cuda_graphs else "")))
    header.add_row("versions", Text(", ".join(f"{k} {v}" for k, v in result.versions.items())))
    header.add_row("date", result.date)
    parts: list[RenderableType] = [header, Text(), _table(result)]
    parts.extend(Text(f"note: {note}", style="yellow") for note in result.notes)
    for name, problems in result.problems.items():
        parts.extend(Text(f"{name}: {problem}", style="red") for problem in problems)
    return Group(*parts)


def caption(result: Bench) -> str:
    """How to read the table, and what evt's numbers are numbers of."""
    return (
        "ms, medians; +-: between the quartiles; evt is: its speed-up over the mode; step: with "
        "fused AdamW; cold, warm: compile time; error: the worst gradient's, over eager's or u. "
        f"{_regions(result)}."
    )


def _regions(result: Bench) -> str:
    if result.regions is None:
        return "Evt did not run"
    if result.regions == 0:
        return "Evt placed no region here, so its code is what Inductor makes"
    how = ", by the reference in plain PyTorch, which is not made to be fast"
    return f"Evt ran {result.regions} regions a step{how if result.reference else ''}"


def _table(result: Bench) -> Table:
    table = Table(caption=caption(result), caption_justify="left")
    table.add_column("mode", no_wrap=True)
    columns = ["fwd+bwd", "+-", "evt is", "step", "cold s", "warm s", "error"]
    peaks = any(mode.peak_bytes is not None for mode in result.modes.values())
    for column in [*columns, "peak"] if peaks else columns:
        table.add_column(column, justify="right")
    for name, mode in result.modes.items():
        speedup = result.speedup.get(name)
        row: list[str | Text] = [
            Text(name, style="bold" if name == EVT else ""),
            _shown(mode.fwdbwd_ms, _three),
            _shown(mode.spread_ms, _three),
            _shown(speedup, lambda x: f"{x:.2f}x"),
            _shown(mode.step_ms, _three),
            _shown(mode.compile_cold_s, lambda s: f"{s:.1f}"),
            _shown(mode.compile_warm_s, lambda s: f"{s:.1f}"),
            _shown(mode.grad_error, lambda e: f"{e:.2f}"),
        ]
        if peaks:
            row.append("-" if mode.peak_bytes is None else size(mode.peak_bytes))
        table.add_row(*row)
    return table


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _three(value: float) -> str:
    """Three digits, or the whole number where it has more."""
    digits = next((d for d, bound in ((0, 100.0), (1, 10.0), (2, 1.0)) if value >= bound), 3)
    return f"{value:.{digits}f}"
