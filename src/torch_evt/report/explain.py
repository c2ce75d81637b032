"""explain: the plan of a model, without compiling or running it.

The model is traced on fake copies of its parameters and inputs, through the same path that
`torch.compile(model, backend="evt")` takes, up to the point where Inductor would generate code. So
nothing of the caller's changes: no gradient, no buffer, no random state, no compiled function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)

from torch_evt import backend, devices, options, pipeline
from torch_evt.errors import ExplainError
from torch_evt.options import Options
from torch_evt.partition.describe import versions
from torch_evt.partition.plan import GraphPlan, Plan
from torch_evt.report.opaque_attention import replace_attention
from torch_evt.report.render import to_text
from torch_evt.torch_compat import caches_disabled, inductor_config, new_code

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Explanation(Plan):
    """A plan that prints as `evt explain` shows it."""

    def __str__(self) -> str:
        return to_text(self)


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    loss: Loss | None = None,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Explanation:
    """What torch.compile(model, backend="evt", mode=mode, options=options) would do.

    To be printed, or read as a `Plan`.

    model: a module or a function. inputs, kwargs: of one call, real or fake tensors.
    loss: makes a scalar of the model's output (or, to leave the loss outside of what is compiled,
    gives the output itself); None takes a scalar output, `output.loss` or
    `output["loss"]`; where there is none, or nothing needs a gradient, the plan is for inference,
    and a note says so.

    Raises OptionError for a wrong option, TargetError for an unknown target, ExplainError where
    the loss is no tensor or the model cannot be traced on fake tensors.
    """
    ours, _ = _split(options)
    target = devices.device(ours.target or devices.default_target())
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake_mode):
        model, inputs, kwargs = copy.deepcopy((model, inputs, dict(kwargs or {})))
    captured_on = _device_of(model, inputs, kwargs)
    notes: list[str] = []
    graphs: list[GraphPlan] = []
    state = torch.random.get_rng_state()
    try:
        with fake_mode:
            step = _step(model, inputs, kwargs, loss, notes)
            opaque = target.kind == "cuda" and captured_on == "cpu"
            compiled = torch.compile(step, backend=_planner(mode, options, opaque))
            with (
                caches_disabled(),
                pipeline.observed(graphs.append),
            ):
                compiled(*inputs, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ExplainError(
            f"the model's path or shapes depend on the values of its tensors ({error}); "
            "explain the parts between, or run the compiled model with "
            'TORCH_LOGS="+torch_evt" to see the plan of each graph'
        ) from error
    finally:
        torch.random.set_rng_state(state)
    if not graphs:
        notes.append("no graph was captured: nothing in the model is a tensor operation")
    return Explanation(captured_on, target.name, versions(), tuple(graphs), tuple(notes))


def _split(given: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Our options and Inductor's, checked."""
    return options.split(given)


def _planner(mode: str | None, given: Mapping[str, Any] | None, opaque: bool) -> Callable[..., Any]:
    """The backend, ending where Inductor would generate code.

    opaque: keep attention as one node.
    """

    def plan_only(module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        if opaque:
            replace_attention(module)
        return backend.compile_with(
            module, example_inputs, mode=mode, options=given, inner_compile=_run_graph
        )

    return plan_only


def _run_graph(
    module: fx.GraphModule, example_inputs: Any, *, is_inference: bool = False, **_: Any
) -> Callable[..., Any]:
    """Stands in for Inductor's code generation: runs the graph as it is, on fake tensors.

    An inference graph gets our pass first, which Inductor would run at the start of its own.
    """
    if is_inference:
        inference_pass = inductor_config().post_grad_custom_pre_pass
        assert isinstance(inference_pass, backend.InferencePass)
        inference_pass(module.graph, True)
        module.recompile()

    def run(arguments: list[Any]) -> Any:
        return module(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _step(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Loss | None,
    notes: list[str],
) -> Callable[..., Any]:
    """The function to trace: the model with its loss."""
    output = model(*inputs, **kwargs)
    find = loss_in(output) if loss is None else loss
    if find is not None and not isinstance(find(output), torch.Tensor):
        raise ExplainError(
            f"loss must make a tensor of the output, not {type(find(output)).__name__}"
        )
    del output
    if find is None:
        notes.append("no loss was found in the output: this is the plan for inference")

    def step(*args: Any, **kw: Any) -> Any:
        output = model(*args, **kw)
        return output if find is None else find(output)

    def inference(*args: Any, **kw: Any) -> Any:
        with torch.no_grad():
            return model(*args, **kw)

    chosen = inference if find is None else step
    return new_code(chosen)


def loss_in(output: Any) -> Loss | None:
    """How to get the scalar loss out of an output like this one."""
    if isinstance(output, torch.Tensor):
        return (lambda result: result) if output.dim() == 0 and output.requires_grad else None
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return lambda result: result["loss"]
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        return lambda result: result.loss
    return None


def _device_of(*values: Any) -> str:
    for value in values:
        if isinstance(value, torch.nn.Module):
            found = next(iter(value.parameters()), None)
            if found is not None:
                return found.device.type
        for leaf in torch.utils._pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                return leaf.device.type
    return "cpu"
