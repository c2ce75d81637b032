"""A random training graph as a description that prints as Python, and is run from what it prints.

What fails can so be copied out of a test's report and run, and nothing is tested that is not shown.
"""

from __future__ import annotations

import hashlib
import linecache
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Dim = int | str
"""An int, or an expression of the program's sizes: "b", "(b * t)"."""

_HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
"""

_TAIL = """

if __name__ == "__main__":
    from interpreted import interpreted  # in tests/; backend="evt" goes through Inductor

    from torch_evt.testing import check_model

    options = {options}
    check_model(
        make, dtype={unit}, seeds={seeds}, backend=interpreted, options=options
    ).raise_if_failed()
"""


@dataclass(frozen=True)
class Leaf:
    """A parameter, a buffer or an input. make: its value as an expression of the sizes."""

    name: str
    dims: tuple[Dim, ...]
    make: str
    requires_grad: bool = False


@dataclass(frozen=True)
class Statement:
    """One assignment, or a change in place. target: the names that it binds, "" where none.
    stand_in: a name that it reads, of the same shape and dtype as what it binds, if there is one.
    """

    target: str
    text: str
    in_place: bool = False
    stand_in: str = ""

    def line(self) -> str:
        return f"{self.target} = {self.text}" if self.target else self.text

    def binds(self) -> list[str]:
        return names_in(self.target)

    def reads(self) -> list[str]:
        return names_in(self.text)


@dataclass(frozen=True)
class Program:
    """One training step.

    sizes: values of b and t; the k-th seed takes the k-th. inside, outside: terms of the loss,
    computed in the compiled function or on its results; a term is an expression over the names that
    it reads. results: further values returned. checkpointed: (first, last) statement of a
    recomputed block. dtype: of parameters and inputs. half: the coarsest half-precision dtype that
    the program rounds to, if any.
    """

    sizes: tuple[tuple[int, int], ...]
    dtype: str
    parameters: tuple[Leaf, ...]
    buffers: tuple[Leaf, ...]
    inputs: tuple[Leaf, ...]
    statements: tuple[Statement, ...]
    inside: tuple[str, ...]
    outside: tuple[tuple[str, str], ...]
    results: tuple[str, ...] = ()
    autocast: str | None = None
    dynamic: bool = False
    checkpointed: tuple[int, int] | None = None
    half: str | None = None
    options: tuple[tuple[str, Any], ...] = field(default=())

    def unit_dtype(self) -> torch.dtype:
        """The dtype that sets the unit of the error standard."""
        found: torch.dtype = getattr(torch, self.half or self.dtype)
        return found

    def body(self) -> list[str]:
        """The lines of forward, without its last."""
        lines = [statement.line() for statement in self.statements]
        if self.checkpointed is not None:
            first, last = self.checkpointed
            block = self.statements[first : last + 1]
            bound = [name for statement in block for name in statement.binds()]
            read = {name for statement in block for name in statement.reads()}
            before = {n for s in self.statements[:first] for n in s.binds()}
            before |= {leaf.name for leaf in self.inputs}
            arguments = ", ".join(sorted(read & before))
            left = ", ".join(bound)
            inner = "\n".join([*lines[first : last + 1], f"return {left}"])
            lines[first : last + 1] = [
                f"def block({arguments}):",
                *textwrap.indent(inner, "    ").splitlines(),
                f"{left} = checkpoint(block, {arguments}, use_reentrant=False)",
            ]
        if self.inside:
            lines.append("loss = " + " + ".join(self.inside))
        return lines

    def returned(self) -> list[str]:
        names = ["loss"] if self.inside else []
        return [*names, *dict.fromkeys([*(n for n, _ in self.outside), *self.results])]

    def source(self) -> str:
        """The program as a module with `Model`, `make(seed)` and a check as its main part."""
        sizes = "b, t = x0.shape[:2]" if self.dynamic else "b, t = {}, {}".format(*self.sizes[0])
        if self.dynamic and len(self.inputs[0].dims) == 2:
            sizes = f"b, t = x0.shape[0], {self.sizes[0][1]}"
        body = self.body()
        if self.autocast is not None and body:
            inner = textwrap.indent("\n".join(body), "    ")
            body = [f'with torch.autocast("cpu", torch.{self.autocast}):', inner]
        forward = "\n".join([sizes, *body, f"return {', '.join(self.returned())},"])
        init = ["super().__init__()"]
        for leaf in self.parameters:
            frozen = "" if leaf.requires_grad else ", requires_grad=False"
            init.append(f"self.{leaf.name} = nn.Parameter({leaf.make}{frozen})")
        init += [f'self.register_buffer("{leaf.name}", {leaf.make})' for leaf in self.buffers]
        make = ["torch.manual_seed(seed)", f"b, t = {list(self.sizes)}[seed % {len(self.sizes)}]"]
        make.append(f"model = Model().to(torch.{self.dtype})")
        for leaf in self.inputs:
            grad = ".requires_grad_()" if leaf.requires_grad else ""
            make.append(f"{leaf.name} = {leaf.make}{grad}")
        make.append(f"return model, ({', '.join(leaf.name for leaf in self.inputs)},), loss_of")
        loss = [f"{', '.join(self.returned())}, = outputs"]
        terms = [*(["loss"] if self.inside else []), *(term for _, term in self.outside)]
        loss.append(f"return {' + '.join(terms)}")
        arguments = ", ".join(leaf.name for leaf in self.inputs)
        return "\n".join(
            [
                _HEAD,
                "\nclass Model(nn.Module):",
                "    def __init__(self):",
                textwrap.indent("\n".join(init), " " * 8),
                f"\n    def forward(self, {arguments}):",
                textwrap.indent(forward, " " * 8),
                "\n\ndef loss_of(outputs):",
                textwrap.indent("\n".join(loss), "    "),
                "\n\ndef make(seed):",
                textwrap.indent("\n".join(make), "    "),
            ]
        )

    def script(self) -> str:
        """The source with a main part that checks it."""
        options = {"evt.place": "always", "evt.strict": True, "evt.poison": True}
        options |= dict(self.options)
        unit, seeds = self.unit_dtype(), list(range(len(self.sizes) + 1))
        dynamic = "\n# compiled with dynamic=True" if self.dynamic else ""
        tail = _TAIL.format(options=options, unit=unit, seeds=seeds)
        return f"{self.source()}\n{dynamic}{tail}"

    def load(self) -> dict[str, Any]:
        """The module that the source makes."""
        source = self.source()
        name = f"<random graph {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        module: dict[str, Any] = {"__name__": "random_graph"}
        exec(compile(source, name, "exec"), module)
        return module

    def __repr__(self) -> str:
        return "\n" + self.script()


Step = tuple[nn.Module, tuple[Tensor, ...], Any]


def names_in(text: str) -> list[str]:
    """The values and inputs that an expression names, in order."""
    return list(dict.fromkeys(re.findall(r"\b[vx]\d+\b", text)))
