"""Activations and their derivatives as operators, so that a graph can hold each as one node.

`joint/recompose` puts them in place of the decomposed chains it recognises. A value is the formula
of `tree.functions`, computed in fp32 for the half types and rounded once to the dtype of the first
argument. Importing this module registers the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from torch_evt.tree.functions import FUNCTIONS

_SIGNATURES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "relu",
            "relu_grad",
            "gelu_erf",
            "gelu_erf_grad",
            "gelu_tanh",
            "gelu_tanh_grad",
            "silu",
            "silu_grad",
        ),
        "Tensor x",
    ),
    "relu_backward": "Tensor g, Tensor y",
    **dict.fromkeys(
        ("gelu_erf_backward", "gelu_tanh_backward", "silu_backward"), "Tensor g, Tensor x"
    ),
}


def _formula(name: str) -> Callable[..., Tensor]:
    """The table's formula; a backward that the table lacks is the gradient times the derivative."""
    if name in FUNCTIONS:
        return FUNCTIONS[name].formula
    derivative = FUNCTIONS[name.removesuffix("_backward") + "_grad"].formula
    return lambda g, x: g * derivative(x)


def _kernel(name: str) -> Callable[..., Tensor]:
    formula = _formula(name)

    def kernel(*arguments: Tensor) -> Tensor:
        wide = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in arguments)
        return torch.empty_like(arguments[0]).copy_(formula(*wide))

    return kernel


def _fake(*arguments: Tensor) -> Tensor:
    return torch.empty_like(arguments[0])


def _register() -> torch.library.Library:
    library = torch.library.Library("torch_evt", "FRAGMENT")  # type: ignore[no-untyped-call]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.pointwise)
    for name, signature in _SIGNATURES.items():
        schema, kernel = f"{name}({signature}) -> Tensor", _kernel(name)
        library.define(schema, tags=tags)  # type: ignore[no-untyped-call]
        library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"torch_evt::{name}", _fake, lib=library)
    return library


if not hasattr(torch.ops.torch_evt, "relu"):
    _LIBRARY = _register()  # the operators live as long as this object

NAMED: Mapping[str, torch._ops.OpOverload] = MappingProxyType(
    {name: getattr(torch.ops.torch_evt, name).default for name in _SIGNATURES}
)
"""The operator of each function, by the function's name in the table."""

_NAMES = {op: name for name, op in NAMED.items()}


def function_name(op: object) -> str | None:
    """The function that a graph node's target computes, None if it is not one of these."""
    return _NAMES.get(op) if isinstance(op, torch._ops.OpOverload) else None
