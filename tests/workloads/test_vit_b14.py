"""ViT: the published size up to patch and tokens, real digits, patches and class tokens."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from torch_evt import workloads
from torch_evt.errors import WorkloadError
from torch_evt.workloads import digits


def test_paper_size_is_vit_b_with_patches_of_14_and_8_class_tokens() -> None:
    model, (pictures,), _ = workloads.get("vit-b14", "paper").make(device="meta")
    assert pictures.shape == (128, 3, 224, 224) and model(pictures).shape == (128, 1000)
    assert model.position.shape == (1, 264, 768)
    count = sum(p.numel() for p in model.parameters())
    published = 86_567_656  # of ViT-B/16: patches of 16, 196 of them, one class token
    longer = (264 - 197 + 8 - 1) * 768
    smaller_patches = 3 * (14**2 - 16**2) * 768
    assert count == published + longer + smaller_patches


@pytest.mark.parametrize(("size", "shape"), [("tiny", (16, 1, 8, 8)), ("small", (32, 3, 32, 32))])
def test_shapes(size: str, shape: tuple[int, ...]) -> None:
    workload = workloads.get("vit-b14", size)
    pictures, classes = workload.inputs(seed=1)
    assert pictures.shape == shape and classes.shape == shape[:1]
    assert classes.min() >= 0 and classes.max() < 10
    model, given, _ = workload.make(seed=1)
    assert model(*given).shape == (shape[0], 10)


def test_tiny_pictures_are_the_digits_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    known = {
        picture.tobytes(): target for picture, target in zip(data.images, data.target, strict=True)
    }
    pictures, classes = workloads.get("vit-b14").inputs(seed=9)
    for picture, target in zip(pictures, classes, strict=True):
        assert known[(8 * (picture[0].double() + 1)).numpy().tobytes()] == target


def test_without_scikit_learn_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    digits._all.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(WorkloadError, match="pip install scikit-learn"):
        workloads.get("vit-b14").make()
    workloads.get("vit-b14", "small").inputs()
    monkeypatch.undo()
    assert digits.sample(random.Random(0), 3)[0].shape == (3, 8, 8)


def test_a_patch_is_a_square_of_all_channels() -> None:
    model, (pictures,), _ = workloads.get("vit-b14", "small").make(seed=2)
    patches = model.patches(pictures)
    assert patches.shape == (32, 64, 48)
    square = pictures[5, :, 8:12, 20:24]
    assert torch.equal(patches[5, 2 * 8 + 5], square.flatten())


def test_every_class_token_and_position_counts() -> None:
    model, (pictures,), _ = workloads.get("vit-b14").make(seed=2)
    model.eval()
    model(pictures).square().sum().backward()
    for parameter in (model.class_tokens, model.position):
        assert (parameter.grad.abs().amax(dim=(0, 2)) > 0).all()
    assert model.class_tokens.shape == (1, 1, 48) and model.position.shape == (1, 17, 48)
