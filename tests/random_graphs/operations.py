"""The statements that a random program may have, each drawn with its operands.

An operation adds statements to the program, or none where there is nothing to apply it to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .growing import Growing, Value
from .program import Dim

Operation = Callable[[Growing], object]

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


def _two(value: Value) -> bool:
    return value.is_float and value.rank == 2


def _wide(value: Value) -> bool:
    return value.is_float and value.rank >= 2 and value.width > 0


def _narrower(g: Growing, value: Value) -> str:
    """A value's name, cast to the dtype of parameters where it has another."""
    if g.autocast is None and str(value.tensor.dtype) != f"torch.{g.dtype}":
        return f"{value.name}.to(torch.{g.dtype})"
    return value.name


# products


def linear(g: Growing) -> object:
    v = g.value(_wide)
    if v is None:
        return None
    n = g.pick(g.widths)
    weight = g.parameter((n, v.width))
    bias = f", {g.parameter((n,))}" if g.chance(60) else ""
    return g.add(f"F.linear({_narrower(g, v)}, {weight}{bias})", (*v.dims[:-1], n), fresh=True)


def matmul(g: Growing) -> object:
    v = g.value(_wide)
    if v is None:
        return None
    n = g.pick(g.widths)
    transposed = g.chance(40)
    weight = g.parameter((n, v.width) if transposed else (v.width, n))
    return g.add(
        f"{_narrower(g, v)} @ {weight}{'.t()' if transposed else ''}", (*v.dims[:-1], n), fresh=True
    )


def addmm(g: Growing) -> object:
    v = g.value(lambda v: _two(v) and v.width > 0)
    if v is None:
        return None
    n = g.pick(g.widths)
    dims = (v.dims[0], n)
    same = g.value(lambda u: u.dims == dims and u.tensor.dtype == v.tensor.dtype)
    bias = same.name if same is not None and g.chance(50) else g.parameter((n,))
    factors = g.pick(["", ", beta=0.5, alpha=2.0", ", alpha=-1.5", ", beta=0.0", ", beta=2.0"])
    weight = g.parameter((v.width, n))
    return g.add(f"torch.addmm({bias}, {_narrower(g, v)}, {weight}{factors})", dims, fresh=True)


def scores(g: Growing) -> object:
    """A batched product of two values over their last dimension, or over their rows."""
    v = g.value(lambda v: v.is_float and v.rank == 3)
    if v is None:
        return None
    u = g.value(
        lambda u: (
            u.rank == 3
            and (u.dims[0], u.dims[2]) == (v.dims[0], v.dims[2])
            and u.tensor.dtype == v.tensor.dtype
        )
    )
    assert u is not None
    b, t, k = v.dims
    form = g.pick(["matmul", "bmm", "einsum", "rows", "baddbmm"])
    if form == "rows":
        if u.dims[1] != t:
            return None
        return g.add(f"{v.name}.transpose(1, 2) @ {u.name} / {g.size(t)}", (b, k, k))
    factor = max(g.size(k), 1) ** -0.5
    text = {
        "matmul": f"{v.name} @ {u.name}.transpose(-1, -2) * {factor:.4f}",
        "bmm": f"torch.bmm({v.name}, {u.name}.transpose(1, 2)) * {factor:.4f}",
        "einsum": f'torch.einsum("bik,bjk->bij", {v.name}, {u.name} * {factor:.4f})',
        "baddbmm": (
            f"torch.baddbmm({v.name}[..., :1], {v.name}, {u.name}.transpose(1, 2), "
            f"beta={g.number()}, alpha={factor:.4f})"
        ),
    }[form]
    return g.add(text, (b, t, u.dims[1]))


def mixing(g: Growing) -> object:
    """(b, i, j) @ (b, j, k) of two values."""
    v = g.value(lambda v: v.is_float and v.rank == 3)
    if v is None:
        return None
    u = g.value(
        lambda u: (
            u.rank == 3
            and u.dims[:2] == (v.dims[0], v.dims[2])
            and u.tensor.dtype == v.tensor.dtype
        )
    )
    if u is None:
        return None
    return g.add(f"{v.name} @ {u.name}", (*v.dims[:2], u.dims[2]))


