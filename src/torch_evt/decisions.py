"""What was decided for each graph: its log, its observers, and the same again on a cache hit.

A graph that comes from Inductor's caches runs none of our passes. So that its decisions can still
be seen, the plans of a graph that is compiled are kept beside the compiled code (`runtime/store`),
and shown, marked, where the code is loaded. A plan that is missing or stale changes what is shown,
and nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from torch_evt.graph_key import graph_key
from torch_evt.options import Options
from torch_evt.partition.plan import GraphPlan, digest, from_data, to_data
from torch_evt.runtime import store
from torch_evt.torch_compat import compile_id

log = logging.getLogger("torch_evt")

_NAMESPACE = "plans"
_SCHEMA = 1
_FROM_CACHE = " (from the cache)"

Observer = Callable[[GraphPlan], None]
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("torch_evt_observers", default=())


@dataclass
class _Compilation:
    """One call of Inductor's compiler. ran: whether a graph of it reached our passes."""

    ran: bool = False
    plans: list[GraphPlan] = field(default_factory=list)


_compilation: ContextVar[_Compilation | None] = ContextVar("torch_evt_compilation", default=None)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer` with the plan of every graph that is compiled inside the block.

    The plan of a graph from Inductor's caches is the one that it was compiled with, and has
    `from_cache` set; such a graph has none where its plan was not kept.
    """
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def has_observers() -> bool:
    """Whether the code is inside a block of `observed`."""
    return bool(_observers.get())


def wanted(options: Options) -> bool:
    """Whether somebody wants to see the plan although nothing is placed."""
    return has_observers() or options.dump is not None or log.isEnabledFor(logging.DEBUG)


def started() -> None:
    """Say that a graph reached our passes: it does not come from a cache."""
    if (current := _compilation.get()) is not None:
        current.ran = True


@contextmanager
def compiling(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    identity: str | None,
    *,
    unplaced: str | None,
) -> Iterator[None]:
    """Around Inductor's compiler: keep the plans that are made inside, or show the kept ones.

    module, inputs: Dynamo's graph, before Inductor changes it. identity: what else decides the
    result, None where Inductor's caches are off. unplaced: why no region may be placed, None where
    one may; if none may and nobody wants to see plans, there are none, and this does nothing.
    """
    key = None
    seen = has_observers() or log.isEnabledFor(logging.INFO)
    if identity is not None and (unplaced is None or seen):
        key = _key(module, inputs, identity)
    current = _Compilation()
    token = _compilation.set(current)
    try:
        yield
    finally:
        _compilation.reset(token)
    if key is None:
        return
    try:
        if current.plans:
            store.put(_NAMESPACE, key, _to_bytes(current.plans))
        elif not current.ran and seen:
            _recall(key, unplaced)
    except Exception as error:  # it is only about what is shown
        log.warning("the plans could not be kept or shown (%r); compiling goes on", error)


def unplanned(kind: str, unplaced: str, mark: str = "") -> None:
    """Log that a graph of this kind ("joint", "inference") was not even planned, and why."""
    log.info("%s %s: left to Inductor, without a plan: %s%s", compile_id(), kind, unplaced, mark)


def report(plan: GraphPlan) -> None:
    """Log a plan, tell the observers, and have it kept by the compilation that it belongs to."""
    current = _compilation.get()
    if current is not None:
        current.plans.append(plan)
    _log(plan)
    for observer in _observers.get():
        observer(plan)


def _log(plan: GraphPlan) -> None:
    mark = _FROM_CACHE if plan.from_cache else ""
    did = "placed" if plan.placed else "planned"
    if log.isEnabledFor(logging.INFO):
        log.info(
            "%s: %s; %d left to Inductor; plan %s%s",
            plan.id,
            _count(plan, did),
            len(plan.unfused),
            digest(plan),
            mark,
        )
    for region in plan.regions:
        log.debug(
            "%s %s (%s): %.1f us instead of %.1f us: %s%s",
            region.half,
            region.anchor,
            did,
            region.modelled_us,
            region.replaced_us,
            region.tree,
            mark,
        )
    for unfused in plan.unfused:
        log.debug(
            "%s %s is left to Inductor: %s%s", unfused.half, unfused.node, unfused.reason, mark
        )
    for note in plan.notes:
        log.info("%s: %s%s", plan.id, note, mark)


def _count(plan: GraphPlan, did: str) -> str:
    """ "3 regions placed (2 forward, 1 backward)"."""
    halves: dict[str, int] = {}
    for region in plan.regions:
        halves[region.half] = halves.get(region.half, 0) + 1
    total = len(plan.regions)
    each = ", ".join(f"{number} {half}" for half, number in halves.items())
    return f"{total} region{'' if total == 1 else 's'} {did}" + (f" ({each})" if each else "")


def _key(module: fx.GraphModule, inputs: Sequence[Any], identity: str) -> str | None:
    try:
        return graph_key(module, inputs, identity)
    except Exception as error:  # whatever a graph may hold, it is only about what is shown
        log.debug("the plan of this graph is not kept: %r", error)
        return None


def _recall(key: str, unplaced: str | None) -> None:
    """Show the kept plans of a graph that came from a cache."""
    plans = _from_bytes(store.get(_NAMESPACE, key))
    if plans is None and unplaced is not None:
        unplanned("graph", unplaced, _FROM_CACHE)
    elif plans is None:
        log.info(
            "%s graph: compiled from the cache; its plan was not kept "
            "(with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 it is planned anew)",
            compile_id(),
        )
    for plan in plans or ():
        kind = plan.id.rsplit(" ", 1)[-1]
        report(replace(plan, id=f"{compile_id()} {kind}", from_cache=True))


def _to_bytes(plans: Sequence[GraphPlan]) -> bytes:
    return json.dumps({"schema": _SCHEMA, "plans": [to_data(plan) for plan in plans]}).encode()


def _from_bytes(value: bytes | None) -> list[GraphPlan] | None:
    if value is None:
        return None
    try:
        data = json.loads(value)
        if data["schema"] != _SCHEMA:
            return None
        return [from_data(plan) for plan in data["plans"]]
    except (ValueError, TypeError, KeyError) as error:
        log.debug("a kept plan could not be read: %r", error)
        return None
