"""verify finds every planted fault, names the region that has it first, and writes a script that
fails while the fault is there and passes when it is gone."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.faulty import (
    OPTIONS,
    Faulty,
    Net,
    copied,
    emitting,
    exchanged,
    loss,
    scaled,
    verified,
)
from torch import Tensor, fx, nn

import torch_evt
from interpreted import PLACE, interpreted
from steps import change, original
from torch_evt import backend, pipeline, verify
from torch_evt.errors import OptionError, RegionError, VerifyError
from torch_evt.joint import recompose
from torch_evt.partition import builder, place
from torch_evt.passes import State
from torch_evt.report.verification import Verification, to_json, to_text
from torch_evt.runtime import check
from torch_evt.runtime.ops import is_region
from torch_evt.tree import evaluate
from torch_evt.tree.functions import FUNCTIONS
from torch_evt.tree.ir import Compute, Const, Reduce

FORWARD, TANH, SECOND, LAST = "addmm", "addmm_1", "mm", "mm_2"
"""The anchors of the four regions, in the order in which they run."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def script_fails(folder: str) -> bool:
    """Run a reproduction in this process, where a fault may be planted."""
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"{folder}/reproduce.py", run_name="__main__")
    return bool(ended.value.code)


def first(found: Verification, anchor: str, kind: str) -> str:
    """The first wrong region is the one with this anchor; what its fault of this kind says."""
    assert not found.passed
    wrong = found.first_wrong
    assert wrong is not None and wrong.anchor == anchor
    assert wrong.name in str(found) and anchor in str(found)
    return str(next(fault for fault in wrong.faults if fault.kind == kind))


def test_a_right_step_is_right(tmp_path: Path) -> None:
    found = verified(tmp_path)
    assert found.passed and found.folder is None and not list(tmp_path.iterdir())
    assert [region.anchor for region in found.regions] == [FORWARD, TANH, SECOND, LAST]
    assert [region.name for region in found.regions] == [f"region{i}" for i in range(4)]
    assert [region.half for region in found.regions] == ["forward"] * 2 + ["backward"] * 2
    assert all(region.runs == 1 and region.compared for region in found.regions)
    assert found.step is not None
    names = {tensor.name for tensor in found.step.tensors}
    assert {"loss:", "grad:first.bias", "grad:third.weight"} <= names
    assert f"all 4 regions and {len(names)} tensors are right" in str(found)
    found.raise_if_failed()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_right_step_in_half_precision_is_right(tmp_path: Path, dtype: torch.dtype) -> None:
    found = verified(tmp_path, dtype)
    assert found.passed, str(found)
    assert len(found.regions) >= 3 and found.step is not None and found.step.dtype == dtype


# Faults of kernels: the outputs are not the tree's.


def _without_sums(tree: Any, inputs: Any, outputs: Any, values: Any) -> None:
    copied(outputs, values)
    for output, sink in zip(outputs, tree.sinks, strict=True):
        if isinstance(sink, Reduce):
            output.zero_()


def _without_last_row(tree: Any, inputs: Any, outputs: Any, values: Any) -> None:
    for output, value in zip(outputs, values, strict=True):
        output[:-1].copy_(value[:-1])


def _one_element(tree: Any, inputs: Any, outputs: Any, values: Any) -> None:
    copied(outputs, values)
    outputs[0].view(-1)[37] += 1e-3


def _spoils_an_operand(tree: Any, inputs: Any, outputs: Any, values: Any) -> None:
    copied(outputs, values)
    inputs[0].add_(1)


class _Unstable:
    """Another last bit at every call."""

    calls = 0

    def __call__(self, tree: Any, inputs: Any, outputs: Any, values: Any) -> None:
        copied(outputs, values)
        self.calls += 1
        outputs[0].mul_(1 + self.calls * 2.0**-23)


