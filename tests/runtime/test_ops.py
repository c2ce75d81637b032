"""Regions as operators: strides, the out and the mutating forms, Inductor, tracing, flops."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from torch_evt.errors import TreeError
from torch_evt.runtime import counters, ops
from torch_evt.tree.evaluate import evaluate
from torch_evt.tree.text import parse

PLAIN = "gemm(A: f32 k 4, B: f32 n 4) -> store(0: f32 n 4, relu(acc0))"
FORWARD = (
    "gemm(A: bf16 k 2, B: bf16 k 2) -> v0 = acc0 + row(0: bf16); "
    "store(0: bf16 n 2, v0); store(1: bf16 m 2, gelu_tanh(v0))"
)
BACKWARD = (
    "gemm(A: f32 k 4, B: f32 n 4) -> v0 = acc0 * gelu_tanh_grad(tile(0: f32 m 4)); "
    "store(0: f32 n 4, v0); reduce(1: f32, sum, rows, v0); reduce(2: f32, max, columns, v0)"
)
BATCHED = (
    "gemm(A: f32 l k 4, B: f32 l n 4) -> v0 = acc0 + tile(0: f32 n 4 [m mod s0, n]); "
    "store(0: f32 m 4, v0); reduce(1: f32, sum, rows, fold l, v0)"
)
IN_PLACE = (
    "gemm(A: f32 k 4, B: f32 n 4) -> v0 = tile(into 0: f32 n 4) + acc0; "
    "store(into 0: f32 n 4, v0); reduce(0: f32, sum, rows, v0)"
)
IN_PLACE_TRANSPOSED = (
    "gemm(A: f32 k 4, B: f32 n 4) -> v0 = tile(into 0: f32 n 4) + acc0; "
    "store(into 0: f32 n 4, v0); store(0: f32 m 4, relu(v0)); store(1: bf16 n 2, v0)"
)
ONLY_IN_PLACE = (
    "gemm(A: f32 k 4, B: f32 n 4) -> store(into 0: f32 n 4, tile(into 0: f32 n 4) + acc0)"
)
EIGHT = "gemm(A: f32 k 4, B: f32 n 4) -> " + "; ".join(
    f"store({i}: f32 n 4, acc0 * {float(i + 1)})" for i in range(8)
)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(request.node.name.encode()))
    counters.reset()


def arguments(spec: str) -> tuple[list[Tensor], list[int]]:
    """Random inputs of a spec, with the strides that its text says, and its sizes."""
    if spec == BATCHED:
        inputs = [torch.randn(2, 6, 5), torch.randn(2, 5, 7), torch.randn(3, 7)]
        return inputs, [3]
    if spec == FORWARD:
        return [
            t.bfloat16() for t in (torch.randn(6, 5), torch.randn(7, 5).t(), torch.randn(7))
        ], []
    inputs = [torch.randn(6, 5), torch.randn(5, 7)]
    return inputs + ([torch.randn(7, 6).t()] if spec == BACKWARD else []), []


def call(spec: str, inputs: list[Tensor], sizes: list[int], prefix: str = "") -> list[Tensor]:
    return list(ops.region_op(len(parse(spec).new_outputs))(inputs, prefix + spec, sizes))


CASES = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(FORWARD, id="forward"),
        pytest.param(BACKWARD, id="backward"),
        pytest.param(BATCHED, id="batched"),
        pytest.param(EIGHT, id="eight"),
    ],
)


@CASES
@pytest.mark.parametrize("prefix", ["", "poison: "])
def test_functional_and_out_forms_equal_the_evaluated_tree(spec, prefix):
    inputs, sizes = arguments(spec)
    expected = evaluate(parse(spec), inputs, sizes)
    results = call(spec, inputs, sizes, prefix)
    buffers = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in expected]
    named = {f"out{i}" if i else "out": t for i, t in enumerate(buffers)}
    packet = getattr(torch.ops.torch_evt, f"region_{len(expected)}")
    returned = packet.out(inputs, prefix + spec, sizes, **named)
    returned = [returned] if len(expected) == 1 else list(returned)
    assert [t.data_ptr() for t in returned] == [t.data_ptr() for t in buffers]
    assert len(results) == len(buffers) == len(expected)
    for wanted, result, buffer in zip(expected, results, buffers, strict=True):
        assert torch.equal(result, wanted) and torch.equal(buffer, wanted)
        assert result.stride() == wanted.stride() and result.dtype == wanted.dtype
        assert wanted.float().abs().sum() > 0
    assert counters.region_runs == {spec: 2}


@CASES
@pytest.mark.parametrize("dynamic", [False, True])
def test_opcheck_of_functional_form(spec, dynamic):
    inputs, sizes = arguments(spec)
    op = ops.region_op(len(parse(spec).new_outputs))
    tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
    if dynamic:
        tests = ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, (inputs, spec, sizes), test_utils=tests)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(IN_PLACE, id="one"),
        pytest.param(IN_PLACE_TRANSPOSED, id="two"),
        pytest.param(ONLY_IN_PLACE, id="none"),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_opcheck_of_mutating_form(spec, dynamic):
    inputs, sizes = arguments(spec)
    op = ops.region_op(len(parse(spec).new_outputs), overwrites=True)
    tests = ["test_schema", "test_faketensor", "test_autograd_registration"]
    if dynamic:
        tests = ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, ([torch.randn(6, 7)], inputs, spec, sizes), test_utils=tests)


@pytest.mark.parametrize("prefix", ["", "poison: "])
def test_mutating_form_overwrites_in_place(prefix):
    (a, b), target = arguments(IN_PLACE)[0], torch.randn(6, 7)
    expected = target + a @ b
    address = target.data_ptr()
    sums = ops.region_op(1, overwrites=True)([target], [a, b], prefix + IN_PLACE, [])
    assert target.data_ptr() == address
    torch.testing.assert_close(target, expected)
    torch.testing.assert_close(sums, expected.sum(0))
    assert ops.region_op(0, overwrites=True)([target], [a, b], prefix + ONLY_IN_PLACE, []) is None
    torch.testing.assert_close(target, expected + a @ b)


def test_fake_kernels_have_the_strides_of_the_real_ones_and_count_nothing():
    for spec in (PLAIN, FORWARD, BACKWARD, BATCHED):
        inputs, sizes = arguments(spec)
        real = call(spec, inputs, sizes)
        counters.reset()
        with FakeTensorMode() as mode:
            fake = call(spec, [mode.from_tensor(t) for t in inputs], sizes)
        meta = call(spec, [t.to("meta") for t in inputs], sizes)
        for result in (fake, meta):
            assert [(t.shape, t.stride(), t.dtype) for t in result] == [
                (t.shape, t.stride(), t.dtype) for t in real
            ]
        assert not counters.region_runs


def test_symbolic_sizes_add_no_guards():
    def f(inputs, size):
        return call(BATCHED, inputs, [size])

    environment = ShapeEnv()
    inputs, _ = arguments(BATCHED)
    with FakeTensorMode(shape_env=environment) as mode:
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        context = [StatelessSymbolicContext([DimDynamic.DYNAMIC] * t.dim()) for t in inputs]
        symbolic = [
            mode.from_tensor(t, symbolic_context=c, source=source)
            for t, c, source in zip(inputs, context, map(_source, "abc"), strict=True)
        ]
        before = list(environment.guards)
        tile, sums = f(symbolic, symbolic[2].shape[0])
    assert environment.guards == before
    a, b = symbolic[:2]
    assert tile.shape == (a.shape[0], a.shape[1], b.shape[2])
    assert str(sums.shape[0]) == str(b.shape[2]) and str(sums.shape[0]).startswith("s")


def _source(name: str):
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def test_ops_can_be_traced():
    inputs, sizes = arguments(BACKWARD)
    graph = make_fx(lambda *ts: call(BACKWARD, list(ts), sizes), tracing_mode="fake")(*inputs)
    node = next(n for n in graph.graph.nodes if n.op == "call_function")
    assert node.target is ops.region_op(3) and ops.is_region(node.target)
    assert not ops.is_region(torch.ops.aten.mm.default) and not ops.is_region("region_1")


def test_region_op_names_the_form_or_says_why_not():
    assert ops.region_op(2).name() == "torch_evt::region_2"
    assert ops.region_op(0, overwrites=True).name() == "torch_evt::region_0_"
    for outputs, overwrites in [(0, False), (9, False), (-1, True), (9, True)]:
        with pytest.raises(ValueError, match="outputs"):
            ops.region_op(outputs, overwrites=overwrites)


def test_importing_again_keeps_the_operators():
    before = ops.region_op(1)
    importlib.reload(ops)
    assert ops.region_op(1) is before
    inputs, sizes = arguments(PLAIN)
    assert torch.equal(call(PLAIN, inputs, sizes)[0], (inputs[0] @ inputs[1]).relu())


def test_poison_checks_inputs_and_a_bad_text_is_an_error():
    a, b = arguments(PLAIN)[0]
    with pytest.raises(TreeError):
        call(PLAIN, [a, b.double()], [], "poison: ")
    with pytest.raises(TreeError):
        torch.ops.torch_evt.region_1([a, b], "gemm(", [])


def test_flops_are_those_of_the_products():
    inputs, sizes = arguments(BATCHED)
    with FlopCounterMode(display=False) as counter:
        call(BATCHED, inputs, sizes)
    assert counter.get_total_flops() == 2 * 2 * 6 * 5 * 7
    (a, b), target = arguments(IN_PLACE)[0], torch.randn(6, 7)
    with FlopCounterMode(display=False) as counter:
        ops.region_op(1, overwrites=True)([target], [a, b], IN_PLACE, [])
        torch.ops.torch_evt.region_1.out([a, b], PLAIN, [], out=target)
    assert counter.get_total_flops() == 2 * (2 * 6 * 5 * 7)
    dual = (
        "gemm(A: f32 k 4, B: f32 n 4, A1: f32 k 4, B1: f32 n 4) -> store(0: f32 n 4, acc0 * acc1)"
    )
    with FlopCounterMode(display=False) as counter:
        call(dual, [a, b, torch.randn(6, 3), torch.randn(3, 7)], [])
    assert counter.get_total_flops() == 2 * 6 * 7 * (5 + 3)


def test_rows_tree_costs_no_flops():
    spec = "rows() -> store(0: f32 n 4, relu(tile(0: f32 n 4)))"
    x = torch.randn(4, 6)
    with FlopCounterMode(display=False) as counter:
        (result,) = call(spec, [x], [])
    assert torch.equal(result, x.relu()) and counter.get_total_flops() == 0


def chain(a: Tensor, b: Tensor, c: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """One, several and no new outputs, after and before pointwise work, one in place."""
    (x,) = torch.ops.torch_evt.region_1([a * 2, b], "poison: " + PLAIN, [])
    y, sums, most = torch.ops.torch_evt.region_3(
        [a + 1, b, x.t().clone().t()], "poison: " + BACKWARD, []
    )
    shifted = target + 5
    column_sums = torch.ops.torch_evt.region_1_([shifted], [c, b], "poison: " + IN_PLACE, [])
    torch.ops.torch_evt.region_0_([shifted], [a, b], "poison: " + ONLY_IN_PLACE, [])
    return x + y, sums * 2, most, shifted - 1, column_sums


def chain_inputs() -> list[Tensor]:
    return [torch.randn(6, 5), torch.randn(5, 7), torch.randn(6, 5), torch.randn(6, 7)]


def has_out_lowering() -> bool:
    """Inductor finds out forms from torch 2.12."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


