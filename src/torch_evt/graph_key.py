"""The identity of a graph that Dynamo hands over: equal in every process that traces the same.

AOTAutograd has such a key, too, but gives it to nobody. This one is for what is kept beside a
compiled graph. Nodes are numbered and not named, as there, so that equal layers have equal keys.
Sizes that are symbolic enter as symbols, not as the numbers of this call. Where a tensor begins in
its storage does not matter, as there: ranks that slice one batch have one key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_evt.runtime import store
from torch_evt.torch_compat import caches_used, checkpoint_policy, config_hashes


def graph_key(module: fx.GraphModule, inputs: Sequence[Any], identity: str) -> str | None:
    """A key for `store`: the graph, the metadata of its inputs, and what compiles it.

    identity: the text of everything else that decides what is compiled, options above all. None
    where the caches are off, or where something in the graph has no text that lasts.
    """
    if not caches_used():
        return None
    parts = [identity, str(torch.__version__), *config_hashes(), _ambient()]
    holders = module.graph.find_nodes(op="placeholder")
    for node, value in zip(holders, inputs, strict=True):
        parts.append(_value(node.meta.get("example_value", value)))  # Dynamo's: it has the symbols
    try:
        return store.key([*parts, *_graph(module)])
    except store.UnstableKeyError:
        return None


def _ambient() -> str:
    kinds = ("cpu", "cuda")
    return repr(
        (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds],
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )
    )


def _graph(module: fx.GraphModule) -> Iterator[str]:
    yield checkpoint_policy(module)
    numbers: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        if node.op == "placeholder":  # its metadata is that of the input
            yield "input"
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        yield f"{node.op} {_target(node.target)} {args!r} {kwargs!r}"
        if node.op in ("get_attr", "call_module"):
            yield from _attribute(module, str(node.target))


def _target(target: Any) -> str:
    name = getattr(target, "__qualname__", None)
    if name is None or isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{name}"


def _attribute(module: fx.GraphModule, path: str) -> Iterator[str]:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    if isinstance(value, fx.GraphModule):
        yield from _graph(value)
    else:
        yield _value(value)


def _value(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__qualname__} {value}"
    text = f"{type(value).__qualname__} {value.dtype} {value.device} {value.requires_grad}"
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        return f"{text} {context} {[_value(getattr(value, name)) for name in names]}"
    if value.layout != torch.strided:
        return f"{text} {value.layout} {tuple(value.shape)}"
    return f"{text} {tuple(value.shape)} {value.stride()}"
