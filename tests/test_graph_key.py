"""The key of a Dynamo graph: equal for equal compilations, different for different ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from torch_evt.graph_key import graph_key


def captured(function: Callable[..., Any], *inputs: Any, **settings: Any) -> tuple[Any, list[Any]]:
    """The graph that Dynamo hands to a backend, and its inputs."""
    torch._dynamo.reset()
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append((module, example_inputs))
        return module.forward

    torch.compile(function, backend=keep, **settings)(*inputs)
    ((module, example_inputs),) = found
    return module, example_inputs


def key_of(function: Callable[..., Any], *inputs: Any, identity: str = "", **settings: Any) -> Any:
    return graph_key(*captured(function, *inputs, **settings), identity)


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Renamed(nn.Module):
    """The same graph from a module with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, states: Tensor) -> Tensor:
        projected = self.projection(states)
        return torch.tanh(projected)


def test_equal_graphs_have_equal_keys_whatever_their_names() -> None:
    x = torch.randn(4, 8)
    first = key_of(Layer(), x)
    assert first is not None
    assert key_of(Layer(), torch.randn(4, 8)) == first
    assert key_of(Layer(), torch.randn(8, 8)[4:]) == first  # another rank's part of a batch
    assert key_of(Renamed(), x) == first


def test_whatever_changes_the_graph_or_its_inputs_changes_the_key() -> None:
    x = torch.randn(4, 8)
    frozen = Layer()
    frozen.linear.bias.requires_grad_(False)

    def checkpointed(x: Tensor, layer: nn.Module) -> Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    class Sine(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.linear(x))

    class Scaled(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * 2.0

    keys = {
        "plain": key_of(Layer(), x),
        "options": key_of(Layer(), x, identity="evt.poison"),
        "rows": key_of(Layer(), torch.randn(5, 8)),
        "width": key_of(Layer(9), x),
        "strides": key_of(Layer(), torch.randn(8, 4).t()),
        "dtype": key_of(Layer().double(), x.double()),
        "gradient of x": key_of(Layer(), x.clone().requires_grad_()),
        "frozen": key_of(frozen, x),
        "function": key_of(Sine(), x),
        "constant": key_of(Scaled(), x),
        "checkpoint": key_of(functools.partial(checkpointed, layer=Layer()), x),
        "checkpoint of another": key_of(functools.partial(checkpointed, layer=Sine()), x),
        "dynamic": key_of(Layer(), x, dynamic=True),
    }
    with torch.no_grad():
        keys["no_grad"] = key_of(Layer(), x)
    with torch.autocast("cpu", torch.bfloat16):
        keys["autocast"] = key_of(Layer(), x)
    with torch._inductor.config.patch(max_autotune=True):
        keys["configuration"] = key_of(Layer(), x)
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)


def test_a_dynamic_size_enters_as_a_symbol() -> None:
    keys = {key_of(Layer(), torch.randn(rows, 8), dynamic=True) for rows in (4, 6)}
    assert len(keys) == 1 and None not in keys


def test_there_is_no_key_where_nothing_is_cached() -> None:
    graph = captured(Layer(), torch.randn(4, 8))
    with torch._inductor.config.patch(force_disable_caches=True):
        assert graph_key(*graph, "") is None


def test_there_is_no_key_for_what_only_this_process_knows() -> None:
    module, inputs = captured(Layer(), torch.randn(4, 8))
    assert graph_key(module, inputs, "") is not None
    assert graph_key(module, inputs, repr(object())) is None


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoints_policy_is_part_of_the_key_only_by_a_name(named: bool) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def key_with(policy: CheckpointPolicy) -> str | None:
        contexts = functools.partial(
            create_selective_checkpoint_contexts, lambda *args, **kwargs: policy
        )
        if named:
            contexts.cache_hash = policy.name  # type: ignore[attr-defined]
        layer = Layer()

        def run(x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(
                layer, x, use_reentrant=False, context_fn=contexts
            )

        return key_of(run, torch.randn(4, 8))

    found = {key_with(CheckpointPolicy.MUST_SAVE), key_with(CheckpointPolicy.PREFER_RECOMPUTE)}
    assert len(found) == 2 and None not in found if named else found == {None}
