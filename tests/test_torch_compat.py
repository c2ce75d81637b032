"""What the rest of the code asks PyTorch's private parts."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_evt.torch_compat import size_hint


@pytest.fixture(autouse=True)
def no_warnings() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_size_without_a_hint_gets_one_without_a_warning_or_a_guard() -> None:
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    torch._check(size >= 0)
    guards = len(env.guards)
    assert size_hint(size) == 8192
    assert size_hint(size * 3) == 3 * 8192
    assert len(env.guards) == guards


def test_a_size_with_a_hint_gives_it_without_a_guard() -> None:
    from torch._dynamo.source import ConstantSource

    env = ShapeEnv()
    symbol = env.create_symbol(12, ConstantSource("rows"), DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=12)
    guards = len(env.guards)
    assert size_hint(size) == 12
    assert size_hint(size * 4) == 48
    assert size_hint(7) == 7
    assert len(env.guards) == guards
