"""The error standard must let a right step pass and catch every small fault of a wrong one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from torch_evt.testing import (
    Fp64Arithmetic,
    check_model,
    compare,
    fp64_copy,
    run_step,
    tensor_error,
)

SCALES = {torch.float32: 1.00001, torch.bfloat16: 1.02, torch.float16: 1.005}


class Block(nn.Module):
    """Embedding, attention, norm and MLP with the loss inside: every kind of gradient."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, tokens: Tensor, shift: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += 1
        x = self.embedding(tokens) + shift
        scores = self.query(x) @ self.key(x).mT
        x = x + self.dropout(scores.softmax(-1) @ self.value(x))
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.5)
        return nn.functional.cross_entropy(x.float().flatten(0, 1), target.flatten()), x


def make_block(dtype: torch.dtype, dropout: float = 0.0):
    def make(seed: int):
        torch.manual_seed(1000 + seed)
        model = Block(dropout).to(dtype)
        tokens, target = torch.randint(0, 32, (4, 8)), torch.randint(0, 16, (4, 8))
        shift = torch.randn(4, 8, 16, dtype=dtype, requires_grad=True)
        return model, (tokens, shift, target), lambda output: output[0]

    return make


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Other numbers in every test, the same in every run."""
    torch.manual_seed(sum(request.node.name.encode()))


@pytest.fixture(scope="module", params=SCALES, ids=str)
def step(request: pytest.FixtureRequest):
    """dtype, eager's tensors, the fp64 tensors of one step."""
    dtype = request.param
    model, (tokens, shift, target), loss = make_block(dtype)(0)
    inputs = (tokens, shift.detach().double().requires_grad_(), target)
    with Fp64Arithmetic():
        exact = run_step(fp64_copy(model), inputs, loss, seed=0)
    eager = run_step(model, (tokens, shift, target), loss, seed=0)
    return dtype, eager, exact


def gradients(eager: dict[str, Tensor]) -> list[str]:
    """All but the key's bias, whose gradient vanishes mathematically."""
    return [name for name in eager if name.startswith("grad:") and name != "grad:key.bias"]


def test_step_collects_every_tensor_of_training(step):
    dtype, eager, exact = step
    parameters = dict(Block().named_parameters())
    expected = {"loss:", "output:[0]", "output:[1]", "grad:input[1]", "buffer:steps", "buffer:mean"}
    assert eager.keys() == exact.keys() == expected | {f"grad:{name}" for name in parameters}
    assert all(t.dtype == torch.float64 for t in exact.values() if t.is_floating_point())
    assert eager["grad:up.weight"].dtype == dtype


def test_right_step_passes(step):
    dtype, eager, exact = step
    comparison = compare(eager, eager, exact, dtype)
    comparison.raise_if_failed()
    assert comparison.passed and len(comparison.tensors) == len(exact)
    assert {t.name: t.rule for t in comparison.tensors}["grad:key.bias"] == "vanishing"
    assert comparison.worst.share <= 1 and 0 < comparison.worst.ratio <= 1.5


def test_zeroing_any_one_gradient_fails(step):
    dtype, eager, exact = step
    for name in gradients(eager):
        ours = {**eager, name: torch.zeros_like(eager[name])}
        with pytest.raises(AssertionError, match=r"1 of .*\n  " + name.replace("[", r"\[")):
            compare(ours, eager, exact, dtype).raise_if_failed()


def test_scaling_any_one_gradient_slightly_fails(step):
    dtype, eager, exact = step
    for name in gradients(eager):
        ours = {**eager, name: (eager[name].double() * SCALES[dtype]).to(dtype)}
        comparison = compare(ours, eager, exact, dtype)
        assert [t.name for t in comparison.tensors if not t.passed] == [name]


@pytest.mark.parametrize("bias", ["up.bias", "down.bias", "value.bias", "query.bias"])
def test_dropping_a_bias_sum_fails(step, bias):
    dtype, eager, exact = step
    ours = {name: t for name, t in eager.items() if name != f"grad:{bias}"}
    comparison = compare(ours, eager, exact, dtype)
    assert not comparison.passed
    assert (comparison.worst.name, comparison.worst.rule) == (f"grad:{bias}", "missing")


def test_dropping_one_row_of_a_bias_sum_fails():
    torch.manual_seed(3)
    x = torch.randn(64, 8, dtype=torch.float64)
    exact = {"grad:bias": x.sum(0)}
    eager = {"grad:bias": x.float().sum(0)}
    ours = {"grad:bias": x[:-1].float().sum(0)}
    assert compare(eager, eager, exact, torch.float32).passed
    assert not compare(ours, eager, exact, torch.float32).passed


