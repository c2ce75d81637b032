"""The command line: what it prints, what it writes, and how it ends."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from torch_evt import workloads
from torch_evt.cli import main
from torch_evt.devices import device
from torch_evt.partition.plan import Plan
from torch_evt.partition.plan_json import to_json
from torch_evt.report import doctor
from torch_evt.report.doctor import Check
from torch_evt.report.verification import RegionVerdict, Verification
from torch_evt.runtime.check import Fault


class Explained:
    """Stands in for `explain`: keeps what it was called with, returns a random plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.calls: list[dict[str, Any]] = []

    def __call__(self, model: Any, *inputs: Any, loss: Any = None, options: Any = None) -> Plan:
        grad = torch.is_grad_enabled()
        self.calls.append(
            {"model": model, "inputs": inputs, "loss": loss, "options": options, "grad": grad}
        )
        if "evt.target" in options:
            device(options["evt.target"])
        return self.plan


@pytest.fixture
def explained(
    monkeypatch: pytest.MonkeyPatch, random_plan: Callable[..., Plan]
) -> Iterator[Explained]:
    stand_in = Explained(random_plan(11))
    module = ModuleType("torch_evt.report.explain")
    module.explain = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_evt.report.explain", module)
    yield stand_in


def _evt(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_help_lists_every_command() -> None:
    result = _evt("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in ("doctor", "demo", "explain", "verify"))


def test_explain_passes_size_dtype_and_options_on_and_prints_the_plan(
    explained: Explained,
) -> None:
    options = "--size small --dtype bf16 --target h200 --place always"
    result = _evt("explain", "mlp", *options.split())
    assert result.exit_code == 0, result.output
    (call,) = explained.calls
    assert call["inputs"][0].shape == (512, 256) and call["inputs"][0].dtype == torch.bfloat16
    assert call["options"] == {"evt.target": "h200", "evt.place": "always"}
    assert callable(call["loss"]) and call["model"].training and call["grad"]
    assert "forward: fused" in result.output and "backward: fused" in result.output


def test_explain_gives_no_option_that_was_not_asked_for(explained: Explained) -> None:
    assert _evt("explain", "mlp").exit_code == 0
    assert explained.calls[0]["options"] == {}
    assert explained.calls[0]["inputs"][0].dtype == torch.float32


def test_options_of_torch_compile_can_be_given_one_by_one(explained: Explained) -> None:
    given = ["evt.memory_budget=1000", "max_autotune=True", "evt.disable=['gelu_erf']", "a.b=c=d"]
    result = _evt("explain", "mlp", *[word for pair in given for word in ("-o", pair)])
    assert result.exit_code == 0, result.output
    assert explained.calls[0]["options"] == {
        "evt.memory_budget": 1000,
        "max_autotune": True,
        "evt.disable": ["gelu_erf"],
        "a.b": "c=d",
    }


@pytest.mark.parametrize("command", ["explain", "bench", "verify"])
@pytest.mark.parametrize("wrong", ["evt.memory_budget", "=3"])
def test_an_option_without_a_name_or_a_value_says_its_form(command: str, wrong: str) -> None:
    result = _evt(command, "mlp", "-o", wrong)
    assert result.exit_code == 2 and "not of the form NAME=VALUE" in result.output


def test_explain_inference_takes_no_loss_and_no_gradient(explained: Explained) -> None:
    assert _evt("explain", "gpt2-medium", "--inference").exit_code == 0
    (call,) = explained.calls
    assert call["loss"] is None and not call["grad"] and not call["model"].training


def test_explain_json_is_the_contract_on_stdout_or_in_a_file(
    explained: Explained, tmp_path: Path
) -> None:
    expected = json.loads(json.dumps(to_json(explained.plan)))
    assert json.loads(_evt("explain", "mlp", "--json", "-").stdout) == expected
    result = _evt("explain", "mlp", "--json", str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text()) == expected
    assert "forward: fused" in result.output


def test_help_of_explain_names_every_workload() -> None:
    help_text = _evt("explain", "--help").output
    assert all(name in help_text for name in workloads.names())


def test_explain_plans_a_real_workload() -> None:
    result = _evt("explain", "mlp", "--target", "h200", "--json", "-")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    (graph,) = plan["graphs"]
    halves = {region["half"]: region for region in graph["regions"]}
    assert plan["target"] == "h200" and set(halves) == {"forward", "backward"}
    assert "relu(acc0)" in halves["forward"]["tree"]
    assert all(region["modelled_us"] < region["replaced_us"] for region in graph["regions"])


def test_explain_takes_a_function_of_the_users(
    explained: Explained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import torch\ndef make():\n    return torch.nn.Linear(2, 3), (torch.ones(1, 2),), None\n"
    )
    (tmp_path / "my_model_of_three.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert _evt("explain", "my_model_of_three:make").exit_code == 0
    assert isinstance(explained.calls[0]["model"], torch.nn.Linear)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mpl"], "unknown workload 'mpl'; did you mean 'mlp'?"),
        (["mlp", "--size", "big"], "unknown size of mlp 'big'"),
        (["mlp", "--target", "h20"], "unknown target 'h20'; did you mean 'h200'?"),
        (["no_such_module_at_all:make"], "cannot load 'no_such_module_at_all:make'"),
    ],
)
def test_our_errors_are_one_line_and_end_with_2(
    explained: Explained, arguments: list[str], message: str
) -> None:
    result = _evt("explain", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith("Error: ") and message in result.output
    assert result.output.count("\n") == 1 and "Traceback" not in result.output


@pytest.mark.parametrize("command", ["explain", "bench", "verify"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bert_large"], "unknown workload 'bert_large'; did you mean 'bert-large'?"),
        (["gpt2"], "unknown workload 'gpt2'; did you mean 'gpt2-medium'?"),
        (["mlp", "--size", "papr"], "unknown size of mlp 'papr'; did you mean 'paper'?"),
    ],
)
def test_a_misspelt_workload_or_size_is_answered_with_the_nearest_and_all(
    command: str, arguments: list[str], message: str
) -> None:
    result = _evt(command, *arguments)
    known = workloads.sizes("mlp") if "--size" in arguments else workloads.names()
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"Error: {message} Known: {', '.join(known)}"


def test_errors_that_are_not_ours_keep_their_traceback(
    explained: Explained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_model.py").write_text("def make():\n    raise RuntimeError('mine')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = _evt("explain", "my_broken_model:make")
    assert isinstance(result.exception, RuntimeError) and str(result.exception) == "mine"


def test_verify_says_that_a_workload_is_right_and_writes_json(tmp_path: Path) -> None:
    """With Inductor's own code."""
    torch._dynamo.reset()
    result = _evt("verify", "mlp", "--seed", "3", "--json", str(tmp_path / "verdict.json"))
    assert result.exit_code == 0, result.output
    assert re.search(r"all \d regions and \d+ tensors are right", result.stdout)
    said = [line.partition(" s  ")[2] for line in result.stderr.splitlines()]
    steps = ["running the step in eager", "compiling the step, and running it"]
    assert said[:2] == steps and said[-1] == "running the step in fp64 eager, and comparing"
    assert [re.sub(r"at \w+", "at it", line) for line in said[2:-1]] == [
        "checking the region at it (forward of graph 0/0)",
        "checking the region at it (backward of graph 0/0)",
    ]
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["passed"] and {r["half"] for r in verdict["regions"]} == {"forward", "backward"}
    assert {"loss:", "grad:up.weight", "grad:down.weight"} <= {
        t["name"] for t in verdict["tensors"]
    }


@pytest.mark.parametrize("passed", [True, False])
def test_verify_passes_its_options_on_and_ends_with_1_where_something_is_wrong(
    passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    fault = Fault("wrong", "output 0", "at (1, 2) it is [3] in place of 4", (1, 2))
    region = RegionVerdict(
        "region7", "0/0", "backward", "mm_3", ("mm_3",), "tree", 1, True, () if passed else (fault,)
    )

    def verified(model: Any, *inputs: Any, **given: Any) -> Verification:
        calls.append({"model": model, "inputs": inputs, "grad": torch.is_grad_enabled(), **given})
        return Verification((region,), None, "cpu", {})

    monkeypatch.setattr("torch_evt.report.verify.verify", verified)
    arguments = f"--dtype bf16 --seed 5 --inference --target h200 --folder {tmp_path} --json -"
    result = _evt("verify", "mlp", *arguments.split())
    assert result.exit_code == (0 if passed else 1), result.output
    verdict = json.loads(result.stdout)
    assert verdict["first_wrong"] == (None if passed else "region7")
    (call,) = calls
    assert (call["seed"], call["folder"], call["grad"]) == (5, str(tmp_path), False)
    assert call["loss"] is None and not call["model"].training
    assert call["options"] == {"evt.target": "h200"}
    assert call["inputs"][0].dtype == torch.bfloat16
    result = _evt("verify", "mlp")
    assert ("[3] in place of 4" in result.output) != passed
    assert calls[1]["grad"] and callable(calls[1]["loss"]) and calls[1]["options"] == {}


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("broken", 1)])
def test_doctor_ends_with_1_exactly_when_something_is_broken(
    monkeypatch: pytest.MonkeyPatch, state: Any, code: int
) -> None:
    checks = [Check("python", "3.11"), Check("thing", "value", state, "do this")]
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    result = _evt("doctor")
    assert result.exit_code == code
    assert "thing" in result.output and "do this" in result.output


@pytest.mark.parametrize("code", [0, 1])
def test_demo_ends_with_what_the_demo_says(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    module = ModuleType("torch_evt.report.demo")
    module.run = lambda: code  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_evt.report.demo", module)
    assert _evt("demo").exit_code == code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "math:pi"], "not a function"),
        (["explain", "mlp", "--json", "no/such/folder/plan.json"], "does not exist"),
        (["explain", "mlp", "--json", "."], "is a directory"),
    ],
)
def test_mistakes_end_with_2_and_a_sentence(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_the_package_can_be_run() -> None:
    for module in ("torch_evt", "torch_evt.cli"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
        )
        assert "version" in done.stdout
