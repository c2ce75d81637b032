"""The private names of PyTorch that torch_evt uses, in one place.

Checked on torch 2.11.0 and 2.13.0 by running, on 2.12, 2.14 and 2.15 by reading; each entry says
where the name comes from. Nothing here patches PyTorch.
"""

from __future__ import annotations

import hashlib
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from torch_evt.errors import OptionError

try:  # from torch 2.12 a pass may be told whether its graph is for inference
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass as GraphPass

    TELLS_INFERENCE = True
except ImportError:
    from torch._inductor.custom_graph_pass import (  # type: ignore[assignment]
        CustomGraphPass as GraphPass,
    )

    TELLS_INFERENCE = False

__all__ = [
    "TELLS_INFERENCE",
    "CustomPartitionerFn",
    "GraphPass",
    "cache_folder",
    "cache_folder_set",
    "caches_disabled",
    "caches_used",
    "checkpoint_policy",
    "common_subexpressions",
    "compile_fx",
    "compile_id",
    "compile_seconds",
    "config_hashes",
    "decomposition_table",
    "files_digest",
    "fresh_cache",
    "inductor_config",
    "inductor_generators",
    "inductor_settings",
    "new_code",
    "register_entry_point",
    "reset_cudagraph_trees",
    "run_graph_pass",
    "run_partitioner",
    "size_hint",
    "timed",
]


def run_graph_pass(other: Callable[..., None], graph: fx.Graph, is_inference: bool) -> None:
    """Run a pass of the user's as Inductor would run it."""
    if TELLS_INFERENCE and isinstance(other, GraphPass):
        other(graph, is_inference)
    else:
        other(graph)


Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@contextmanager
def caches_disabled() -> Iterator[None]:
    """Neither read nor write AOTAutograd's and Inductor's graph caches inside the block."""
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
    ):
        yield


def caches_used() -> bool:
    """Whether AOTAutograd or Inductor would load this compilation from a local cache."""
    import torch._functorch.config
    import torch._inductor.config

    if torch._inductor.config.force_disable_caches:
        return False
    return bool(
        torch._functorch.config.enable_autograd_cache or torch._inductor.config.fx_graph_cache
    )


def config_hashes() -> list[str]:
    """Digests of the configuration of Inductor and AOTAutograd, without what changes no result
    (torch/utils/_config_module.py)."""
    import torch._functorch.config
    import torch._inductor.config

    return [c.get_hash().hex() for c in (torch._inductor.config, torch._functorch.config)]


def checkpoint_policy(module: fx.GraphModule) -> str:
    """The text of the policy of a selective checkpoint, for the module of the checkpointed part; ""
    where there is none. AOTAutograd, too, asks a policy for its `cache_hash`, and caches no graph
    with a policy that has none (torch/_functorch/_aot_autograd/autograd_cache.py)."""
    policy = module.meta.get("_checkpoint_context_fn")
    return "" if policy is None else str(getattr(policy, "cache_hash", hex(id(policy))))


def fresh_cache() -> Any:
    """A context with an empty cache folder of its own (torch._inductor.utils.fresh_cache)."""
    from torch._inductor.utils import fresh_cache as fresh

    return fresh()


def cache_folder() -> str:
    """Where Inductor caches what it compiled (torch._inductor.runtime.cache_dir_utils)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


@contextmanager
def cache_folder_set(folder: str) -> Iterator[None]:
    """Let Inductor and Triton cache in `folder` inside the block; what it holds is kept."""
    from torch._inductor.utils import clear_caches

    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    clear_caches()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        clear_caches()


def timed(name: str) -> Any:
    """A context whose time PyTorch keeps under `name`, beside the stages of its own compilers
    (torch._dynamo.utils.dynamo_timed): `compile_seconds`, traces and tlparse show it."""
    from torch._dynamo.utils import dynamo_timed

    return dynamo_timed(name, log_pt2_compile_event=True)


def compile_seconds() -> dict[str, float]:
    """Seconds that this process has spent in every stage of compiling, by PyTorch's names and
    those given to `timed`; a stage's time holds that of the stages inside it."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: float(sum(seconds)) for name, seconds in compilation_time_metrics.items()}


