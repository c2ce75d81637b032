"""Eager's dropout masks as an operator of their own (`rng=eager`).

`native_dropout` ties the mask to the tensor that it drops from, so a product could not hold its own
dropout. The numbers depend on that tensor's size, dtype and device alone, so the mask can be drawn
first and become an operand. Importing this module registers the operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SCHEMA = (
    "eager_keep_mask(SymInt[] size, float p, Tensor? after, *, ScalarType dtype, Device device)"
    " -> Tensor"
)


def _mask(
    size: Sequence[int],
    p: float,
    after: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The mask that eager's dropout would draw now for a contiguous tensor: True with 1 - p.

    after: the mask drawn before this one; it only keeps the order of draws.
    """
    dropped = torch.zeros(list(size), dtype=dtype, device=device)
    mask: Tensor = torch.ops.aten.native_dropout(dropped, p, True)[1]
    return mask


def _fake(
    size: Sequence[int],
    p: float,
    after: Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(list(size), dtype=torch.bool, device=device)


def _register() -> torch.library.Library:
    library = torch.library.Library("torch_evt", "FRAGMENT")  # type: ignore[no-untyped-call]
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
    library.define(_SCHEMA, tags=tags)  # type: ignore[no-untyped-call]
    library.impl("eager_keep_mask", _mask, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("torch_evt::eager_keep_mask", _fake, lib=library)
    return library


if not hasattr(torch.ops.torch_evt, "eager_keep_mask"):
    _LIBRARY = _register()  # the operator lives as long as this object

EAGER_KEEP_MASK: torch._ops.OpOverload = torch.ops.torch_evt.eager_keep_mask.default
