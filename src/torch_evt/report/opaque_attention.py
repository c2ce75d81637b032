"""Attention as one node, for plans that are traced on a CPU for a GPU.

A GPU runs `scaled_dot_product_attention` as one kernel, forward and backward. A trace on the CPU
would decompose it, with dropout or a mask, into products and a softmax that the GPU never runs. So
`explain` puts an operator in its place, before the graph is differentiated, that has the shapes and
strides of PyTorch's flash attention and saves what that saves. It has no kernel: nothing runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

_SCHEMAS = {
    "attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal) "
        "-> (Tensor, Tensor)"
    ),
    "attention_backward": (
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, "
        "Tensor? mask) -> (Tensor, Tensor, Tensor)"
    ),
}


def replace_attention(module: fx.GraphModule) -> int:
    """Put the operator in place of attention in a Dynamo graph and the graphs that it calls.

    Attention stays as it is where a GPU may run it otherwise: with a mask that needs a gradient, or
    other than four dimensions. Returns the number of calls replaced.
    """
    count = 0
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        found = [n for n in part.graph.nodes if n.target is F.scaled_dot_product_attention]
        for node in found:
            node.target = attention
        if found:
            part.recompile()
        count += len(found)
    return count


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Stands in for scaled_dot_product_attention, with its arguments."""
    if query.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **kwargs
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    output: Tensor = torch.ops.torch_evt.attention(
        query, key, value, attn_mask, dropout_p, is_causal
    )[0]
    return output


def _fake(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout_p: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(query)
    if value.shape[-1] != query.shape[-1]:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, _, _ = inputs
    ctx.save_for_backward(query, key, value, *output, mask)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, output, logsumexp, mask = ctx.saved_tensors
    gradients = torch.ops.torch_evt.attention_backward(
        grad, query, key, value, output, logsumexp, mask
    )
    return (*gradients, None, None, None)


def _register() -> torch.library.Library:
    library = torch.library.Library("torch_evt", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in _SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake("torch_evt::attention", _fake, lib=library)
    torch.library.register_fake("torch_evt::attention_backward", _fake_backward, lib=library)
    torch.library.register_autograd(
        "torch_evt::attention", _backward, setup_context=_setup, lib=library
    )
    return library


if not hasattr(torch.ops.torch_evt, "attention"):
    _LIBRARY = _register()  # the operators live as long as this object