@pytest.fixture(scope="module")
def compiled():
    """The chain compiled once: inputs, results, generated code, runs."""
    torch.manual_seed(7)
    torch._dynamo.reset()
    inputs = chain_inputs()
    expected = chain(*inputs)
    function = torch.compile(chain, fullgraph=True)
    counters.reset()
    # cached code would hide what the operators' tags do, for they are no part of the key
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, torch._inductor.config.patch(fx_graph_cache=False):
        results, (code,) = run_and_get_code(function, *inputs)
    return expected, results, code, dict(counters.region_runs)


def test_inductor_calculates_what_eager_does(compiled):
    expected, results, _, _ = compiled
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)
        assert result.stride() == wanted.stride() and not result.isnan().any()


def test_each_region_ran_once_and_compiling_counted_nothing(compiled):
    assert compiled[3] == dict.fromkeys((PLAIN, BACKWARD, IN_PLACE, ONLY_IN_PLACE), 1)


@pytest.mark.skipif(not has_out_lowering(), reason="torch 2.11 calls the functional form")
def test_inductor_calls_the_out_form_with_buffers_it_allocated(compiled):
    code = compiled[2]
    for op, names in (("region_1", ["out"]), ("region_3", ["out", "out1", "out2"])):
        (line,) = [x for x in code.splitlines() if f"torch.ops.torch_evt.{op}.out(" in x]
        assert f"torch.ops.torch_evt.{op}.default" not in line
        for name in names:
            buffer = line.split(f"{name}=")[1].split(",")[0].split(")")[0]
            allocations = [
                x for x in code.splitlines()
                if x.strip().startswith(f"{buffer} = ") and ("empty_strided" in x or "reuse" in x)
            ]  # fmt: skip
            assert allocations, f"{buffer} is not allocated by Inductor"


def test_dynamic_shapes_compile_once_with_the_symbolic_form():
    torch._dynamo.reset()

    def f(a, b, bias):
        x, act = torch.ops.torch_evt.region_2_symbolic.default([a, b, bias], FORWARD, [])
        (y,) = torch.ops.torch_evt.region_1_symbolic.default([a.float(), b.float()], PLAIN, [])
        return x + 1, act, y + 1

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        node = next(n for n in graph.graph.nodes if ops.is_region(n.target))
        tensors = [n.meta["example_value"] for n in node.args[0]]
        assert ops.has_symbols(tensors, []) and not ops.has_symbols([torch.randn(3)], [])
        return torch._inductor.compile(graph, inputs)

    function = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for m, n in ((6, 7), (9, 4)):
        a, b, bias = (torch.randn(*s).bfloat16() for s in ((m, 5), (n, 5), (n,)))
        for result, wanted in zip(function(a, b.t(), bias), f(a, b.t(), bias), strict=True):
            torch.testing.assert_close(result, wanted)
            assert result.stride() == wanted.stride()
    assert len(graphs) == 1
