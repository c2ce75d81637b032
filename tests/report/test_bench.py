"""bench: the contract's fields, modes that fail, gradients that are wrong, mistakes."""

from __future__ import annotations

import datetime
import io
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from interpreted import PLACE
from report.benching import Quick, quick, refusing, wrong_gradient
from torch_evt import cli
from torch_evt.errors import BenchError, ExplainError, OptionError, TargetError
from torch_evt.report import bench_timing
from torch_evt.report.bench import Bench, ModeResult, bench, device_name, to_json, to_json_text
from torch_evt.report.bench_table import caption, render
from torch_evt.report.explain import explain
from torch_evt.workloads import get

__all__ = ["quick"]

MODE_FIELDS = [
    "fwdbwd_ms",
    "step_ms",
    "spread_ms",
    "compile_cold_s",
    "compile_warm_s",
    "peak_bytes",
    "grad_error",
]
COMMAND = ("bench", "mlp", "--device", "cpu", "--repeats", "1", "--no-compile-time", "--no-check")
FIELDS = ["workload", "size", "dtype", "device", "versions", "date", "cuda_graphs", "modes"]


def fast(what: str, **arguments: Any) -> Bench:
    """bench with few samples, and without processes unless asked for."""
    given = {"repeats": 2, "compile_time": False, "check": False, **arguments}
    return bench(what, device=None if ":" in what else "cpu", **given)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """source of `make`'s body -> "module:make", importable."""

    def write(body: str) -> str:
        name = f"bench_model_{random.getrandbits(64):x}"
        lines = "\n    ".join(body.splitlines())
        text = f"import torch\nfrom torch import nn\n\ndef make():\n    {lines}\n"
        (tmp_path / f"{name}.py").write_text(text)
        return f"{name}:make"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return write


def test_the_json_is_the_contract(quick: Quick) -> None:
    seed = random.randrange(1000)
    result = fast("mlp", seed=seed, compile_time=True, check=True, options=PLACE)
    found = json.loads(to_json_text(result))
    assert list(found) == [*FIELDS, "speedup"]
    assert found["workload"] == "mlp" and found["size"] == "tiny" and found["dtype"] == "fp32"
    assert found["device"] == device_name(torch.device("cpu")) and found["cuda_graphs"] is False
    assert {"torch", "torch_evt", "python"} <= set(found["versions"])
    date = datetime.datetime.fromisoformat(found["date"])
    assert abs(datetime.datetime.now(datetime.timezone.utc) - date).total_seconds() < 600
    assert list(found["modes"]) == ["eager", "inductor", "evt"]
    for name, mode in found["modes"].items():
        assert list(mode) == MODE_FIELDS
        assert mode["fwdbwd_ms"] > 0 and mode["step_ms"] > 0 and mode["spread_ms"] >= 0
        assert mode["peak_bytes"] is None
        assert 0 < mode["grad_error"] <= (1.0 if name == "eager" else 1.5)
        for field in ("compile_cold_s", "compile_warm_s"):
            assert mode[field] is None if name == "eager" else mode[field] >= 0
    ours = found["modes"]["evt"]["fwdbwd_ms"]
    assert found["speedup"] == {
        name: found["modes"][name]["fwdbwd_ms"] / ours for name in ("eager", "inductor")
    }
    assert result.sound and not result.problems


def test_each_process_is_asked_for_what_it_can_answer(quick: Quick) -> None:
    fast("mlp", compile_time=True, check=True)
    warm = ("compile", "gradients")
    assert quick.asked == [
        ("eager", ("gradients",)),
        ("inductor", ("compile",)),
        ("inductor", warm),
        ("evt", ("compile",)),
        ("evt", warm),
    ]


def test_without_compile_time_and_check_no_process_is_started(quick: Quick) -> None:
    result = fast("mlp", against=[])
    assert quick.asked == [] and list(result.modes) == ["evt"] and result.speedup == {}
    mode = result.modes["evt"]
    assert mode.fwdbwd_ms and mode.compile_cold_s is None and mode.grad_error is None


