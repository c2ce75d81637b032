"""Statements around matrix products: alone, in pairs, in attention."""

from __future__ import annotations

from .growing import Growing, is_matrix, is_wide


def linear(g: Growing) -> object:
    v = g.value(is_wide)
    if v is None:
        return None
    n = g.pick(g.widths)
    weight = g.parameter((n, v.width))
    bias = f", {g.parameter((n,))}" if g.chance(60) else ""
    return g.add(f"F.linear({g.as_parameters(v)}, {weight}{bias})", (*v.dims[:-1], n), fresh=True)


def matmul(g: Growing) -> object:
    v = g.value(is_wide)
    if v is None:
        return None
    n = g.pick(g.widths)
    transposed = g.chance(40)
    weight = g.parameter((n, v.width) if transposed else (v.width, n))
    return g.add(
        f"{g.as_parameters(v)} @ {weight}{'.t()' if transposed else ''}",
        (*v.dims[:-1], n),
        fresh=True,
    )


def addmm(g: Growing) -> object:
    v = g.value(lambda v: is_matrix(v) and v.width > 0)
    if v is None:
        return None
    n = g.pick(g.widths)
    dims = (v.dims[0], n)
    same = g.value(lambda u: u.dims == dims and u.tensor.dtype == v.tensor.dtype)
    bias = same.name if same is not None and g.chance(50) else g.parameter((n,))
    factors = g.pick(["", ", beta=0.5, alpha=2.0", ", alpha=-1.5", ", beta=0.0", ", beta=2.0"])
    weight = g.parameter((v.width, n))
    return g.add(f"torch.addmm({bias}, {g.as_parameters(v)}, {weight}{factors})", dims, fresh=True)


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
    v = g.value(is_wide)
    if v is None or v.rank > 3:
        return None
    n = g.pick(g.widths)
    letters = "abc"[: v.rank - 1]
    if g.chance(30):
        weight, right = g.parameter((n, v.width)), "nk"
    else:
        weight, right = g.parameter((v.width, n)), "kn"
    return g.add(
        f'torch.einsum("{letters}k,{right}->{letters}n", {g.as_parameters(v)}, {weight})',
        (*v.dims[:-1], n),
    )


def over_rows(g: Growing) -> object:
    """A product that contracts the rows, as a weight gradient does."""
    v = g.value(is_matrix)
    if v is None:
        return None
    u = g.value(
        lambda u: is_matrix(u) and u.dims[0] == v.dims[0] and u.tensor.dtype == v.tensor.dtype
    )
    assert u is not None
    rows = max(g.size(v.dims[0]), 1)
    return g.add(f"{v.name}.t() @ {u.name} / {rows**0.5:.3f}", (v.dims[1], u.dims[1]))


def gated(g: Growing) -> object:
    """Two linears of one value, one of them through an activation."""
    v = g.value(is_wide)
    if v is None:
        return None
    n = g.pick(g.widths)
    activation = g.pick(["F.silu({})", "F.gelu({})", "torch.sigmoid({})", "torch.relu({})"])
    name = g.as_parameters(v)
    gate = g.add(f"F.linear({name}, {g.parameter((n, v.width))})", (*v.dims[:-1], n))
    up = g.add(f"F.linear({name}, {g.parameter((n, v.width))})", (*v.dims[:-1], n))
    if gate is None or up is None:
        return None
    return g.add(f"{activation.format(gate.name)} * {up.name}", gate.dims)


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
