"""BERT: the published size, rows as in pre-training, and a decoder that is the embedding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torch_evt import workloads
from torch_evt.workloads import bert_large, text
from torch_evt.workloads.layers import IGNORED

WORDS = 252
PADDING, START, END, MASKED = range(WORDS, 256)


def test_paper_size_is_bert_large() -> None:
    model, inputs, _ = workloads.get("bert-large", "paper").make(device="meta")
    assert [tuple(t.shape) for t in inputs] == [(32, 512)] * 3
    words, pair = model(*inputs)
    assert words.shape == (32, 512, 30528) and pair.shape == (32, 2)
    count = sum(p.numel() for p in model.parameters())
    published = 336_226_108  # of BertForPreTraining, with a vocabulary of 30522
    assert count == published + (30528 - 30522) * (1024 + 1)


def test_rows_are_two_pieces_of_text_and_padding() -> None:
    followed = 0
    for seed in range(10):
        tokens, types, mask, words, pairs = workloads.get("bert-large").inputs(seed)
        assert mask.dtype == torch.bool and types.unique().tolist() == [0, 1]
        restored = torch.where(words == IGNORED, tokens, words)
        for row, kinds, kept, other in zip(restored, types, mask, pairs, strict=True):
            used = int(kept.sum())
            assert kept[:used].all() and (row[used:] == PADDING).all() and 24 <= used <= 32
            first, second, rest = "".join(map(chr, row[:used])).split(chr(END))
            assert first[0] == chr(START) and rest == ""
            assert kinds.tolist() == [0] * (len(first) + 1) + [1] * (len(second) + 1) + [0] * (
                32 - used
            )
            first_text, second_text = (piece.encode("latin-1") for piece in (first[1:], second))
            assert first_text in text.corpus() and second_text in text.corpus()
            if not other:
                assert first_text + second_text in text.corpus()
            followed += int(other == 0)
    assert 10 <= followed <= 30, "of 40 rows, about half"


def test_masked_words_are_replaced_8_1_1() -> None:
    size = bert_large.SIZES["paper"]
    tokens, _, mask, words, _ = bert_large.inputs(size, 0, torch.float32, "cpu")
    chosen = words != IGNORED
    assert chosen.sum() / mask.sum() == pytest.approx(0.15, abs=0.01)
    assert (words[chosen] < size.words).all(), "special tokens are never asked for"
    share_masked = (tokens[chosen] == size.vocabulary - 1).float().mean()
    share_left = (tokens[chosen] == words[chosen]).float().mean()
    assert share_masked == pytest.approx(0.8, abs=0.03)
    assert share_left == pytest.approx(0.1, abs=0.03)
    assert (tokens[~chosen] != size.vocabulary - 1).all()


def test_padding_is_not_attended_to() -> None:
    model, (tokens, types, mask), _ = workloads.get("bert-large").make(seed=0)
    model.eval()
    assert not mask.all()
    changed = torch.where(mask, tokens, 7)
    (before, pair), (after, pair_after) = model(tokens, types, mask), model(changed, types, mask)
    torch.testing.assert_close(before[mask], after[mask])
    torch.testing.assert_close(pair, pair_after)
    unmasked, _ = model(changed, types, torch.ones_like(mask))
    assert (unmasked[mask] - after[mask]).abs().max() > 1e-3


def test_the_decoder_is_the_embedding() -> None:
    model, (tokens, types, mask), _ = workloads.get("bert-large").make(seed=0)
    model.eval()
    before, _ = model(tokens, types, mask)
    unused = next(token for token in range(256) if not (tokens == token).any())
    bias = model.word_bias[unused]
    with torch.no_grad():
        model.embedding.word.weight[unused] *= 2
    after, _ = model(tokens, types, mask)
    torch.testing.assert_close(after[..., unused] - bias, 2 * (before[..., unused] - bias))
    assert torch.equal(after[..., :unused], before[..., :unused])


def test_the_loss_is_that_of_the_asked_words_and_of_the_pairs() -> None:
    words = torch.randn(2, 5, 9)
    pair = torch.randn(2, 2)
    targets = torch.full((2, 5), IGNORED)
    targets[0, 3], targets[1, 0] = 4, 8
    expected = -(words[0, 3].log_softmax(0)[4] + words[1, 0].log_softmax(0)[8]) / 2
    expected -= (pair[0].log_softmax(0)[1] + pair[1].log_softmax(0)[0]) / 2
    ours = bert_large.pretraining_loss((words, pair), targets, torch.tensor([1, 0]))
    torch.testing.assert_close(ours, expected)


def test_a_block_is_post_norm() -> None:
    model, _, _ = workloads.get("bert-large").make(seed=3)
    block = model.blocks[0].eval()
    x = torch.randn(2, 5, 64)
    keep = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    heads = [
        F.linear(x, p.weight, p.bias).view(2, 5, 4, 16).transpose(1, 2)
        for p in (block.attention.query, block.attention.key, block.attention.value)
    ]
    scores = heads[0] @ heads[1].transpose(2, 3) / 4
    scores = scores.masked_fill(~keep[:, None, None, :], float("-inf"))
    mixed = (scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(2, 5, 64)
    first = block.attention_norm(x + block.attention.out(mixed))
    expected = block.mlp_norm(first + block.down(F.gelu(block.up(first), approximate="tanh")))
    torch.testing.assert_close(block(x, keep), expected, atol=1e-5, rtol=1e-5)
