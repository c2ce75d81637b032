"""A second, independent meaning of a tree: one element at a time, in Python numbers (fp64).

Slow and simple on purpose; `tree.evaluate` in exact mode must agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from tests.tree.strategies import Case
from torch import Tensor

from torch_evt.tree.ir import (
    Accumulator,
    Cast,
    Compute,
    Const,
    Index,
    Keep,
    Load,
    Neighbour,
    Select,
    Statistic,
    Store,
    Value,
    children,
)

Point = dict[str, int]
_C = math.sqrt(2 / math.pi)


def _cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def _gelu_tanh_grad(x: float) -> float:
    t = math.tanh(_C * (x + 0.044715 * x**3)) if abs(x) < 1e3 else math.copysign(1, x)
    slope = 0.0 if abs(x) > 1e3 else (1 - t * t) * _C * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + t) + 0.5 * x * slope


def _pdf(x: float) -> float:
    return math.exp(-min(x * x, 1400) / 2) / math.sqrt(2 * math.pi)


PLAIN: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda x: -x,
    "abs": abs,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "erf": math.erf,
    "maximum": max,
    "minimum": min,
    "where": lambda c, a, b: a if c else b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "logical_and": lambda a, b: a and b,
    "logical_or": lambda a, b: a or b,
    "logical_not": lambda a: not a,
    "relu": lambda x: max(x, 0.0),
    "relu_grad": lambda x: 1.0 if x > 0 else 0.0,
    "relu_backward": lambda g, y: 0.0 if y <= 0 else g,
    "gelu_erf": lambda x: x * _cdf(x),
    "gelu_erf_grad": lambda x: _cdf(x) + x * _pdf(x),
    "gelu_tanh": lambda x: x * _sigmoid(2 * _C * (x + 0.044715 * x**3)),
    "gelu_tanh_grad": _gelu_tanh_grad,
    "silu": lambda x: x * _sigmoid(x),
    "silu_grad": lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
}


def philox_uniform(seed: int, offset: int) -> float:
    """Inductor's uniform number on a CPU, in Python integers, from the paper's description."""
    word = 2**32
    x = [offset % word, 0, 0, 0]
    key = [seed % word, 0]
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            second // word ^ x[1] ^ key[0],
            second % word,
            first // word ^ x[3] ^ key[1],
            first % word,
        ]
        key = [(key[0] + 0x9E3779B9) % word, (key[1] + 0xBB67AE85) % word]
    return float(torch.tensor(x[0] % 2**31).float() * torch.tensor(4.6566127342e-10))


class ByElement:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.first = sum(operand.value is None for operand in case.tree.operands)
        extents = case.extents
        self.batch = extents["l"] if case.tree.batched else 1
        self.rows, self.columns, self.reduced = extents["m"], extents["n"], extents["k"]
        self.memo: dict[Any, Any] = {}

    def value(self, value: Value, at: Point) -> Any:
        key = (value, *sorted(at.items()))
        if key not in self.memo:
            self.memo[key] = self._value(value, at)
        return self.memo[key]

    def _value(self, value: Value, at: Point) -> Any:
        if isinstance(value, Accumulator):
            return self._product(value.index, at)
        if isinstance(value, Load):
            tensors = self.case.overwritten if value.overwritten else self.case.inputs
            tensor = tensors[value.argument + (0 if value.overwritten else self.first)]
            for term in value.index:
                i = at[term.axis]
                if term.size is not None:
                    p = self.case.sizes[term.size]
                    i = i // p if term.op == "div" else i % p
                tensor = tensor[i]
            return tensor.item()
        if isinstance(value, Const):
            return value.value
        if isinstance(value, Index):
            return at[value.axis]
        if isinstance(value, Cast):
            x = self.value(value.value, at)
            if value.dtype.is_floating_point:
                return float(x)
            return bool(x) if value.dtype == torch.bool else int(x)
        if isinstance(value, Statistic):
            row = [self.value(value.value, {**at, "n": n}) for n in range(self.columns)]
            return _reduced(row, value.op)
        if isinstance(value, Neighbour):
            column = "n" if "n" in at else "k"
            return self.value(value.value, {**at, column: at[column] ^ 1})
        arguments = [self.value(child, at) for child in children(value)]
        if isinstance(value, Keep):
            return philox_uniform(*arguments) > float(torch.tensor(value.p))
        assert isinstance(value, Compute)
        result = PLAIN[value.function](*arguments)
        if isinstance(result, bool) and any(type(a) in (int, float) for a in arguments[-2:]):
            kinds = {type(a) for a in arguments[-2:]}
            if value.function in ("where", "maximum", "minimum"):
                return float(result) if float in kinds else int(result)
        return result

    def _product(self, pair: int, at: Point) -> float:
        total = 0.0
        for k in range(self.reduced):
            total += self._operand(2 * pair, at, k) * self._operand(2 * pair + 1, at, k)
        return total

    def _operand(self, number: int, at: Point, k: int) -> float:
        operands = self.case.tree.operands
        operand = operands[number]
        point = {"m": at["m"], "k": k} if operand.name[0] == "A" else {"k": k, "n": at["n"]}
        if operand.batched:
            point = {"l": at["l"], **point}
        if operand.value is not None:
            return self.value(operand.value, point)
        position = sum(o.value is None for o in operands[:number])
        return self.case.inputs[position][tuple(point.values())].item()

    def outputs(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """New outputs (fp64, int64 or bool) and what is written over arguments."""
        new: list[Tensor] = []
        written: dict[int, Tensor] = {}
        axes = ("l", "m", "n") if self.case.tree.batched else ("m", "n")
        shape = [{"l": self.batch, "m": self.rows, "n": self.columns}[a] for a in axes]
        points = [dict(zip(axes, p, strict=True)) for p in product(*map(range, shape))]
        for sink in self.case.tree.sinks:
            flat = [self.value(sink.value, point) for point in points]
            tile = torch.tensor(flat, dtype=_wide(sink.dtype)).reshape(shape)
            if isinstance(sink, Store):
                if sink.into is None:
                    new.append(tile)
                else:
                    written[sink.into] = tile
            elif isinstance(sink, Select):
                columns = [self.value(sink.column, p) for p in points]
                picked = torch.tensor(columns).reshape(shape)[..., :1]
                inside = (picked >= 0) & (picked < self.columns)
                taken = tile.gather(-1, picked.clamp(0, self.columns - 1))
                new.append(torch.where(inside, taken, torch.zeros_like(taken)).squeeze(-1))
            else:
                new.append(self._reduce(sink, tile))
        return new, written

    def _reduce(self, sink: Any, tile: Tensor) -> Tensor:
        full = tile if tile.dim() == 3 else tile.unsqueeze(0)
        if sink.over == "all":
            groups, kept = full.reshape(1, -1), []
        elif sink.over == "rows":
            groups, kept = full.permute(0, 2, 1), [self.batch, self.columns]
        else:
            groups, kept = full, [self.batch, self.rows]
        if kept and (sink.fold_batch or tile.dim() == 2):
            groups, kept = groups.transpose(0, 1), kept[1:]
        lists = groups.reshape(max(1, math.prod(kept)), -1).tolist()
        results = [_reduced(group, sink.op) for group in lists]
        if sink.op == "moments":
            pairs = [torch.tensor([r[i] for r in results], dtype=torch.float64) for i in range(2)]
            return torch.stack(pairs).reshape([2, *kept])
        return torch.tensor(results, dtype=_wide(sink.dtype)).reshape(kept)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float64
    return dtype if dtype == torch.bool else torch.int64


def _reduced(values: list[Any], op: str) -> Any:
    if op == "sum":
        return sum(values)
    if op == "max":
        return max(values)
    if op == "logsumexp":
        top = max(values)
        return top + math.log(sum(math.exp(v - top) for v in values))
    mean = sum(values) / len(values)
    return mean, sum((v - mean) ** 2 for v in values)
