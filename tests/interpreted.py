"""The backend without Inductor's code generation: graphs run node by node, regions by the
reference. Compiles in well under a second, so that many models can be tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torch_evt import backend
from torch_evt.torch_compat import caches_disabled, inductor_config

PLACE: Mapping[str, Any] = {
    "evt.place": "always",
    "evt.strict": True,
    "evt.poison": True,
    "evt.target": "h200",
}
"""Options of nearly every test: place on any device, hide nothing."""


def interpreted(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """A backend for torch.compile."""
    with caches_disabled():
        return backend.compile_with(
            module, example_inputs, mode=mode, options=options, inner_compile=run_graph
        )


def run_graph(module: fx.GraphModule, example_inputs: Any, **_: Any) -> Callable[..., Any]:
    """In place of Inductor's code generation. Inference graphs still get our pass."""
    config = inductor_config()
    placing = config.post_grad_custom_pre_pass
    is_inference = _.get("is_inference", False)
    if is_inference and placing is not None:
        placing(module.graph, True)
        module.recompile()

    def run(arguments: list[Any]) -> Any:
        results = module(*arguments)
        arguments.clear()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def reset() -> None:
    torch._dynamo.reset()
