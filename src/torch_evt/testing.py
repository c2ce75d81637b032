"""The error standard: when is a compiled training step right?

Every tensor of a step (loss, outputs, gradients, buffers) is compared with an fp64 eager run that
drew the same random numbers, and is allowed the error that plain eager makes, with some room:

    e = ||t - t64|| / ||t64||        e_ours <= 1.5 max(e_eager, u)        (L2)
                                     e_ours <= 3   max(e_eager, u)        (largest absolute value)

Each tensor is held against its own e_eager, so an error that is small beside the largest gradient
still fails. `check_model` does all of it for one model; `compare` judges tensors that you have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_map_only

from torch_evt.comparison import (
    L2_FACTOR,
    MAX_ABS_FACTOR,
    UNIT,
    VANISHING,
    VANISHING_FACTOR,
    Comparison,
    TensorComparison,
    TensorError,
    compare,
    tensor_error,
)

__all__ = [
    "EAGER_RANDOMNESS",
    "L2_FACTOR",
    "MAX_ABS_FACTOR",
    "UNIT",
    "VANISHING",
    "VANISHING_FACTOR",
    "Comparison",
    "Fp64Arithmetic",
    "TensorComparison",
    "TensorError",
    "check_model",
    "compare",
    "copy_inputs",
    "fp64_copy",
    "run_step",
    "tensor_error",
]

EAGER_RANDOMNESS: Mapping[str, Mapping[str, Any]] = {
    "evt": {"evt.rng": "eager"},
    "inductor": {"fallback_random": True},
}
"""For each backend, the options with which dropout draws the numbers that eager draws."""

Inputs = Sequence[Any] | Mapping[str, Any]
Loss = Callable[[Any], Tensor]
Make = Callable[[int], tuple[torch.nn.Module, Inputs, Loss | None]]


def run_step(
    model: torch.nn.Module,
    inputs: Inputs,
    loss: Loss | None,
    *,
    compiled: Callable[..., Any] | None = None,
    seed: int,
) -> dict[str, Tensor]:
    """One forward and backward; every tensor that training could see of it.

    model: holds the parameters; their gradients are reset before and stay set after. inputs: the
    positional (a sequence) or keyword (a mapping) arguments. loss: output -> scalar; None where the
    output, its `.loss` or its `["loss"]` is the scalar. compiled: what to call instead of model.
    seed: set on every device just before the call. Returns detached copies: "loss:",
    "output:<path>", "grad:<parameter>", "grad:input<path>" for inputs that require it, and
    "buffer:<name>"; a gradient that is None is left out. Raises ValueError for a loss that is no
    scalar.
    """
    leaves = {
        "input" + keystr(path): leaf
        for path, leaf in tree_flatten_with_path(inputs)[0]
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    leaves.update(model.named_parameters())
    for leaf in leaves.values():
        leaf.grad = None
    call = model if compiled is None else compiled
    torch.manual_seed(seed)
    output = call(**inputs) if isinstance(inputs, Mapping) else call(*inputs)
    scalar = scalar_of(output) if loss is None else loss(output)
    if scalar.numel() != 1:
        raise ValueError(f"the loss must be a scalar, not of shape {tuple(scalar.shape)}")
    torch.autograd.backward(scalar)

    step = {"loss:": scalar}
    for path, leaf in tree_flatten_with_path(output)[0]:
        if isinstance(leaf, Tensor):
            step["output:" + keystr(path)] = leaf
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            step["grad:" + name] = leaf.grad
    for name, buffer in model.named_buffers():
        step["buffer:" + name] = buffer
    return {name: tensor.detach().clone() for name, tensor in step.items()}


def fp64_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with its floating parameters and buffers in fp64, without gradients.

    Run it under `Fp64Arithmetic`, or casts in the model's own code round to fp32 or less.
    """
    return copy.deepcopy(model).to(torch.float64)  # a deep copy leaves gradients behind


class Fp64Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, a cast to any floating dtype is one to fp64, and so is a tensor made in one."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def lengthen(dtype: torch.dtype) -> torch.dtype:
            return torch.float64 if dtype.is_floating_point else dtype

        args, kwargs = tree_map_only(torch.dtype, lengthen, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def check_model(
    make: Make,
    *,
    dtype: torch.dtype,
    seeds: Sequence[int] = (0, 1, 2),
    backend: str = "evt",
    options: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare compiled training steps with eager's by the error standard; raises nothing itself.

    make: seed -> (model, inputs, loss), already in the dtype to test; only parameters, buffers,
    inputs and loss may depend on the seed, for the model is compiled once. dtype: sets u. backend,
    options: as for torch.compile; what makes dropout draw eager's numbers is added to the options.
    On a CPU those are the same numbers in fp64, so dropout is compared too; elsewhere eager's
    depend on the dtype, so turn dropout off there.
    """
    merged = {**EAGER_RANDOMNESS.get(backend, {}), **(options or {})}
    target, _, _ = make(seeds[0])
    compiled = torch.compile(target, backend=backend, options=merged or None)
    verdicts: list[TensorComparison] = []
    for seed in seeds:
        model, inputs, loss = make(seed)
        double = fp64_copy(model)
        _copy_state(model, target)
        # the eager run goes last: it may change the buffers that the others started from
        with Fp64Arithmetic():  # type: ignore[no-untyped-call]
            exact = run_step(double, copy_inputs(inputs, torch.float64), loss, seed=seed)
        ours = run_step(target, copy_inputs(inputs), loss, compiled=compiled, seed=seed)
        eager = run_step(model, copy_inputs(inputs), loss, seed=seed)
        verdicts += compare(ours, eager, exact, dtype, seed=seed).tensors
    return Comparison(dtype, tuple(verdicts))


def scalar_of(output: Any) -> Tensor:
    """The loss in a model's output: itself if it is a tensor, else its `["loss"]` or `.loss`.

    Raises ValueError where there is none.
    """
    if isinstance(output, Mapping):
        output = output["loss"]
    scalar = getattr(output, "loss", output)
    if not isinstance(scalar, Tensor):
        raise ValueError("without a loss function the output must be, or hold, a scalar `loss`")
    return scalar


def copy_inputs(inputs: Inputs, dtype: torch.dtype | None = None) -> Any:
    """Copies of a step's inputs, of any structure: fresh leaves, so that runs share no gradient and
    no mutation; floating ones in dtype."""

    def fresh(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        t = leaf.detach().clone()
        if dtype is not None and t.is_floating_point():
            t = t.to(dtype)
        return t.requires_grad_(leaf.requires_grad)

    return tree_map(fresh, inputs)


@torch.no_grad()
def _copy_state(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy parameters and buffers, also those that a state dict leaves out."""
    pairs = zip(
        (*source.named_parameters(), *source.named_buffers()),
        (*target.named_parameters(), *target.named_buffers()),
        strict=True,
    )
    for (name, ours), (other_name, theirs) in pairs:
        if name != other_name:
            raise ValueError(f"make gave different models: {name} and {other_name}")
        theirs.copy_(ours)
