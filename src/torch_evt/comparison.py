"""When is a tensor right? The error standard for tensors that one already has.

    e = ||t - t64|| / ||t64||        e_ours <= 1.5 max(e_eager, u)        (L2)
                                     e_ours <= 3   max(e_eager, u)        (largest absolute value)

t64: the same in fp64; e_eager: the error of a plain computation in the step's own dtype. Each
tensor is held against its own e_eager, so an error that is small beside the largest gradient still
fails. `torch_evt.testing` applies it to training steps, `runtime.check` to single regions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UNIT: Mapping[torch.dtype, float] = {
    torch.float32: 1e-6,
    torch.bfloat16: 2e-3,
    torch.float16: 5e-4,
}
"""u: the relative error that a step of this dtype is always allowed, however exact eager was."""

L2_FACTOR = 1.5
MAX_ABS_FACTOR = 3.0
VANISHING_FACTOR = 3.0
VANISHING = 1e-9
"""A tensor this small beside the largest one of its kind is rounding noise around zero."""


@dataclass(frozen=True)
class TensorError:
    """Relative errors of a tensor: of its L2 norm, and of its largest absolute value."""

    l2: float
    max_abs: float

    def __str__(self) -> str:
        return f"{self.l2:.2e} (max {self.max_abs:.2e})"


@dataclass(frozen=True)
class TensorComparison:
    """The verdict on one tensor.

    rule: what decided: "relative" (the standard above), "zero" (exactly zero in fp64, so it must
    be exactly zero), "vanishing" (zero but for rounding; errors are then norms, not relative),
    "integer", "missing", "unexpected", "shape", "dtype", "non-finite". limit: the largest errors
    that would have passed. detail: a sentence where the numbers do not say it all.
    """

    name: str
    passed: bool
    rule: str
    ours: TensorError
    eager: TensorError
    limit: TensorError
    detail: str = ""
    seed: int | None = None

    @property
    def share(self) -> float:
        """The error as a share of what is allowed: up to 1 passes; inf where a rule was broken."""
        shares = (
            _share(self.ours.l2, self.limit.l2),
            _share(self.ours.max_abs, self.limit.max_abs),
        )
        return max(shares) if self.passed else max(1.0, *shares)

    @property
    def ratio(self) -> float:
        """e_ours / max(e_eager, u) in the L2 norm: 1 is as exact as eager, 1.5 the most allowed."""
        return L2_FACTOR * _share(self.ours.l2, self.limit.l2)

    def __str__(self) -> str:
        where = self.name if self.seed is None else f"{self.name} (seed {self.seed})"
        text = f"{where}: ours {self.ours}, eager {self.eager}, limit {self.limit} [{self.rule}]"
        return f"{text}: {self.detail}" if self.detail else text


@dataclass(frozen=True)
class Comparison:
    """The verdict on all tensors of one or several steps."""

    dtype: torch.dtype
    tensors: tuple[TensorComparison, ...]

    @property
    def passed(self) -> bool:
        """True when there was something to compare and all of it passed."""
        return bool(self.tensors) and all(tensor.passed for tensor in self.tensors)

    @property
    def worst(self) -> TensorComparison:
        """The tensor nearest to its limit or furthest beyond it, a failed one before any passed.

        Raises ValueError when there are no tensors.
        """
        return max(self.tensors, key=lambda tensor: (not tensor.passed, tensor.share))

    def table(self) -> str:
        """All tensors as text, worst first: verdict, errors of ours and of eager, limit, rule."""
        rows = [("", "tensor", "ours", "eager", "limit", "rule")]
        for tensor in sorted(self.tensors, key=lambda t: (t.passed, -t.share)):
            seed = "" if tensor.seed is None else f" (seed {tensor.seed})"
            rule = f"{tensor.rule}: {tensor.detail}" if tensor.detail else tensor.rule
            errors = (str(tensor.ours), str(tensor.eager), str(tensor.limit))
            rows.append(("ok" if tensor.passed else "FAIL", tensor.name + seed, *errors, rule))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = (
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]])
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)

    def raise_if_failed(self) -> None:
        """Raise AssertionError naming every failed tensor with its errors and its limit."""
        if self.passed:
            return
        failed = [str(tensor) for tensor in self.tensors if not tensor.passed]
        if not failed:
            raise AssertionError("there were no tensors to compare")
        raise AssertionError(
            f"{len(failed)} of {len(self.tensors)} tensors fail the error standard "
            f"({self.dtype}):\n  " + "\n  ".join(failed)
        )


def tensor_error(t: Tensor, t64: Tensor) -> TensorError:
    """The relative errors of `t` beside the fp64 tensor `t64` of the same shape.

    Where t64 is not finite, t must hold the same value (NaN for NaN) and the place counts for
    nothing; anything else not finite in t makes both errors inf. An error beside an all-zero t64 is
    0 or inf. Raises ValueError when the shapes differ.
    """
    if t.shape != t64.shape:
        raise ValueError(f"shapes differ: {tuple(t.shape)} and {tuple(t64.shape)}")
    t, t64 = _real(t).to(t64.device, torch.float64), _real(t64).to(torch.float64)
    if not _same_non_finite(t, t64, t64).all():
        return TensorError(math.inf, math.inf)
    return _relative(t, t64, t64.isfinite())


def compare(
    ours: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    seed: int | None = None,
    units: Mapping[str, float] | None = None,
) -> Comparison:
    """Judge every tensor of a step by the error standard.

    ours, eager, exact: name -> tensor of the compiled, the eager and the fp64 eager run. A name is
    "kind:rest" as `run_step` spells it ("grad:linear.weight"); a tensor counts as vanishing beside
    the largest norm of its kind. dtype: the dtype the step computed in, which sets u. seed: only
    noted in the result. units: u of the tensors that do not have the dtype's. Raises ValueError
    when dtype has no u, or eager and exact differ in names.
    """
    if dtype not in UNIT:
        raise ValueError(f"no error standard for {dtype}; one of {', '.join(map(str, UNIT))}")
    if eager.keys() != exact.keys():
        raise ValueError(f"eager and fp64 tensors differ: {sorted(eager.keys() ^ exact.keys())}")
    scales: dict[str, float] = {}
    for name, t64 in exact.items():
        if _is_real(t64):
            scales[_kind(name)] = max(scales.get(_kind(name), 0.0), _norm(t64))
    tensors = []
    for name, t64 in exact.items():
        if name in ours:
            scale = scales.get(_kind(name), 0.0)
            unit = (units or {}).get(name, UNIT[dtype])
            verdict = _judge(name, ours[name], eager[name], t64, unit, scale)
        else:
            verdict = _broken(name, "missing", "eager has it, the compiled step does not")
        tensors.append(replace(verdict, seed=seed))
    for name, t in ours.items():
        # AOTAutograd hands out zeros where eager leaves a gradient None: no other value is allowed
        if name not in exact and not (_kind(name) == "grad" and _is_zero(t)):
            verdict = _broken(name, "unexpected", "the compiled step has it, eager does not")
            tensors.append(replace(verdict, seed=seed))
    return Comparison(dtype, tuple(tensors))


def _judge(
    name: str, ours: Tensor, eager: Tensor, exact: Tensor, unit: float, scale: float
) -> TensorComparison:
    """Apply the rules in order. scale: the largest fp64 norm among tensors of this kind."""
    if ours.shape != exact.shape or eager.shape != exact.shape:
        shapes = f"{tuple(ours.shape)}, eager {tuple(eager.shape)}, fp64 {tuple(exact.shape)}"
        return _broken(name, "shape", f"ours {shapes}")
    if ours.dtype != eager.dtype:
        return _broken(name, "dtype", f"ours {ours.dtype}, eager {eager.dtype}")
    if not _is_real(exact):
        wrong = int(((ours != eager) & (ours.to(exact) != exact)).sum())
        if wrong:
            return _broken(name, "integer", f"{wrong} of {exact.numel()} differ from eager's")
        return _passed(name, "integer")

    t64 = _real(exact).to(torch.float64)
    t = _real(ours).to(t64.device, torch.float64)
    t_eager = _real(eager).to(t64.device, torch.float64)
    # where eager itself overflowed its dtype, the same inf is as good as can be asked for
    allowed = _same_non_finite(t, t64, t_eager)
    if not allowed.all():
        wrong = int((~allowed).sum())
        return _broken(name, "non-finite", f"{wrong} of {t.numel()} NaN or inf unlike fp64's")
    counted = t64.isfinite() & t.isfinite()
    eager_counted = t64.isfinite() & t_eager.isfinite()

    if not t64.any():
        if t.any():
            size = TensorError(_norm(t), float(t.abs().max()))
            zero = TensorError(0.0, 0.0)
            detail = "is exactly zero in fp64; the errors are norms"
            return TensorComparison(name, False, "zero", size, _size(t_eager), zero, detail)
        return _passed(name, "zero")
    if _norm(t64) < VANISHING * scale:
        size, eager_size = _size(t[counted]), _size(t_eager[eager_counted])
        bound = VANISHING_FACTOR * max(eager_size.l2, unit * scale)
        limit = TensorError(bound, math.inf)
        detail = f"||t64|| is {_norm(t64):.1e} beside {scale:.1e}; the errors are norms"
        passed = size.l2 <= bound
        return TensorComparison(name, passed, "vanishing", size, eager_size, limit, detail)

    e_ours, e_eager = _relative(t, t64, counted), _relative(t_eager, t64, eager_counted)
    limit = TensorError(
        L2_FACTOR * max(e_eager.l2, unit), MAX_ABS_FACTOR * max(e_eager.max_abs, unit)
    )
    passed = e_ours.l2 <= limit.l2 and e_ours.max_abs <= limit.max_abs
    return TensorComparison(name, passed, "relative", e_ours, e_eager, limit)


def _same_non_finite(t: Tensor, t64: Tensor, t_eager: Tensor) -> Tensor:
    """Where t is finite as t64 is, equals its NaN or inf, or overflowed to inf as t_eager did."""
    both_finite = t.isfinite() & t64.isfinite()
    same = (t == t64) | (t.isnan() & t64.isnan())
    overflow = t64.isfinite() & t.isinf() & (t == t_eager)
    return both_finite | same | overflow


def _relative(t: Tensor, t64: Tensor, counted: Tensor) -> TensorError:
    difference, reference = (t - t64)[counted], t64[counted]
    error, size = _size(difference), _size(reference)
    return TensorError(_share(error.l2, size.l2), _share(error.max_abs, size.max_abs))


def _share(part: float, whole: float) -> float:
    if part == 0.0:
        return 0.0
    return part / whole if whole else math.inf


def _size(t: Tensor) -> TensorError:
    return TensorError(_norm(t), float(t.abs().max()) if t.numel() else 0.0)


def _norm(t: Tensor) -> float:
    """The L2 norm in fp64 of what is finite, safe from underflow of the squares."""
    t = _real(t).to(torch.float64)
    t = t[t.isfinite()]
    largest = float(t.abs().max()) if t.numel() else 0.0
    return largest * float((t / largest).norm()) if largest else 0.0


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _is_real(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _is_zero(t: Tensor) -> bool:
    return not bool(t.any())


def _kind(name: str) -> str:
    return name.split(":", 1)[0]


def _broken(name: str, rule: str, detail: str) -> TensorComparison:
    infinite, zero = TensorError(math.inf, math.inf), TensorError(0.0, 0.0)
    return TensorComparison(name, False, rule, infinite, zero, zero, detail)


def _passed(name: str, rule: str) -> TensorComparison:
    zero = TensorError(0.0, 0.0)
    return TensorComparison(name, True, rule, zero, zero, zero)
