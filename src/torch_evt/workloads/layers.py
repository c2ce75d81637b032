"""What several workloads share: normalisations in fp32, and cross-entropy in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""The target of a position that the loss leaves out."""


class LayerNorm(nn.LayerNorm):
    """Layer norm in the dtype of its own parameters, fp32 or more; the result is rounded back."""

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(self.weight.dtype)
        normal = F.layer_norm(exact, self.normalized_shape, self.weight, self.bias, self.eps)
        return normal.to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, in the weight's dtype; the result is rounded back."""

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(self.weight.dtype)
        return F.rms_norm(exact, self.normalized_shape, self.weight, self.eps).to(x.dtype)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or as it is if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over targets that are not ignored, computed in at least fp32.

    logits: [..., classes]; targets: int64 of the same shape without the last dimension.
    """
    exact = at_least_fp32(logits).flatten(0, -2)
    return F.cross_entropy(exact, targets.flatten(), ignore_index=IGNORED)


def next_tokens(tokens: Tensor) -> Tensor:
    """The target of every position: the token after it; the last one has none and is ignored."""
    return F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