def test_a_mode_that_fails_to_compile_is_null_and_the_others_run(quick: Quick) -> None:
    quick.backends["max-autotune"] = refusing
    result = fast("mlp", against=["eager", "max-autotune"], compile_time=True, check=True)
    assert result.modes["max-autotune"] == ModeResult()
    assert result.speedup["max-autotune"] is None
    assert any("no compiler today" in said for said in result.problems["max-autotune"])
    assert set(result.problems) == {"max-autotune"} and result.sound
    for name in ("eager", "evt"):
        mode = result.modes[name]
        assert mode.fwdbwd_ms and mode.step_ms and mode.grad_error
    assert json.loads(to_json_text(result))["modes"]["max-autotune"]["fwdbwd_ms"] is None


def test_evt_failing_is_not_sound(quick: Quick) -> None:
    quick.backends["evt"] = refusing
    result = fast("mlp", against=["eager"])
    assert not result.sound and result.speedup == {"eager": None} and result.regions is None
    assert result.modes["eager"].fwdbwd_ms


@pytest.mark.parametrize("share", [1.001, 0.0], ids=["scaled", "zeroed"])
def test_a_wrong_gradient_is_seen(quick: Quick, share: float) -> None:
    quick.backends["evt"] = wrong_gradient(lambda gradient: gradient * share)
    result = fast("mlp", check=True)
    assert (result.modes["evt"].grad_error or 0) > 1.5
    assert not result.sound and "grad:model." in " ".join(result.problems["evt"])
    assert (result.modes["inductor"].grad_error or 9) <= 1.5


def test_a_gradient_that_is_not_finite_is_a_problem_not_a_number(quick: Quick) -> None:
    quick.backends["evt"] = wrong_gradient(lambda gradient: gradient / 0)
    result = fast("mlp", against=["eager"], check=True)
    assert result.modes["evt"].grad_error is None and not result.sound


def test_the_regions_of_a_step_are_counted(quick: Quick) -> None:
    model, inputs, loss = get("mlp").make()
    plan = explain(model, *inputs, loss=loss, options={"evt.place": "always"})
    planned = sum(len(graph.regions) for graph in plan.graphs)
    placed = fast("mlp", options=PLACE)
    assert placed.regions == planned > 0 and placed.reference
    assert f"Evt ran {planned} regions a step, by the reference" in caption(placed)
    plain = fast("mlp", options={"evt.strict": True})
    assert plain.regions == 0
    assert "placed no region here, so its code is what Inductor makes" in caption(plain)


def test_a_function_of_the_users_is_measured(quick: Quick, module: Any) -> None:
    what = module(
        "model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).bfloat16()\n"
        "return model, (torch.randn(4, 8).bfloat16(),), lambda y: y.float().square().mean()"
    )
    result = fast(what, check=True)
    assert result.size is None and result.dtype == "bf16" and result.workload == what
    assert to_json(result)["size"] is None
    assert all(mode.fwdbwd_ms and mode.grad_error is not None for mode in result.modes.values())
    assert result.sound


def test_a_loss_in_the_output_is_found(quick: Quick, module: Any) -> None:
    what = module(
        "class Model(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return {'loss': super().forward(x).square().sum()}\n"
        "return Model(8, 4), (torch.randn(3, 8),), None"
    )
    result = fast(what, check=True)
    assert result.sound and result.modes["evt"].step_ms


def test_a_function_that_makes_another_loss_each_time_is_compared_with_itself(
    quick: Quick, module: Any
) -> None:
    what = module(
        "import random\n"
        "factor = random.random()\n"
        "return nn.Linear(8, 4), (torch.randn(3, 8),), lambda y: (factor * y).square().sum()"
    )
    result = fast(what, against=["eager"], check=True)
    assert result.sound and (result.modes["evt"].grad_error or 9) <= 1.5


def test_dropout_draws_one_mask_for_the_comparison(quick: Quick, module: Any) -> None:
    what = module(
        "model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8))\n"
        "return model, (torch.randn(16, 8),), lambda y: y.square().sum()"
    )
    result = fast(what, check=True, options={**PLACE, "evt.rng": "eager"})
    assert result.sound and (result.modes["evt"].grad_error or 9) <= 1.5


