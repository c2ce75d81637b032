"""Dumps: every stage of every graph is a Python file that runs alone and computes the same."""

from __future__ import annotations

import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tracing import assert_same, run, trace
from torch import Tensor, fx, nn

import torch_evt
from interpreted import PLACE, interpreted, run_graph
from torch_evt import backend, dump, passes, pipeline
from torch_evt.graphs import copy_of
from torch_evt.torch_compat import caches_disabled
from torch_evt.tree.text import parse, to_text

aten = torch.ops.aten


class Layers(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = dropout
        self.first = nn.Linear(32, 24)
        self.second = nn.Linear(24, 16)
        self.register_buffer("mask", torch.rand(12, 24) > 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(x)) * self.mask
        return torch.tanh(self.second(nn.functional.dropout(hidden, self.dropout)))


def step(folder: Path, **options: Any) -> None:
    """One training step and one inference, dumped."""
    torch.manual_seed(3)
    model, x = Layers(), torch.randn(12, 32)
    given = {**PLACE, "evt.rng": "eager", "evt.dump": str(folder), **options}
    for inference in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=interpreted, options=given)
        if inference:
            with torch.no_grad():
                compiled(x)
        else:
            compiled(x).sum().backward()


Dumped = tuple[Path, list[tuple[Path, fx.GraphModule]]]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Dumped:
    """The folder of a step's dump, and each file with a copy of the graph it was made from."""
    folder = tmp_path_factory.mktemp("dumped")
    written: list[tuple[Path, fx.GraphModule]] = []
    write = dump.write_stage

    def spied(where: Path, stage: str, module: fx.GraphModule, seconds: float) -> Path:
        path = write(where, stage, module, seconds)
        written.append((path, copy_of(module)))
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes.dump, "write_stage", spied)
        step(folder)
    return folder, written


def test_every_stage_is_written_in_order(dumped: Dumped) -> None:
    folder, _ = dumped
    assert len(list(folder.iterdir())) == 2
    (training,), (inference,) = folder.glob("*_joint"), folder.glob("*_inference")
    stages = [path.stem for path in sorted(training.glob("*.py"))]
    halves = [
        f"{half}_{stage}"
        for half in ("forward", "backward")
        for stage in ("cut", *(one.name for one in pipeline.HALF))
    ]
    joint = ["captured", *(one.name for one in (*pipeline.JOINT, *pipeline.BEFORE_CUT))]
    wanted = [*(f"joint_{stage}" for stage in joint), *halves]
    assert stages == [f"{i:02d}_{stage}" for i, stage in enumerate(wanted)]
    stages = [path.stem[3:] for path in sorted(inference.glob("*.py"))]
    every = (*pipeline.INFERENCE, *pipeline.PLACE_INFERENCE)
    assert stages == ["inference_captured", *(f"inference_{one.name}" for one in every)]


def test_every_stage_is_headed_by_its_pass_and_its_time(dumped: Dumped) -> None:
    _, written = dumped
    for path, module in written:
        heading = ast.get_docstring(ast.parse(path.read_text()))
        calls = sum(n.op == "call_function" for n in module.graph.nodes)
        assert heading is not None
        assert heading.startswith(path.stem[3:]) and heading.endswith(f"{calls} operations.")
        assert " ms: " in heading


def test_every_stage_computes_what_its_graph_computes(dumped: Dumped) -> None:
    _, written = dumped
    assert len(written) > 20
    placed = 0
    for path, module in written:
        stage = runpy.run_path(str(path))
        inputs = stage["inputs"]()
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        assert len(inputs) == len(placeholders)
        for given, n in zip(inputs, placeholders, strict=True):
            if isinstance(given, Tensor):
                traced = n.meta["val"]
                assert (given.shape, given.dtype) == (traced.shape, traced.dtype)
                assert given.stride() == traced.stride()
        torch.manual_seed(1)
        ours = stage["Graph"]()(*inputs)
        torch.manual_seed(1)
        theirs = [r for r in run(module, *inputs)]
        assert_same(ours, theirs)
        assert any(isinstance(r, Tensor) and bool(r.isfinite().all()) and r.any() for r in ours)
        placed += "region_" in path.read_text()
    assert placed >= 4  # place and expand in both halves


