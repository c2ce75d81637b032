"""Elementwise statements: activations, gates, operands that broadcast, conditions, masks."""

from __future__ import annotations

import torch

from .growing import Growing, Value, is_wide

ACTIVATIONS = (
    "F.gelu({})", 'F.gelu({}, approximate="tanh")', "F.silu({})", "torch.tanh({})",
    "torch.sigmoid({})", "F.relu({})", "torch.exp({} * 0.3)", "torch.erf({})",
)  # fmt: skip
SMOOTH = (
    "F.gelu({})", 'F.gelu({}, approximate="tanh")', "F.silu({})", "torch.tanh({})",
    "torch.sigmoid({})", "torch.erf({})", "F.softplus({})", "F.mish({})", "torch.exp({} * 0.3)",
    "torch.exp(-{0} * {0})", "torch.log({0} * {0} + 0.5)", "torch.sqrt({0} * {0} + 0.5)",
    "torch.rsqrt({0} * {0} + 0.5)", "1 / ({0} * {0} + 1)", "{} ** 2", "({} * 0.5) ** 3", "-{}",
    "{} * 0.7", "{} + 1", "1 - {}", "{} / 3", "torch.sin({})", "F.logsigmoid({})",
    "torch.log1p({0} * {0})", "({0} * {0} + 0.5) ** 0.5", "({0} * {0} + 0.5) ** -0.5",
    "torch.expm1({} * 0.3)", "{}.detach() + {}",
)  # fmt: skip
KINKED = (
    "F.relu({})", "F.leaky_relu({}, 0.1)", "F.elu({})", "F.hardswish({})", "F.relu6({})",
    "{}.abs()", "{}.clamp(-0.8, 0.9)", "{}.clamp(min=-0.5)", "torch.relu({}) ** 2",
)  # fmt: skip


OPERANDS = (
    "same", "number", "row", "column", "table", "batch", "scalar", "mask", "reduced", "seen",
)  # fmt: skip


def unary(g: Growing) -> object:
    v = g.value()
    if v is None:
        return None
    forms = g.pick([ACTIVATIONS, ACTIVATIONS, SMOOTH, SMOOTH, KINKED])
    return g.add(g.pick(forms).format(v.name, v.name), v.dims)


def operand(g: Growing, v: Value) -> str:
    """Something that broadcasts to `v`."""
    kinds = [
        "same",
        "number",
        "row",
        "column",
        "table",
        "batch",
        "scalar",
        "mask",
        "reduced",
        "seen",
    ]
    kind = g.pick(kinds)
    if kind == "same":
        u = g.value(lambda u: u.dims == v.dims and u.is_float)
        if u is not None:
            return u.name
    if kind == "reduced":
        u = g.value(
            lambda u: (
                u.is_float
                and 0 < u.rank <= v.rank
                and u.dims != v.dims
                and all(d in (1, e) for d, e in zip(u.dims, v.dims[v.rank - u.rank :], strict=True))
            )
        )
        if u is not None:
            return u.name
    if kind == "scalar":
        return g.parameter(()) if g.chance(50) else f"{g.parameter((g.widths[0],))}[0]"
    if kind == "row" and v.width:
        return g.parameter((v.width,))
    if kind == "mask" and v.rank:
        dims = tuple(1 if g.chance(30) else d for d in v.dims)
        return g.input(dims, "mask")
    if kind == "seen" and v.width and not g.dynamic:
        return f"torch.arange({v.width})"
    if kind == "column" and v.rank >= 2:
        return g.input((*v.dims[:-1], 1))
    if kind == "table" and v.rank == 3:
        return g.input(v.dims[1:])
    if kind == "batch" and v.rank == 3:
        if g.chance(40):
            return f"{g.input((v.dims[0], v.dims[2]))}[:, None]"
        return g.input((v.dims[0], 1, v.dims[2] if g.chance(60) else 1))
    return repr(g.number())