KERNELS = {
    "a wrong derivative": (Faulty(scaled("gelu_erf_grad", 1.001)), LAST, "wrong"),
    "a wrong activation": (Faulty(scaled("tanh", 0.9999)), TANH, "wrong"),
    "a dropped sum": (Faulty(spoil=_without_sums), SECOND, "wrong"),
    "a swapped operand": (Faulty(exchanged(0, 2)), LAST, "wrong"),
    "an unwritten part": (Faulty(spoil=_without_last_row), FORWARD, "unwritten"),
    "one wrong element": (Faulty(spoil=_one_element), FORWARD, "wrong"),
    "a spoiled operand": (Faulty(spoil=_spoils_an_operand), FORWARD, "input"),
    "unequal runs": (Faulty(spoil=_Unstable()), FORWARD, "unstable"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_fault_of_a_kernel_is_found_named_and_reproduced(name: str, tmp_path: Path) -> None:
    faulty, anchor, kind = KERNELS[name]
    with emitting(faulty):
        found = verified(tmp_path)
        said = first(found, anchor, kind)
        assert found.folder is not None and Path(found.folder).parent == tmp_path
        assert script_fails(found.folder)
    assert said in Path(found.folder, "reproduce.py").read_text()
    assert not script_fails(found.folder)
    wanted = {
        "a dropped sum": "output 2 (sum over rows f32): at",
        "an unwritten part": "24 of 288 elements were never written, first at (11, 0)",
        "one wrong element": "output 0 (store f32): at (1, 13)",
        "a spoiled operand": "input 0: the kernel changed it",
    }
    assert said.startswith(wanted.get(name, "output")) or wanted[name] in said


def test_a_bool_output_that_is_not_written_is_found() -> None:
    ours, again = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    fault = check._unwritten("output 0", ours, again)
    assert fault is not None and fault.index == (1,)


# Faults of the compiler: the tree is not what its nodes compute, and kernel and tree agree.


@contextmanager
def _wrong_formula() -> Iterator[None]:
    grad = FUNCTIONS["gelu_erf_grad"]
    wrong = dataclasses.replace(grad, formula=lambda x: grad.formula(x) * 1.0001)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "FUNCTIONS", {**FUNCTIONS, "gelu_erf_grad": wrong})
        yield


@contextmanager
def _dropped_addition() -> Iterator[None]:
    """The builder forgets what is added to a value."""
    value_of = builder.value_of

    def forgets(node: fx.Node, argument: Callable[[Any], Any]) -> Any:
        value = value_of(node, argument)
        if isinstance(value, Compute) and value.function == "add":
            return value.arguments[1]
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "value_of", forgets)
        yield


@contextmanager
def _dropped_sum() -> Iterator[None]:
    """The builder folds half of what it should."""
    add = builder.Builder._add_reduction

    def halves(self: Any, node: fx.Node, tensor: Tensor) -> None:
        add(self, node, tensor)
        sink = self.reductions[node]
        half = Compute("mul", (sink.value, Const(0.5)))
        self.reductions[node] = dataclasses.replace(sink, value=half)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder.Builder, "_add_reduction", halves)
        yield


@contextmanager
def _swapped_by_place() -> Iterator[None]:
    """Placing exchanges two arguments of one shape and dtype."""
    original_place = place.place

    def swaps(graph: fx.Graph, region: Any, *given: Any, **named: Any) -> fx.Node:
        kernel = original_place(graph, region, *given, **named)
        inputs = list(kernel.args[0])
        tiles = [
            i
            for i, n in enumerate(inputs)
            if i > 1 and n.meta["val"].dim() == 2 and n.meta["val"].dtype == torch.float32
        ]
        if len(tiles) > 1:
            a, b = tiles[:2]
            inputs[a], inputs[b] = inputs[b], inputs[a]
            kernel.args = (inputs, *kernel.args[1:])
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "place", swaps)
        yield


@contextmanager
def _wrong_recomposition() -> Iterator[None]:
    """One activation's chain is taken for another's."""
    right = recompose.patterns()
    names = {"gelu_erf": "gelu_tanh"}
    wrong = tuple(dataclasses.replace(p, name=names.get(p.name, p.name)) for p in right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompose, "patterns", lambda _: wrong)
        yield


Plant = Callable[[], AbstractContextManager[None]]
COMPILER: dict[str, tuple[Plant, str, str]] = {
    "a wrong derivative": (_wrong_formula, LAST, "output 0"),
    "a dropped addition": (_dropped_addition, TANH, "output 1"),
    "a dropped sum": (_dropped_sum, SECOND, "output 2"),
    "a swapped operand": (_swapped_by_place, LAST, "output"),
    "a wrong recomposition": (_wrong_recomposition, FORWARD, "output 1"),
}


