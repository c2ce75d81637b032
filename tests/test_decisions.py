"""Plans are logged and kept when a graph is compiled, and shown again when a cache has it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from torch_evt import decisions
from torch_evt.decisions import observed
from torch_evt.partition.plan import GraphPlan, Plan, digest, from_data, to_data
from torch_evt.runtime import store

MARK = "(from the cache)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "torch_evt"


@pytest.fixture
def plan(random_plan: Callable[..., Plan]) -> GraphPlan:
    return replace(random_plan(3).graphs[0], id="7/3 joint")


def graph() -> tuple[fx.GraphModule, list[Tensor]]:
    return fx.symbolic_trace(lambda x: torch.tanh(x) + 1), [torch.randn(3, 5)]


def compiled(*plans: GraphPlan, identity: str | None = "options", unplaced: Any = None) -> None:
    """What a compilation does: our passes see the graph and make these plans."""
    with decisions.compiling(*graph(), identity, unplaced=unplaced):
        decisions.started()
        for each in plans:
            decisions.report(each)


def loaded(identity: str | None = "options", unplaced: str | None = None) -> list[GraphPlan]:
    """What a cache hit does: nothing between. The plans that an observer sees."""
    seen: list[GraphPlan] = []
    with observed(seen.append), decisions.compiling(*graph(), identity, unplaced=unplaced):
        pass
    return seen


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_plan_survives_its_text(plan: GraphPlan) -> None:
    assert from_data(json.loads(json.dumps(to_data(plan)))) == plan


def test_equal_decisions_have_equal_digests(plan: GraphPlan) -> None:
    again = replace(plan, id="8/0 joint", inductor_saved_bytes=None, from_cache=True)
    assert digest(again) == digest(plan)
    first, *others = plan.regions
    changes = [
        replace(plan, regions=tuple(others)),
        replace(plan, regions=(replace(first, tree=first.tree + " "), *others)),
        replace(plan, saved=plan.saved[1:]),
        replace(plan, unfused=plan.unfused[1:]),
        replace(plan, placed=False),
    ]
    assert digest(plan) not in map(digest, changes)


def test_a_hit_shows_every_plan_of_the_compilation_marked(plan: GraphPlan) -> None:
    inference = replace(plan, id="7/3 inference", regions=plan.regions[:1])
    compiled(plan, inference)
    assert loaded() == [
        replace(plan, id="- joint", from_cache=True),
        replace(inference, id="- inference", from_cache=True),
    ]
    assert loaded() == loaded()  # showing a kept plan changes nothing


def test_a_hit_logs_what_the_compilation_logged_marked(
    plan: GraphPlan, caplog: pytest.LogCaptureFixture
) -> None:
    plan = replace(plan, id="- joint")
    with caplog.at_level(logging.DEBUG, logger="torch_evt"):
        compiled(plan)
        first = [(r.levelname, r.getMessage()) for r in caplog.records]
        caplog.clear()
        loaded()
        second = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert len(first) == 1 + len(plan.regions) + len(plan.unfused) + len(plan.notes)
    assert second == [(level, f"{message} {MARK}") for level, message in first]


def test_the_info_level_has_one_line_and_the_notes(
    plan: GraphPlan, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torch_evt"):
        compiled(plan)
    line, note = [r.getMessage() for r in caplog.records]
    assert line == (
        "7/3 joint: 6 regions placed (3 forward, 3 backward); 6 left to Inductor; "
        f"plan {digest(plan)}"
    )
    assert note == "7/3 joint: a note on the graph"


def test_plans_are_kept_though_nobody_looks_at_the_logs(
    plan: GraphPlan, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="torch_evt"):
        compiled(plan)
    assert len(loaded()) == 1


def test_another_identity_is_another_compilation(plan: GraphPlan) -> None:
    compiled(plan)
    assert loaded("other options") == []


def test_nothing_is_kept_where_inductor_caches_nothing(plan: GraphPlan, folder: Path) -> None:
    compiled(plan, identity=None)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(plan)
    assert entries(folder) == []


def test_without_emitter_and_without_onlookers_nothing_is_computed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    computed: list[Any] = []
    monkeypatch.setattr(decisions, "graph_key", lambda *args: computed.append(args))
    with caplog.at_level(logging.WARNING, logger="torch_evt"):
        compiled(unplaced="there is no emitter for cpu")
        assert computed == []
        compiled()
    assert len(computed) == 1


def test_a_compilation_that_failed_keeps_nothing(plan: GraphPlan, folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), decisions.compiling(*graph(), "", unplaced=None):
        decisions.report(plan)
        raise ZeroDivisionError
    assert entries(folder) == []
    assert decisions._compilation.get() is None


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap_schema(path: Path) -> None:
    value = json.loads(store.get("plans", path.name) or b"")
    store.put("plans", path.name, json.dumps({**value, "schema": 99}).encode())


def swap_contents(path: Path) -> None:
    store.put("plans", path.name, b'{"schema": 1, "plans": [{"regions": [{}]}]}')


@pytest.mark.parametrize(
    "spoil",
    [damage, swap_schema, swap_contents, Path.unlink, lambda path: shutil.rmtree(path.parents[2])],
    ids=["truncated", "schema", "contents", "removed", "no folder"],
)
def test_a_plan_that_cannot_be_read_is_said_to_be_missing_and_kept_anew(
    spoil: Callable[[Path], None],
    plan: GraphPlan,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled(plan)
    (path,) = entries(folder)
    spoil(path)
    with caplog.at_level(logging.INFO, logger="torch_evt"):
        assert loaded() == []
    assert "compiled from the cache; its plan was not kept" in caplog.text
    compiled(plan)
    assert len(loaded()) == 1


def test_a_folder_that_cannot_be_written_changes_nothing(plan: GraphPlan, folder: Path) -> None:
    folder.write_bytes(b"in the way")
    compiled(plan)
    assert loaded() == []


def test_a_failing_observer_does_not_stop_a_load(
    plan: GraphPlan, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(plan)

    def fail(_: GraphPlan) -> None:
        raise ZeroDivisionError("planted on purpose")

    with (
        caplog.at_level(logging.WARNING, logger="torch_evt"),
        observed(fail),
        decisions.compiling(*graph(), "options", unplaced=None),
    ):
        pass
    assert "planted on purpose" in caplog.text


def test_a_graph_that_reached_our_passes_is_never_said_to_be_cached(
    plan: GraphPlan, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(plan)
    with caplog.at_level(logging.INFO, logger="torch_evt"):
        compiled()
    assert MARK not in caplog.text and "cache" not in caplog.text


def test_a_hit_where_nothing_may_be_placed_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torch_evt"):
        assert loaded(unplaced="there is no emitter for cpu") == []
    assert "without a plan: there is no emitter for cpu (from the cache)" in caplog.text