def test_where_adamw_does_not_run_the_step_is_unknown_with_a_note(
    quick: Quick, module: Any
) -> None:
    what = module(
        "x = torch.randn(4, 8, requires_grad=True)\n"
        "return nn.GELU(), (x,), lambda y: y.square().sum()"
    )
    result = fast(what, check=True)
    assert result.sound and all(mode.fwdbwd_ms for mode in result.modes.values())
    assert all(mode.step_ms is None for mode in result.modes.values())
    assert "fused AdamW does not run in eager" in result.notes[0]
    assert (result.modes["evt"].grad_error or 9) <= 1.5  # of the input's gradient


def test_a_dtype_without_a_unit_has_a_note(quick: Quick, module: Any) -> None:
    what = module(
        "return nn.Linear(4, 4).double(), (torch.randn(2, 4).double(),), lambda y: y.sum()"
    )
    result = fast(what, against=["eager"], check=True)
    assert result.dtype == "float64" and result.modes["evt"].grad_error is None
    assert any("no unit for torch.float64" in note for note in result.notes) and result.sound


def test_overflowing_gradients_leave_the_weights_alone(quick: Quick, module: Any) -> None:
    what = module(
        "return nn.Linear(4, 4), (torch.randn(2, 4),), lambda y: (y * 1e30).square().sum()"
    )
    result = fast(what, against=["eager"])
    assert result.modes["eager"].step_ms is None and "not finite" in result.notes[0]
    assert result.modes["eager"].fwdbwd_ms


def test_a_large_spread_is_said(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(runs: Any, *_: Any) -> Any:
        even, uneven = bench_timing.Samples((1.0,) * 5), bench_timing.Samples((1.0, 2.0, 3.0))
        return {name: uneven if name == "inductor/fwdbwd" else even for name in runs}

    monkeypatch.setattr(bench_timing, "interleaved", noisy)
    (note,) = fast("mlp").notes
    assert note.startswith("the times of inductor spread by more than 10%")


@pytest.mark.parametrize(
    ("what", "arguments", "error", "said"),
    [
        ("mpl", {}, OptionError, "did you mean 'mlp'"),
        ("mlp", {"against": ["eagre"]}, OptionError, "did you mean 'eager'"),
        ("mlp", {"size": "big"}, OptionError, "unknown size"),
        ("mlp", {"dtype": "fp8"}, OptionError, "one of fp32, bf16, fp16"),
        ("mlp", {"device": "tpu"}, OptionError, "one of cpu, cuda"),
        ("mlp", {"device": "cpu", "cuda_graphs": True}, BenchError, "need a CUDA GPU"),
        ("mlp", {"repeats": 0}, OptionError, "at least 1"),
        ("mlp", {"options": {"evt.plase": "always"}}, OptionError, "evt.place"),
        ("mlp", {"options": {"evt.target": "h20"}}, TargetError, "h200"),
        ("a:b", {"size": "tiny"}, OptionError, "size is for workloads only"),
        ("a:b", {"dtype": "bf16"}, OptionError, "dtype is for workloads only"),
        ("a:b", {"device": "cpu"}, OptionError, "device is for workloads only"),
        ("no_such_module:make", {}, ExplainError, "cannot load"),
    ],
)
def test_mistakes_are_errors_before_anything_is_measured(
    quick: Quick, what: str, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        bench(what, **arguments)
    assert quick.asked == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a CUDA GPU")
def test_cuda_without_a_gpu_is_an_error() -> None:
    with pytest.raises(BenchError, match="no CUDA GPU"):
        bench("mlp", device="cuda")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return nn.Linear(4, 4), (torch.randn(2, 4),), lambda y: y", "must be a scalar"),
        (
            "return nn.Linear(4, 4).requires_grad_(False), (torch.randn(2, 4),), lambda y: y.sum()",
            "nothing in the model needs a gradient",
        ),
        (
            "return nn.Linear(4, 4, device='meta'), (torch.randn(2, 4, device='meta'),), None",
            "on meta",
        ),
    ],
)
def test_what_is_no_training_step_is_an_error(
    quick: Quick, module: Any, body: str, said: str
) -> None:
    with pytest.raises(BenchError, match=said):
        fast(module(body))


