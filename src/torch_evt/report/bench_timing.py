"""Timing several modes in one process, interleaved, so that a drift of the machine meets them all.

Every round takes one sample of every run, beginning with another one each round; a sample is a few
calls in a row, at least `SAMPLE_S` long. On a GPU all runs are CUDA graphs captured in the same
way, or none is.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_evt.report.bench_subject import Call

SAMPLE_S = 0.02
WARM_UPS = 3
"""Calls before anything is timed or captured: the first compiles."""

Run = Callable[[], Any]


@dataclass(frozen=True)
class Samples:
    """Milliseconds of one call, one entry a round."""

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """The distance of the quartiles; 0 for a single sample."""
        if len(self.ms) == 1:
            return 0.0
        low, _, high = statistics.quantiles(self.ms, n=4, method="inclusive")
        return high - low


def forward_backward(step: nn.Module, inputs: tuple[Any, ...], call: Call) -> Run:
    """One forward and backward of `call`, which runs `step`, into gradients that start as None."""
    leaves = [
        leaf
        for leaf in (*step.parameters(), *tree_leaves(inputs))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(call(*inputs))

    return run


def fused_adamw(step: nn.Module, capturable: bool) -> torch.optim.Optimizer:
    """Fused AdamW over what is trained. Its rate is 0: the same work, and weights that stay."""
    trained = [p for p in step.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=0.0, fused=True, capturable=capturable)


def with_optimizer(run: Run, optimizer: torch.optim.Optimizer) -> Run:
    """A forward and backward, and one step of the optimizer."""

    def whole() -> None:
        run()
        optimizer.step()

    return whole


def warmed_up(run: Run) -> None:
    """Call a run until it has compiled and settled."""
    for _ in range(WARM_UPS):
        run()


def captured(run: Run, pool: Any) -> Run:
    """The run as one CUDA graph, its memory from `pool`, which graphs that never overlap share."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warmed_up(run)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay


def seconds(run: Run, calls: int, device: torch.device) -> float:
    """What `calls` calls in a row take, until the device is done."""
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - begin


def interleaved(
    runs: Mapping[str, Run], rounds: int, device: torch.device
) -> dict[str, Samples | Exception]:
    """Samples of every run, by its name. A run that raises gets its exception and no more turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, Exception] = {}
    calls: dict[str, int] = {}
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # so that what a round leaves behind is found in no time
    gc.disable()
    try:
        for number in range(-1, rounds):  # round -1 finds out how many calls make a sample
            gc.collect()
            for name in _rotated(tuple(runs), number):
                if name in failed:
                    continue
                try:
                    if number < 0:
                        once = seconds(runs[name], 1, device)
                        calls[name] = max(1, math.ceil(SAMPLE_S / max(once, 1e-7)))
                    else:
                        took = seconds(runs[name], calls[name], device)
                        found[name].append(1e3 * took / calls[name])
                except Exception as error:
                    failed[name] = error
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
    return {name: failed.get(name) or Samples(tuple(found[name])) for name in runs}


def _rotated(names: Sequence[str], by: int) -> list[str]:
    first = by % len(names) if names else 0
    return [*names[first:], *names[:first]]
