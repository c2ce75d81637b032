"""What all tests share: the gpu marker, and plans made of random numbers."""

import random
from collections.abc import Callable

import pytest
import torch

from torch_evt.partition.plan import (
    Alternative,
    GraphPlan,
    Plan,
    RegionPlan,
    Saved,
    Unfused,
)

GELU = (
    "gemm(A: bf16 k 16, B: bf16 k 16) -> v0 = acc0 + row(0: bf16); store(0: bf16 n 16, v0); "
    "store(1: bf16 n 16, gelu_tanh(v0))"
)
GRAD = (
    "gemm(A: bf16 k 16, B: bf16 n 16) -> v0 = acc0 * gelu_tanh_grad(tile(0: bf16 n 16)); "
    "store(0: bf16 n 16, v0); reduce(1: bf16, sum, rows, v0)"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def random_plan() -> Callable[..., Plan]:
    """(seed, layers=3) -> a training plan with that many equal layers."""
    return make_plan


def make_plan(seed: int, layers: int = 3) -> Plan:
    """A training plan: in each layer a region forward and one backward, and two unfused nodes."""
    source = random.Random(seed)
    regions, unfused = [], []
    for layer in range(layers):
        for half, tree, fuses in (
            ("forward", GELU, ("bias", "gelu_tanh", "2 stores")),
            ("backward", GRAD, ("gelu_tanh_grad", "bias gradient")),
        ):
            regions.append(
                RegionPlan(
                    name=f"{half}_{layer}",
                    half=half,  # type: ignore[arg-type]
                    anchor=f"{half}_mm_{layer}",
                    mainloop="gemm",
                    tree=tree,
                    shape=("1", "256", "512", "128"),
                    nodes=(f"{half}_mm_{layer}", f"{half}_add_{layer}"),
                    stored=(f"{half}_add_{layer}",),
                    modelled_us=source.uniform(1, 9),
                    replaced_us=source.uniform(10, 20),
                    alternatives=(Alternative("gemm() -> ", source.uniform(10, 20)),),
                    fuses=fuses,
                )
            )
        unfused.append(
            Unfused(f"mm_{layer}", "forward", "a plain product is cuBLAS's", "plain-product")
        )
        unfused.append(
            Unfused(f"bmm_{layer}", "backward", "priced slower", "price", 7.5 + layer, 6.25)
        )
    saved = tuple(Saved(f"t{i}", source.randrange(1, 10**6)) for i in range(layers))
    graph = GraphPlan(
        id="0",
        solver="greedy",
        optimal=False,
        objective_us=sum(r.modelled_us for r in regions),
        regions=tuple(regions),
        unfused=tuple(unfused),
        saved=saved,
        saved_bytes=sum(s.bytes or 0 for s in saved),
        inductor_saved_bytes=7 * 2**20,
        placed=True,
        notes=("a note on the graph",),
    )
    versions = {"torch": "2.13.0", "torch_evt": "0.1.0"}
    return Plan("cpu", "h200", versions, (graph,), ("a note on the plan",))