@pytest.mark.parametrize("name", COMPILER)
def test_a_fault_of_the_compiler_is_found_named_and_reproduced(name: str, tmp_path: Path) -> None:
    plant, anchor, where = COMPILER[name]
    with plant():
        found = verified(tmp_path)
        said = first(found, anchor, "nodes")
        assert said.startswith(where)
        assert not [f for r in found.regions for f in r.faults if f.kind == "wrong"]
        assert found.folder is not None
        assert script_fails(found.folder)
    assert not script_fails(found.folder)


def test_an_operand_that_the_kernel_is_never_given_is_found(tmp_path: Path) -> None:
    def model(x: Tensor, w: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return first + torch.tanh(x @ w + second)

    given = torch.randn(12, 32), torch.randn(32, 24), torch.randn(12, 24), torch.randn(12, 24)
    assert small(model, *given).passed
    with _dropped_addition():
        found = small(model, *given, folder=str(tmp_path))
        assert "the kernel is not given it" in first(found, "mm", "nodes")
        assert found.folder is not None and script_fails(found.folder)
    assert not script_fails(found.folder)


# Faults between regions: every region is right by itself.


@contextmanager
def _stale_mask(when: str) -> Iterator[None]:
    """In the backward half, another mask than forward's. when: after the pass of that name."""
    run = original("HALF", when)

    def stales(state: State) -> None:
        run(state)
        if state.half != "backward":
            return
        graph = state.module.graph
        mask = next(
            n for n in graph.find_nodes(op="placeholder") if n.meta["val"].dtype == torch.bool
        )
        with graph.inserting_after(mask):
            stale = graph.call_function(torch.ops.aten.flip.default, (mask, [0]))
        stale.meta["val"] = mask.meta["val"].flip(0)
        mask.replace_all_uses_with(stale, delete_user_cb=lambda user: user is not stale)

    with pytest.MonkeyPatch.context() as patch:
        change(patch, "HALF", when, stales)
        patch.setattr(backend, "evt", interpreted)  # for the script
        yield


def test_a_mask_that_backward_sees_otherwise_is_found_and_reproduced(tmp_path: Path) -> None:
    with _stale_mask("expand"):
        found = verified(tmp_path)
        said = first(found, LAST, "operand")
        assert "(getitem_1)" in said and "forward" in said and "a mask" in said
        assert found.step is not None and not found.step.passed
        assert found.folder is not None
        assert script_fails(found.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "evt", interpreted)
        assert not script_fails(found.folder)


def test_a_stale_mask_that_the_graph_itself_asks_for_fails_the_step(tmp_path: Path) -> None:
    """Every region does what its half says; only the step as a whole can tell."""
    with _stale_mask("canonicalise"):
        found = verified(tmp_path)
        assert not found.passed and found.first_wrong is None and found.step is not None
        failed = {t.name for t in found.step.tensors if not t.passed}
        assert failed == {"grad:first.weight", "grad:first.bias"}
        assert "grad:first.bias" in str(found) and "outside of them" in str(found)
        assert found.folder is not None
        assert script_fails(found.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "evt", interpreted)
        assert not script_fails(found.folder)


# What a script needs, and what the report says.


def test_a_script_stands_alone(tmp_path: Path) -> None:
    with emitting(Faulty(spoil=_without_last_row)):
        found = verified(tmp_path)
    assert found.folder is not None
    script = Path(found.folder) / "reproduce.py"
    source = str(Path(torch_evt.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    assert "the region is right" in done.stdout
    broken = script.read_text().replace("check_region(Graph()", "check_region(Wrong()")
    assert "class Graph" in broken and "never written" in broken
    code = broken.replace("if __name__", "class Wrong(Graph): pass\n\n\nif __name__")
    code = code.replace("torch.ops.aten.erf.default(", "1.01 * torch.ops.aten.erf.default(")
    script.write_text(code)
    with pytest.raises(ValueError, match="argument"):  # the calls are not those that were saved
        runpy.run_path(str(script), run_name="__main__")


def test_json_says_what_the_table_says(tmp_path: Path) -> None:
    with emitting(KERNELS["a wrong derivative"][0]):
        found = verified(tmp_path)
    data = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert data["passed"] is False and data["first_wrong"] == "region3"
    assert data["folder"] == found.folder
    last = data["regions"][3]
    assert (last["half"], last["anchor"], last["passed"]) == ("backward", LAST, False)
    fault = last["faults"][0]
    assert fault["error"] > fault["limit"] > 0 and len(fault["index"]) == 2
    tensors = {t["name"]: t["passed"] for t in data["tensors"]}
    assert tensors["loss:"] and not tensors["grad:first.weight"]
    text = to_text(found)
    assert "WRONG" in text and "1 of 4 regions are wrong; the first is region3" in text
    assert f"python {found.folder}/reproduce.py" in " ".join(text.split()) or found.folder
    with pytest.raises(AssertionError, match="the first is region3"):
        found.raise_if_failed()


def test_nothing_is_written_where_nothing_may_be(tmp_path: Path) -> None:
    with emitting(KERNELS["a wrong derivative"][0]):
        found = verified(tmp_path, write=False)
    assert not found.passed and found.folder is None and not list(tmp_path.iterdir())


# Models of every kind.


def small(model: Any, *inputs: Any, **given: Any) -> Verification:
    torch.manual_seed(5)
    return verify(model, *inputs, options=OPTIONS, backend=interpreted, **given)


def test_a_model_without_a_region() -> None:
    found = small(nn.LayerNorm(16), torch.randn(4, 16), loss=lambda y: y.square().sum())
    assert found.passed and not found.regions
    assert "no region was placed" in str(found)
    assert "no region ran, so none was checked; 3 tensors are right" in str(found)


@pytest.mark.parametrize("gradients", [True, False])
def test_inference_is_compared_by_its_outputs(gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        found = small(Net().eval(), torch.randn(12, 32), loss=None if gradients else loss)
    assert found.passed and found.step is not None
    assert {region.half for region in found.regions} == {"inference"}
    assert [t.name for t in found.step.tensors] == ["output:"]
    assert any("forward pass alone" in note for note in found.notes)


def test_a_wrong_inference_is_found(tmp_path: Path) -> None:
    with emitting(Faulty(scaled("gelu_erf", 1.001))), torch.no_grad():
        found = verified(tmp_path)
        assert "error" in first(found, FORWARD, "wrong")
        assert found.first_wrong is not None and found.first_wrong.half == "inference"
        assert found.step is not None and not found.step.passed
        assert found.folder is not None
        assert script_fails(found.folder)
    assert not script_fails(found.folder)


def test_functions_keyword_arguments_and_losses_in_the_output() -> None:
    weight = torch.randn(32, 24, requires_grad=True)

    def model(x: Tensor, w: Tensor, *, scale: float, extra: Tensor) -> dict[str, Tensor]:
        y = torch.relu(x @ w + extra) * scale
        return {"loss": y.square().mean(), "y": y}

    inputs = torch.randn(12, 32), weight
    found = small(model, *inputs, kwargs={"scale": 2.0, "extra": torch.randn(24)})
    assert found.passed, str(found)
    assert found.regions and found.step is not None
    assert "grad:input[1]" in {t.name for t in found.step.tensors}
    assert weight.grad is None


def test_operands_that_are_not_contiguous(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(40, 24)) for _ in range(2))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = nn.functional.gelu(x.t()[:, 3:35] @ self.up[4:36]) * mask.expand(12, 24)
            return hidden @ self.down[::2].t()

    given = torch.randn(35, 12), torch.randn(1, 24)
    model = Views()
    found = small(model, *given, loss=loss)
    assert found.passed, str(found)
    assert all(region.compared for region in found.regions) and found.regions
    with emitting(Faulty(scaled("gelu_erf", 1.001))):
        found = small(model, *given, loss=loss, folder=str(tmp_path))
        assert found.folder is not None and script_fails(found.folder)
    assert not script_fails(found.folder)


def test_views_between_regions_of_three_dimensional_models(tmp_path: Path) -> None:
    torch.manual_seed(5)
    found = small(Net(), torch.randn(6, 5, 32), loss=loss)
    assert found.passed, str(found)
    assert len(found.regions) == 4 and all(region.compared for region in found.regions)


def test_symbolic_sizes(tmp_path: Path) -> None:
    x = torch.randn(6, 5, 32)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)

    def dynamic(module: fx.GraphModule, inputs: Any, **given: Any) -> Any:
        symbols = [n for n in module.graph.find_nodes(op="placeholder") if n.type is torch.SymInt]
        seen.append(len(symbols))
        return interpreted(module, inputs, **given)

    seen: list[int] = []
    with torch._dynamo.config.patch(assume_static_by_default=False):
        torch.manual_seed(5)
        found = verify(Net(), x, loss=loss, options=OPTIONS, backend=dynamic)
    assert seen == [2]
    assert found.passed, str(found)
    assert len(found.regions) >= 3 and all(region.compared for region in found.regions)
    with (
        torch._dynamo.config.patch(assume_static_by_default=False),
        emitting(Faulty(scaled("tanh", 1.001))),
    ):
        found = verify(Net(), x, loss=loss, options=OPTIONS, backend=dynamic, folder=str(tmp_path))
        assert found.folder is not None and script_fails(found.folder)
    assert not script_fails(found.folder)


def test_a_module_called_twice_and_a_graph_break() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 16), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.part(x)
            return x.square().sum()

        def part(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.net(x)

    found = small(Twice(), torch.randn(4, 16))
    assert found.passed, str(found)
    assert sum(region.runs for region in found.regions) >= 2


def test_nothing_of_the_callers_changes(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(32), Net()), torch.randn(12, 32, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert small(model, x, loss=loss).passed
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    assert x.grad is None and all(p.grad is None for p in model.parameters())


def test_masks_of_inductor_leave_the_step_uncompared() -> None:
    options = {**OPTIONS, "evt.rng": "inductor"}
    found = verify(Net(), torch.randn(12, 32), loss=loss, options=options, backend=interpreted)
    assert found.passed and found.step is None and found.regions
    assert any("not compared as a whole" in note for note in found.notes)


# Mistakes.


def test_mistakes_get_a_message(tmp_path: Path) -> None:
    x = torch.randn(12, 32)

    def raises(x: Tensor) -> Tensor:
        raise RuntimeError("of the model")

    with pytest.raises(VerifyError, match="in eager.*RuntimeError: of the model; mend that first"):
        small(raises, x)
    with pytest.raises(VerifyError, match=r"scalar of the output, not \(12, 16\)"):
        small(Net(), x, loss=lambda y: y)
    with pytest.raises(VerifyError, match="not NoneType"):
        small(Net(), x, loss=lambda y: None)
    with pytest.raises(OptionError, match="nearest is evt.place"):
        verify(Net(), x, options={"evt.plaec": "always"})
    model = Net()
    model.lock = (i for i in range(3))  # type: ignore[assignment]
    with pytest.raises(VerifyError, match="cannot be copied"):
        small(model, x, loss=loss)


def test_a_compiled_step_that_raises_says_so() -> None:
    def broken(module: fx.GraphModule, inputs: Any, **given: Any) -> Any:
        interpreted(module, inputs, **given)

        def raises(*args: Any) -> Any:
            raise RuntimeError("of the backend")

        return raises

    with pytest.raises(VerifyError, match="compiled step raises RuntimeError.*evt.place"):
        verify(Net(), torch.randn(12, 32), loss=loss, options=OPTIONS, backend=broken)


# The option.


def test_under_the_option_a_wrong_region_raises_and_a_right_one_does_not() -> None:
    options = {**PLACE, "evt.rng": "eager", "evt.verify": True}
    torch.manual_seed(2)
    model, x = Net(), torch.randn(12, 32)
    loss(torch.compile(model, backend=interpreted, options=options)(x)).backward()
    assert model.first.weight.grad is not None
    torch._dynamo.reset()
    with emitting(KERNELS["a wrong derivative"][0]):
        compiled = torch.compile(model, backend=interpreted, options=options)
        with pytest.raises(RegionError, match=r"backward mm_2 is wrong: output 0 \(store f32\)"):
            loss(compiled(x)).backward()


def test_the_option_puts_the_regions_name_into_its_spec() -> None:
    options = {**PLACE, "evt.verify": True}
    specs: list[str] = []

    def seeing(module: fx.GraphModule, inputs: Any, **given: Any) -> Any:
        return interpreted(module, inputs, **given)

    place_of = original("HALF", "place")
    with pytest.MonkeyPatch.context() as patch:

        def spied(state: State) -> None:
            place_of(state)
            specs.extend(n.args[1] for n in state.module.graph.nodes if is_region(n.target))

        change(patch, "HALF", "place", spied)
        model = Net()
        loss(torch.compile(model, backend=seeing, options=options)(torch.randn(12, 32))).backward()
    assert {spec.split(":")[0].split(" ", 2)[2] for spec in specs} >= {
        "forward addmm",
        "backward mm_2",
    }
    assert all(spec.startswith("verify ") and ": gemm(" in spec for spec in specs)


def test_watching_costs_nothing_that_is_left_behind() -> None:
    assert not check._listeners and not pipeline._watchers.get()