def exact_and_eager(*shape: int, error: float = 1e-7) -> tuple[Tensor, Tensor]:
    t64 = torch.randn(*shape, dtype=torch.float64)
    return t64, (t64 * (1 + error * torch.randn_like(t64))).float()


def judge(ours: Tensor, eager: Tensor, exact: Tensor, **others: Tensor):
    """The verdict on one gradient beside others that are right."""
    extra = {f"grad:{name}": t for name, t in others.items()}
    floats = {name: t.float() for name, t in extra.items()}
    comparison = compare(
        {"grad:x": ours, **floats}, {"grad:x": eager, **floats}, {"grad:x": exact, **extra},
        torch.float32,
    )  # fmt: skip
    return next(t for t in comparison.tensors if t.name == "grad:x")


def test_tensor_error_is_relative_in_both_norms():
    t64 = torch.tensor([3.0, -4.0], dtype=torch.float64)
    error = tensor_error(torch.tensor([3.0, -4.5]), t64)
    assert error.l2 == pytest.approx(0.1) and error.max_abs == pytest.approx(0.125)
    assert tensor_error(torch.tensor([3.0, -4.0]), t64).l2 == 0
    assert tensor_error(torch.tensor([3.0, math.nan]), t64).l2 == math.inf
    assert tensor_error(torch.zeros(2), torch.zeros(2, dtype=torch.float64)).l2 == 0
    assert tensor_error(torch.ones(2), torch.zeros(2, dtype=torch.float64)).l2 == math.inf
    with pytest.raises(ValueError, match="shapes"):
        tensor_error(torch.zeros(3), t64)


def test_error_of_tiny_values_does_not_underflow():
    t64 = torch.tensor([3e-200, 4e-200], dtype=torch.float64)
    assert tensor_error(t64 * 2, t64).l2 == pytest.approx(1.0)


def test_limit_grows_with_the_error_of_eager():
    t64, eager = exact_and_eager(10_000, error=1e-4)
    ours = (t64 * (1 + 1.2e-4 * torch.randn_like(t64))).float()
    assert judge(ours, eager, t64).passed
    assert not judge(ours, t64.float(), t64).passed


def test_one_wrong_element_fails_by_the_largest_absolute_value():
    t64, eager = exact_and_eager(1_000_000, error=1e-6)
    ours = eager.clone()
    ours[7] = float(t64[7]) + 1e-4
    verdict = judge(ours, eager, t64)
    assert verdict.ours.l2 < verdict.limit.l2
    assert not verdict.passed and verdict.ours.max_abs > verdict.limit.max_abs
    assert verdict.limit.max_abs == pytest.approx(3 * max(verdict.eager.max_abs, 1e-6))
    assert verdict.limit.l2 == pytest.approx(1.5 * max(verdict.eager.l2, 1e-6))


def test_exactly_zero_must_stay_exactly_zero():
    zero = torch.zeros(5)
    assert judge(zero, zero, zero.double()).passed
    tiny = torch.tensor([0.0, 0, 1e-30, 0, 0])
    for eager in (zero, tiny):
        verdict = judge(tiny, eager, zero.double(), big=torch.randn(5, dtype=torch.float64))
        assert (verdict.passed, verdict.rule) == (False, "zero")


def test_vanishing_gradient_is_held_against_the_largest_one():
    big = torch.randn(100, dtype=torch.float64)
    unit = 1e-6 * float(big.norm())
    exact = 1e-17 * torch.randn(10, dtype=torch.float64)
    direction = torch.randn(10)
    direction /= direction.norm()
    quiet = 1e-3 * unit * direction
    assert judge(2.9 * unit * direction.flip(0), quiet, exact, big=big).passed
    assert not judge(3.1 * unit * direction.flip(0), quiet, exact, big=big).passed
    loud = 2 * unit * direction
    assert judge(5.9 * unit * direction, loud, exact, big=big).passed
    assert not judge(6.1 * unit * direction, loud, exact, big=big).passed
    # alone it is the largest, so it is judged relatively
    assert judge(2 * exact.float(), exact.float(), exact).rule == "relative"
    assert not judge(2 * exact.float(), exact.float(), exact).passed