def register_entry_point(name: str, value: str) -> None:
    """Make torch.compile find a backend by name without importing it, as an installed entry point
    does (torch/_dynamo/backends/registry.py)."""
    from torch._dynamo.backends import registry

    if name not in registry._BACKENDS:
        registry._BACKENDS[name] = EntryPoint(name, value, "torch_dynamo_backends")


def inductor_settings(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's configuration for `mode=` and `options=`, checked as its own backend checks them.

    Raises OptionError for what Inductor does not know. Also makes the environment settings that
    CUDA graphs need on old CUDA versions (torch/__init__.py, _TorchCompileInductorWrapper).
    """
    try:
        wrapper = torch._TorchCompileInductorWrapper(mode, dict(options), None)  # type: ignore[no-untyped-call]
        return dict(wrapper.config)
    except (RuntimeError, ValueError) as error:
        raise OptionError(f"Inductor: {error}") from error


def compile_fx(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's compiler (torch._inductor.compile_fx), imported when first used: it is large."""
    from torch._inductor.compile_fx import compile_fx as compile_with_inductor

    return compile_with_inductor(module, inputs, **kwargs)


def compile_id() -> str:
    """The id of the compilation in progress, as TORCH_LOGS prints it: "0/0"; "-" outside one."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "-" if current is None else str(current)


def new_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo keeps what it compiled with the code
    object, so that calls of the copy are apart from all others (torch/_dynamo/eval_frame.py)."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=function.__name__)
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph that computes every value once, random ones aside: what min-cut itself does
    to a joint graph first (torch._functorch.compile_utils.fx_graph_cse)."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def lazy_module(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module that is made to Python only when somebody runs or prints it, as Inductor has
    them: most of ours are only cut or copied."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def inductor_generators() -> frozenset[Any]:
    """Inductor's own random operations (torch._inductor.inductor_prims): they read no memory."""
    import torch._inductor.inductor_prims  # registers them

    prims = torch.ops.prims
    return frozenset({prims.inductor_random.default, prims.inductor_lookup_seed.default})


def decomposition_table() -> dict[Any, Any]:
    """The decompositions that Inductor traces with (torch._inductor.decomposition)."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_config() -> Any:
    """torch._inductor.config, imported when first needed."""
    import torch._inductor.config

    return torch._inductor.config


def reset_cudagraph_trees() -> None:
    """What Inductor's own backend does on torch._dynamo.reset (torch/__init__.py)."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees as reset

    reset()


def run_partitioner(
    joint: fx.GraphModule, inputs: Sequence[Any], other: Partitioner | None, kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph in halves: by `other`, or else by min-cut, as Inductor calls it."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    partitioner: Partitioner = other or min_cut_rematerialization_partition
    with timed("min_cut_rematerialization_partition"):  # as Inductor itself names it
        return partitioner(joint, inputs, **kwargs)


def has_memory_budget() -> bool:
    """Whether PyTorch's own limit on what is saved is set: activation_memory_budget."""
    from torch._functorch import config

    return bool(config.activation_memory_budget != 1.0)


_NO_HINT = 8192
"""Inductor's own choice for a size of which nothing is known."""


def size_hint(size: int | torch.SymInt) -> int:
    """A number for a size, symbolic or not, without adding a guard; 0 < result.

    Symbolic sizes give their hint (the value of the traced call), or one that is made of 8192 for
    each unbacked symbol in them.
    """
    if isinstance(size, int):
        return size
    node = size.node
    hint = getattr(node, "_hint", None)
    if hint is None:
        env = node.shape_env
        try:
            if hasattr(env, "optimization_hint"):  # where size_hint is deprecated
                hint = env.optimization_hint(node.expr, fallback=_NO_HINT)
            else:
                known = env.var_to_val
                symbols = {s: known.get(s, _NO_HINT) for s in node.expr.free_symbols}
                hint = node.expr.xreplace(symbols)
        except (AttributeError, RuntimeError, ValueError):
            hint = None
    return int(hint) if hint is not None and int(hint) > 0 else _NO_HINT


def files_digest(paths: Sequence[str]) -> str:
    """Digest of the contents of source files, for cache keys."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(path.rsplit("/", 1)[-1].encode())
            digest.update(file.read())
    return digest.hexdigest()
