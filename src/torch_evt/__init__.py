"""torch_evt: a training compiler for PyTorch, `torch.compile(model, backend="evt")`.

    errors                      every error, every reason for not fusing
    options devices graphs      what was asked for; what is priced; helpers on FX graphs
    tree                        epilogue trees: language, text, meaning
    mainloops emit runtime      what main loops hold; kernels; operators that carry regions
    joint partition             rewrites of the joint graph; choosing and placing regions
    passes decisions            running passes; what was decided: logs, observers, kept plans
    summary                     a graph's plan from what its passes left
    pipeline backend            the order of it all; how torch.compile reaches it
    testing workloads report    the error standard; models; explain, verify, bench, demo

Importing the package registers the backend; everything else is imported when it is used.
"""

from __future__ import annotations

from typing import Any

from torch_evt.torch_compat import register_entry_point
from torch_evt.version import __version__

register_entry_point("evt", "torch_evt.backend:evt")

__all__ = ["__version__", "check_options", "evt", "explain", "verify"]


def __getattr__(name: str) -> Any:
    if name in ("evt", "check_options"):
        from torch_evt import backend

        return getattr(backend, name)
    if name == "explain":
        from torch_evt.report.explain import explain

        return explain
    if name == "verify":
        from torch_evt.report.verify import verify

        return verify
    raise AttributeError(f"module 'torch_evt' has no attribute {name!r}")
