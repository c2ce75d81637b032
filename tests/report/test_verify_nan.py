"""Where a step starts with NaN, verify says where it is and takes no region for its cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.report.faulty import OPTIONS, Faulty, Net, emitting, loss, scaled
from torch import Tensor, nn

from interpreted import interpreted
from torch_evt import verify
from torch_evt.report.verification import Verification, to_json


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Choosing(nn.Module):
    """Functions that take one value or another, and so may lose a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.register_buffer("scale", torch.rand(24) + 0.5)

    def forward(self, x: Tensor, *, residual: dict[str, Tensor]) -> Tensor:
        hidden = torch.relu(self.up(x)) * self.scale
        hidden = torch.clamp(self.down(hidden), -1.5, 1.5) + residual["deep"]
        return torch.where(hidden > 0.1, hidden, 0.3 * hidden)


def found_in(where: str, value: float = torch.nan, **given: Any) -> Verification:
    """verify with two elements of `where` changed."""
    torch.manual_seed(3)
    model, x, residual = Choosing(), torch.randn(12, 16), {"deep": torch.randn(12, 16)}
    named = {"input 0": x, "input residual['deep']": residual["deep"]}
    named |= {f"parameter {name}": p for name, p in model.named_parameters()}
    named |= {f"buffer {name}": b for name, b in model.named_buffers()}
    with torch.no_grad():
        named[where].view(-1)[3:5] = value
    kwargs, given = {"residual": residual}, {"backend": interpreted, "write": False, **given}
    return verify(model, x, loss=loss, options=OPTIONS, kwargs=kwargs, **given)


@pytest.mark.parametrize(
    ("where", "elements"),
    [
        ("input 0", 192),
        ("input residual['deep']", 192),
        ("parameter up.bias", 24),
        ("parameter down.weight", 384),
        ("buffer scale", 24),
    ],
)
def test_nan_is_named_and_no_region_is_accused(where: str, elements: int) -> None:
    found = found_in(where)
    assert len(found.regions) >= 2 and found.passed, str(found)
    assert found.nan == (f"{where} (2 of {elements} elements)",)
    text = " ".join(str(found).split())
    assert f"the inputs hold NaN: {where} (2 of {elements} elements). " in text
    assert "verify again without it" in text and "WRONG" not in text
    verdict = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert verdict["nan"] == list(found.nan) and verdict["first_wrong"] is None
    assert found.step is not None
    assert any(t.name.startswith("grad:") for t in found.step.tensors)


def test_a_step_without_nan_says_nothing_of_it() -> None:
    for found in (found_in("input 0", 0.5), found_in("buffer scale", torch.inf)):
        assert found.passed and not found.nan and to_json(found)["nan"] == []
        assert "NaN" not in str(found)


def test_a_kernel_that_is_wrong_beside_nan_is_still_found() -> None:
    torch.manual_seed(11)
    model, x = Net(), torch.randn(12, 32)
    x[2, 5] = torch.nan
    given: dict[str, Any] = {"backend": interpreted, "write": False, "options": OPTIONS}
    with emitting(Faulty(change=scaled("tanh", 1.001))):
        found = verify(model, x, loss=loss, **given)
    assert found.first_wrong is not None and found.nan == ("input 0 (1 of 384 elements)",)
    assert "regions are wrong" in str(found) and "the inputs hold NaN" in str(found)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_another_place_is_not_laid_to_the_compiler(value: float) -> None:
    """A loss that is infinite where eager has NaN: as from a sum in another order."""

    def infinite(module: Any, inputs: Any, *, options: Any) -> Any:
        compiled = interpreted(module, inputs, options=options)

        def call(*args: Any) -> Any:
            results = compiled(*args)
            for result in results:
                result.data[result.isnan()] = torch.inf
            return results

        return call

    found = found_in("input 0", value, backend=infinite, write=True)
    assert not found.passed and found.first_wrong is None
    (note,) = [note for note in found.notes if note.startswith("every region is right")]
    assert "The inputs hold them: input 0 (2 of 192 elements)" in note
    assert "a rewrite of the graph" not in str(found)