def test_small_gradient_is_not_vanishing():
    big, (exact, eager) = torch.randn(100, dtype=torch.float64), exact_and_eager(10)
    assert not judge(torch.zeros(10), 1e-7 * eager, 1e-7 * exact, big=big).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_never_passes_unless_fp64_has_it_there(bad):
    exact, eager = exact_and_eager(10)
    ours = eager.clone()
    ours[3] = bad
    assert judge(ours, eager, exact).rule == "non-finite"
    assert not judge(ours, eager, exact).passed
    exact[3] = bad
    assert not judge(eager, eager, exact).passed
    assert judge(ours, ours, exact).passed
    ours[4] *= 1.001
    assert not judge(ours, eager, exact).passed


def test_nan_of_eager_alone_excuses_nothing():
    exact, eager = exact_and_eager(10)
    wrong = eager * 1.01
    eager[2] = math.nan
    assert not judge(wrong, eager, exact).passed
    assert not judge(eager, eager, exact).passed


def test_overflow_that_eager_has_too_passes_and_hides_nothing():
    exact, eager = exact_and_eager(10)
    eager[2] = math.inf
    ours = eager.clone()
    assert judge(ours, eager, exact).passed
    assert not judge(ours * 1.01, eager, exact).passed
    ours[2] = -math.inf
    assert not judge(ours, eager, exact).passed
    ours[2] = exact[2].float()
    assert judge(ours, eager, exact).passed
    exact, eager = exact_and_eager(1_000_000, error=1e-6)
    eager[2] = math.inf
    ours = eager.clone()
    ours[7] = float(exact[7]) + 1e-4
    assert not judge(ours, eager, exact).passed


def test_shape_dtype_and_missing_tensors_fail():
    exact, eager = exact_and_eager(4, 4)
    assert judge(eager.flatten(), eager, exact).rule == "shape"
    assert judge(eager.double(), eager, exact).rule == "dtype"
    named = {"grad:x": eager}
    missing = compare({}, named, {"grad:x": exact}, torch.float32)
    assert not missing.passed and missing.worst.rule == "missing"
    unexpected = compare({**named, "grad:y": eager}, named, {"grad:x": exact}, torch.float32)
    assert not unexpected.passed and unexpected.worst.name == "grad:y"
    zeros = {**named, "grad:y": torch.zeros(3)}
    assert compare(zeros, named, {"grad:x": exact}, torch.float32).passed
    assert not compare({}, {}, {}, torch.float32).passed
    with pytest.raises(AssertionError, match="no tensors"):
        compare({}, {}, {}, torch.float32).raise_if_failed()
    with pytest.raises(ValueError, match=r"differ.*grad:x"):
        compare(named, named, {}, torch.float32)
    with pytest.raises(ValueError, match="float64"):
        compare(named, named, {"grad:x": exact}, torch.float64)


def test_integers_equal_eager_exactly():
    eager = torch.tensor([2**53 + 1, 5])
    assert judge(eager.clone(), eager, eager).passed
    verdict = judge(eager - torch.tensor([1, 0]), eager, eager)
    assert (verdict.passed, verdict.rule) == (False, "integer")
    assert judge(torch.tensor([True]), torch.tensor([True]), torch.tensor([True])).passed
    assert not judge(torch.tensor([False]), torch.tensor([True]), torch.tensor([True])).passed


def test_empty_tensor_passes():
    assert judge(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3).double()).passed


def test_message_and_table_name_tensor_errors_and_limit():
    exact, eager = exact_and_eager(20, error=3e-6)
    comparison = compare(
        {"grad:x": eager * 1.01, "grad:y": eager}, {"grad:x": eager, "grad:y": eager},
        {"grad:x": exact, "grad:y": exact}, torch.float32, seed=4,
    )  # fmt: skip
    worst = comparison.worst
    with pytest.raises(AssertionError) as failure:
        comparison.raise_if_failed()
    text = str(failure.value)
    assert "grad:x (seed 4)" in text and "grad:y" not in text
    for error in (worst.ours.l2, worst.eager.l2, worst.limit.l2):
        assert f"{error:.2e}" in text and f"{error:.2e}" in comparison.table()
    lines = comparison.table().splitlines()
    assert lines[1].startswith("FAIL") and lines[2].startswith("ok")


