"""The options under `evt.`, read once into one frozen object.

`torch.compile(model, backend="evt", options={"evt.place": "always", "max_autotune": True})`: keys
that start with `evt.` are ours, all others are Inductor's. The first value of a choice is its
default.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_evt.errors import OptionError

PREFIX = "evt."


def _option(
    default: Any,
    doc: str,
    *,
    kind: type | tuple[type, ...],
    choices: tuple[Any, ...] = (),
    available: tuple[Any, ...] | None = None,
    in_key: bool = True,
) -> Any:
    return dataclasses.field(
        default=default,
        metadata={
            "doc": doc,
            "kind": kind if isinstance(kind, tuple) else (kind,),
            "choices": choices,
            "available": available,
            "in_key": in_key,
        },
    )


@dataclass(frozen=True)
class Options:
    """What a compilation was asked to do. Every field is described by `describe()`."""

    target: str | None = _option(
        None,
        "device to price for: a name from `torch_evt.devices`; by default the one present, else "
        "h200",
        kind=(str, type(None)),
    )
    place: str = _option(
        "auto",
        "auto: place a region where the running device has an emitter and the region is priced "
        "faster; always: priced for the target, run by the reference where no emitter is present "
        "(for tests and demonstrations); never: plan only",
        kind=str,
        choices=("auto", "always", "never"),
    )
    precision: str = _option(
        "fused",
        "fused: fp32 inside a region, rounded where it is stored or cast; eager: rounded after "
        "every operation, as eager does",
        kind=str,
        choices=("fused", "eager"),
    )
    rng: str = _option(
        "inductor",
        "inductor: Inductor's random numbers; eager: eager's own numbers (Inductor's "
        "fallback_random); grouped: a cheaper stream",
        kind=str,
        choices=("inductor", "eager", "grouped"),
        available=("inductor", "eager"),
    )
    tune: str = _option(
        "auto",
        "auto: measure a shortlist where a tuner is present; off: modelled costs only; full: "
        "measure everything, and guard the whole step",
        kind=str,
        choices=("auto", "off", "full"),
        available=("auto", "off"),
    )
    strict: bool = _option(
        False,
        "raise when one of our passes fails, instead of leaving its graph to Inductor",
        kind=bool,
    )
    poison: bool = _option(
        False, "fill every output of a region with NaN before it is computed", kind=bool
    )
    verify: bool = _option(
        False,
        "check every region against its tree in fp64 each time it runs, and raise RegionError, "
        "which names the region, where it is wrong; fills outputs with NaN before, as poison "
        "does; slow; for a report on a whole step see torch_evt.verify",
        kind=bool,
    )
    disable: tuple[str, ...] = _option(
        (), "passes, or functions of trees, that are left out, by name", kind=(tuple, list)
    )
    dump: str | None = _option(
        None,
        "folder that receives every stage of every graph as Python that runs, the plan and the "
        "trees",
        kind=(str, type(None)),
        in_key=False,
    )
    memory_budget: int | None = _option(
        None,
        "bytes that may be saved for backward",
        kind=(int, type(None)),
    )
    loss_chunk: int | None = _option(
        None, "rows per chunk of the loss", kind=(int, type(None)), available=(None,)
    )
    save_weight: float = _option(
        1e-7,
        "price of saving a byte for backward, in microseconds; the default gives up 0.1 ms of a "
        "step where that saves 1 GB; 0: the fastest plan, whatever it saves",
        kind=(int, float),
    )
    solver_nodes: int = _option(
        1000,
        "nodes that the solver may visit in its search tree; 0: the greedy plan only",
        kind=int,
    )

    def cache_key(self) -> str:
        """The options that change a compiled graph, as text."""
        return repr(
            [
                (f.name, getattr(self, f.name))
                for f in dataclasses.fields(self)
                if f.metadata["in_key"]
            ]
        )


def split(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Our options, and the rest, which is Inductor's.

    Raises OptionError for a key under `evt.` that does not exist, has the wrong type or a value
    that is not among its choices.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options takes a dict, not {options!r} ({type(options).__name__})")
    ours: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise OptionError(f"options takes names as keys, not {key!r}")
        if key.startswith(PREFIX):
            ours[key[len(PREFIX) :]] = value
        else:
            rest[key] = value
    fields = {f.name: f for f in dataclasses.fields(Options)}
    for name in rest:  # Inductor has no option of any of these names
        if name in fields:
            raise OptionError(f"{name} is an option of evt: write {PREFIX}{name}")
    for name, value in ours.items():
        if name not in fields:
            raise OptionError(_unknown(name, list(fields)))
        _check_value(fields[name], value)
    if "disable" in ours:
        ours["disable"] = tuple(ours["disable"])
    return Options(**ours), rest


def describe() -> list[tuple[str, str, str, str, bool]]:
    """(name, values, default, description, part of the cache key) of every option, for the docs."""
    rows = []
    for f in dataclasses.fields(Options):
        meta = f.metadata
        values = " | ".join(map(str, meta["choices"])) or " or ".join(
            "none" if k is type(None) else k.__name__ for k in meta["kind"]
        )
        doc = meta["doc"]
        if meta["available"] is not None and not meta["choices"]:
            doc += " (not available yet)"
        elif meta["available"] is not None:
            missing = [str(c) for c in meta["choices"] if c not in meta["available"]]
            doc += f" (not available yet: {', '.join(missing)})"
        rows.append((PREFIX + f.name, values, str(f.default), doc, bool(meta["in_key"])))
    return rows


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return (
        f"unknown option {PREFIX}{name}; the nearest is {PREFIX}{nearest[0]}. "
        f"Known options: {', '.join(PREFIX + k for k in known)}"
    )


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    meta = field.metadata
    name = PREFIX + field.name
    kinds = meta["kind"]
    wrong_bool = isinstance(value, bool) and bool not in kinds  # bool is an int, but not here
    if not isinstance(value, kinds) or wrong_bool:
        wanted = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
        raise OptionError(f"{name} takes {wanted}, not {value!r} ({type(value).__name__})")
    if field.name == "disable" and not all(isinstance(item, str) for item in value):
        raise OptionError(f"{name} takes a list of names, not {value!r}")
    if field.name == "dump" and value == "":
        raise OptionError(f"{name} takes a folder, not an empty name; None writes nothing")
    if isinstance(value, (int, float)) and not 0 <= value < math.inf:
        raise OptionError(f"{name} takes a finite number that is not negative, not {value!r}")
    if meta["choices"] and value not in meta["choices"]:
        nearest = difflib.get_close_matches(str(value), list(meta["choices"]), n=1)
        raise OptionError(
            f"{name}={value!r} is not one of {', '.join(meta['choices'])}"
            + (f"; the nearest is {nearest[0]!r}" if nearest else "")
        )
    if meta["available"] is not None and value not in meta["available"]:
        possible = ", ".join(repr(a) for a in meta["available"])
        raise OptionError(
            f"{name}={value!r} is not available in this version of torch_evt; use {possible}"
        )