def einsum(g: Growing) -> object:
    v = g.value(_wide)
    if v is None or v.rank > 3:
        return None
    n = g.pick(g.widths)
    letters = "abc"[: v.rank - 1]
    if g.chance(30):
        weight, right = g.parameter((n, v.width)), "nk"
    else:
        weight, right = g.parameter((v.width, n)), "kn"
    return g.add(
        f'torch.einsum("{letters}k,{right}->{letters}n", {_narrower(g, v)}, {weight})',
        (*v.dims[:-1], n),
    )


def over_rows(g: Growing) -> object:
    """A product that contracts the rows, as a weight gradient does."""
    v = g.value(_two)
    if v is None:
        return None
    u = g.value(lambda u: _two(u) and u.dims[0] == v.dims[0] and u.tensor.dtype == v.tensor.dtype)
    assert u is not None
    rows = max(g.size(v.dims[0]), 1)
    return g.add(f"{v.name}.t() @ {u.name} / {rows**0.5:.3f}", (v.dims[1], u.dims[1]))


# elementwise


def unary(g: Growing) -> object:
    v = g.value()
    if v is None:
        return None
    return g.add(g.pick(KINKED if g.chance(25) else SMOOTH).format(v.name, v.name), v.dims)


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


# gates


def gated(g: Growing) -> object:
    """Two linears of one value, one of them through an activation."""
    v = g.value(_wide)
    if v is None:
        return None
    n = g.pick(g.widths)
    activation = g.pick(["F.silu({})", "F.gelu({})", "torch.sigmoid({})", "torch.relu({})"])
    name = _narrower(g, v)
    gate = g.add(f"F.linear({name}, {g.parameter((n, v.width))})", (*v.dims[:-1], n))
    up = g.add(f"F.linear({name}, {g.parameter((n, v.width))})", (*v.dims[:-1], n))
    if gate is None or up is None:
        return None
    return g.add(f"{activation.format(gate.name)} * {up.name}", gate.dims)


def halves(g: Growing) -> object:
    """A value in two halves along its columns, one gating the other."""
    v = g.value(lambda v: _wide(v) and v.width % 2 == 0)
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


# norms and reductions


def norm(g: Growing) -> object:
    v = g.value(lambda v: _wide(v) and v.width >= 4)
    if v is None:
        return None
    n, x = v.width, v.name
    same = str(v.tensor.dtype) == f"torch.{g.dtype}"
    forms = [
        f"F.layer_norm({x}, ({n},))",
        f"F.rms_norm({x}, ({n},), eps=1e-3)",
        f"{x} * torch.rsqrt({x}.float().square().mean(-1, keepdim=True) + 1e-3).to({x}.dtype)",
        f"({x} - {x}.mean(-1, keepdim=True)) / ({x}.var(-1, keepdim=True) + 1e-2).sqrt()",
    ]
    if same:
        forms += [
            f"F.layer_norm({x}, ({n},), {g.parameter((n,))}, {g.parameter((n,))})",
            f"F.rms_norm({x}, ({n},), {g.parameter((n,))}, eps=1e-3)",
            f"F.layer_norm({x}, ({n},), {g.parameter((n,))})",
        ]
    return g.add(g.pick(forms), v.dims)


def softmax(g: Growing) -> object:
    v = g.value(lambda v: v.is_float and v.rank >= 1)
    if v is None:
        return None
    dim = -1 if g.chance(75) else g.pick(list(range(-v.rank, 0)))
    forms = ["F.softmax({}, {})", "F.log_softmax({}, {})", "F.softmax({} * 0.5, {}) * 4"]
    return g.add(g.pick(forms).format(v.name, dim), v.dims)


