"""The error standard over several seeds together, for tensors whose error is a matter of luck."""

from __future__ import annotations

import math

from torch_evt.testing import L2_FACTOR, MAX_ABS_FACTOR, UNIT, Comparison


def failures(verdict: Comparison) -> dict[str, str]:
    """The tensors that fail with their relative errors of all seeds taken together, by name, and in
    what: the root of the mean square may be as far beside eager's as the standard allows a single
    error to be. What another rule decides has to pass on each seed."""
    unit = UNIT[verdict.dtype]
    found = {t.name: str(t) for t in verdict.tensors if t.rule != "relative" and not t.passed}
    for name in {t.name for t in verdict.tensors} - found.keys():
        tensors = [t for t in verdict.tensors if t.name == name and t.rule == "relative"]
        for kind, factor in (("l2", L2_FACTOR), ("max_abs", MAX_ABS_FACTOR)):
            ours = math.hypot(*(getattr(t.ours, kind) for t in tensors))
            allowed = factor * math.hypot(*(max(getattr(t.eager, kind), unit) for t in tensors))
            if not ours <= allowed:
                found[name] = f"{name}: {kind} {ours / allowed:.2f} of its limit, over all seeds"
    return found
