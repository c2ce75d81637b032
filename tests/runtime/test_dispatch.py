"""Dispatch: specs, the choice of a kernel, poison, counting."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from torch_evt import emit
from torch_evt.emit.reference import REFERENCE
from torch_evt.errors import Reason, TreeError
from torch_evt.runtime import counters, dispatch
from torch_evt.tree.evaluate import evaluate
from torch_evt.tree.text import parse

SPEC = (
    "gemm(A: f32 k 4, B: f32 n 4) -> v0 = acc0 + row(0: f32); "
    "store(0: f32 n 4, v0); reduce(1: f32, sum, rows, relu(v0))"
)
TYPES = (
    "gemm(A: f32 k 4, B: f32 n 4) -> store(0: bf16 n 4, acc0); store(1: bool n 1, gt(acc0, 0.0)); "
    "store(2: i32 m 4, index(n))"
)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(request.node.name.encode()))
    counters.reset()


def tensors() -> list[torch.Tensor]:
    return [torch.randn(6, 5), torch.randn(5, 7), torch.randn(7)]


def test_spec_round_trips_with_and_without_poison():
    tree = parse(SPEC)
    for poison in (False, True):
        spec = dispatch.write_spec(tree, poison)
        read = dispatch.read_spec(spec)
        assert (read.tree, read.text, read.poison) == (tree, SPEC, poison)
        assert dispatch.read_spec(spec) is read
    assert dispatch.write_spec(tree, True) == "poison: " + SPEC
    with pytest.raises(TreeError):
        dispatch.read_spec("poison: poison: " + SPEC)


def test_spec_with_the_name_of_a_region_to_be_checked():
    tree = parse(SPEC)
    spec = dispatch.write_spec(tree, name="0/0 backward mm_2")
    read = dispatch.read_spec(spec)
    assert spec == "verify 0/0 backward mm_2: " + SPEC
    assert (read.tree, read.text, read.poison, read.name) == (tree, SPEC, True, "0/0 backward mm_2")
    assert dispatch.read_spec(SPEC).name is None
    inputs = tensors()
    for wanted, result in zip(evaluate(tree, inputs), dispatch.run(spec, inputs, []), strict=True):
        assert torch.equal(result, wanted)


def test_run_allocates_or_fills_the_given_buffers():
    inputs = tensors()
    expected = evaluate(parse(SPEC), inputs)
    results = dispatch.run(SPEC, inputs, [])
    buffers = [torch.full_like(t, 7.0) for t in expected]
    returned = dispatch.run(SPEC, inputs, [], buffers)
    for wanted, result, buffer, same in zip(expected, results, buffers, returned, strict=True):
        assert torch.equal(result, wanted) and torch.equal(buffer, wanted) and same is buffer


def test_runs_are_counted_by_the_tree_whatever_the_poison():
    inputs = tensors()
    for spec in (SPEC, SPEC, "poison: " + SPEC):
        dispatch.run(spec, inputs, [])
    assert counters.region_runs == {SPEC: 3}
    counters.reset()
    assert not counters.region_runs


class Incomplete:
    """An emitter whose kernels leave the last row of every output unwritten."""

    name = "incomplete"

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.compiled = 0

    def supports(self, tree):
        return Reason("test", "it refuses everything") if self.refuses else None

    def compile(self, tree):
        self.compiled += 1

        def kernel(inputs, sizes, outputs, overwritten):
            for output, value in zip(outputs, evaluate(tree, inputs, sizes), strict=True):
                output[:-1].copy_(value[:-1])

        return kernel


@pytest.fixture
def use_emitter(monkeypatch):
    def use(emitter):
        monkeypatch.setattr(emit, "EMITTERS", MappingProxyType({"cpu": emitter}))
        dispatch.kernel_of.cache_clear()
        return emitter

    yield use
    dispatch.kernel_of.cache_clear()


def test_poison_shows_what_a_kernel_leaves_unwritten(use_emitter):
    use_emitter(Incomplete())
    for given in (False, True):
        buffers = [torch.randn(6, 7), torch.randn(7)] if given else None
        for result in dispatch.run("poison: " + SPEC, tensors(), [], buffers):
            assert result[-1].isnan().all() and not result[:-1].isnan().any()


def test_poison_covers_every_dtype(use_emitter):
    use_emitter(Incomplete())
    floats, bools, integers = dispatch.run("poison: " + TYPES, tensors()[:2], [])
    assert floats[-1].isnan().all()
    assert bools[-1].all()
    assert (integers[-1] == torch.iinfo(torch.int32).min).all()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
        filled = torch.empty(3, dtype=dtype).fill_(dispatch.poison_value(dtype))
        assert filled.float().isnan().all()


def test_poison_leaves_a_complete_kernel_alone():
    inputs = tensors()
    expected = evaluate(parse(SPEC), inputs)
    for result, wanted in zip(dispatch.run("poison: " + SPEC, inputs, []), expected, strict=True):
        assert torch.equal(result, wanted)


def test_poison_catches_a_buffer_that_is_also_an_input():
    a, b = torch.randn(6, 6), torch.randn(6, 6)
    spec = "gemm(A: f32 k 4, B: f32 n 4) -> store(0: f32 n 4, acc0)"
    (result,) = dispatch.run("poison: " + spec, [a, b], [], [a])
    assert result.isnan().all()


def test_poison_rejects_inputs_that_do_not_fit_the_tree():
    a, b, bias = tensors()
    for wrong in ([a, b], [a, b, bias[:3]], [a, b.double(), bias], [a.t(), b, bias]):
        with pytest.raises(TreeError):
            dispatch.run("poison: " + SPEC, wrong, [])


def test_an_emitter_is_asked_once_a_tree_and_device(use_emitter):
    emitter = use_emitter(Incomplete())
    for spec in (SPEC, SPEC, "poison: " + SPEC):
        dispatch.run(spec, tensors(), [])
    assert emitter.compiled == 1


def test_the_reference_runs_what_an_emitter_refuses_and_where_there_is_none(use_emitter):
    assert emit.emitter_for(torch.device("cpu")) is None
    inputs = tensors()
    expected = evaluate(parse(SPEC), inputs)
    refusing = use_emitter(Incomplete(refuses=True))
    assert emit.emitter_for(torch.device("cpu")) is refusing
    for result, wanted in zip(dispatch.run(SPEC, inputs, []), expected, strict=True):
        assert torch.equal(result, wanted)
    assert refusing.compiled == 0
    assert REFERENCE.supports(parse(SPEC)) is None and REFERENCE.name == "reference"


def test_overwritten_arguments_are_read_before_they_are_written():
    spec = (
        "gemm(A: f32 k 4, B: f32 n 4) -> v0 = tile(into 0: f32 n 4) + acc0; "
        "store(into 0: f32 n 4, v0); store(0: f32 m 4, tile(into 0: f32 n 4) * v0)"
    )
    (a, b, _), target = tensors(), torch.randn(6, 7)
    before, after = target.clone(), target + a @ b
    (product,) = dispatch.run("poison: " + spec, [a, b], [], overwritten=[target])
    torch.testing.assert_close(target, after)
    torch.testing.assert_close(product, before * after)
    assert product.stride() == (1, 6)


def test_a_scalar_on_the_cpu_does_not_decide_the_device():
    scalar, tile = torch.randn(()), torch.randn(3, 4, device="meta")
    assert dispatch.device_of([scalar, tile]).type == "meta"
    assert dispatch.device_of([scalar], [tile]).type == "meta"
    assert dispatch.device_of([scalar]).type == "cpu"


def test_empty_and_single_rows():
    for m, n in ((0, 7), (1, 7), (6, 1), (1, 1)):
        inputs = [torch.randn(m, 5), torch.randn(5, n), torch.randn(n)]
        tile, sums = dispatch.run("poison: " + SPEC, inputs, [])
        torch.testing.assert_close(tile, inputs[0] @ inputs[1] + inputs[2])
        torch.testing.assert_close(sums, tile.relu().sum(0))
