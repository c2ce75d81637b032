"""One rank: trains one step of a small model in several ways, and writes what happened as JSON.

    program.py RANK WORLD FOLDER WAY...

Each way is one of `WAYS`. The same step is done by eager under the same wrapper, and by one process
in fp64 on the whole batch; `verdict` holds what `torch_evt.testing` says about the three.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from interpreted import PLACE, interpreted
from torch_evt.partition.plan import Plan
from torch_evt.partition.plan_json import to_json
from torch_evt.pipeline import observed
from torch_evt.runtime import counters
from torch_evt.testing import compare, fp64_copy

WIDTH, LAYERS, ROWS = 256, 3, 12  # rows of one rank; a layer has 1 MiB of parameters
Compiler = Callable[[Any], Any]


class Layer(nn.Module):
    """x + down(gelu(up(norm(x))))"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (
        (output.float() if output.dtype == torch.bfloat16 else output).sub(target).square().mean()
    )


def ddp(model: nn.Module, compiler: Compiler | None, *, optimize_ddp: bool | str) -> nn.Module:
    """DistributedDataParallel, compiled from outside, in buckets of about one layer: 1 MiB, the
    least that Dynamo cuts by."""
    torch._dynamo.config.optimize_ddp = optimize_ddp  # DDP reads it when it is made, too
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    assert wrapped._use_python_reducer == (optimize_ddp == "python_reducer")
    return wrapped if compiler is None else torch.compile(wrapped, backend=compiler)


def fsdp(
    model: nn.Module, compiler: Compiler | None, *, each_layer: bool, policy: Any = None
) -> nn.Module:
    """FSDP2 of every layer and of the rest; each layer compiled by itself, or the whole model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = policy or MixedPrecisionPolicy()
    for layer in model.layers:
        if compiler is not None and each_layer:
            layer.compile(backend=compiler)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if compiler is not None and not each_layer:
        model.compile(backend=compiler)
    return model


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], torch.dtype]] = {
    "ddp": (ddp, {"optimize_ddp": True}, torch.float32),
    "ddp-whole": (ddp, {"optimize_ddp": False}, torch.float32),
    "ddp-python-reducer": (ddp, {"optimize_ddp": "python_reducer"}, torch.float32),
    "fsdp-layers": (fsdp, {"each_layer": True}, torch.float32),
    "fsdp-whole": (fsdp, {"each_layer": False}, torch.float32),
    "fsdp-layers-bf16": (fsdp, {"each_layer": True, "policy": BF16}, torch.bfloat16),
    "fsdp-whole-bf16": (fsdp, {"each_layer": False, "policy": BF16}, torch.bfloat16),
}


def make() -> nn.Module:
    torch.manual_seed(5)
    return Model()


def whole_batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks, equal on all."""
    source = torch.Generator().manual_seed(11)
    rows = ROWS * dist.get_world_size()
    return (
        torch.randn(rows, WIDTH, generator=source),
        torch.randn(rows, 8, generator=source),
    )


def step(wrapped: nn.Module, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """One step: the loss and the whole gradients, both means over the ranks."""
    loss = loss_of(wrapped(x), y)
    loss.backward()
    mean = loss.detach().clone()
    if wrapped is not model or hasattr(model, "unshard"):
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    found = {"loss": mean}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def compiler_of(way: str) -> Compiler:
    """The backend with regions placed: without code generation, or Inductor for "...:inductor"."""
    real = way.endswith(":inductor")

    def compiler(module: Any, inputs: Any) -> Any:
        if not real:
            return interpreted(module, inputs, options=PLACE)
        from torch_evt.backend import evt

        return evt(module, inputs, options=PLACE)

    return compiler


def try_way(way: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.reset()
    wrap, settings, dtype = WAYS[way.removesuffix(":inductor")]
    rank = dist.get_rank()
    xs, ys = whole_batch()
    x, y = xs[rank * ROWS : (rank + 1) * ROWS], ys[rank * ROWS : (rank + 1) * ROWS]
    graphs: list[Any] = []
    model = make()
    with observed(graphs.append):
        wrapped = wrap(model, compiler_of(way), **settings)
        ours = step(wrapped, model, x, y)
    model = make()
    eager = step(wrap(model, None, **settings), model, x, y)
    exact_model = fp64_copy(make())
    exact = step(exact_model, exact_model, xs.double(), ys.double())
    verdict = compare(ours, eager, exact, dtype)
    regions = [region for graph in graphs for region in graph.regions if graph.placed]
    trees = {h: {r.tree for r in regions if r.half == h} for h in ("forward", "backward")}
    return {
        "plan": to_json(Plan("cpu", "h200", {}, tuple(graphs))),
        "placed": {half: sum(r.half == half for r in regions) for half in trees},
        "ran": {half: sum(counters.region_runs[t] for t in trees[half]) for half in trees},
        "failed": [str(tensor) for tensor in verdict.tensors if not tensor.passed],
        "eager": max(tensor.eager.l2 for tensor in verdict.tensors),
        "tensors": len(verdict.tensors),
        "from cache": sum(graph.from_cache for graph in graphs),
        "regions": [[region.tree for region in graph.regions] for graph in graphs],
        "trees": sorted(trees["forward"] | trees["backward"]),
    }


def main(rank: str, world: str, folder: str, *ways: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=600),
    )
    found = {way: try_way(way) for way in ways}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
