"""Random small training graphs, each a `Program`.

generate(seed)          the program of a seed
@given(programs())      for hypothesis, which shrinks one by leaving parts out
"""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import strategies as st

from .growing import Growing, Value
from .operations import EPILOGUES, PRODUCTS, TABLE
from .program import Program, names_in
from .reducing import keeping, parts

_OPTIONS: tuple[tuple[tuple[str, Any], ...], ...] = (
    (("evt.precision", "eager"),),
    (("evt.disable", ["gelu_erf", "add"]),),
    (("evt.disable", ["recompose"]),),
)


_PRODUCTS = ("F.linear", " @ ", "torch.addmm", "torch.bmm", "torch.baddbmm", "torch.einsum")


@st.composite
def programs(draw: Any, seeds: st.SearchStrategy[int] | None = None) -> Program:
    """Hypothesis draws the seed, and for each part of the program whether it stays: nearly always,
    until a failure is shrunk. Drawing every choice of the program by itself would be no good: what
    hypothesis learns from one example would make the next one much like it."""
    program = generate(draw(st.integers(0, 2**24 - 1) if seeds is None else seeds))
    kept = [draw(st.integers(0, 999)) > 0 for _ in range(parts(program))]
    return keeping(program, kept)


def generate(seed: int, longest: int = 8) -> Program:
    """The program of a seed, with up to `longest` operations and a few products more."""
    source = random.Random(seed)
    wanted = source.choice([1, 2, 2, 3])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while True:  # until enough products count for the loss
            program = _generate(source, longest)
            texts = [statement.text for statement in program.statements]
            if sum(any(word in text for word in _PRODUCTS) for text in texts) >= wanted:
                return program


def _generate(source: random.Random, longest: int) -> Program:
    g = _start(source)
    _product(g)
    for _ in range(g.source.randint(1, longest)):
        g.pick(TABLE)(g)
        if g.chance(30):
            _product(g)
    inside, outside = _losses(g)
    results = _results(g)
    options: tuple[tuple[str, Any], ...] = ()
    if g.chance(15):
        options = g.pick(_OPTIONS)
    if g.random:
        options = (*options, ("evt.rng", "eager"))
    half = _coarsest(g)
    sizes = [(g.sizes["b"], g.sizes["t"])]
    if g.dynamic:
        sizes.append((sizes[0][0] + 2, sizes[0][1] + 3))
    program = Program(
        sizes=tuple(sizes),
        dtype=g.dtype,
        parameters=tuple(g.parameters),
        buffers=tuple(g.buffers),
        inputs=tuple(g.inputs),
        statements=tuple(g.statements),
        inside=inside,
        outside=outside,
        results=results,
        autocast=g.autocast,
        dynamic=g.dynamic,
        checkpointed=_checkpointed(g),
        half=half,
        options=options,
    )
    return keeping(program, [True] * parts(program))


def _product(g: Growing) -> None:
    """A product, and most of the time something that an epilogue could hold."""
    g.pick(PRODUCTS)(g)
    if g.chance(85):
        g.following = True
        for _ in range(g.pick([1, 2, 2, 3])):
            g.pick(EPILOGUES)(g)
        g.following = False


def _start(source: random.Random) -> Growing:
    kind = source.choice(["fp32"] * 6 + ["bf16", "bf16", "fp16", "autocast", "autocast"])
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(kind, "float32")
    batched = source.random() < 0.5
    dynamic = source.random() < 0.1
    rows = [3, 4, 16, 2, 5] if dynamic else [3, 4, 16, 2, 5, 1, 7, 12, 12, 16]
    b, t = source.choice(rows), source.choice(rows)
    if not dynamic and source.random() < 0.02:
        b = 0
    widths = source.sample([16, 8, 24, 32, 12, 6, 7, 1], source.randint(1, 3))
    g = Growing(
        source,
        (b, t),
        widths,
        dtype,
        batched=batched,
        autocast="bfloat16" if kind == "autocast" else None,
        dynamic=dynamic,
    )
    g.input(("b", "t", widths[0]) if batched else ("b", widths[0]))
    return g


