"""XML-CNN: its shapes, its features and its loss over many labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torch_evt import workloads
from torch_evt.workloads import xmlcnn


def test_paper_size_is_that_of_amazon_670k() -> None:
    workload = workloads.get("xmlcnn", "paper")
    model, (embedded,), _ = workload.make(device="meta")
    assert embedded.shape == (1024, 512, 304)
    assert workload.inputs(device="meta")[1].shape == (1024, 670208)
    assert model(embedded).shape == (1024, 670208)
    assert model.bottleneck.weight.shape == (512, 24576)
    convolutions = 32 * 304 * (2 + 4 + 8) + 3 * 32
    linears = 512 * (24576 + 1) + 670208 * (512 + 1)
    assert sum(p.numel() for p in model.parameters()) == convolutions + linears


def test_features_are_pooled_convolutions_of_every_width() -> None:
    model, (embedded,), _ = workloads.get("xmlcnn").make(seed=1)
    model.eval()
    features = []
    for words, convolve in zip((2, 4, 8), model.convolutions, strict=True):
        around = words // 2 - 1
        padded = F.pad(embedded, (0, 0, around, around))
        windows = padded.unfold(1, words, 2)  # [batch, place, width, words]
        found = torch.einsum("bpdw,cdw->bcp", windows, convolve.weight) + convolve.bias[:, None]
        row = F.pad(found.flatten(1), (1, 1), value=float("-inf"))
        features.append(row.unfold(1, 3, 1).amax(-1).clamp(min=0))
    hidden = F.linear(torch.cat(features, 1), model.bottleneck.weight, model.bottleneck.bias)
    expected = F.linear(hidden.clamp(min=0), model.labels.weight, model.labels.bias)
    torch.testing.assert_close(model(embedded), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_targets_are_five_of_many(size: str) -> None:
    _, targets = workloads.get("xmlcnn", size).inputs(seed=3, dtype=torch.bfloat16)
    assert targets.dtype == torch.bfloat16
    assert (targets.sum(1) == 5).all() and targets.unique().tolist() == [0, 1]
    assert not torch.equal(targets[0], targets[1])


def test_the_loss_is_summed_over_labels_and_averaged_over_the_batch() -> None:
    logits = torch.randn(4, 7)
    targets = (torch.rand(4, 7) < 0.3).float()
    p = logits.double().sigmoid()
    y = targets.double()
    expected = -(y * p.log() + (1 - y) * (1 - p).log()).sum() / 4
    torch.testing.assert_close(xmlcnn.binary_cross_entropy(logits, targets), expected.float())
    half = xmlcnn.binary_cross_entropy(logits.bfloat16(), targets.bfloat16())
    assert half.dtype == torch.float32
    assert torch.equal(half, xmlcnn.binary_cross_entropy(logits.bfloat16().float(), targets))