def _shown(result: Bench) -> str:
    console = Console(width=110, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(render(result))
    return capture.get()


def test_the_table_shows_every_mode_what_is_unknown_and_why() -> None:
    ours, other = random.uniform(1, 9), random.uniform(10, 99)
    result = Bench(
        workload="my:model",
        size=None,
        dtype="bf16",
        device="[a] GPU",
        versions={"torch": "2.13.0"},
        date="2026-01-02T03:04:05+00:00",
        cuda_graphs=True,
        modes={
            "eager": ModeResult(fwdbwd_ms=other, step_ms=other + 1, peak_bytes=3 * 2**30),
            "max-autotune": ModeResult(),
            "evt": ModeResult(ours, ours + 1, 0.5, 12.34, 1.23, 2**30, 1.01),
        },
        problems={"max-autotune": ("does not run: [e]: it broke",)},
        notes=("a note",),
        regions=3,
    )
    text = _shown(result)
    (eager,) = [line for line in text.splitlines() if line.startswith("│ eager")]
    assert f"{other / ours:.2f}x" in eager and "3.0 GiB" in eager
    (evt,) = [line for line in text.splitlines() if line.startswith("│ evt")]
    assert f"{ours:.2f}" in evt and "12.3" in evt and "1.2" in evt and "1.01" in evt
    assert "max-autotune: does not run: [e]: it broke" in text and "note: a note" in text
    assert "my:model, bf16" in text and "[a] GPU, CUDA graphs" in text
    assert " ".join(text.split()).count("Evt ran 3 regions a step.") == 1


def test_the_command_prints_json_alone_on_stdout(quick: Quick, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli.main, [*COMMAND, "--against", "eager, max-autotune", "--json", "-"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found["modes"]) == ["eager", "max-autotune", "evt"] and found["size"] == "tiny"
    assert "fwd+bwd" in done.stderr
    said = re.findall(r"^ *\d+ s  (.*)$", done.stderr, re.M)
    assert said[:2] == ["running mlp once in eager", "compiling eager"]
    assert said[-1].startswith("timing eager, max-autotune, evt: sample 1 of ")
    path = tmp_path / "bench.json"
    done = CliRunner().invoke(cli.main, [*COMMAND, "--against", "eager", "--json", str(path)])
    assert list(json.loads(path.read_text())["modes"]) == ["eager", "evt"]
    assert "fwd+bwd" in done.stdout


def test_the_command_ends_with_1_where_evt_fails_and_with_2_for_a_mistake(quick: Quick) -> None:
    quick.backends["inductor"] = refusing
    assert CliRunner().invoke(cli.main, COMMAND).exit_code == 0
    quick.backends["evt"] = refusing
    assert CliRunner().invoke(cli.main, COMMAND).exit_code == 1
    done = CliRunner().invoke(cli.main, [*COMMAND, "--against", "none"])
    assert done.exit_code == 2 and "unknown mode 'none'" in done.output
    done = CliRunner().invoke(cli.main, [*COMMAND, "--cuda-graphs"])
    assert done.exit_code == 2 and "CUDA graphs need a CUDA GPU" in done.output


def test_the_command_passes_place_on(quick: Quick) -> None:
    done = CliRunner().invoke(cli.main, [*COMMAND, "--place", "always"])
    assert done.exit_code == 0, done.output
    assert "regions a step, by the" in done.output


@pytest.mark.slow
def test_real_processes_and_inductor() -> None:
    result = bench("mlp", device="cpu", repeats=3, options={"evt.place": "always"})
    for name in ("inductor", "evt"):
        mode = result.modes[name]
        assert mode.compile_cold_s and mode.compile_warm_s
        assert mode.compile_warm_s < mode.compile_cold_s
    assert result.sound and result.regions and not result.problems