def test_every_stage_of_a_training_step_runs_as_a_script(dumped: Dumped) -> None:
    folder, _ = dumped
    (training,) = folder.glob("*joint*")
    program = (
        "import runpy, sys\n"
        "for path in sys.argv[1:]:\n"
        "    print('#', path)\n"
        "    runpy.run_path(path, run_name='__main__')\n"
    )
    files = sorted(map(str, training.glob("*.py")))
    done = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split("# ")[1:]
    assert len(printed) == len(files)
    for output in printed:
        assert "torch.float32" in output


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_dumped_half_gives_the_numbers_of_the_real_step(tmp_path: Path, dynamic: bool) -> None:
    """Each half as it was compiled, run alone by `python FILE --inputs ...` on real inputs."""
    calls: list[tuple[list[Any], list[Any]]] = []

    def kept(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def recording(module: fx.GraphModule, example_inputs: Any, **given: Any) -> Any:
        compiled = run_graph(module, example_inputs, **given)

        def run_and_keep(arguments: list[Any]) -> Any:
            before = [kept(value) for value in arguments]
            results = compiled(arguments)
            calls.append((before, [kept(value) for value in results]))
            return results

        run_and_keep._boxed_call = True  # type: ignore[attr-defined]
        return run_and_keep

    def recorded(module: fx.GraphModule, inputs: Any, **given: Any) -> Any:
        with caches_disabled():
            return backend.compile_with(module, inputs, inner_compile=recording, **given)

    torch._dynamo.reset()
    torch.manual_seed(4)
    model, x = Layers(dropout=0.0), torch.randn(12, 32)
    options = {**PLACE, "evt.dump": str(tmp_path)}
    compiled = torch.compile(model, backend=recorded, options=options, dynamic=dynamic)
    compiled(x).square().sum().backward()
    (folder,) = tmp_path.iterdir()
    for (inputs, wanted), half in zip(calls, ("forward", "backward"), strict=True):
        assert sum(isinstance(value, Tensor) for value in inputs) >= 4
        stages = sorted(folder.glob(f"*_{half}_*.py"))
        for path in (stages[0], stages[-1]):  # as it was cut, and as it was compiled
            given, got = tmp_path / "inputs.pt", tmp_path / "results.pt"
            torch.save(inputs, given)
            arguments = [str(path), "--inputs", str(given), "--results", str(got)]
            compiled_now = path == stages[-1]
            if compiled_now and not dynamic:
                env = {**os.environ, "PYTHONPATH": str(Path(torch_evt.__file__).parents[1])}
                command = [sys.executable, *arguments]
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                assert done.returncode == 0, done.stderr
                assert "torch.float32" in done.stdout
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sys, "argv", arguments)
                    runpy.run_path(str(path), run_name="__main__")
            results = torch.load(got, weights_only=True)
            assert len(results) == len(wanted)
            assert ("region_" in path.read_text()) == compiled_now
            for ours, theirs in zip(results, wanted, strict=True):
                if isinstance(theirs, Tensor) and theirs.is_floating_point():
                    assert theirs.any()
                    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
                else:
                    assert isinstance(theirs, Tensor) or ours == theirs
                    assert not isinstance(theirs, Tensor) or torch.equal(ours, theirs)


def test_the_plan_and_the_trees_are_written(dumped: Dumped) -> None:
    folder, _ = dumped
    for graph, halves in (("joint", {"forward", "backward"}), ("inference", {"inference"})):
        (where,) = folder.glob(f"*_{graph}")
        plan = json.loads((where / "plan.json").read_text())
        assert plan["schema"] == 1 and plan["target"] == "h200" and plan["captured_on"] == "cpu"
        (described,) = plan["graphs"]
        assert {region["half"] for region in described["regions"]} == halves
        if graph == "joint":
            assert described["saved_bytes"] > 0 and described["inductor_saved_bytes"] > 0
        trees = (where / "trees.txt").read_text()
        texts = [line for line in trees.splitlines() if line and not line.startswith("#")]
        assert len(texts) == sum(region["count"] for region in described["regions"]) >= 2
        assert set(texts) == {region["tree"] for region in described["regions"]}
        for text in texts:
            assert to_text(parse(text)) == text
        for region in described["regions"]:
            assert f"# {region['name']}, {region['half']}: " in trees
        placed = "".join(path.read_text() for path in where.glob("*_expand.py"))
        assert all(text in placed for text in texts)


def test_a_graph_left_to_inductor_has_its_plan_too(tmp_path: Path) -> None:
    step(tmp_path, **{"evt.place": "never"})
    plans = [json.loads(path.read_text()) for path in tmp_path.rglob("plan.json")]
    assert len(plans) == 2
    assert all(plan["graphs"][0]["regions"] for plan in plans)  # planned, not placed


