"""Workloads: reproducible, random where a zero would hide a fault, and what the papers describe."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_evt import workloads
from torch_evt.errors import ExplainError, OptionError
from torch_evt.workloads import layers, mlp, text

NAMES = workloads.names()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class RealNumbers(TorchDispatchMode):
    """Within it, `most` is the number of elements of the largest result that is not on meta."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.most = max(self.most, tensor.numel())
        return result


def _gradients(name: str, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    workload = workloads.get(name)
    model, inputs, loss = workload.make(seed=seed, dtype=dtype)
    assert loss is not None
    torch.manual_seed(seed)
    loss(model(*inputs)).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def test_the_registered_names_and_sizes() -> None:
    assert set(NAMES) == {"mlp", "gpt2-medium", "bert-large", "llama-1b", "vit-b14", "xmlcnn"}
    assert all(workloads.sizes(name) == ("tiny", "small", "paper") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_give_equal_models_and_other_seeds_others(name: str) -> None:
    (a, x, _), (b, y, _), (c, z, _) = (workloads.get(name).make(seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))
    assert torch.equal(x[0], y[0]) and not torch.equal(x[0], z[0])
    first, same, other = (workloads.get(name).inputs(seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(t, u) for t, u in zip(first, same, strict=True))
    assert not any(torch.equal(t, u) for t, u in zip(first, other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_begins_with_the_inputs_that_make_has(name: str) -> None:
    workload = workloads.get(name)
    _, given, _ = workload.make(seed=5)
    batch = workload.inputs(seed=5)
    assert all(torch.equal(t, u) for t, u in zip(given, batch[: len(given)], strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_parameter_is_zero_or_one_and_no_gradient_zero(name: str, dtype: torch.dtype) -> None:
    model, _, _ = workloads.get(name).make(seed=1, dtype=dtype)
    gradients = _gradients(name, dtype, seed=1)
    for key, parameter in model.named_parameters():
        assert ((parameter == 0) | (parameter == 1)).float().mean() < 0.01, key
        assert gradients[key].isfinite().all() and gradients[key].norm() > 0, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_have_the_dtype_and_norms_stay_fp32(name: str, dtype: torch.dtype) -> None:
    model, inputs, loss = workloads.get(name).make(dtype=dtype)
    assert loss is not None
    for module in model.modules():
        own = torch.float32 if isinstance(module, nn.LayerNorm | nn.RMSNorm) else dtype
        assert all(p.dtype == own for p in module.parameters(recurse=False))
    output = model(*inputs)
    assert all(t.dtype == dtype for t in tree_leaves((output, inputs)) if t.is_floating_point())
    assert loss(output).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_step_is_the_loss_of_make(name: str) -> None:
    workload = workloads.get(name)
    model, inputs, loss = workload.make(seed=2)
    assert loss is not None
    torch.manual_seed(0)
    expected = loss(model(*inputs))
    torch.manual_seed(0)
    assert torch.equal(workload.step(model, workload.inputs(seed=2)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_equal_seeds_give_equal_gradients(name: str) -> None:
    first, same = (_gradients(name, torch.float32, seed=2) for _ in range(2))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert len(first) == len(list(workloads.get(name).make()[0].parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_in_training(name: str) -> None:
    workload = workloads.get(name)
    model, _, _ = workload.make(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    losses = []
    for number in range(50):
        optimizer.zero_grad()
        loss = workload.step(model, workload.inputs(seed=number))
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.85 * losses[0]


DROPPED_IN_ATTENTION = {"bert-large": 0.1, "vit-b14": 0.1, "gpt2-medium": 0.0, "llama-1b": 0.0}


@pytest.mark.parametrize("name", DROPPED_IN_ATTENTION)
def test_attention_drops_in_training_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, _ = workloads.get(name).make(seed=0)
    original = F.scaled_dot_product_attention
    used = []

    def recorded(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
        used.append(dropout_p)
        return original(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    model(*inputs)
    model.eval()(*inputs)
    assert used == [DROPPED_IN_ATTENTION[name]] * 2 + [0.0] * 2, "two layers, twice"


@pytest.mark.parametrize("name", ["gpt2-medium", "bert-large", "vit-b14", "xmlcnn"])
def test_every_dropout_acts_in_training_only(name: str) -> None:
    model, inputs, _ = workloads.get(name).make(seed=0)
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert dropouts and all(module.p == 0.1 for module in dropouts)
    model.eval()
    expected = tree_leaves(model(*inputs))
    assert all(map(torch.equal, tree_leaves(model(*inputs)), expected))
    for module in dropouts:
        module.train()
        assert not all(map(torch.equal, tree_leaves(model(*inputs)), expected))
        module.eval()


@pytest.mark.parametrize("name", NAMES)
def test_a_double_copy_computes_in_double(name: str) -> None:
    model, inputs, loss = workloads.get(name).make(dtype=torch.float64)
    assert loss is not None
    value = loss(model.eval()(*inputs))
    assert value.dtype == torch.float64
    single = value.float().double()
    assert value != single, "a value that fp32 can hold was rounded to fp32 on its way"


@pytest.mark.parametrize("name", NAMES)
def test_the_paper_size_works_without_memory(name: str) -> None:
    with RealNumbers() as real:
        model, inputs, loss = workloads.get(name, "paper").make(device="meta")
        assert loss is not None and loss(model(*inputs)).shape == ()
        batch = workloads.get(name, "paper").inputs(device="meta")
    assert real.most < 2**20, "elements of one tensor that has memory"
    assert all(t.is_meta for t in (*model.parameters(), *inputs, *batch))
    with FakeTensorMode():
        model, inputs, loss = workloads.get(name, "paper").make(dtype=torch.bfloat16)
        output = model(*inputs)
        for tensor in tree_leaves((output, list(model.parameters()))):
            assert isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
        assert loss is not None and loss(output).shape == ()


def test_mlp_is_two_relu_layers_without_bias() -> None:
    model, (x,), loss = workloads.get("mlp").make(seed=7)
    w1, w2 = (p.detach() for p in model.parameters())
    assert (w1.shape, w2.shape, x.shape) == ((128, 64), (64, 128), (32, 64))
    output = model(x)
    torch.testing.assert_close(output, ((x @ w1.T).clamp(min=0) @ w2.T).clamp(min=0))
    assert loss is not None
    (upstream,) = torch.autograd.grad(loss(output), output)
    torch.testing.assert_close(upstream, torch.softmax(output, 1))


def test_gpt_sees_no_token_after_its_own() -> None:
    model, (tokens,), _ = workloads.get("gpt2-medium").make(seed=0)
    model.eval()
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=(0, 2)).min() > 1e-5


def test_gpt_ties_its_head_to_its_embedding() -> None:
    model, (tokens,), _ = workloads.get("gpt2-medium").make(seed=0)
    model.eval()
    before = model(tokens)
    unused = next(token for token in range(256) if not (tokens == token).any())
    with torch.no_grad():
        model.embedding.weight[unused] *= 2
    after = model(tokens)
    torch.testing.assert_close(after[..., unused], 2 * before[..., unused])
    assert torch.equal(after[..., :unused], before[..., :unused])
    layers.cross_entropy(after, layers.next_tokens(tokens)).backward()
    assert model.embedding.weight.grad[unused].norm() > 0, "only the head reads that row"


def test_gpt_paper_size_is_gpt2_medium() -> None:
    model, (tokens,), _ = workloads.get("gpt2-medium", "paper").make(device="meta")
    assert tokens.shape == (8, 1024)
    count = sum(p.numel() for p in model.parameters())
    assert count == 354_823_168 + (50304 - 50257) * 1024, "GPT-2 medium with a padded vocabulary"


def test_the_last_position_has_no_target() -> None:
    tokens = torch.randint(256, (3, 9))
    targets = layers.next_tokens(tokens)
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    assert (targets[:, -1] == layers.IGNORED).all()
    logits = torch.randn(3, 9, 256)
    expected = -logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(layers.cross_entropy(logits, targets), expected)


def test_the_text_is_the_standard_library_and_windows_are_parts_of_it() -> None:
    corpus = text.corpus()
    assert len(corpus) == text.LIMIT
    assert b"import " in corpus
    for row in text.tokens(0, batch=4, length=100, vocabulary=256).tolist():
        assert bytes(row) in corpus


def test_a_wide_vocabulary_is_read_in_more_than_256_rows() -> None:
    wide = text.tokens(0, batch=8, length=1024, vocabulary=50304)
    assert wide.unique().numel() > 256
    assert wide.min() >= 0 and wide.max() < 50304
    assert text.tokens(0, batch=2, length=50, vocabulary=100).max() < 100


def test_mlp_loss_is_computed_in_fp32_for_half_outputs() -> None:
    output = torch.randn(16, 64).bfloat16()
    assert torch.equal(mlp.loss(output), torch.logsumexp(output.float(), 1).sum())


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("gpt2", "tiny", "unknown workload 'gpt2'; did you mean 'gpt2-medium'"),
        ("GPT", "tiny", "unknown workload 'GPT'; did you mean 'gpt2-medium'"),
        ("resnet50", "tiny", "unknown workload 'resnet50'. Known: mlp, gpt2-medium, bert-large"),
        ("mlp", "papr", "unknown size of mlp 'papr'; did you mean 'paper'"),
        ("mlp", "big", "unknown size of mlp 'big'. Known: tiny, small, paper"),
    ],
)
def test_an_unknown_name_or_size_names_the_nearest(name: str, size: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        workloads.get(name, size)


def test_load_takes_a_function_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import torch\ndef make():\n    return torch.nn.Linear(2, 3), (torch.ones(1, 2),), None\n"
    )
    source += "def wrong():\n    return 1\ndef two():\n    return make()[:2]\n"
    source += "def bare():\n    return make()[0], make()[1][0], None\ndef needs(size):\n    pass\n"
    (tmp_path / "my_model_of_two.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model, inputs, loss = workloads.load("my_model_of_two:make")
    assert model(*inputs).shape == (1, 3) and loss is None
    with pytest.raises(ExplainError, match="returned int"):
        workloads.load("my_model_of_two:wrong")
    with pytest.raises(ExplainError, match="returned a tuple of 2"):
        workloads.load("my_model_of_two:two")
    with pytest.raises(ExplainError, match="must be a tuple of the model's arguments.*Tensor"):
        workloads.load("my_model_of_two:bare")
    with pytest.raises(ExplainError, match="cannot be called without arguments.*'size'"):
        workloads.load("my_model_of_two:needs")
    with pytest.raises(ExplainError, match="cannot load 'my_model_of_two:missing'"):
        workloads.load("my_model_of_two:missing")
    with pytest.raises(ExplainError, match="cannot load 'no_such_module_at_all:make'"):
        workloads.load("no_such_module_at_all:make")