def test_fp64_copy_leaves_the_model_alone_and_casts_are_kept_out():
    model, inputs, loss = make_block(torch.bfloat16)(0)
    run_step(model, inputs, loss, seed=0)
    double = fp64_copy(model)
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.grad is None for p in double.parameters())
    assert all(p.grad is not None for p in model.parameters())
    x = torch.randn(10, dtype=torch.float64, requires_grad=True)
    with Fp64Arithmetic():
        rounded = x.bfloat16().float() * torch.ones(10, dtype=torch.float16)
        rounded.sum().backward()
        assert rounded.dtype == x.grad.dtype == torch.float64 and torch.equal(rounded, x)
        assert x.to(torch.int64).dtype == torch.int64


def test_loss_may_be_the_output_or_inside_it():
    model = nn.Linear(3, 1)
    x = torch.randn(1, 3)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return {"loss": self.inner(x).sum(), "logits": self.inner(x)}

    direct = run_step(model, {"input": x}, None, seed=0)
    wrapped = run_step(Wrapped(), [x], None, seed=0)
    assert torch.equal(direct["grad:weight"], x)
    assert torch.equal(wrapped["grad:inner.weight"], x)
    assert wrapped.keys() >= {"output:['loss']", "output:['logits']", "loss:"}
    with pytest.raises(ValueError, match="scalar"):
        run_step(nn.Linear(3, 2), [x], None, seed=0)
    with pytest.raises(ValueError, match="loss"):
        run_step(Block(), make_block(torch.float32)(0)[1], None, seed=0)


@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_correct_backend_passes_with_dropout(dtype):
    comparison = check_model(make_block(dtype, dropout=0.3), dtype=dtype, backend="aot_eager")
    comparison.raise_if_failed()
    for name in ("grad:input[1]", "grad:embedding.weight", "output:[1]"):
        assert [t.seed for t in comparison.tensors if t.name == name] == [0, 1, 2]
    steps = [t for t in comparison.tensors if t.name == "buffer:steps"]
    assert len(steps) == 3 and all(t.rule == "integer" for t in steps)


def test_backend_with_a_wrong_gradient_fails():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.00001

    def faulty(seed: int):
        model, inputs, loss = make_block(torch.float32)(seed)
        handle = model.up.register_forward_hook(
            lambda module, args, output: (
                Wrong.apply(output) if torch.compiler.is_compiling() else output
            )
        )
        assert handle is not None
        return model, inputs, loss

    comparison = check_model(faulty, dtype=torch.float32, seeds=(0,), backend="aot_eager")
    failed = {t.name for t in comparison.tensors if not t.passed}
    assert {"grad:up.weight", "grad:up.bias"} <= failed
    assert not any(name.startswith(("output:", "loss:", "grad:down")) for name in failed)


def test_vanishing_is_judged_among_gradients_only():
    exact, eager = exact_and_eager(10)
    output = {"output:": 1e12 * torch.randn(10, dtype=torch.float64)}
    ours = {"grad:x": torch.zeros(10), "output:": output["output:"].float()}
    comparison = compare(
        ours, {**ours, "grad:x": eager}, {**output, "grad:x": exact}, torch.float32
    )
    assert [t.name for t in comparison.tensors if not t.passed] == ["grad:x"]


def test_options_reach_the_backend_with_eager_randomness(monkeypatch):
    seen = []

    def compile_nothing(model, *, backend, options):
        seen.append((backend, options))
        return model

    monkeypatch.setattr(torch, "compile", compile_nothing)
    make = make_block(torch.float32)
    for backend, options in [("evt", {"evt.place": "always"}), ("inductor", None), ("eager", None)]:
        check_model(make, dtype=torch.float32, seeds=(0,), backend=backend, options=options)
    assert seen == [
        ("evt", {"evt.place": "always", "evt.rng": "eager"}),
        ("inductor", {"fallback_random": True}),
        ("eager", None),
    ]


def test_casts_in_the_model_count_as_errors_of_eager():
    class Rounded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(torch.bfloat16).to(x.dtype)).sum()

    def make(seed: int):
        torch.manual_seed(seed)
        return Rounded(8, 3), (torch.randn(4, 8),), None

    comparison = check_model(make, dtype=torch.float32, backend="eager")
    errors = [t.eager.l2 for t in comparison.tensors if t.name == "grad:weight"]
    assert comparison.passed and min(errors) > 1e-4


def test_every_seed_compares_its_own_model():
    comparison = check_model(make_block(torch.float32), dtype=torch.float32, backend="eager")
    outputs = [t for t in comparison.tensors if t.name == "grad:up.weight"]
    comparison.raise_if_failed()
    assert len({t.ours.l2 for t in outputs}) == 3
