"""Main loops and what each can hold. Only the records here are asked; nothing else knows."""

from __future__ import annotations

from torch_evt.mainloops.gemm import GEMM
from torch_evt.mainloops.record import MainLoop

MAIN_LOOPS: tuple[MainLoop, ...] = (GEMM,)


def for_target(target: object) -> MainLoop | None:
    """The main loop that anchors an operation; None for an operation that anchors nothing."""
    return next((loop for loop in MAIN_LOOPS if target in loop.anchors), None)


__all__ = ["MAIN_LOOPS", "MainLoop", "for_target"]
