"""Models to train, measure and explain, each at the sizes tiny, small and paper.

A workload is one module with `SIZES`, `make(size, seed, dtype, device)`, `inputs(...)` with the
same arguments, and `step(model, inputs)`; its name goes into `_MODULES`. `inputs` gives a batch:
the model's inputs, and behind them the targets that the inputs do not already hold.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torch_evt.errors import ExplainError, OptionError
from torch_evt.workloads import bert_large, gpt2_medium, llama_1b, mlp, vit_b14, xmlcnn

Made = tuple[nn.Module, tuple[Any, ...], "Callable[[Any], Tensor] | None"]
"""(model, inputs, loss): loss maps the model's output to a scalar; None: the output is the loss."""

_MODULES: dict[str, ModuleType] = {
    "mlp": mlp,
    "gpt2-medium": gpt2_medium,
    "bert-large": bert_large,
    "llama-1b": llama_1b,
    "vit-b14": vit_b14,
    "xmlcnn": xmlcnn,
}

NEAR = 0.4
"""Names less alike than this (difflib's ratio) are not offered for one another: gpt is 0.43 of
gpt2-medium."""


@dataclass(frozen=True)
class Workload:
    """A model at one size. Raises OptionError for a name or size that does not exist."""

    name: str
    size: str

    def __post_init__(self) -> None:
        _check("workload", self.name, _MODULES)
        _check(f"size of {self.name}", self.size, sizes(self.name))

    def make(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Made:
        """(model, inputs, loss), a function of the arguments alone (text: and of Python's version).

        The model is in training mode with its parameters in `dtype`, those of normalisations in at
        least fp32. device "meta" gives shapes without values.
        """
        module = _MODULES[self.name]
        made: Made = module.make(module.SIZES[self.size], seed, dtype, device)
        return made

    def inputs(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, ...]:
        """A whole batch, as `step` takes it: the inputs that `make` with this seed has, then the
        targets of its loss, unless those follow from the inputs (as next tokens do)."""
        module = _MODULES[self.name]
        batch: tuple[Tensor, ...] = module.inputs(module.SIZES[self.size], seed, dtype, device)
        return batch

    def step(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """The scalar loss of one forward pass, to be compiled as a whole.

        inputs: a batch from `inputs`, with the targets.
        """
        loss: Tensor = _MODULES[self.name].step(model, inputs)
        return loss


def names() -> tuple[str, ...]:
    """Every workload's name."""
    return tuple(_MODULES)


def sizes(name: str) -> tuple[str, ...]:
    """The sizes of a workload, smallest first."""
    return tuple(_MODULES[name].SIZES)


def get(name: str, size: str = "tiny") -> Workload:
    """The workload of that name and size. Raises OptionError that names the nearest, and all."""
    return Workload(name, size)


def load(reference: str) -> Made:
    """Call "module:function", found from the current folder, for its (model, inputs, loss).

    Raises ExplainError if it cannot be imported or returns something else. What the function itself
    raises is passed on.
    """
    module_name, _, function_name = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ExplainError(
            f"cannot load {reference!r}: {error}; give an importable module and a function in it, "
            "as module:function"
        ) from error
    if not callable(function):
        raise ExplainError(
            f"{reference} is {type(function).__name__}, not a function that returns "
            "(model, inputs, loss)"
        )
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise ExplainError(
            f"{reference} cannot be called without arguments ({error}); give a function that takes "
            "none and returns (model, inputs, loss)"
        ) from error
    made = function()
    if not (isinstance(made, tuple) and len(made) == 3):
        found = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise ExplainError(f"{reference} must return (model, inputs, loss); it returned {found}")
    if not isinstance(made[1], tuple):
        raise ExplainError(
            f"the inputs that {reference} returns must be a tuple of the model's arguments, also "
            f"for a single one; it returned {type(made[1]).__name__}"
        )
    return made


def _check(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=NEAR)
        asked = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise OptionError(f"unknown {what} {name!r}{asked} Known: {', '.join(known)}")
