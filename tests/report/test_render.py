"""The printed plan: every fact of a plan is in it, equal things once, costs that add up."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from torch_evt.partition.plan import Plan, group_regions
from torch_evt.report import render
from torch_evt.report.render import microseconds, size, to_text

Plans = Callable[..., Plan]


def _flat(text: str) -> str:
    """The text without the frames and line breaks of tables."""
    return " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())


def _row(text: str, start: str) -> list[str]:
    """The cells of the row whose first cell is `start`."""
    line = next(line for line in text.splitlines() if re.match(rf"\W*{start}\b", line))
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def test_the_header_names_target_versions_and_solver(random_plan: Plans) -> None:
    text = _flat(to_text(random_plan(0)))
    for part in ("target h200", "traced on cpu", "torch 2.13.0, torch_evt 0.1.0", "solver greedy"):
        assert part in text
    assert "note: a note on the plan" in text and "note: a note on the graph" in text


def test_equal_regions_are_one_row_with_their_count_and_mean_cost(random_plan: Plans) -> None:
    plan = random_plan(1, layers=4)
    text = to_text(plan)
    for half in ("forward", "backward"):
        regions = [r for r in plan.graphs[0].regions if r.half == half]
        cells = _row(text, f"{half}_0")
        modelled = sum(r.modelled_us for r in regions) / 4
        replaced = sum(r.replaced_us for r in regions) / 4
        assert cells[1] == "4"
        assert cells[3:] == [
            microseconds(modelled), microseconds(replaced), f"{replaced / modelled:.2f}x"
        ]  # fmt: skip
        assert f"{half}_1" not in text


def test_the_total_of_a_half_is_the_sum_over_all_instances(random_plan: Plans) -> None:
    plan = random_plan(2)
    totals = [_row(part, "total") for part in to_text(plan).split("backward: fused")]
    for half, cells in zip(("forward", "backward"), totals, strict=True):
        regions = [r for r in plan.graphs[0].regions if r.half == half]
        assert cells[1] == "3"
        assert cells[3] == microseconds(sum(r.modelled_us for r in regions))
        assert cells[4] == microseconds(sum(r.replaced_us for r in regions))


@pytest.mark.parametrize("width", [70, 100, 160])
def test_the_tree_and_what_it_fuses_are_shown_whole_however_narrow(
    random_plan: Plans, width: int
) -> None:
    plan = random_plan(3)
    text = to_text(plan, width)
    assert max(map(len, text.splitlines())) <= width
    rows = [re.split("[│┃]", line) for line in text.splitlines()]
    held = "".join(row[3] for row in rows if len(row) > 6).replace(" ", "")
    for region in plan.graphs[0].regions[:2]:
        for part in (",".join(region.fuses), region.anchor, region.tree):
            assert part.replace(" ", "") in held


def test_trees_that_differ_only_in_shape_are_two_rows(random_plan: Plans) -> None:
    regions = random_plan(4).graphs[0].regions
    changed = dataclasses.replace(regions[2], shape=("1", "s0", "512", "128"))
    groups = group_regions([regions[0], changed, regions[4]])
    assert [[r.name for r in group] for group in groups] == [
        ["forward_0", "forward_2"],
        ["forward_1"],
    ]


def test_what_was_not_fused_is_collapsed_by_reason(random_plan: Plans) -> None:
    text = _flat(to_text(random_plan(5, layers=6), 160))
    assert "a plain product is cuBLAS's 6 mm_0, mm_1, mm_2, mm_3 and 2 more" in text
    assert f"priced slower 6 bmm_0, bmm_1, bmm_2, bmm_3 and 2 more {7.5 + 2.5:.1f} 6.25" in text


def test_saved_bytes_stand_beside_inductors(random_plan: Plans) -> None:
    plan = random_plan(6)
    text = _flat(to_text(plan))
    assert f"{size(plan.graphs[0].saved_bytes)} in 3 tensors" in text
    assert "Inductor alone would save 7.0 MiB" in text
    symbolic = dataclasses.replace(plan.graphs[0], saved_bytes=None)
    text = _flat(to_text(dataclasses.replace(plan, graphs=(symbolic,))))
    assert "saved for backward: unknown in 3 tensors" in text


def test_measured_times_have_a_column_of_their_own(random_plan: Plans) -> None:
    plan = random_plan(7)
    assert "measured" not in to_text(plan)
    graph = plan.graphs[0]
    regions = tuple(dataclasses.replace(r, measured_us=123.4) for r in graph.regions)
    measured = dataclasses.replace(plan, graphs=(dataclasses.replace(graph, regions=regions),))
    assert _row(to_text(measured), "forward_0")[4] == "123"


def test_a_plan_without_graphs_or_without_regions_says_so(random_plan: Plans) -> None:
    plan = random_plan(8)
    assert "nothing was compiled" in to_text(dataclasses.replace(plan, graphs=()))
    empty = dataclasses.replace(plan.graphs[0], regions=(), placed=False)
    text = _flat(to_text(dataclasses.replace(plan, graphs=(empty,))))
    assert "forward: nothing fused" in text and "planned, nothing placed" in text


def test_markup_in_a_name_is_printed_as_it_is(random_plan: Plans) -> None:
    plan = random_plan(9)
    graph = dataclasses.replace(plan.graphs[0], notes=("a[b] [red]c[/red]",), id="[x]")
    text = to_text(dataclasses.replace(plan, graphs=(graph,)))
    assert "a[b] [red]c[/red]" in text and "graph [x]" in text
    tile = "gemm(A: bf16 k 16) -> tile(0: bf16 n 16 [m mod s0, n])"
    regions = (dataclasses.replace(graph.regions[0], tree=tile, name="[bold]r"),)
    unfused = (dataclasses.replace(graph.unfused[0], node="[n]", reason="[why]"),)
    graph = dataclasses.replace(graph, regions=regions, unfused=unfused)
    text = _flat(to_text(dataclasses.replace(plan, graphs=(graph,)), 160))
    assert all(part in text for part in ("[m mod s0, n]", "[bold]r", "[n]", "[why]"))


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.1234, "0.12"), (12.34, "12.3"), (1234.5, "1234")]
)
def test_microseconds(value: float | None, text: str) -> None:
    assert render.microseconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")],
)
def test_size(count: int | None, text: str) -> None:
    assert size(count) == text
