"""bench without Inductor and without processes: every mode compiles in well under a second."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreted import interpreted
from torch_evt.report import bench, bench_process, bench_subject, bench_timing
from torch_evt.report.bench_subject import Mode

QUICK: Mapping[str, Any] = {
    "eager": None,
    "inductor": "aot_eager",
    "max-autotune": "aot_eager",
    "evt": interpreted,
}
"""Backends in place of the real ones."""


@dataclasses.dataclass
class Quick:
    """What the tests may change: the backend of a mode, and which processes were asked for."""

    backends: dict[str, Any]
    asked: list[tuple[str, tuple[str, ...]]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Quick]:
    state = Quick(dict(QUICK), [])
    real = bench_subject.mode

    def mode(name: str, options: Mapping[str, Any]) -> Mode:
        found = real(name, options)
        ours = found.options if name == "evt" else {}
        return Mode(name, state.backends[name], ours)

    def in_process(request: bench_process.Request, folder: str) -> bench_process.Answer:
        state.asked.append((request.mode, request.measures))
        return bench_process.measure(request)

    monkeypatch.setattr(bench_subject, "mode", mode)
    monkeypatch.setattr(bench, "in_fresh_process", in_process)
    monkeypatch.setattr(bench_process, "compile_something", lambda device: None)
    monkeypatch.setattr(bench_timing, "SAMPLE_S", 1e-4)
    torch._dynamo.reset()
    yield state
    torch._dynamo.reset()


def refusing(module: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
    """A backend that cannot compile anything."""
    raise RuntimeError("no compiler today\nand a second line")


def wrong_gradient(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A backend whose backward hands out one gradient changed: the largest."""

    def backend(module: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        def backward(graph: Any, _: Any) -> Callable[..., Any]:
            def run(arguments: list[Any]) -> Any:
                results = list(graph(*arguments))
                arguments.clear()
                sizes = [t.numel() if isinstance(t, Tensor) else 0 for t in results]
                largest = sizes.index(max(sizes))
                results[largest] = change(results[largest])
                return results

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        from functorch.compile import nop

        return aot_autograd(fw_compiler=nop, bw_compiler=backward)(module, inputs)

    return backend
