"""The devices a plan can be priced for: one table, each figure with where it comes from.

A new device is one more entry in `DEVICES`; nothing else in the project names a device. Figures
are the maker's, for dense work; what is reached in practice is a separate factor, `sustained`, so
that a price is `peak * sustained` and a datasheet can be checked against the entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from torch_evt.errors import TargetError

FlopKind = Literal["f64", "f32", "tf32", "bf16", "f16", "f8"]

_FLOP_KIND: Mapping[torch.dtype, FlopKind] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8",
    torch.float8_e5m2: "f8",
}


@dataclass(frozen=True)
class Device:
    """What the price of a kernel depends on.

    name: the target's name, a key of `DEVICES`. product_names: what `torch.cuda.get_device_name`
    says on this device. capability: the CUDA compute capability, None for a CPU.
    memory_bandwidth: bytes/s, read plus written. l2_bytes: the last cache before memory.
    peak_flops: flop/s by number format, dense. sustained: the share of `memory_bandwidth`
    ("memory") and of `peak_flops` ("flops") that good kernels reach. launch_us: what one more
    kernel costs beyond its work, in microseconds. sources: field name -> where its figure comes
    from.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    product_names: tuple[str, ...]
    capability: tuple[int, int] | None
    memory_bandwidth: float
    l2_bytes: int
    launch_us: float
    peak_flops: Mapping[str, float] = field(hash=False)
    sustained: Mapping[str, float] = field(hash=False)
    sources: Mapping[str, str] = field(hash=False, compare=False)

    def bytes_per_us(self) -> float:
        """Bytes read plus written in a microsecond by a good memory-bound kernel."""
        return self.memory_bandwidth * self.sustained["memory"] / 1e6

    def flops_per_us(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Floating-point operations in a microsecond by a good matrix product of `dtype`.

        tf32: whether fp32 products may use TF32. A format without an entry of its own is priced as
        fp32, which is what the device computes it in.
        """
        kind: str = _FLOP_KIND.get(dtype, "f32")
        if kind == "f32" and tf32 and "tf32" in self.peak_flops:
            kind = "tf32"
        peak = self.peak_flops.get(kind, self.peak_flops["f32"])
        return peak * self.sustained["flops"] / 1e6


_H200_DATASHEET = "NVIDIA H200 datasheet (SXM); figures with sparsity halved"
_H200_MEASURED = "measured on one H200, 2026-12-01"

DEVICES: Mapping[str, Device] = {
    "h200": Device(
        name="h200",
        kind="cuda",
        product_names=("NVIDIA H200",),
        capability=(9, 0),
        memory_bandwidth=4.8e12,
        l2_bytes=60 * 2**20,
        launch_us=3.0,
        peak_flops={
            "f64": 67e12,
            "f32": 67e12,
            "tf32": 494.5e12,
            "bf16": 989.5e12,
            "f16": 989.5e12,
            "f8": 1979e12,
        },
        sustained={"memory": 0.89, "flops": 0.70},
        sources={
            "product_names": "torch.cuda.get_device_name on that machine",
            "capability": "CUDA C++ programming guide, compute capabilities",
            "memory_bandwidth": _H200_DATASHEET,
            "l2_bytes": _H200_MEASURED + ": the size that torch reports",
            "launch_us": "assumed: the start and the tail of one kernel inside a busy stream",
            "peak_flops": _H200_DATASHEET,
            "sustained": _H200_MEASURED
            + ": device copy 4.26 of 4.8 TB/s; cuBLAS bf16 products 637 to 755 of 989.5 TFLOP/s",
        },
    ),
    "cpu": Device(
        name="cpu",
        kind="cpu",
        product_names=(),
        capability=None,
        memory_bandwidth=40e9,
        l2_bytes=32 * 2**20,
        launch_us=2.0,
        peak_flops={"f64": 0.5e12, "f32": 1e12, "bf16": 1e12, "f16": 1e12},
        sustained={"memory": 0.8, "flops": 0.7},
        sources={
            name: "assumed: a present-day server CPU with a few cores; not any one machine"
            for name in ("memory_bandwidth", "l2_bytes", "launch_us", "peak_flops", "sustained")
        },
    ),
}


def device(name: str) -> Device:
    """The table's entry of that name. Raises TargetError that names the nearest one."""
    found = DEVICES.get(name)
    if found is not None:
        return found
    nearest = difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.0)[0]
    raise TargetError(
        f"unknown target {name!r}; did you mean {nearest!r}? Known targets: {', '.join(DEVICES)}"
    )


def device_of(where: torch.device) -> Device | None:
    """The table's entry for a device that is present; None for a GPU that the table lacks."""
    if where.type == "cpu":
        return DEVICES["cpu"]
    if where.type != "cuda" or not torch.cuda.is_available():
        return None
    product = torch.cuda.get_device_name(where)
    return next((entry for entry in DEVICES.values() if product in entry.product_names), None)


def default_target() -> str:
    """The name of the present GPU's entry if the table has it, else "h200"."""
    if torch.cuda.is_available():
        present = device_of(torch.device("cuda", torch.cuda.current_device()))
        if present is not None:
            return present.name
    return "h200"


def table_digest() -> str:
    """The table as text, for cache keys: a plan depends on every figure in it."""
    return repr(sorted(DEVICES.items()))
