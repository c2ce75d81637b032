"""The table of statements that a random program may have; norms, reductions, shapes, in place.

An operation adds statements to the program, or none where there is nothing to apply it to.
"""

from __future__ import annotations

from collections.abc import Callable

from .elementwise import binary, choice, comparison, dropout, halves, unary
from .growing import Growing, is_wide
from .products import (
    addmm,
    attention,
    einsum,
    gated,
    linear,
    matmul,
    mixing,
    over_rows,
    scores,
)
from .program import Dim

Operation = Callable[[Growing], object]


def norm(g: Growing) -> object:
    v = g.value(lambda v: is_wide(v) and v.width >= 4)
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
    v = g.value(is_wide)
    if v is None:
        return None
    u = g.value(lambda u: is_wide(u) and u.dims == v.dims and u.tensor.dtype == v.tensor.dtype)
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
EPILOGUES = [unary, unary, unary, binary, binary, choice, reduction, halves]
"""What follows a product most of the time."""
