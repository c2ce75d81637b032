"""What `bench` measures: a model with its loss, and the ways to run it.

A subject is spelled as on the command line, so that a fresh process can make the same one. Every
mode runs the same step, loss included: a backend that sees the loss can do more.
"""

from __future__ import annotations

import difflib
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_evt import workloads
from torch_evt.errors import BenchError, OptionError
from torch_evt.options import PREFIX
from torch_evt.testing import scalar_of

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DEVICES = ("cpu", "cuda")
MODES = ("eager", "inductor", "max-autotune", "evt")

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Mode:
    """A way to run a step: `torch.compile(step, backend=backend, options=options)`.

    backend None is eager: the step as it is.
    """

    name: str
    backend: str | Callable[..., Any] | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def compiled(self, step: nn.Module) -> Call:
        """The step in this mode; nothing is compiled before the first call."""
        if self.backend is None:
            return step
        return torch.compile(
            _own_function(step), backend=self.backend, options=dict(self.options) or None
        )


def mode(name: str, options: Mapping[str, Any]) -> Mode:
    """The mode of that name; `options` are evt's, and Inductor's for every mode that is compiled.
    Raises OptionError for an unknown name.

    max-autotune is Inductor's mode of that name without its CUDA graphs, which `bench` captures
    itself, for all modes alike.
    """
    if name not in MODES:
        nearest = difflib.get_close_matches(name, MODES, n=1, cutoff=0.0)[0]
        raise OptionError(
            f"unknown mode {name!r}; did you mean {nearest!r}? Known: {', '.join(MODES)}"
        )
    inductors = {key: value for key, value in options.items() if not key.startswith(PREFIX)}
    if name == "max-autotune":
        from torch._inductor import list_mode_options

        tuned = list_mode_options("max-autotune-no-cudagraphs")
        return Mode(name, "inductor", {**tuned, **inductors})
    if name == "inductor":
        return Mode(name, "inductor", inductors)
    return Mode(name, "evt", dict(options)) if name == "evt" else Mode(name, None, {})


class Step(nn.Module):
    """A model and its loss as one module: inputs -> the scalar loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *inputs: Any) -> Tensor:
        output = self.model(*inputs)
        return scalar_of(output) if self.loss is None else self.loss(output)


@dataclass(frozen=True)
class Subject:
    """A workload at one size, or "module:function".

    size, dtype ("fp32"), device ("cpu"): of a workload; None for a function, whose model decides.
    """

    what: str
    size: str | None
    dtype: str | None
    device: str | None
    seed: int = 0

    def make(self) -> workloads.Made:
        """(model, inputs, loss); the seed is set before, so that random weights are the same."""
        torch.manual_seed(self.seed)
        if self.size is None or self.dtype is None or self.device is None:
            return workloads.load(self.what)
        workload = workloads.get(self.what, self.size)
        return workload.make(self.seed, DTYPES[self.dtype], self.device)


def subject(
    what: str, size: str | None, dtype: str | None, device: str | None, seed: int
) -> Subject:
    """The subject of a command, checked as far as that goes without making it.

    None is the default: tiny, fp32, the GPU where there is one. Raises OptionError or BenchError.
    """
    if ":" in what:
        for name, value in (("size", size), ("dtype", dtype), ("device", device)):
            if value is not None:
                raise OptionError(
                    f"{name} is for workloads only; {what} makes its own model, so choose the "
                    f"{name} there"
                )
        return Subject(what, None, None, None, seed)
    size, dtype = size or "tiny", dtype or "fp32"
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    workloads.get(what, size)
    for kind, value, known in (("dtype", dtype, tuple(DTYPES)), ("device", device, DEVICES)):
        if value not in known:
            raise OptionError(f"unknown {kind} {value!r}; one of {', '.join(known)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchError("this machine has no CUDA GPU; leave device out to measure on the CPU")
    return Subject(what, size, dtype, device, seed)


def device_of(step: nn.Module, inputs: tuple[Any, ...]) -> torch.device:
    """Where a step runs: the first tensor's device. Raises BenchError for neither CPU nor CUDA."""
    tensors = _tensors(step, inputs)
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type not in DEVICES:
        raise BenchError(f"bench measures on {' and '.join(DEVICES)}; the model is on {device}")
    return device


def dtype_of(step: nn.Module, inputs: tuple[Any, ...]) -> torch.dtype:
    """What a step computes in: the floating dtype of most parameters, counted by element, or of
    most inputs where there are no parameters."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in list(step.parameters()) or _tensors(step, inputs):
        if tensor.is_floating_point():
            elements[tensor.dtype] += tensor.numel()
    return elements.most_common(1)[0][0] if elements else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As the command line spells it; others as torch does, without its name in front."""
    known = {value: name for name, value in DTYPES.items()}
    return known.get(dtype, str(dtype).removeprefix("torch."))


def _tensors(step: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    leaves = [*step.parameters(), *step.buffers(), *tree_leaves(inputs)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _own_function(step: nn.Module) -> Call:
    """A function that calls the step. Dynamo keeps what it compiled with the code object, so each
    mode gets one of its own."""

    def call(*inputs: Any) -> Any:
        return step(*inputs)

    code = call.__code__.replace(co_name=call.__name__)
    return types.FunctionType(code, call.__globals__, "call", None, call.__closure__)