def test_a_second_dump_never_overwrites_the_first(tmp_path: Path) -> None:
    step(tmp_path)
    first = {path: path.read_text() for path in tmp_path.rglob("*.py")}
    step(tmp_path)
    assert first
    for path, text in first.items():
        assert path.read_text() == text
    assert len(list(tmp_path.rglob("*.py"))) == 2 * len(first)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_is_new_whatever_its_name(tmp_path: Path) -> None:
    found = [dump.folder_for(str(tmp_path / "deep" / "er"), "0/0 a:b") for _ in range(3)]
    assert len(set(found)) == 3
    assert all(folder.is_dir() and folder.parent == tmp_path / "deep" / "er" for folder in found)
    assert [folder.name for folder in found] == ["0_0_a_b", "0_0_a_b.1", "0_0_a_b.2"]
    assert dump.folder_for(str(tmp_path), "").name == "graph"


def test_stages_are_numbered_in_the_order_they_are_written(tmp_path: Path) -> None:
    module = trace(lambda x: x + 1, torch.randn(3))
    names = [dump.write_stage(tmp_path, stage, module, 0.0125).name for stage in ("b", "a")]
    assert names == ["00_b.py", "01_a.py"]
    assert (tmp_path / names[0]).read_text().startswith('"""b, 12.5 ms: 1 operations."""')


def test_nowhere_to_write_is_said_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    step(blocked)
    assert "nothing is written" in caplog.text


def loaded(tmp_path: Path, module: fx.GraphModule) -> dict[str, Any]:
    path = dump.write_stage(tmp_path, "stage", module, 0.0)
    return runpy.run_path(str(path))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(3, 8)[:, ::2],
        torch.randn(1, 4).expand(3, 4),
        torch.randn(3, 4) > 0,
        torch.arange(12).view(3, 4),
        torch.randn(3, 4).bfloat16(),
        torch.randn(3, 4, dtype=torch.complex64),
        torch.randn(()),
        torch.empty(0, 4),
    ],
    ids=["transposed", "sliced", "expanded", "bool", "int", "bf16", "complex", "scalar", "empty"],
)
def test_inputs_have_the_traced_shape_stride_and_dtype(tensor: Tensor, tmp_path: Path) -> None:
    module = trace(lambda x: x * 2, tensor)
    stage = loaded(tmp_path, module)
    (made,) = stage["inputs"]()
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    again = stage["inputs"]()[0]
    assert torch.equal(made, again)  # the same numbers every time
    if made.dtype.is_floating_point and made.numel() > 1:
        assert made.unique().numel() > 1
    assert_same(stage["Graph"]()(made), run(module, made))


def test_constants_infinities_and_devices_can_be_read_back(tmp_path: Path) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        filled = torch.full((3,), float("-inf")) + torch.full((3,), float("nan"))
        return x.clamp(max=float("inf")), filled, torch.arange(3, device="cpu") + x.sum()

    x = torch.randn(3)
    module = trace(f, x)
    assert_same(loaded(tmp_path, module)["Graph"]()(x), run(module, x))


def test_symbolic_sizes_become_the_sizes_of_the_traced_call(tmp_path: Path) -> None:
    def f(x: Tensor) -> Tensor:
        b, s, n = x.shape
        return x.view(b * s, n) * 2

    x = torch.randn(3, 5, 8)
    module = trace(f, x, mode="symbolic")
    stage = loaded(tmp_path, module)
    (made,) = stage["inputs"]()
    assert made.shape == x.shape
    assert_same(stage["Graph"]()(x), run(module, x))


def test_a_graph_with_a_tensor_of_its_own_runs_on_a_random_one(tmp_path: Path) -> None:
    module = trace(lambda x: x + 1, torch.randn(3))
    module.register_buffer("table", torch.randn(3))
    add = next(n for n in module.graph.nodes if n.op == "call_function")
    with module.graph.inserting_before(add):
        table = module.graph.get_attr("table")
    table.meta["val"] = module.table
    add.args = (add.args[0], table)
    module.recompile()
    stage = loaded(tmp_path, module)
    graph = stage["Graph"]()
    x = torch.randn(3)
    assert graph.table.shape == (3,)
    assert_same(graph(x), [x + graph.table])


def test_results_that_are_no_tensors_are_kept(tmp_path: Path) -> None:
    module = trace(lambda x: (x + 1, None), torch.randn(3))
    x = torch.randn(3)
    assert_same(loaded(tmp_path, module)["Graph"]()(x), run(module, x))
