"""Initial values that are a function of the seed alone, and never zero.

A bias of zeros would hide a bias that is loaded from the wrong place, so every parameter is random.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def materialise(
    model: nn.Module,
    value: Callable[[str, nn.Parameter, torch.Generator], torch.Tensor],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """Give a model built on the meta device its memory, number format and values.

    value: (name, parameter, generator) -> its values, any float dtype, on the CPU. Normalisation
    parameters stay in at least fp32, all others get `dtype`. A device of "meta" leaves the model
    without values. Returns the model.
    """
    for module in model.modules():
        norm = isinstance(module, nn.LayerNorm)
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
