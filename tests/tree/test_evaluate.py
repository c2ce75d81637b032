"""The oracle: against an element-by-element meaning of trees, and against plain torch."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.tree.by_element import ByElement, philox_uniform
from tests.tree.strategies import Case, cases, make_case

from torch_evt.errors import TreeError
from torch_evt.tree.evaluate import evaluate
from torch_evt.tree.philox import philox, uniform
from torch_evt.tree.shapes import check_inputs, output_specs
from torch_evt.tree.text import parse

GEMM = "gemm(A: f32 k 16, B: f32 n 16) -> "
BATCHED = "gemm(A: f32 l k 16, B: f32 l n 16) -> "


def run(text: str, *inputs: torch.Tensor, sizes=(), overwritten=(), **options):
    tree = parse(text)
    check_inputs(tree, inputs, sizes, overwritten)
    return evaluate(tree, inputs, sizes, overwritten, **options)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_exact_evaluation_is_what_every_element_says(case: Case):
    expected, written = ByElement(case).outputs()
    overwritten = [t.double() for t in case.overwritten]
    outputs = evaluate(
        case.tree,
        case.inputs,
        case.sizes,
        overwritten,
        compute_dtype=torch.float64,
        exact=True,
    )
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        _close(output, wanted)
    for into, wanted in written.items():
        _close(overwritten[into], wanted)


def _close(output: torch.Tensor, wanted: torch.Tensor) -> None:
    if wanted.dtype == torch.float64:
        assert output.dtype == torch.float64
    scale = max(1.0, wanted.double().abs().max().item())
    torch.testing.assert_close(output.double(), wanted.double(), rtol=1e-9, atol=1e-9 * scale)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(smooth=False))
def test_outputs_have_the_specified_shape_stride_and_dtype_and_share_no_memory(case: Case):
    check_inputs(case.tree, case.inputs, case.sizes, case.overwritten)
    before = [t.clone() for t in case.inputs]
    specs = output_specs(case.tree, case.inputs, case.sizes, case.overwritten)
    outputs = evaluate(case.tree, case.inputs, case.sizes, case.overwritten)
    assert len(outputs) == len(specs) == len(case.tree.new_outputs)
    for output, spec in zip(outputs, specs, strict=True):
        assert tuple(output.shape) == spec.shape
        assert output.stride() == spec.stride
        assert output.dtype == spec.dtype
    everything = (*outputs, *case.inputs, *case.overwritten)
    addresses = [t.untyped_storage().data_ptr() for t in everything]
    assert len(set(addresses)) == len(addresses)
    for tensor, old in zip(case.inputs, before, strict=True):
        same(tensor.float(), old.float())


def test_linear_with_bias_and_gelu_keeps_fp32_between_stores():
    a, b, bias = torch.randn(33, 17).bfloat16(), torch.randn(17, 9).bfloat16(), torch.randn(9)
    bias = bias.bfloat16()
    z, y = run(
        "gemm(A: bf16 k 2, B: bf16 n 2) -> v0 = acc0 + row(0: bf16); store(0: bf16 n 2, v0); "
        "store(1: bf16 n 2, gelu_tanh(v0))",
        a,
        b,
        bias,
    )
    exact = a.float() @ b.float() + bias.float()
    same(z, exact.bfloat16())
    same(y, torch.nn.functional.gelu(exact, approximate="tanh").bfloat16())
    assert not torch.equal(y, torch.nn.functional.gelu(z, approximate="tanh"))


def test_casts_are_rounding_points_and_stores_round():
    x = torch.randn(40, 30)
    cast, double = run(
        "rows() -> v0 = tile(0: f32 n 4); store(0: f32 n 4, cast(v0, bf16) * 3.0); "
        "store(1: f16 n 4, v0)",
        x,
    )
    same(cast, x.bfloat16().float() * 3)
    same(double, x.half())
    exact = run(
        "rows() -> store(0: bf16 n 4, cast(tile(0: f32 n 4), bf16) * 3.0)",
        x,
        compute_dtype=torch.float64,
        exact=True,
    )[0]
    same(exact, x.double() * 3)


def test_float64_without_exact_rounds_at_casts_and_stores_only():
    a, b = torch.randn(12, 5), torch.randn(5, 7)
    (y,) = run(GEMM + "store(0: bf16 n 4, cast(acc0, f16))", a, b, compute_dtype=torch.float64)
    same(y, (a.double() @ b.double()).half().bfloat16())


@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 4, 3), (5, 0, 3), (5, 4, 0), (1, 7, 2)])
def test_empty_and_single_axes(shape):
    m, n, k = shape
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    y, rows, columns, total, top, lse = run(
        GEMM + "v0 = acc0 + row(0: f32); store(0: f32 n 16, v0); reduce(1: f32, sum, rows, v0); "
        "reduce(2: f32, sum, columns, v0); reduce(3: f32, sum, all, v0); "
        "reduce(4: f32, max, columns, v0); reduce(5: f32, logsumexp, rows, v0)",
        a,
        b,
        bias,
    )
    z = a @ b + bias
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(rows, z.sum(0))
    torch.testing.assert_close(columns, z.sum(1))
    torch.testing.assert_close(total, z.sum())
    torch.testing.assert_close(top, z.amax(1) if n else torch.full((m,), -math.inf))
    torch.testing.assert_close(lse, z.logsumexp(0))
    assert total.shape == ()


def test_empty_max_of_ints_and_select_without_columns():
    x, column = torch.randint(0, 9, (3, 0)), torch.zeros(3, dtype=torch.int64)
    top, picked = run(
        "rows() -> v0 = tile(0: i64 n 8); reduce(0: i64, max, columns, v0); "
        "select(1: i64, v0, column(1: i64))",
        x,
        column,
    )
    assert top.tolist() == [torch.iinfo(torch.int64).min] * 3
    assert picked.tolist() == [0] * 3


def test_column_major_store_is_the_same_values_with_the_other_stride():
    a, b = torch.randn(5, 3), torch.randn(3, 4)
    n, m = run(GEMM + "store(0: f32 n 16, acc0); store(1: f32 m 16, acc0)", a, b)
    same(n, m)
    assert n.stride() == (4, 1) and m.stride() == (1, 5)
    a, b = torch.randn(2, 5, 3), torch.randn(2, 3, 4)
    n, m = run(BATCHED + "store(0: f32 n 16, acc0); store(1: f32 m 16, acc0)", a, b)
    same(n, m)
    assert n.stride() == (20, 4, 1) and m.stride() == (20, 1, 5)


def test_transposed_and_expanded_operands_and_a_stride_0_gradient():
    a, b = torch.randn(7, 6).t(), torch.randn(1, 5).expand(7, 5)
    g = torch.randn(()).expand(6, 5)
    (y,) = run(
        "gemm(A: f32 m 4, B: f32 n 4) -> store(0: f32 n 4, acc0 * tile(0: f32 - 4))", a, b, g
    )
    torch.testing.assert_close(y, (a @ b) * g)


def test_one_batched_operand_is_shared_with_the_other_in_every_batch():
    a, b = torch.randn(4, 3), torch.randn(5, 3, 6)
    (y,) = run("gemm(A: f32 k 4, B: f32 l n 4) -> store(0: f32 n 4, acc0)", a, b)
    torch.testing.assert_close(y, a @ b)
    (y,) = run("gemm(A: f32 l k 4, B: f32 k 4) -> store(0: f32 n 4, acc0)", b.mT.contiguous(), a.mT)
    torch.testing.assert_close(y, b.mT @ a.mT)


def test_computed_operands_are_rounded_to_their_dtype():
    g, z, b = torch.randn(9, 6), torch.randn(9, 6), torch.randn(6, 5).bfloat16()
    (y,) = run(
        "gemm(A: bf16 = relu_backward(tile(0: f32 k 4), tile(1: f32 k 4)) * row(2: f32), "
        "B: bf16 n 2) -> store(0: f32 n 4, acc0)",
        b,
        g,
        z,
        scale := torch.randn(6),
    )
    operand = (torch.where(z <= 0, 0.0, g) * scale).bfloat16()
    torch.testing.assert_close(y, operand.float() @ b.float())


def test_second_product_and_computed_b_with_its_own_k():
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    a1, t = torch.randn(4, 7), torch.randn(7, 5)
    (y,) = run(
        "gemm(A: f32 k 4, B: f32 n 4, A1: f32 k 4, B1: f32 = silu(tile(0: f32 n 4))) -> "
        "store(0: f32 n 4, acc0 + acc1)",
        a,
        b,
        a1,
        t,
    )
    torch.testing.assert_close(y, a @ b + a1 @ torch.nn.functional.silu(t))


def test_div_and_mod_index_maps():
    batch, time, width, k = 3, 4, 6, 5
    a, b = torch.randn(batch * time, k), torch.randn(k, width)
    position, per_batch = torch.randn(time, width), torch.randn(batch)
    both = torch.randn(batch, time)
    y = run(
        GEMM + "store(0: f32 n 4, acc0 + tile(0: f32 n 4 [m mod s0, n]) * "
        "column(1: f32 [m div s0]) - column(2: f32 [m div s0, m mod s0]))",
        a,
        b,
        position,
        per_batch,
        both,
        sizes=(time,),
    )[0]
    expected = (a @ b).view(batch, time, width) + position * per_batch[:, None, None]
    torch.testing.assert_close(y, (expected - both[..., None]).flatten(0, 1))


def test_div_and_mod_of_the_batch_and_of_ragged_rows():
    a, b = torch.randn(6, 5, 3), torch.randn(6, 3, 4)
    heads, ragged = torch.randn(3, 4), torch.randn(3)
    y = run(
        BATCHED + "store(0: f32 n 4, acc0 + row(0: f32 [l mod s0, n]) + column(1: f32 [m div s1]))",
        a,
        b,
        heads,
        ragged,
        sizes=(3, 2),
    )[0]
    expected = a @ b + heads.repeat(2, 1)[:, None] + ragged.repeat_interleave(2)[:5, None]
    torch.testing.assert_close(y, expected)


def test_one_coordinate_may_index_two_dimensions():
    x, square = torch.randn(5, 4), torch.randn(5, 5)
    (y,) = run("rows() -> store(0: f32 n 4, tile(0: f32 n 4) * column(1: f32 [m, m]))", x, square)
    same(y, x * square.diagonal()[:, None])


def test_batched_sums_fold_or_keep_the_batch():
    a, b = torch.randn(3, 5, 2), torch.randn(3, 2, 4)
    z = a @ b
    outputs = run(
        BATCHED + "reduce(0: f32, sum, rows, acc0); reduce(1: f32, sum, rows, fold l, acc0); "
        "reduce(2: f32, max, columns, acc0); reduce(3: f32, max, columns, fold l, acc0); "
        "reduce(4: f32, moments, rows, fold l, acc0); reduce(5: f32, logsumexp, all, acc0)",
        a,
        b,
    )
    variance, mean = torch.var_mean(z, (0, 1), correction=0)
    expected = [
        z.sum(1),
        z.sum((0, 1)),
        z.amax(2),
        z.amax((0, 2)),
        torch.stack((mean, variance * 15)),
        z.logsumexp((0, 1, 2)),
    ]
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted)


def test_moments_are_the_mean_and_the_squared_deviations_without_cancellation():
    x = torch.randn(7, 300) + 1e4
    (moments,) = run("rows() -> reduce(0: f32, moments, columns, tile(0: f32 n 4))", x)
    variance, mean = torch.var_mean(x.double(), 1, correction=0)
    assert moments.shape == (2, 7)
    torch.testing.assert_close(moments[0].double(), mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(moments[1].double(), variance * 300, rtol=1e-3, atol=0)


def test_logsumexp_of_minus_inf_is_minus_inf_and_of_inf_is_inf():
    x = torch.randn(4, 6)
    x[1] = -math.inf
    x[2, 3] = -math.inf
    x[3, 0] = math.inf
    (y,) = run("rows() -> reduce(0: f32, logsumexp, columns, tile(0: f32 n 4))", x)
    assert y[1] == -math.inf and y[3] == math.inf
    torch.testing.assert_close(y, x.logsumexp(1))


def test_statistics_give_a_softmax_and_what_is_constant_in_a_row_counts_n_times():
    x, c = torch.randn(5, 8), torch.randn(5)
    softmax, total = run(
        "rows() -> v0 = tile(0: f32 n 4); v1 = exp(v0 - statistic(v0, columns, max)); "
        "store(0: f32 n 4, v1 / statistic(v1, columns, sum)); "
        "store(1: f32 n 4, statistic(column(1: f32), columns, sum))",
        x,
        c,
    )
    torch.testing.assert_close(softmax, x.softmax(1))
    torch.testing.assert_close(total, (c * 8)[:, None].expand(5, 8))


def test_neighbour_swaps_the_columns_of_a_pair():
    x = torch.randn(3, 6)
    (y,) = run("rows() -> store(0: f32 n 4, neighbour(tile(0: f32 n 4)))", x)
    same(y, x[:, [1, 0, 3, 2, 5, 4]])
    with pytest.raises(TreeError, match="even number of columns, not 5"):
        run("rows() -> store(0: f32 n 4, neighbour(tile(0: f32 n 4)))", x[:, :5])


def test_select_takes_the_target_and_gives_0_where_there_is_no_such_column():
    a, b = torch.randn(6, 4), torch.randn(4, 5)
    target = torch.tensor([0, 4, -100, 2, 5, 1])
    b[:, 0] = math.inf  # what is not selected must not leak
    (y,) = run(GEMM + "select(0: f32, acc0, column(0: i64))", a, b, target)
    z = a @ b
    expected = torch.stack([z[0, 0], z[1, 4], z.new_zeros(()), z[3, 2], z.new_zeros(()), z[5, 1]])
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_in_place_stores_read_everything_before_they_write():
    x = torch.randn(4, 4)
    first, second = torch.randn(4, 4), torch.randn(4, 4)
    old_first, old_second = first.clone(), second.clone()
    (total,) = run(
        "rows() -> v0 = tile(into 1: f32 n 4); v1 = tile(into 0: f32 n 4); "
        "store(into 0: f32 n 4, v0); store(into 1: f32 n 4, v1 + tile(0: f32 n 4)); "
        "reduce(0: f32, sum, all, v1 * v0)",
        x,
        overwritten=(first, second),
    )
    same(first, old_second)
    same(second, old_first + x)
    torch.testing.assert_close(total, (old_first * old_second).sum())


def test_in_place_swap_of_two_arguments():
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    olds = first.clone(), second.clone()
    outputs = run(
        "rows() -> store(into 0: f32 n 4, tile(into 1: f32 n 4)); "
        "store(into 1: f32 n 4, cast(tile(into 0: f32 n 4), f32))",
        overwritten=(first, second),
    )
    assert outputs == ()
    same(first, olds[1])
    same(second, olds[0])


def test_accumulation_in_place_keeps_the_arguments_strides():
    a, b = torch.randn(5, 3), torch.randn(3, 4)
    gradient = torch.randn(4, 5).bfloat16().t()
    old = gradient.clone()
    run(
        GEMM + "store(into 0: bf16 m 2, acc0 + tile(into 0: bf16 m 2))",
        a,
        b,
        overwritten=(gradient,),
    )
    same(gradient, (a @ b + old.float()).bfloat16())
    assert gradient.stride() == (1, 5)


def test_two_stores_of_one_value_are_two_tensors():
    x = torch.randn(3, 4)
    a, b = run("rows() -> v0 = tile(0: f32 n 4); store(0: f32 n 4, v0); store(1: f32 n 4, v0)", x)
    a.add_(1)
    same(b, x)


def test_integers_beyond_fp32_and_fp64_stay_exact():
    big = 2**53 + torch.randint(0, 3, (6, 5))
    label = 2**53 + torch.randint(0, 3, (6,))
    same_as, chosen, count, top = run(
        "rows() -> v0 = tile(0: i64 n 8); v1 = column(1: i64); v2 = eq(v0, v1); "
        f"store(0: bool n 1, v2); store(1: i64 n 8, where(v2, v0 + 1, {2**53 + 1})); "
        "reduce(2: i64, sum, columns, v2); reduce(3: i64, max, columns, v0)",
        big,
        label,
    )
    rows = zip(big.tolist(), label.tolist(), strict=True)
    expected = torch.tensor([[x == wanted for x in row] for row, wanted in rows])
    same(same_as, expected)
    same(chosen, torch.where(expected, big + 1, 2**53 + 1))
    same(count, expected.sum(1))
    same(top, big.amax(1))


def test_small_integer_stores_wrap_and_casts_to_int_truncate():
    x = torch.randn(4, 5) * 100
    wrapped, truncated = run(
        "rows() -> v0 = cast(tile(0: f32 n 4), i32); store(0: i8 n 1, v0 * 7); "
        "store(1: i32 n 4, v0)",
        x,
    )
    same(truncated, x.int())
    same(wrapped, (x.long() * 7).to(torch.int8))


def test_a_mask_counts_as_0_and_1_and_mixes_into_floats():
    x, mask = torch.randn(5, 6), torch.rand(5, 6) > 0.3
    y, chosen = run(
        "rows() -> v0 = tile(1: bool n 1); store(0: f32 n 4, tile(0: f32 n 4) * v0 * 1.25); "
        "store(1: f32 n 4, where(v0, true, 0.5))",
        x,
        mask,
    )
    same(y, x * mask * 1.25)
    same(chosen, torch.where(mask, 1.0, 0.5))


def test_index_and_constants_without_any_axis():
    x = torch.randn(4, 6)
    causal, constant = run(
        "rows() -> store(0: f32 n 4, where(ge(index(m), index(n)), tile(0: f32 n 4), -inf)); "
        "store(1: f32 n 4, 2.5)",
        x,
    )
    same(causal, x.masked_fill(torch.ones(4, 6).triu(1).bool(), -math.inf))
    same(constant, torch.full((4, 6), 2.5))


def test_fp8_loads_and_operands():
    a = torch.randn(8, 16).to(torch.float8_e4m3fn)
    b, scale = torch.randn(8, 16).to(torch.float8_e5m2).t(), torch.rand(())
    (y,) = run(
        "gemm(A: f8e4m3 k 16, B: f8e5m2 k 16) -> store(0: bf16 n 16, acc0 * scalar(0: f32))",
        a,
        b,
        scale,
    )
    same(y, (a.float() @ b.float() * scale).bfloat16())


def test_values_follow_autograd_through_a_whole_layer():
    x, w = torch.randn(10, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    bias, g = torch.randn(8, dtype=torch.float64), torch.randn(10, 8, dtype=torch.float64)
    x, w, bias, g = (t.float().double() for t in (x, w, bias, g))
    z = (x @ w + bias).requires_grad_()
    torch.nn.functional.gelu(z).backward(g)
    d, sums = run(
        "rows() -> v0 = tile(0: f32 n 4) * gelu_erf_grad(tile(1: f32 n 4)); "
        "store(0: f32 n 4, v0); reduce(1: f32, sum, rows, v0)",
        g.float(),
        z.detach().float(),
    )
    torch.testing.assert_close(d.double(), z.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), z.grad.sum(0), rtol=1e-5, atol=1e-5)


def test_philox_is_the_published_generator():
    # known answers of Random123's kat_vectors for philox4x32-10, first word
    ones = torch.tensor(0xFFFFFFFF)
    assert philox((ones * 0, ones * 0), (ones * 0,) * 4).item() == 0x6627E8D5
    assert philox((ones, ones), (ones,) * 4).item() == 0x408F276D
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    words = [torch.tensor(w) for w in pi]
    assert philox((words[4], words[5]), tuple(words[:4])).item() == 0xD16CFE09


@pytest.mark.parametrize(
    ("seed", "numbers"),
    [
        (
            1234567890123456789,
            "1.74531ep-2 1.44fcp-2 1.44dcaap-2 1.03ea0ap-1 1.1b3faep-2 1.e3f7aep-2 1.5ca92ep-2 "
            "1.fa686ep-1",
        ),
        (
            -42,
            "1.371e82p-1 1.5d75c6p-1 1.42c3e8p-1 1.5c598cp-2 1.db5134p-2 1.65fbcap-1 1.c94732p-1 "
            "1.54b256p-1",
        ),
        (
            7,
            "1.73f0b8p-4 1.a0ba38p-1 1.8e23bep-7 1.8f9056p-1 1.7053bcp-3 1.a85bc4p-1 1.aebe6p-2 "
            "1.5abd58p-1",
        ),
    ],
)
def test_uniform_numbers_are_those_of_tritons_rand_where_triton_runs(seed, numbers):
    """The numbers are tl.rand's, from Triton's interpreter, on offsets cast to uint32."""
    offset = torch.tensor([0, 1, 2, 3, 1000, 123456789, 2**32 - 1, 2**32 + 5])
    expected = [float.fromhex(f"0x{number}") for number in numbers.split()]
    assert uniform(torch.tensor(seed), offset, as_cpp=False).tolist() == expected


def test_keep_is_a_function_of_seed_and_offset_alone():
    seed = torch.randint(-(2**62), 2**62, ())
    x = torch.randn(64, 128)
    (y,) = run(
        "rows() -> store(0: f32 n 4, where(keep(scalar(1: i64), index(m) * 128 + index(n), 0.3), "
        "tile(0: f32 n 4), 0.0))",
        x,
        seed,
    )
    kept = (y != 0).float().mean().item()
    assert abs(kept - 0.7) < 0.03
    for _ in range(20):
        m, n = torch.randint(64, ()).item(), torch.randint(128, ()).item()
        keeps = philox_uniform(seed.item(), m * 128 + n) > float(torch.tensor(0.3))
        assert y[m, n].item() == (x[m, n].item() if keeps else 0.0)


def test_uniform_numbers_are_bit_equal_to_those_of_a_compiled_dropout():
    """Inductor draws seed from torch's generator and numbers by linear element index."""

    def dropout(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(x.shape)

    shape = (37, 53)
    x = torch.randn(shape)
    compiled = torch.compile(dropout)
    state = torch.get_rng_state()
    drawn = compiled(x)
    torch.set_rng_state(state)
    seed = torch.randint(-(2**63), 2**63 - 1, (1,))
    offset = torch.arange(shape[0] * shape[1]).view(shape)
    same(uniform(seed, offset), drawn)


def test_evaluation_in_make_case_order_uses_inputs_as_documented():
    tree = parse(
        "gemm(A: f32 = tile(0: f32 k 4), B: f32 n 4) -> store(0: f32 n 4, acc0 + row(1: f32))"
    )
    case = make_case(tree, {"l": 1, "m": 3, "n": 5, "k": 2}, seed=int(torch.randint(1000, ())))
    b, a, bias = case.inputs
    torch.testing.assert_close(evaluate(tree, case.inputs)[0], a @ b + bias)


def test_a_constant_beyond_fp32_is_infinite_as_in_torch():
    x = torch.randn(3, 4)
    (y,) = run("rows() -> store(0: f32 n 4, maximum(tile(0: f32 n 4), -1e+300) * 1e+300)", x)
    same(y, x * math.inf)
