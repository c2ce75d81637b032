"""Garbage is collected after the passes as it was before them."""

from __future__ import annotations

import gc

import pytest

from torch_evt.passes import collecting_later


def test_collection_goes_on_afterwards_even_behind_a_failure() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), collecting_later():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_who_has_switched_collection_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collecting_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
