"""One step of a model, run by eager, compiled or in fp64, each on copies of everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_evt.comparison import UNIT
from torch_evt.errors import VerifyError
from torch_evt.report.explain import Loss, loss_in
from torch_evt.testing import copy_inputs, run_step
from torch_evt.torch_compat import new_code

Tensors = dict[str, Tensor]


def tensors_of(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, nn.Module):
            found += [*value.parameters(), *value.buffers()]
        found += [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return found


def devices_of(*values: Any) -> list[torch.device]:
    found = list(dict.fromkeys(tensor.device for tensor in tensors_of(*values)))
    return found or [torch.device("cpu")]


class _Function(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Step:
    """What is run: the model, on copies of the inputs. find: output -> loss; None: inference."""

    model: nn.Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    find: Loss | None
    seed: int
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Loss | None,
        seed: int,
    ) -> Step:
        module = model if isinstance(model, nn.Module) else _Function(model)
        bare = cls(module, inputs, kwargs, None, seed, ())
        trial = bare.copied()
        torch.manual_seed(seed)
        try:
            output = trial(*copy_inputs(inputs), **copy_inputs(kwargs))
            find = loss_in(output) if loss is None else loss
            scalar = None if find is None else find(output)
        except Exception as error:
            raise VerifyError(
                f"the model or its loss raises in eager, without torch_evt: "
                f"{type(error).__name__}: {error}; mend that first"
            ) from error
        if find is None:
            note = "no loss was found in the output: the forward pass alone was verified"
            return replace(bare, notes=(note,))
        if not isinstance(scalar, Tensor) or scalar.numel() != 1:
            what = tuple(scalar.shape) if isinstance(scalar, Tensor) else type(scalar).__name__
            raise VerifyError(f"loss must make a scalar of the output, not {what}")
        if not scalar.requires_grad:
            note = "nothing needs a gradient: the forward pass alone was verified"
            return replace(bare, notes=(note,))
        return replace(bare, find=find)

    def copied(self) -> nn.Module:
        """A copy of the model. Raises VerifyError where there can be none."""
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            raise VerifyError(
                f"the model cannot be copied ({type(error).__name__}: {error}); verify works on "
                "copies, so give it a model that copy.deepcopy takes"
            ) from error

    def holding(self, test: Callable[[Tensor], Tensor]) -> list[str]:
        """The inputs, parameters and buffers with an element for which `test` is true, in words:
        "input 0 (3 of 128 elements)"."""
        named: list[tuple[str, Any]] = []
        arguments = [(f"input {i}", value) for i, value in enumerate(self.inputs)]
        arguments += [(f"input {name}", value) for name, value in self.kwargs.items()]
        for name, value in arguments:
            for path, leaf in torch.utils._pytree.tree_flatten_with_path(value)[0]:
                named.append((name + torch.utils._pytree.keystr(path), leaf))
        named += [(f"parameter {name}", p) for name, p in self.model.named_parameters()]
        named += [(f"buffer {name}", b) for name, b in self.model.named_buffers()]
        found = []
        for name, t in named:
            if not isinstance(t, Tensor) or is_lazy(t):
                continue
            if t.dtype in UNIT or t.dtype == torch.float64:
                count = int(test(t.detach()).sum())
                if count:
                    found.append(f"{name} ({count} of {t.numel()} elements)")
        return found

    def function(self, model: nn.Module) -> Callable[..., Any]:
        """What to compile: (inputs, kwargs) -> the loss, or the output for inference."""
        find = self.find

        def step(*args: Any, **kwargs: Any) -> Any:
            output = model(*args, **kwargs)
            return output if find is None else find(output)

        return new_code(step)

    def run(
        self,
        model: nn.Module,
        what: str,
        call: Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensors:
        """One step of `model`, through `call` where given. Raises VerifyError where it raises."""
        function = self.function(model) if call is None else call
        args, kwargs = copy_inputs(self.inputs, dtype), copy_inputs(self.kwargs, dtype)

        def called(*given: Any) -> Any:
            return function(*given, **kwargs)

        try:
            if self.find is None:
                return self._infer(model, called, args)
            found = run_step(model, args, lambda scalar: scalar, compiled=called, seed=self.seed)
            del found["output:"]  # the loss again
            return found
        except Exception as error:
            raise VerifyError(f"the {what} step raises {type(error).__name__}: {error}") from error

    def _infer(self, model: nn.Module, call: Callable[..., Any], args: Any) -> Tensors:
        torch.manual_seed(self.seed)
        with torch.no_grad():
            output = call(*args)
        paths, _ = torch.utils._pytree.tree_flatten_with_path(output)
        found = {
            "output:" + torch.utils._pytree.keystr(path): leaf.clone()
            for path, leaf in paths
            if isinstance(leaf, Tensor)
        }
        buffers = {f"buffer:{name}": b.clone() for name, b in model.named_buffers()}
        return {**found, **buffers}
