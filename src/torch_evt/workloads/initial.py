"""Initial values and inputs that are a function of the seed alone, and never special.

A bias of zeros would hide a bias that is loaded from the wrong place, and so would norm weights of
one; so every parameter is random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Value = Callable[[str, nn.Parameter, torch.Generator], Tensor]
"""(name, parameter, generator) -> its values, any float dtype, on the CPU."""

NORMS = (nn.LayerNorm, nn.RMSNorm)
SPREAD = 0.02
"""How far biases lie from 0 and norm weights from 1: the deviation of a normal distribution."""


def transformer(deviation: float, own: Mapping[str, float] | None = None) -> Value:
    """Values for a transformer: normal, norm weights around 1 and all else around 0.

    deviation: of weights. own: another deviation for parameters whose name ends with a key.
    """

    def value(name: str, parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
        normal = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1 + SPREAD * normal
        if name.endswith("bias"):
            return SPREAD * normal
        for end, narrower in (own or {}).items():
            if name.endswith(end):
                return normal.mul_(narrower)
        return normal.mul_(deviation)  # in place: an embedding can be a GiB

    return value


def materialise(
    model: nn.Module,
    value: Value,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """Give a model built on the meta device its memory, number format and values.

    Normalisation parameters stay in at least fp32, all others get `dtype`. A device of "meta"
    leaves the model without values. Returns the model.
    """
    for module in model.modules():
        norm = isinstance(module, NORMS)
        own = torch.promote_types(dtype, torch.float32) if norm else dtype
        # Not module.to_empty: that swaps tensors, which fake tensors refuse.
        for name, empty in list(module.named_parameters(recurse=False)):
            memory = torch.empty(empty.shape, dtype=own, device=device)
            module.register_parameter(name, nn.Parameter(memory))
    if torch.device(device).type == "meta":
        return model
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value(name, parameter, generator))
    return model


def normal(*shape: int, seed: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """An input of normal numbers, drawn on the CPU; on the meta device without any memory."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)
