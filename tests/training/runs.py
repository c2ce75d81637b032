"""One way to train, run three times: compiled, in eager and in fp64, and judged by the standard."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from interpreted import PLACE, interpreted
from torch_evt import pipeline
from torch_evt.partition.plan import GraphPlan, RegionPlan
from torch_evt.runtime import counters
from torch_evt.testing import Fp64Arithmetic, compare, fp64_copy
from torch_evt.torch_compat import caches_disabled

Wrap = Callable[[Any], Any]
"""What a step puts around the callable that is to be compiled; in eager it changes nothing."""

Step = Callable[[Any, tuple[Tensor, ...], Wrap], Mapping[str, Tensor]]
"""(model, inputs, wrap) -> what the step leaves, each tensor named "kind:rest"."""

EAGER_NUMBERS: Mapping[str, Any] = {**PLACE, "evt.rng": "eager"}
"""As PLACE, but dropout draws what eager draws."""

BACKENDS = pytest.mark.parametrize("backend", [interpreted, "evt"], ids=["interpreted", "inductor"])
"""Without Inductor's code generation, and with it."""


class Block(nn.Module):
    """A residual block with a norm in front: something to fuse in both halves."""

    def __init__(self, width: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.p = p
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")
        return x + nn.functional.dropout(self.down(hidden), self.p, self.training)


class Layers(nn.Module):
    """Two products with an activation behind each: two regions forward, one backward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, 24)
        self.second = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(nn.functional.gelu(self.first(x))))


def weighted(result: Tensor) -> Tensor:
    """A scalar in which every element counts differently and nothing cancels."""
    steps = torch.arange(result.numel(), device=result.device)
    weights = 1 + torch.cos(steps).view(result.shape) / 2
    wide = result.float() if result.dtype in (torch.float16, torch.bfloat16) else result
    return (wide.square() * weights).sum()


@dataclass(frozen=True)
class Outcome:
    """What the compiled runs planned and ran. steps: how many runs there were."""

    plans: tuple[GraphPlan, ...]
    runs: Counter[str]
    steps: int
    tensors: Mapping[str, Tensor]
    """What the last compiled run left."""

    @property
    def regions(self) -> list[RegionPlan]:
        return [region for plan in self.plans if plan.placed for region in plan.regions]

    @property
    def trees(self) -> str:
        return "; ".join(region.tree for region in self.regions)

    @property
    def halves(self) -> tuple[int, int]:
        """Placed regions of one run: forward and inference, backward."""
        backward = sum(region.half == "backward" for region in self.regions)
        forward = len(self.regions) - backward
        assert forward % self.steps == backward % self.steps == 0
        return forward // self.steps, backward // self.steps

    def ran(self, forward: int = 1, backward: int = 1) -> bool:
        """Whether each forward region ran that often in a run, and each backward region, and
        nothing else did."""
        planned: Counter[str] = Counter()
        for region in self.regions:
            planned[region.tree] += backward if region.half == "backward" else forward
        return planned == self.runs


@contextlib.contextmanager
def watched() -> Iterator[list[GraphPlan]]:
    """A fresh start: nothing compiled, nothing counted; the plans that the block makes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counters.reset()
    plans: list[GraphPlan] = []
    with caches_disabled(), pipeline.observed(plans.append):
        yield plans


def check(
    make: Callable[[], nn.Module],
    shapes: Sequence[tuple[int, ...]],
    step: Step,
    *,
    dtype: torch.dtype = torch.float32,
    computed_in: torch.dtype | None = None,
    backend: Any = interpreted,
    options: Mapping[str, Any] = PLACE,
    seeds: Sequence[int] = (0, 1),
    **compile_arguments: Any,
) -> Outcome:
    """Hold a step against the error standard, once for each seed.

    make: the model, whose parameters are drawn. shapes: of the random inputs, which require a
    gradient. dtype: of model and inputs. computed_in: sets u, where autocast computes in another.
    """
    with watched() as plans:
        for seed in seeds:
            torch.manual_seed(seed)
            model = make().to(dtype)
            inputs = tuple(torch.randn(shape).to(dtype) for shape in shapes)
            ours, eager = (copy.deepcopy(model) for _ in range(2))

            def compiled(target: Any) -> Any:
                return torch.compile(
                    target, backend=backend, options=dict(options) or None, **compile_arguments
                )

            torch._dynamo.reset()
            tensors = _run(step, ours, inputs, compiled, seed)
            theirs = _run(step, eager, inputs, lambda target: target, seed)
            with Fp64Arithmetic():
                double = tuple(x.double() for x in inputs)
                exact = _run(step, fp64_copy(model), double, lambda target: target, seed)
            compare(tensors, theirs, exact, computed_in or dtype, seed=seed).raise_if_failed()
    return Outcome(tuple(plans), Counter(counters.region_runs), len(seeds), tensors)


def _run(
    step: Step, model: nn.Module, inputs: tuple[Tensor, ...], wrap: Wrap, seed: int
) -> dict[str, Tensor]:
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    torch.manual_seed(seed)
    left = dict(step(model, leaves, wrap))
    return {name: tensor.detach().clone() for name, tensor in left.items()}


def left_by(
    model: nn.Module, inputs: Sequence[Tensor], outputs: Any = (), loss: Tensor | None = None
) -> dict[str, Tensor]:
    """Everything that a step leaves: loss, outputs, gradients and buffers."""
    found: dict[str, Tensor] = {} if loss is None else {"loss:": loss}
    for path, leaf in tree_flatten_with_path(outputs)[0]:
        found["output:" + keystr(path)] = leaf
    for i, x in enumerate(inputs):
        if x.grad is not None:
            found[f"grad:input{i}"] = x.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found["grad:" + name] = parameter.grad
    found.update({"buffer:" + name: buffer for name, buffer in model.named_buffers()})
    return found


def one_step(model: Any, inputs: tuple[Tensor, ...], wrap: Wrap) -> dict[str, Tensor]:
    """The plain way: the compiled model, a loss outside, backward."""
    output = wrap(model)(*inputs)
    loss = weighted(output)
    loss.backward()
    return left_by(model, inputs, output, loss)