def reduction(g: Growing) -> object:
    v = g.value(lambda v: v.is_float and v.rank >= 1)
    if v is None:
        return None
    kind = g.pick(["one", "one", "one", "all", "others", "none"])
    if kind == "one":
        dims = [g.pick(list(range(v.rank - 1, -1, -1)))]
    elif kind == "others":  # all but one: the gradient of a row
        dims = [d for d in range(v.rank) if d != v.rank - 1] or [0]
    else:
        dims = list(range(v.rank))
    keep = g.chance(50)
    count = 1
    for d in dims:
        count *= max(g.size(v.dims[d]), 1)
    left: tuple[Dim, ...] = tuple(
        1 if d in dims else v.dims[d] for d in range(v.rank) if keep or d not in dims
    )
    which = f"({', '.join(map(str, dims))},), keepdim={keep}"
    if kind == "none":
        left, which = (), ""
    forms = [f"{v.name}.sum({which}) * {count**-0.5:.4f}"] * 3 + [f"{v.name}.mean({which})"]
    if kind != "none":
        forms += [
            f"{v.name}.amax({which})", f"{v.name}.amin({which})",
            f"torch.logsumexp({v.name}, {which})", f"{v.name}.var({which}, correction=0)",
            f"({v.name} * {v.name} + 0.1).sum({which}).sqrt() * {count**-0.5:.4f}",
            f"{v.name}.float().sum({which}) * {count**-0.5:.4f}",
            f"({v.name} * {v.name}).sum({which}) * {1 / count:.4f}",
        ]  # fmt: skip
    return g.add(g.pick(forms), left)


# shapes


