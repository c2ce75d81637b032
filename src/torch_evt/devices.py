"""The devices a plan can be priced for: one table, each figure with where it comes from.

A new device is one more entry in `DEVICES`; nothing else in the project names a device. Figures
are the maker's, for dense work; what is reached in practice is a separate factor, `sustained`, so
that a price is `peak * sustained` and a datasheet can be checked against the entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
    multiprocessors: of a GPU; 0 for a CPU.
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
    multiprocessors: int
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


_CAPABILITIES = "CUDA C++ programming guide, compute capabilities"
_LAUNCH = "assumed: the start and the tail of one kernel inside a busy stream"
_REPORTED = "published outputs of torch.cuda.get_device_properties"
_HALVED = "; figures with sparsity halved"

_H200_DATASHEET = "NVIDIA H200 datasheet (SXM)" + _HALVED
_H200_MEASURED = "measured on one H200, 2026-12-01"

_H100_DATASHEET = (
    "NVIDIA H100 datasheet, resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
)
_H100_PCIE_DATASHEET = "NVIDIA H100 datasheet, edition of 2023 with the PCIe card"
_HOPPER_WHITEPAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper"
_A100_DATASHEET = (
    "NVIDIA A100 datasheet 1758950, www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/"
    "pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_AMPERE_WHITEPAPER = (
    "NVIDIA A100 Tensor Core GPU Architecture whitepaper, images.nvidia.com/aem-dam/en-zz/"
    "Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
)
_AMPERE_GUIDE = "NVIDIA Ampere tuning guide, docs.nvidia.com/cuda/ampere-tuning-guide"
_L40S_DATASHEET = "NVIDIA L40S datasheet"
_ADA_WHITEPAPER = "NVIDIA Ada GPU Architecture whitepaper V2.01, appendix A"
_ADA_GUIDE = "NVIDIA Ada tuning guide, docs.nvidia.com/cuda/ada-tuning-guide"
_BLACKWELL_DATASHEET = "NVIDIA Blackwell datasheet, HGX B200, one GPU"
_BLACKWELL_GUIDE = (
    "NVIDIA Blackwell tuning guide, as quoted elsewhere, "
    + "docs.nvidia.com/cuda/blackwell-tuning-guide"
)


def _like_h200(name: str, **figures: Any) -> Device:
    """A GPU that was not measured: what an H200 sustains and what a launch costs there is assumed.

    figures: the other fields; sources: for those whose source is not the same everywhere.
    """
    sources = {
        "product_names": _REPORTED,
        "capability": _CAPABILITIES,
        "launch_us": _LAUNCH + ", as on an H200",
        "sustained": "assumed: what was measured on an H200",
        **figures.pop("sources"),
    }
    return Device(
        name=name,
        kind="cuda",
        launch_us=3.0,
        sustained={"memory": 0.89, "flops": 0.70},
        sources=sources,
        **figures,
    )


_HOPPER_SXM_FLOPS = {
    "f64": 67e12,
    "f32": 67e12,
    "tf32": 494.5e12,
    "bf16": 989.5e12,
    "f16": 989.5e12,
    "f8": 1979e12,
}
_A100_FLOPS = {"f64": 19.5e12, "f32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "f16": 312e12}
_A100_SOURCES = {
    "multiprocessors": _AMPERE_WHITEPAPER,
    "l2_bytes": _AMPERE_GUIDE + ", 1.4.2.2: 40 MB",
    "peak_flops": _A100_DATASHEET + ": without sparsity",
}

DEVICES: Mapping[str, Device] = {
    "h200": Device(
        name="h200",
        kind="cuda",
        product_names=("NVIDIA H200",),
        capability=(9, 0),
        multiprocessors=132,
        memory_bandwidth=4.8e12,
        l2_bytes=60 * 2**20,
        launch_us=3.0,
        peak_flops=_HOPPER_SXM_FLOPS,
        sustained={"memory": 0.89, "flops": 0.70},
        sources={
            "product_names": "torch.cuda.get_device_name on that machine",
            "capability": _CAPABILITIES,
            "multiprocessors": _REPORTED,
            "memory_bandwidth": _H200_DATASHEET,
            "l2_bytes": _H200_MEASURED + ": the size that torch reports",
            "launch_us": _LAUNCH,
            "peak_flops": _H200_DATASHEET,
            "sustained": _H200_MEASURED
            + ": device copy 4.26 of 4.8 TB/s; cuBLAS bf16 products 637 to 755 of 989.5 TFLOP/s",
        },
    ),
    "h100": _like_h200(
        "h100",
        product_names=("NVIDIA H100 80GB HBM3",),
        capability=(9, 0),
        multiprocessors=132,
        memory_bandwidth=3.35e12,
        l2_bytes=50 * 2**20,
        peak_flops=_HOPPER_SXM_FLOPS,
        sources={
            "multiprocessors": _HOPPER_WHITEPAPER + ": SXM5",
            "memory_bandwidth": _H100_DATASHEET + ": SXM",
            "l2_bytes": _HOPPER_WHITEPAPER + ": 50 MB",
            "peak_flops": _H100_DATASHEET + ": SXM" + _HALVED,
        },
    ),
    "h100-pcie": _like_h200(
        "h100-pcie",
        product_names=("NVIDIA H100 PCIe",),
        capability=(9, 0),
        multiprocessors=114,
        memory_bandwidth=2.0e12,
        l2_bytes=50 * 2**20,
        peak_flops={
            "f64": 51e12,
            "f32": 51e12,
            "tf32": 378e12,
            "bf16": 756.5e12,
            "f16": 756.5e12,
            "f8": 1513e12,
        },
        sources={
            "multiprocessors": _HOPPER_WHITEPAPER + ": PCIe",
            "memory_bandwidth": _H100_PCIE_DATASHEET,
            "l2_bytes": _HOPPER_WHITEPAPER + ": 50 MB",
            "peak_flops": _H100_PCIE_DATASHEET + _HALVED,
        },
    ),
    "a100": _like_h200(
        "a100",
        product_names=("NVIDIA A100-SXM4-80GB",),
        capability=(8, 0),
        multiprocessors=108,
        memory_bandwidth=2.039e12,
        l2_bytes=40 * 2**20,
        peak_flops=_A100_FLOPS,
        sources={**_A100_SOURCES, "memory_bandwidth": _A100_DATASHEET + ": 80 GB SXM"},
    ),
    "a100-pcie": _like_h200(
        "a100-pcie",
        product_names=("NVIDIA A100 80GB PCIe",),
        capability=(8, 0),
        multiprocessors=108,
        memory_bandwidth=1.935e12,
        l2_bytes=40 * 2**20,
        peak_flops=_A100_FLOPS,
        sources={**_A100_SOURCES, "memory_bandwidth": _A100_DATASHEET + ": 80 GB PCIe"},
    ),
    "a100-40gb": _like_h200(
        "a100-40gb",
        product_names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        capability=(8, 0),
        multiprocessors=108,
        memory_bandwidth=1.555e12,
        l2_bytes=40 * 2**20,
        peak_flops=_A100_FLOPS,
        sources={**_A100_SOURCES, "memory_bandwidth": _AMPERE_WHITEPAPER + ": 40 GB, both forms"},
    ),
    "l40s": _like_h200(
        "l40s",
        product_names=("NVIDIA L40S",),
        capability=(8, 9),
        multiprocessors=142,
        memory_bandwidth=0.864e12,
        l2_bytes=96 * 2**20,
        peak_flops={
            "f64": 91.6e12 / 64,
            "f32": 91.6e12,
            "tf32": 183e12,
            "bf16": 362.05e12,
            "f16": 362.05e12,
            "f8": 733e12,
        },
        sources={
            "multiprocessors": _L40S_DATASHEET + ": 18,176 cores, 128 in each; and " + _REPORTED,
            "memory_bandwidth": _L40S_DATASHEET,
            "l2_bytes": _ADA_GUIDE + ", 1.4.2.1: 98304 KB in AD102",
            "peak_flops": _L40S_DATASHEET
            + ": without sparsity; f64: a 64th of f32, "
            + _ADA_WHITEPAPER,
        },
    ),
    "rtx4090": _like_h200(
        "rtx4090",
        product_names=("NVIDIA GeForce RTX 4090",),
        capability=(8, 9),
        multiprocessors=128,
        memory_bandwidth=1.008e12,
        l2_bytes=72 * 2**20,
        peak_flops={
            "f64": 82.6e12 / 64,
            "f32": 82.6e12,
            "tf32": 82.6e12,
            "bf16": 165.2e12,
            "f16": 165.2e12,
            "f8": 330.3e12,
        },
        sources={
            "multiprocessors": _ADA_WHITEPAPER,
            "memory_bandwidth": _ADA_WHITEPAPER,
            "l2_bytes": _ADA_WHITEPAPER + ": 73728 KB",
            "peak_flops": _ADA_WHITEPAPER
            + ": without sparsity, accumulated in fp32, which halves f16 on this card; "
            "f64: a 64th of f32; tf32 and f8: assumed, half and twice of f16",
        },
    ),
    "b200": _like_h200(
        "b200",
        product_names=("NVIDIA B200",),
        capability=(10, 0),
        multiprocessors=148,
        memory_bandwidth=7.7e12,
        l2_bytes=126 * 2**20,
        peak_flops={
            "f64": 37e12,
            "f32": 75e12,
            "tf32": 1100e12,
            "bf16": 2250e12,
            "f16": 2250e12,
            "f8": 4500e12,
        },
        sources={
            "multiprocessors": _REPORTED,
            "memory_bandwidth": _BLACKWELL_DATASHEET + ": 180 GB at 7.7 TB/s",
            "l2_bytes": _BLACKWELL_GUIDE + ", 1.4.2.2: 126 MB",
            "peak_flops": _BLACKWELL_DATASHEET + _HALVED,
        },
    ),
    "cpu": Device(
        name="cpu",
        kind="cpu",
        product_names=(),
        capability=None,
        multiprocessors=0,
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
