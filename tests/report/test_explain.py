"""explain: the plan that compiling would make, without touching what is the caller's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from interpreted import PLACE, interpreted
from torch_evt import explain, pipeline, workloads
from torch_evt.errors import ExplainError, OptionError, TargetError
from torch_evt.partition.plan import GraphPlan, Plan
from torch_evt.report.render import to_text


class Model(nn.Module):
    """Two layers and a batch norm; wrap says how the loss is returned."""

    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(32)
        self.wrap = wrap

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = self.down(F.dropout(F.gelu(self.up(self.norm(x * scale))), 0.1))
        return y if self.wrap is None else self.wrap(y.square().mean())


def regions(plan: Plan) -> list[tuple[str, str]]:
    return [(r.half, r.anchor) for graph in plan.graphs for r in graph.regions]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "wrap",
    [lambda loss: loss, lambda loss: {"loss": loss}, lambda loss: SimpleNamespace(loss=loss)],
    ids=["scalar", "mapping", "attribute"],
)
def test_finds_the_loss(wrap: Any) -> None:
    plan = explain(Model(wrap), torch.randn(8, 32))
    assert {half for half, _ in regions(plan)} == {"forward", "backward"}
    assert not plan.notes
    (graph,) = plan.graphs
    assert graph.saved_bytes and graph.inductor_saved_bytes
    assert not graph.placed  # place=auto on a CPU


def test_a_loss_function_makes_it_training_and_without_one_it_says_inference() -> None:
    x = torch.randn(8, 32)
    training = explain(Model(), x, loss=lambda y: y.sum())
    assert {half for half, _ in regions(training)} == {"forward", "backward"}
    inference = explain(Model().eval(), x)
    assert {half for half, _ in regions(inference)} == {"inference"}
    assert "no loss was found" in inference.notes[0]


def test_printed_it_is_what_the_command_shows() -> None:
    plan = explain(Model(), torch.randn(8, 32), loss=lambda y: y.sum())
    assert str(plan) == to_text(plan)
    assert "forward: fused" in str(plan)


def test_without_the_plan_nothing_is_said_to_be_planned() -> None:
    x = torch.randn(8, 32)
    plan = explain(Model(), x, loss=lambda y: y.sum(), options={"evt.disable": ["plan"]})
    assert [graph.solver for graph in plan.graphs] == ["none"]
    assert "0 regions, nothing placed, not planned\n" in str(plan)


def test_a_loss_may_stay_outside() -> None:
    plan = explain(Model(), torch.randn(8, 32), loss=lambda y: y)
    assert {half for half, _ in regions(plan)} == {"forward", "backward"}


def test_keyword_arguments_reach_the_model() -> None:
    x = torch.randn(8, 32)
    plain = explain(Model(), x, loss=lambda y: y.sum())
    scaled = explain(Model(), x, loss=lambda y: y.sum(), kwargs={"scale": 2.0})
    assert regions(plain) and len(regions(scaled)) == len(regions(plain))


def test_nothing_of_the_callers_changes() -> None:
    model, x = Model(lambda loss: loss), torch.randn(8, 32, requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compiled = torch.compile(model, backend=interpreted, options=PLACE)
    compiled(x).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    before.update({name: value.clone() for name, value in model.state_dict().items()})
    state = torch.random.get_rng_state()
    frames = len(torch._dynamo.utils.compilation_time_metrics.get("_compile.compile_inner", []))
    explain(model, x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    after = len(torch._dynamo.utils.compilation_time_metrics.get("_compile.compile_inner", []))
    compiled(x)  # still compiled: explaining threw nothing away
    again = len(torch._dynamo.utils.compilation_time_metrics.get("_compile.compile_inner", []))
    assert frames <= after == again


def test_it_can_be_asked_any_number_of_times() -> None:
    """More often than Dynamo would recompile one function."""
    model, x = Model(lambda loss: loss), torch.randn(8, 32)
    first = regions(explain(model, x))
    assert first
    for _ in range(10):
        assert regions(explain(model, x)) == first


def test_the_plan_is_what_compiling_makes() -> None:
    model, x = Model(lambda loss: loss), torch.randn(8, 32)
    plan = explain(model, x, options=PLACE)
    compiled: list[GraphPlan] = []
    with pipeline.observed(compiled.append):
        torch.compile(model, backend=interpreted, options=PLACE)(x)
    assert plan.graphs[0].placed
    assert [r.tree for r in plan.graphs[0].regions] == [r.tree for r in compiled[0].regions]


def test_fake_parameters_and_meta_sized_models_take_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model, inputs, loss = workloads.get("mlp", "paper").make(0, dtype=torch.bfloat16)
    plan = explain(model, *inputs, loss=loss)
    assert len(regions(plan)) == 2


def test_mistakes_get_a_message() -> None:
    model, x = Model(lambda loss: loss), torch.randn(8, 32)
    with pytest.raises(OptionError, match="nearest is evt.place"):
        explain(model, x, options={"evt.plac": "always"})
    with pytest.raises(TargetError, match="h200"):
        explain(model, x, options={"evt.target": "h2000"})

    with pytest.raises(ExplainError, match="make a tensor of the output, not NoneType"):
        explain(Model(), x, loss=lambda y: None)

    def decides(x: Tensor) -> Tensor:
        return x.sin() if x.sum().item() > 0 else x.cos()

    with pytest.raises(ExplainError, match="depend on the values"):
        explain(decides, x)


def test_a_function_without_tensors_has_no_graph() -> None:
    plan = explain(lambda n: n + 1, 3)
    assert not plan.graphs and "no graph was captured" in plan.notes[-1]
