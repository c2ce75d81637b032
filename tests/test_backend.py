"""How torch.compile reaches the backend: registration, options, modes, caches, fallbacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_evt
from interpreted import PLACE, interpreted
from torch_evt import backend, workloads
from torch_evt.errors import OptionError, TargetError
from torch_evt.runtime import counters
from torch_evt.testing import run_step


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.reset()


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(4, 8)


def test_importing_the_package_is_enough_to_find_the_backend() -> None:
    program = (
        "import torch, torch_evt, sys; assert 'torch_evt.backend' not in sys.modules;"
        "from torch._dynamo.backends.registry import lookup_backend;"
        "print(lookup_backend('evt').__module__)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "torch_evt.backend", found.stderr


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"evt.plce": "always"}, OptionError, "the nearest is evt.place"),
        ({"evt.place": "alwais"}, OptionError, "'always'"),
        ({"evt.poison": "yes"}, OptionError, "takes bool"),
        ({"evt.tune": "full"}, OptionError, "not available"),
        ({"evt.target": "h20"}, TargetError, "h200"),
        ({"max_autotune_gem": True}, OptionError, "max_autotune"),
        ({"evt.disable": ["recompos"]}, OptionError, "nearest is .recompose"),
    ],
)
@pytest.mark.parametrize("suppress", [False, True])
def test_a_wrong_option_raises_at_the_first_call_and_nothing_hides_it(
    options: dict[str, Any], error: type[Exception], said: str, suppress: bool
) -> None:
    model, x = model_and_input()
    with torch._dynamo.config.patch(suppress_errors=suppress):
        compiled = torch.compile(model, backend="evt", options=options)
        for _ in range(2):
            with pytest.raises(error, match=said):
                compiled(x)


def test_check_options_raises_at_once() -> None:
    torch_evt.check_options({"evt.place": "always", "max_autotune": True})
    with pytest.raises(OptionError, match="evt.placing"):
        torch_evt.check_options({"evt.placing": "always"})


def test_modes_and_inductors_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def stop(module: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches)
        return module.forward

    monkeypatch.setattr(backend, "compile_fx", stop)
    model, x = model_and_input()
    torch.compile(model, backend="evt", mode="max-autotune")(x)
    torch._dynamo.reset()
    torch.compile(model, backend="evt", options={"shape_padding": False, "evt.rng": "eager"})(x)
    mode, options = seen
    assert mode["max_autotune"] is True and mode["triton.cudagraphs"] is True
    assert "fallback_random" not in mode
    assert options["shape_padding"] is False and options["fallback_random"] is True
    for patches in seen:
        assert isinstance(patches["custom_partitioner_fn"], backend.Partitioner)


def test_reset_reaches_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(backend, "reset_cudagraph_trees", lambda: called.append(True))
    model, x = model_and_input()
    torch.compile(model, backend="evt")(x)
    torch._dynamo.reset()
    assert called


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("mlp", torch.float32, id="mlp-fp32"),
        pytest.param("mlp", torch.bfloat16, id="mlp-bf16"),
        pytest.param("gpt2-medium", torch.float32, id="gpt2-medium-fp32"),
        pytest.param("gpt2-medium", torch.bfloat16, id="gpt2-medium-bf16", marks=pytest.mark.slow),
    ],
)
def test_on_a_cpu_the_default_places_nothing_and_equals_inductor_bit_for_bit(
    name: str, dtype: torch.dtype
) -> None:
    workload = workloads.get(name, "tiny")
    steps = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, Inductor's embedding gradient sums in a random order
    for backend_name in ("inductor", "evt"):
        torch._dynamo.reset()
        model, inputs, loss = workload.make(0, dtype=dtype)
        compiled = torch.compile(model, backend=backend_name)
        steps.append(run_step(model, inputs, loss, compiled=compiled, seed=1))
    torch.set_num_threads(threads)
    assert not counters.region_runs
    assert steps[0].keys() == steps[1].keys()
    for key, tensor in steps[0].items():
        assert torch.equal(tensor, steps[1][key]), key


def test_the_users_own_partitioner_and_pass_still_run() -> None:
    from torch._functorch.partitioners import default_partition
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

    ran: list[str] = []

    class Own(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
            ran.append("partitioner")
            kwargs.pop("compiler", None)
            return default_partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "own"

    class OwnPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            ran.append("pass")

        def uuid(self) -> str:
            return "own pass"

    model, x = model_and_input()
    options = {
        **PLACE,
        "custom_partitioner_fn": Own(),
        "post_grad_custom_pre_pass": OwnPass(),
    }
    torch.compile(model, backend=interpreted, options=options)(x).sum().backward()
    assert "partitioner" in ran
    assert sum(counters.region_runs.values()) == 2
    with torch.no_grad():
        torch.compile(model, backend=interpreted, options=options)(x)
    assert "pass" in ran


def run_program(cache: Path, options: dict[str, Any]) -> dict[str, Any]:
    program = Path(__file__).parent / "programs" / "second_process.py"
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(options)],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_hits_every_cache_and_plans_nothing(tmp_path: Path) -> None:
    first = run_program(tmp_path, {})
    assert first["planned"] == 1  # the joint graph, for both halves
    assert first["aot"].get("autograd_cache_miss") == 1
    second = run_program(tmp_path, {})
    assert second["planned"] == 0
    assert second["aot"].get("autograd_cache_hit") == 1
    for kind in ("miss", "bypass"):
        assert not second["aot"].get(f"autograd_cache_{kind}")
        assert not second["inductor"].get(f"fxgraph_cache_{kind}")
    assert second["regions"] == first["regions"] == 3
    assert (second["loss"], second["gradient"]) == (first["loss"], first["gradient"])
    other = run_program(tmp_path, {"evt.poison": True})
    assert other["planned"] == 1  # another option is another graph


def test_an_inference_graph_keeps_its_owner() -> None:
    """Inductor's own passes put subgraphs into the module that owns the graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from torch_evt.options import Options
    from torch_evt.pipeline import transform_inference

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w)

    module = make_fx(layer, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 8))
    transform_inference(module.graph, Options(place="always", strict=True))
    assert any("region_1" in str(node.target) for node in module.graph.nodes)
    assert module.graph.owning_module is module
    module.recompile()
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    torch.testing.assert_close(module(x, w), layer(x, w))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (["evt.place"], OptionError, "takes a dict"),
        ({3: 4}, OptionError, "names as keys"),
        ({"evt.target": "zz"}, TargetError, "h200"),
        ({"evt.disable": ["foo"]}, OptionError, "neither a pass"),
        ({"no_such_setting": 1}, OptionError, "Inductor"),
    ],
)
def test_check_options_checks_everything(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        torch_evt.check_options(options)
