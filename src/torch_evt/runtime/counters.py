"""What ran: how often each region was executed, on real tensors, in this process."""

from __future__ import annotations

from collections import Counter

region_runs: Counter[str] = Counter()
"""Executions of each region on real tensors, by the text of its tree; tracing counts nothing."""


def reset() -> None:
    """Forget all counts."""
    region_runs.clear()
