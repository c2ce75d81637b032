"""Timing several modes in one process, interleaved, so that a drift of the machine meets them all.

Every round takes one sample of every run, beginning with another one each round. A sample is some
calls in a row, at least `SAMPLE_S` of the quickest run and as many of every other: on a machine
that is not idle a short sample is either undisturbed or badly disturbed, and its median cannot be
compared with that of a long one. On a GPU all runs are CUDA graphs captured in the same way, or
none is.
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
TRIALS = 5
"""Calls of each run that decide how many make a sample: one alone may be disturbed."""
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
    runs: Mapping[str, Run],
    rounds: int,
    device: torch.device,
    begun: Callable[[int], None] = lambda _: None,
) -> dict[str, Samples | Exception]:
    """Samples of every run, by its name. A run that raises gets its exception and no more turns.

    begun: called with the number of each round, from 1, before its samples.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, Exception] = {}
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # so that what a round leaves behind is found in no time
    gc.disable()
    try:
        quickest = math.inf
        for name, run in runs.items():
            try:
                quickest = min(quickest, *(seconds(run, 1, device) for _ in range(TRIALS)))
            except Exception as error:
                failed[name] = error
        calls = max(1, math.ceil(SAMPLE_S / max(quickest, 1e-7)))
        for number in range(rounds):
            begun(number + 1)
            gc.collect()
            for name in _rotated(tuple(runs), number):
                if name in failed:
                    continue
                try:
                    found[name].append(1e3 * seconds(runs[name], calls, device) / calls)
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
