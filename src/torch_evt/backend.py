"""The backend: `torch.compile(model, backend="evt", mode=..., options=...)`.

Sits on TorchInductor: `compile_fx` with a partitioner of ours for training graphs and a pass of
ours for inference graphs. Everything that no region takes is Inductor's, and so are its caches,
CUDA graphs and memory planning.
"""

from __future__ import annotations

import difflib
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from torch_evt import decisions, devices, options, pipeline
from torch_evt.errors import OptionError, TargetError
from torch_evt.options import Options
from torch_evt.partition.elementwise import function_names
from torch_evt.torch_compat import (
    CustomPartitionerFn,
    GraphPass,
    compile_fx,
    files_digest,
    inductor_config,
    inductor_settings,
    reset_cudagraph_trees,
    run_graph_pass,
)
from torch_evt.version import __version__


def evt(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile a graph; the function that torch.compile calls.

    mode: as for Inductor. options: Inductor's, and ours under `evt.` (`torch_evt.options`).

    A wrong option raises OptionError when the compiled function is first called, even under
    `torch._dynamo.config.suppress_errors`; `torch_evt.check_options` raises it at once.
    """
    return compile_with(module, example_inputs, mode=mode, options=options)


def compile_with(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **compile_fx_kwargs: Any,
) -> Callable[..., Any]:
    """`evt` with further arguments for Inductor's `compile_fx`."""
    try:
        ours, patches = _settings(mode, options)
    except (OptionError, TargetError) as error:
        return functools.partial(_raise, error)
    config = inductor_config()
    partitioner = Partitioner(
        ours, patches.get("custom_partitioner_fn", config.custom_partitioner_fn)
    )
    inference = InferencePass(
        ours, patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    )
    patches["custom_partitioner_fn"] = partitioner
    patches["post_grad_custom_pre_pass"] = inference
    if ours.rng == "eager":
        patches["fallback_random"] = True
    if ours.dump is not None:
        patches["force_disable_caches"] = True  # a cached graph runs no pass
    found = {x.device for x in example_inputs if isinstance(x, torch.Tensor)}
    with decisions.compiling(
        module,
        example_inputs,
        _identity(patches, partitioner, inference),
        unplaced=pipeline.why_unplaced(ours, found),
    ):
        compiled: Any = compile_fx(
            module, example_inputs, config_patches=patches, **compile_fx_kwargs
        )
    return compiled  # type: ignore[no-any-return]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError or TargetError at once if torch.compile's `options` are wrong.

    `torch.compile` itself only stores a backend's options, so that without this call a mistake
    shows at the first run of the compiled model.
    """
    _settings(None, options)


def _settings(mode: str | None, given: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Our options and Inductor's configuration. Raises OptionError or TargetError."""
    ours, rest = options.split(given)
    _check_names(ours)
    return ours, inductor_settings(mode, rest)


def _check_names(ours: Options) -> None:
    """Raise TargetError or OptionError for names in the options that name nothing."""
    if ours.target is not None:
        devices.device(ours.target)
    known = [*pipeline.names(), *function_names()]
    for name in ours.disable:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise OptionError(
                f"evt.disable: {name!r} is neither a pass ({', '.join(pipeline.names())}) nor a "
                f"function ({', '.join(function_names())}); the nearest is {nearest!r}"
            )


def _reset() -> None:
    reset_cudagraph_trees()


evt.reset = _reset  # type: ignore[attr-defined]


def _raise(error: Exception, *_: Any, **__: Any) -> NoReturn:
    """Stands in for the compiled function where the options are wrong, so that the error reaches
    the user as it is, unwrapped, and no setting hides it."""
    raise error


class Partitioner(CustomPartitionerFn):
    """Cuts joint graphs by the plan. other: the user's own partitioner, in place of min-cut."""

    def __init__(self, options: Options, other: Any = None) -> None:
        self.options = options
        self.other = other

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = pipeline.partition(gm, joint_inputs, self.options, self.other, kwargs)
        for half in halves:
            pipeline.mark_training_half(half)
        return halves

    def uuid(self) -> str | None:
        return _uuid(self.options, self.other)


class InferencePass(GraphPass):
    """Places regions in inference graphs, behind the user's own pass."""

    def __init__(self, options: Options, other: Any = None) -> None:
        self.options = options
        self.others = other if isinstance(other, (list, tuple)) else [other]

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        """is_inference: given by torch 2.12 and later; torch 2.11 leaves it to us."""
        if is_inference is None:
            is_inference = not pipeline.is_training_half(graph)
        for other in self.others:
            if other is not None:
                run_graph_pass(other, graph, is_inference)
        if is_inference:
            pipeline.transform_inference(graph, self.options)

    def uuid(self) -> str | None:
        return _uuid(self.options, self.others)


def _identity(
    patches: Mapping[str, Any], partitioner: Partitioner, inference: InferencePass
) -> str | None:
    """What decides a compiled graph beside the graph; None where Inductor's caches are off."""
    uuids = (partitioner.uuid(), inference.uuid())
    if None in uuids or patches.get("force_disable_caches"):
        return None
    ours = ("custom_partitioner_fn", "post_grad_custom_pre_pass")
    return repr((uuids, sorted((k, repr(v)) for k, v in patches.items() if k not in ours)))


def _uuid(options: Options, other: Any) -> str | None:
    """Version, sources, options, device table and the wrapped pass; None, which switches the caches
    off, where the wrapped pass has no identity."""
    parts = [__version__, _sources_digest(), options.cache_key(), devices.table_digest()]
    for item in other if isinstance(other, (list, tuple)) else [other]:
        if item is None:
            continue
        identity = item.uuid() if hasattr(item, "uuid") else None
        if identity is None:
            return None
        parts.append(repr(identity))
    return "|".join(parts)


@functools.lru_cache(maxsize=1)
def _sources_digest() -> str:
    root = pathlib.Path(__file__).parent
    return files_digest(sorted(str(path) for path in root.rglob("*.py")))
