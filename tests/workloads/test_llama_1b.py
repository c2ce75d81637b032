"""Llama: the published size, rotary positions, grouped heads, SwiGLU and RMS norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_evt import workloads
from torch_evt.workloads import llama_1b
from torch_evt.workloads.layers import RMSNorm


def test_paper_size_is_llama_3_2_1b() -> None:
    model, (tokens,), _ = workloads.get("llama-1b", "paper").make(device="meta")
    assert tokens.shape == (4, 2048) and model(tokens).shape == (4, 2048, 128256)
    assert sum(p.numel() for p in model.parameters()) == 1_235_814_400


def test_no_token_after_its_own_is_seen() -> None:
    model, (tokens,), _ = workloads.get("llama-1b").make(seed=0)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=(0, 2)).min() > 1e-5


def test_the_head_is_the_embedding() -> None:
    model, (tokens,), _ = workloads.get("llama-1b").make(seed=0)
    before = model(tokens)
    unused = next(token for token in range(256) if not (tokens == token).any())
    with torch.no_grad():
        model.embedding.weight[unused] *= 2
    torch.testing.assert_close(model(tokens)[..., unused], 2 * before[..., unused])


def test_rotated_products_depend_on_the_distance_alone() -> None:
    cos, sin = llama_1b.rotation(64, 16, torch.device("cpu"))
    q, k = torch.randn(16), torch.randn(16)
    turned_q = llama_1b.rotate(q.expand(64, 16), cos, sin)
    turned_k = llama_1b.rotate(k.expand(64, 16), cos, sin)
    products = turned_q @ turned_k.T
    for distance in (0, 3, 40):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand(len(diagonal)), atol=1e-4, rtol=0)
    assert (products[0] - products[0, 0]).abs().max() > 0.1
    torch.testing.assert_close(turned_q[0], q)


def test_rotation_has_the_frequencies_of_the_paper() -> None:
    cos, sin = llama_1b.rotation(10, 64, torch.device("cpu"))
    for pair in (0, 5, 31):
        angle = torch.tensor(7 * 500_000.0 ** (-2 * pair / 64), dtype=torch.float64)
        assert cos[7, pair].item() == pytest.approx(angle.cos().item(), abs=1e-6)
        assert sin[7, pair + 32].item() == pytest.approx(angle.sin().item(), abs=1e-6)


def test_halves_are_rotated_in_fp32() -> None:
    cos, sin = llama_1b.rotation(8, 16, torch.device("cpu"))
    x = torch.randn(2, 8, 16).bfloat16()
    turned = llama_1b.rotate(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, llama_1b.rotate(x.float(), cos, sin).bfloat16())


def test_pairs_of_query_heads_share_a_key_head() -> None:
    model, _, _ = workloads.get("llama-1b").make(seed=4)
    attention = model.blocks[0].attention
    cos, sin = llama_1b.rotation(6, 16, torch.device("cpu"))
    x = torch.randn(3, 6, 64)
    q, k, v = (
        projection(x).view(3, 6, heads, 16).transpose(1, 2)
        for projection, heads in (
            (attention.query, 4),
            (attention.key, 2),
            (attention.value, 2),
        )
    )
    q, k = llama_1b.rotate(q, cos, sin), llama_1b.rotate(k, cos, sin)
    mixed = [
        F.scaled_dot_product_attention(q[:, i], k[:, i // 2], v[:, i // 2], is_causal=True)
        for i in range(4)
    ]
    expected = attention.out(torch.cat(mixed, dim=-1))
    torch.testing.assert_close(attention(x, cos, sin), expected, atol=1e-5, rtol=1e-5)


def test_the_mlp_is_gated_by_silu() -> None:
    model, _, _ = workloads.get("llama-1b").make(seed=5)
    mlp = model.blocks[1].mlp
    x = torch.randn(3, 64)
    gate, up, down = (layer.weight for layer in (mlp.gate, mlp.up, mlp.down))
    z = x @ gate.T
    torch.testing.assert_close(mlp(x), (z * torch.sigmoid(z) * (x @ up.T)) @ down.T)


def test_the_norm_computes_in_fp32() -> None:
    norm = RMSNorm(32, eps=1e-5)
    nn.init.normal_(norm.weight)
    x = torch.randn(4, 32).bfloat16()
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    result = norm(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, expected.bfloat16())


def test_there_is_no_bias_and_no_dropout() -> None:
    model, (tokens,), _ = workloads.get("llama-1b").make(seed=0)
    assert not any("bias" in name for name, _ in model.named_parameters())
    assert torch.equal(model(tokens), model(tokens))