def _losses(g: Growing) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Terms inside and outside, first of the values that nobody reads."""
    inside: list[str] = []
    outside: list[tuple[str, str]] = []
    used: set[str] = set()
    read = {name for statement in g.statements for name in statement.reads()}
    for _ in range(g.pick([1, 2, 2, 3, 4])):
        wanted = [v for v in reversed(g.values) if v.is_float and v.name not in used]
        wanted = [v for v in wanted if v.name.startswith("v")]
        if not wanted:
            break
        v = next((v for v in wanted if v.name not in read), None) or g.pick(wanted)
        used.add(v.name)
        if g.chance(35):
            outside.append((v.name, _outside(g, v)))
        else:
            inside.append(_inside(g, v))
    return tuple(inside), tuple(outside)


def _outside(g: Growing, v: Value) -> str:
    steps = f"torch.arange({v.name}.numel()).view({v.name}.shape)"
    forms = [
        f"({v.name}.float().square() * (1 + torch.cos({steps}) / 2)).sum()",
        f"({v.name}.float() * torch.cos({steps} + 1.0)).sum()",
    ]
    return g.pick(forms)


def _inside(g: Growing, v: Value) -> str:
    """A term of the loss that is sure to be finite."""
    x = v.name
    scale = g.pick(["", "0.5 * ", "3.0 * ", "g * "])
    if scale == "g * ":
        scale = f"{g.parameter(())} * "
    steps = f"torch.arange({x}.numel()).view({x}.shape)"
    forms = [
        f"{x}.float().square().sum()",
        f"({x}.float() * torch.cos({steps} + 1.0)).sum()",
        f"torch.logsumexp({x}.float().flatten(), 0)",
    ]
    if v.tensor.numel():
        forms += [f"{x}.square().mean()", f"(torch.tanh({x}) * 2 - 0.3).square().mean()"]
        if v.rank:
            target = "weights"
            forms += [
                f"F.mse_loss({x}, {{{target}}})",
                f"F.binary_cross_entropy_with_logits({x}, {{{target}}})",
                f"F.smooth_l1_loss({x}, {{{target}}} * 0.3)",
                f'F.binary_cross_entropy_with_logits({x}, {{{target}}}, reduction="sum") * 0.1',
            ]
        if v.rank == 2 and v.width > 1:
            labels = "labels"
            forms += [
                f"F.cross_entropy({x}, {{{labels}}})",
                f"F.cross_entropy({x}.float(), {{{labels}}}, label_smoothing=0.1)",
                f'F.cross_entropy({x}, {{{labels}}}, ignore_index=1, reduction="sum")',
                f"-(F.log_softmax({x}, -1) * F.one_hot({{{labels}}}, {v.width})).sum() / 4",
                f"F.nll_loss(F.log_softmax({x}.float(), -1), {{{labels}}})",
                f"(torch.logsumexp({x}, -1) - {x}.gather(1, {{{labels}}}[:, None])[:, 0]).mean()",
            ] * 2
        if v.rank == 3 and v.width > 1:
            forms += [f"F.cross_entropy({x}.flatten(0, 1), {{flat}})"] * 3
    else:
        forms = forms[:2]
    text = g.pick(forms)
    if "{weights}" in text:
        text = text.replace("{weights}", g.input(v.dims, "weights"))
        if v.tensor.dtype is not g.space[g.inputs[-1].name].dtype:
            text = text.replace(f"({x},", f"({x}.float(),").replace(
                g.inputs[-1].name, f"{g.inputs[-1].name}.float()"
            )
    if "{labels}" in text:
        text = text.replace("{labels}", g.input(v.dims[:1], str(v.width)))
    if "{flat}" in text:
        text = text.replace("{flat}", g.input((f"({v.dims[0]} * {v.dims[1]})",), str(v.width)))
    return scale + text


def _results(g: Growing) -> tuple[str, ...]:
    """Values returned besides the loss. Masks of half-precision values may differ by rounding."""
    exact = [v for v in g.values if v.name.startswith("v")]
    if _coarsest(g) is not None:
        exact = [v for v in exact if v.is_float]
    if not exact or not g.chance(40):
        return ()
    count = g.pick([1, 1, 2])
    return tuple(g.pick(exact).name for _ in range(count))


def _coarsest(g: Growing) -> str | None:
    if g.autocast is not None:
        return g.autocast
    text = " ".join([g.dtype, *(s.text for s in g.statements)])
    return next((d for d in ("bfloat16", "float16") if d in text), None)


def _checkpointed(g: Growing) -> tuple[int, int] | None:
    """Some statements in a row that read something and change nothing in place."""
    if not g.chance(15) or len(g.statements) < 2:
        return None
    first = g.source.randint(0, len(g.statements) - 2)
    last = g.source.randint(first, min(first + 4, len(g.statements) - 1))
    block = g.statements[first : last + 1]
    if any(s.in_place for s in block):
        return None
    bound = {n for s in block for n in s.binds()}
    changed = {n for s in g.statements if s.in_place for n in names_in(s.text)}
    read = {n for s in block for n in s.reads()} - bound
    return (first, last) if read and not (bound | read) & changed else None
