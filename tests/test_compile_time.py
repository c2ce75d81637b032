"""benchmarks/compile_time.py: stages that add up, ratios, and a run that can be broken off."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks import compile_time
from click.testing import CliRunner, Result

from torch_evt.report.bench_process import Answer, Request


def _stages() -> dict[str, float]:
    """Times as PyTorch would give them: each stage longer than what is in it."""
    own = {name: random.uniform(0.1, 1.0) for name in ("dynamo", "aot", "joint", "rest", "cut")}
    passes = {f"evt.joint.{name}": random.uniform(0.1, 1.0) for name in ("plan", "recompose")}
    forward, backward = random.uniform(1, 2), random.uniform(1, 2)
    partitioner = own["rest"] + own["cut"] + sum(passes.values())
    aot = own["aot"] + own["joint"] + partitioner + forward
    return {
        "_compile.compile_inner": own["dynamo"] + aot,
        "create_aot_dispatcher_function": aot,
        "_recursive_joint_graph_passes": own["joint"],
        "Partitioner": partitioner,
        **passes,
        "min_cut_rematerialization_partition": own["cut"],
        "compile_fx.<locals>.fw_compiler_base": forward,
        "compile_fx.<locals>.bw_compiler": backward,
        "Scheduler.codegen": random.uniform(0, 1),
        "the rest of evt": own["rest"],
    }


def test_stages_add_up_and_nothing_counts_twice() -> None:
    given = _stages()
    rest = given.pop("the rest of evt")
    whole = given["_compile.compile_inner"] + given["compile_fx.<locals>.bw_compiler"] + 0.75
    found = compile_time.by_stage(given, whole)
    assert sum(found.values()) == pytest.approx(whole)
    assert found["first run"] == pytest.approx(0.75)
    assert found["evt, the rest"] == pytest.approx(rest)
    ours = rest + given["evt.joint.plan"] + given["evt.joint.recompose"]
    assert compile_time.of_evt(found) == pytest.approx(ours)
    assert min(found.values()) > 0


def test_inductor_alone_has_min_cut_and_nothing_of_ours() -> None:
    given = {name: s for name, s in _stages().items() if "evt" not in name}
    del given["Partitioner"]
    found = compile_time.by_stage(given, 20.0)
    assert found["min-cut"] == given["min_cut_rematerialization_partition"]
    assert sum(found.values()) == pytest.approx(20.0)
    assert abs(compile_time.of_evt(found)) < 1e-9


def test_the_median_is_a_process_that_was_and_a_failed_one_spoils_it() -> None:
    answers = [Answer(compile_s=s, stages={"Partitioner": s / 2}) for s in (3.0, 9.0, 5.0)]
    entry = compile_time.summary(answers)
    assert entry["compile_s"] == 5.0 and entry["samples_s"] == [3.0, 9.0, 5.0]
    assert sum(entry["stages"].values()) == pytest.approx(5.0)
    entry = compile_time.summary([*answers, Answer(problems=("it broke",))])
    assert entry["compile_s"] is None and entry["problems"] == ["it broke"]


class Processes:
    """Stands in for processes: seconds by mode."""

    def __init__(self) -> None:
        self.seconds = {"inductor": 2.0, "evt": 2.2, "evt-always": 2.5}
        self.asked: list[tuple[str, str]] = []
        self.folders: list[str] = []

    def __call__(self, request: Request, folder: str) -> Answer:
        assert request.measures == ("compile",) and not list(Path(folder).iterdir())
        mode = "evt-always" if request.options else request.mode
        self.asked.append((request.subject.what, mode))
        self.folders.append(folder)
        seconds = self.seconds[mode]
        return Answer(compile_s=seconds, stages={"Partitioner": 0.5, "evt.joint.plan": 0.25})


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    stand_in = Processes()
    monkeypatch.setattr(compile_time, "in_fresh_process", stand_in)
    return stand_in


def _run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(compile_time.main, [*arguments, "--output", str(path)])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_modes_take_turns_each_in_an_empty_folder(processes: Processes, tmp_path: Path) -> None:
    done = _run(tmp_path / "a.json", "--workloads", "mlp", "--repeats", "2")
    assert done.exit_code == 0, done.output
    assert processes.asked == [("mlp", mode) for mode in processes.seconds] * 2
    assert len(set(processes.folders)) == 6
    found = _read(tmp_path / "a.json")
    entry = found["workloads"]["mlp"]
    assert entry["ratio"] == {"evt": pytest.approx(1.1), "evt-always": pytest.approx(1.25)}
    assert entry["modes"]["evt"]["samples_s"] == [2.2, 2.2]
    assert found["limit"] == 1.3 and found["size"] == "small" and found["versions"]["torch"]
    assert found["device"] and found["date"] and found["repeats"] == 2
    assert "mlp, evt-always: evt.joint.plan 0.25 s" in done.output and "1.25" in done.output


@pytest.mark.parametrize(("seconds", "code"), [(2.59, 0), (2.61, 1)])
def test_it_ends_with_1_beyond_the_limit(
    processes: Processes, tmp_path: Path, seconds: float, code: int
) -> None:
    processes.seconds["evt-always"] = seconds
    assert _run(tmp_path / "a.json", "--workloads", "mlp").exit_code == code


def test_a_mode_that_fails_is_shown_and_ends_with_1(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compile_time,
        "in_fresh_process",
        lambda request, folder: (
            Answer(problems=("[e] broke",)) if request.options else processes(request, folder)
        ),
    )
    done = _run(tmp_path / "a.json", "--workloads", "mlp", "--repeats", "1")
    assert done.exit_code == 1 and "[e] broke" in done.output
    assert _read(tmp_path / "a.json")["workloads"]["mlp"]["ratio"]["evt-always"] is None


def test_the_next_run_measures_what_is_missing_and_keeps_the_rest(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_time.workloads, "names", lambda: ("mlp", "gpt2-medium"))
    path = tmp_path / "a.json"
    assert _run(path, "--workloads", "gpt2-medium", "--repeats", "1").exit_code == 0
    first = _read(path)["workloads"]["gpt2-medium"]
    processes.asked.clear()
    assert _run(path, "--repeats", "1").exit_code == 0
    assert {what for what, _ in processes.asked} == {"mlp"}
    found = _read(path)["workloads"]
    assert found["gpt2-medium"] == first and set(found) == {"mlp", "gpt2-medium"}
    processes.asked.clear()
    assert _run(path, "--workloads", "mlp", "--repeats", "1").exit_code == 0
    assert {what for what, _ in processes.asked} == {"mlp"}  # named, so measured again


def test_a_file_of_other_conditions_is_not_continued(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert _run(path, "--workloads", "mlp", "--size", "tiny").exit_code == 0
    before = _read(path)
    done = _run(path, "--workloads", "mlp", "--size", "small")
    assert done.exit_code == 1 and "another size" in done.output and "--output" in done.output
    assert _read(path) == before


def test_an_unknown_workload_is_an_error_before_anything_runs(
    processes: Processes, tmp_path: Path
) -> None:
    done = _run(tmp_path / "a.json", "--workloads", "mlp,gtp2-medium")
    assert done.exit_code == 1 and "did you mean 'gpt2-medium'" in done.output
    assert processes.asked == [] and not (tmp_path / "a.json").exists()


@pytest.mark.slow
def test_the_tiny_mlp_is_measured(tmp_path: Path) -> None:
    arguments = ["--workloads", "mlp", "--size", "tiny", "--repeats", "1"]
    done = _run(tmp_path / "a.json", *arguments)
    assert done.exit_code in (0, 1), done.output  # a busy machine may be beyond the limit
    modes = _read(tmp_path / "a.json")["workloads"]["mlp"]["modes"]
    for name, entry in modes.items():
        stages = entry["stages"]
        assert entry["problems"] == [] and entry["compile_s"] > 0
        assert sum(stages.values()) == pytest.approx(entry["compile_s"])
        assert stages["inductor"] > 0 and stages["min-cut"] > 0
        assert ("evt.joint.plan" in stages) == (name == "evt-always")