def binary(g: Growing) -> object:
    v = g.value()
    if v is None:
        return None
    other = operand(g, v)
    form = g.pick(
        [
            "{v} + {o}", "{v} * {o}", "{o} * {v} * 0.5", "{v} - {o}", "{o} - {v}",
            "{v} / (1 + {o} * {o})", "torch.add({v}, {o}, alpha=0.5)",
            "torch.sub({v}, {o}, alpha=-2)", "torch.addcmul({v}, {v}, {v}, value=0.3) + {o}",
            "torch.lerp({v}, {v} + {o}, 0.3)", "torch.hypot({v}, {o} + 2.5)",
        ]
    )  # fmt: skip
    if "mask" not in other and "arange" in other:
        other = f"({other} * 0.1)" if g.chance(50) else f"({other} % 3)"
    return g.add(
        form.format(v=v.name, o=other), v.dims, fresh="lerp" not in form and "hypot" not in form
    )


def choice(g: Growing) -> object:
    """where, masked_fill, comparisons, maxima of two."""
    v = g.value()
    if v is None or not v.rank:
        return None
    u = g.value(lambda u: u.dims == v.dims and u.is_float)
    assert u is not None
    mask = g.value(lambda m: m.tensor.dtype == torch.bool and m.dims == v.dims)
    if mask is None or g.chance(30):
        dims = tuple(1 if g.chance(25) else d for d in v.dims)
        condition = g.input(dims, "mask")
    else:
        condition = mask.name
    forms = [
        f"torch.where({condition}, {v.name}, {u.name} * 0.5)",
        f"torch.where({condition}, {v.name}, {g.number()})",
        f"torch.where({condition}, {g.number()}, {v.name})",
        f"{v.name}.masked_fill({condition}, {g.number()})",
        f"torch.where(~{condition}, {v.name}, {g.parameter(())})",
        f"{v.name} * {condition}",
        f"{v.name} * ({condition} & {condition}).to({v.name}.dtype) * 1.25",
    ]
    if not v.is_half:
        forms += [
            f"torch.where({v.name} > {u.name} * 0.5 + 0.1, {v.name}, {u.name} * 0.2)",
            f"torch.maximum({v.name}, {u.name} * 0.5 + 0.1)",
            f"torch.minimum({v.name}, {g.number()} - {u.name})",
            f"{v.name} * ({u.name} < 0.3)",
            f"{v.name} * ({u.name} * 2).int()",
            f"{v.name} * (({u.name} > -0.2) & ({v.name} <= 0.7)).float()",
            f"torch.where(torch.logical_or({u.name} > 0.4, {condition}), {v.name}, 0.2)",
        ]
    return g.add(g.pick(forms), v.dims)


def comparison(g: Growing) -> object:
    """A mask of a computed value."""
    v = g.value(lambda v: v.is_float and not v.is_half and v.rank > 0)
    if v is None:
        return None
    return g.add(f"{v.name} {g.pick(['>', '<=', '<', '>='])} {g.pick([0.1, -0.3])}", v.dims)


def dropout(g: Growing) -> object:
    v = g.value()
    if v is None or g.dynamic:
        return None
    g.random = True
    return g.add(f"F.dropout({v.name}, {g.pick([0.1, 0.3, 0.5])})", v.dims)


def halves(g: Growing) -> object:
    """A value in two halves along its columns, one gating the other."""
    v = g.value(lambda v: is_wide(v) and v.width % 2 == 0)
    if v is None:
        return None
    half = (*v.dims[:-1], v.width // 2)
    form = g.pick(["chunk", "split", "glu", "slices"])
    if form == "glu":
        return g.add(f"F.glu({v.name}, -1)", half)
    text = {
        "chunk": f"{v.name}.chunk(2, -1)",
        "split": f"{v.name}.split({v.width // 2}, -1)",
        "slices": f"{v.name}[..., : {v.width // 2}], {v.name}[..., {v.width // 2} :]",
    }[form]
    found = g.add_several(text, [half, half])
    if found is None:
        return None
    activation = g.pick(["F.silu({})", "F.gelu({})", "torch.sigmoid({})", "torch.tanh({})"])
    return g.add(f"{activation.format(found[0].name)} * {found[1].name}", half)