def reshaped(g: Growing) -> object:
    v = g.value(lambda v: v.is_float and v.rank >= 2)
    if v is None:
        return None
    x, dims = v.name, v.dims
    *front, m, n = dims
    forms: list[tuple[str, tuple[Dim, ...]]] = [
        (f"{x}.transpose(-1, -2)", (*front, n, m)),
        (f"{x}.transpose(-1, -2).contiguous()", (*front, n, m)),
        (f"{x}.unsqueeze(-2).squeeze(-2)", dims),
        (f"torch.cat(({x}, {x} * 0.5), 0)", (f"(2 * {dims[0]})", *dims[1:])),
        (f"{x}.flip(-1)", dims),
        (f"{x}.roll(1, 0)", dims),
    ]
    if v.width:
        forms += [
            (f"{x}[..., : {(v.width + 1) // 2}]", (*dims[:-1], (v.width + 1) // 2)),
            (f"{x}[..., ::2]", (*dims[:-1], (v.width + 1) // 2)),
            (f"torch.cat(({x}, torch.tanh({x})), -1)", (*dims[:-1], 2 * v.width)),
            (f"F.pad({x}, (0, 1))", (*dims[:-1], v.width + 1)),
        ]
    if g.size(dims[0]) > 2 and not g.dynamic:
        forms += [
            (f"{x}[1:]", (f"({dims[0]} - 1)", *dims[1:])),
            (f"{x}[:1].expand({', '.join(map(str, dims))})", dims),
        ]
    if v.rank == 3:
        forms += [
            (f"{x}.reshape({dims[0]} * {dims[1]}, {n})", (f"({dims[0]} * {dims[1]})", n)),
            (f"{x}.permute(1, 0, 2)", (dims[1], dims[0], n)),
            (f"{x}.select(1, 0)", (dims[0], n)),
            (f"{x}.flatten(1)", (dims[0], f"({dims[1]} * {n})")),
        ]
        if v.width % 2 == 0 and v.width:
            heads = f"{x}.reshape({dims[0]}, {dims[1]}, 2, {v.width // 2}).transpose(1, 2)"
            forms.append((heads, (dims[0], 2, dims[1], v.width // 2)))
    if v.rank == 2 and dims[0] == "(b * t)":
        forms += [(f"{x}.reshape(b, t, {n})", ("b", "t", n))] * 3
    if v.rank == 4:
        forms.append((f"{x}.transpose(1, 2).flatten(2)", (dims[0], dims[2], f"({dims[1]} * {n})")))
        forms.append((f"{x} @ {x}.transpose(-1, -2) * 0.3", (*dims[:2], m, m)))
    text, left = g.pick(forms)
    left = tuple(_simple(g, d) for d in left)
    return g.add(text, left, fresh=False)


def _simple(g: Growing, dim: Dim) -> Dim:
    """An expression without sizes as the int that it is."""
    if isinstance(dim, str) and "b" not in dim and "t" not in dim:
        return g.size(dim)
    return dim


def joined(g: Growing) -> object:
    """Two values of one shape, side by side."""
    v = g.value(_wide)
    if v is None:
        return None
    u = g.value(lambda u: _wide(u) and u.dims == v.dims and u.tensor.dtype == v.tensor.dtype)
    assert u is not None
    form = g.pick(["columns", "stack"])
    if form == "columns":
        return g.add(f"torch.cat(({v.name}, {u.name}), -1)", (*v.dims[:-1], 2 * v.width))
    return g.add(f"torch.stack(({v.name}, {u.name})).sum(0) * 0.7", v.dims)


def cast(g: Growing) -> object:
    v = g.value()
    if v is None:
        return None
    kinds = ["bfloat16", "float16", "float32"] if g.dtype != "float32" or g.chance(40) else []
    if not kinds:
        return g.add(f"{v.name}.double() * 0.5", v.dims) if g.chance(30) else None
    return g.add(f"{v.name}.to(torch.{g.pick(kinds)})", v.dims)


def attention(g: Growing) -> object:
    v = g.value(lambda v: v.is_float and v.rank == 3 and v.width >= 2)
    if v is None:
        return None
    same = g.value(lambda u: u.dims == v.dims and u.tensor.dtype == v.tensor.dtype)
    assert same is not None
    if g.chance(30):
        text = f"F.scaled_dot_product_attention({v.name}, {same.name}, {v.name})"
    else:
        weights = f"F.softmax({v.name} @ {same.name}.transpose(1, 2) * 0.3, -1)"
        text = f"{weights} @ {same.name}"
    return g.add(text, v.dims)


# in place


def in_place(g: Growing) -> object:
    v = g.value(lambda v: v.fresh and v.is_float and v.rank > 0)
    if v is None:
        return None
    u = g.value(lambda u: u.dims == v.dims and u.is_float and u is not v)
    forms = [
        f"{v.name}.mul_({g.number()})", f"{v.name}.add_({g.number()})",
        f"{v.name}.relu_()", f"{v.name}.sigmoid_()", f"{v.name}[:1].mul_(0.5)",
    ]  # fmt: skip
    if u is not None:
        forms += [f"{v.name}.add_({u.name}, alpha=0.5)", f"{v.name}.mul_(torch.tanh({u.name}))"]
        forms += [f"{v.name}[..., :1] = {u.name}[..., :1]"]
    if v.width:
        forms.append(f"{v.name}.add_({g.parameter((v.width,))})")
    text = g.pick(forms)
    taken = g.change(v, text)
    v.fresh = "relu_" not in text and "sigmoid_" not in text  # they keep what they wrote
    return taken


def statistics(g: Growing) -> object:
    """A running mean in a buffer, as batch norm keeps it."""
    v = g.value(lambda v: v.is_float and v.rank >= 2 and v.width > 0)
    if v is None or g.size(v.dims[0]) == 0:
        return None
    buffer = g.buffer((v.width,), f"torch.randn({v.width})")
    axes = tuple(range(v.rank - 1))
    mean = f"{v.name}.detach().mean({axes}).to({buffer}.dtype)"
    if g.chance(50):
        g.note(f"{buffer}.mul_(0.9).add_({mean}, alpha=0.1)")
        return None
    g.note(f"{buffer}.lerp_({mean}, 0.1)")
    return g.add(f"{v.name} - {buffer}", v.dims) if g.chance(50) else None


WEIGHTED: tuple[tuple[Operation, int], ...] = (
    (unary, 16), (linear, 10), (binary, 14), (reduction, 10), (matmul, 4), (choice, 6),
    (gated, 3), (halves, 3), (norm, 5), (softmax, 3), (reshaped, 7), (addmm, 3), (scores, 4),
    (mixing, 3), (einsum, 3), (over_rows, 2), (cast, 4), (joined, 2), (in_place, 4),
    (statistics, 1), (comparison, 1), (dropout, 2), (attention, 1),
)  # fmt: skip
TABLE = [operation for operation, weight in WEIGHTED for _ in range(weight)]
PRODUCTS = [linear, matmul, addmm, scores, einsum, linear]
