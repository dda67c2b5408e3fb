"""Tests of what three public tutorials say and print.

"Feature 11" and "figure 9" are numbers in a list that was made from the texts
before the kit was written. These tests cover what other files do not. The
mistakes in the texts are in zoo/README.md.
"""

import math
import re

import pytest
import torch
from torch import nn

from gpt_duet import GPTConfig, annotated, load_tokenizer, mingpt_style
from gpt_duet.masks import causal_mask
from gpt_duet.mingpt_style.ladder import (
    RUNGS,
    Bigram,
    FeedForward,
    FullGPT,
    NormedBlock,
    OneHead,
    Residual,
)
from gpt_duet.mingpt_style.ladder_heads import (
    MultiHead,
    average_by_loop,
    average_by_matrix,
    average_by_softmax,
)
from gpt_duet.tokenization.texts import random_batch, read_text, split_ids

# The first models of the notebook: 65 characters, context 8, 32 features.
SMALL = GPTConfig(65, 8, n_layer=1, n_head=4, n_embd=32, dropout=0.0)
# The notebook's last model: 3 layers, 8 heads, 384 features, context 256.
LARGE = GPTConfig(65, 256, n_layer=3, n_head=8, n_embd=384, dropout=0.2)


@pytest.fixture(scope="module")
def shakespeare(sibling):
    return read_text(sibling / "data" / "tinyshakespeare.txt")


def count(module):
    return sum(p.numel() for p in module.parameters())


# Texts and tokens ------------------------------------------------------------


def test_features_1_to_4_shakespeare_as_characters(shakespeare):
    char = load_tokenizer("char", shakespeare)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert (len(shakespeare), char.n_vocab) == (1115394, 65)
    assert char.characters == f"\n !$&',-.3:;?{letters}{letters.lower()}"
    ids = char.encode(shakespeare)
    assert char.decode(ids) == shakespeare
    assert char.decode(
        [46, 43, 50, 50, 53, 1, 61, 53, 56, 50, 42]
    ) == "hello world"  # fmt: skip
    parts = split_ids(torch.tensor(ids))
    assert [len(part) for part in parts] == [1003854, 111540]
    # each prefix of a window is an example for training
    x, y = random_batch(torch.tensor(ids[:9]), 1, 8)
    lines = [f"{x[0, : t + 1].tolist()} --> {y[0, t]}" for t in range(8)]
    assert lines[0] == "[18] --> 47"
    assert lines[4] == "[18, 47, 56, 57, 58] --> 1"
    assert lines[7] == "[18, 47, 56, 57, 58, 1, 15, 47] --> 58"


def test_feature_7_byte_pairs_by_a_models_name(r50k_base):
    davinci = load_tokenizer("davinci")
    ids = [
        32, 890, 640, 2084, 3556, 48241, 26430, 34350, 28146, 43264, 3556,
        6787, 45859, 13884,
    ]  # fmt: skip
    for tokenizer in (r50k_base, davinci):
        assert tokenizer.n_vocab == 50257
        assert tokenizer.encode("A long time ago") == ids[:4]
        words = ("she", "her", " she", " her", "galaxy")
        found = [tokenizer.encode(word) for word in words]
        assert found == [[7091], [372], [673], [607], [13528, 6969]]
        assert tokenizer.decode(ids) == (
            "A long time ago</ spaghetti Rapiddx Rav unresolved</ rail "
            "MUCHkeeper"
        )


# Models ----------------------------------------------------------------------


def test_feature_10_a_bigram_table():
    model, tokens = Bigram(SMALL), torch.tensor([[1, 2, 1]])
    logits, loss = model(tokens, torch.tensor([[2, 1, 3]]))
    assert logits.equal(model.table.weight[tokens])
    want = -model.table.weight.log_softmax(-1)[[1, 2, 1], [2, 1, 3]].mean()
    torch.testing.assert_close(loss, want)
    # figure 23: random normal scores cost half a nat more than equal scores
    x, y = torch.randint(65, (2, 4, 8)).unbind(0)
    losses = torch.stack([Bigram(SMALL)(x, y)[1].detach() for _ in range(300)])
    assert abs(losses.mean() - (math.log(65) + 0.5)) < 0.1


def test_feature_20_a_block_without_and_with_the_stream():
    x = torch.randn(2, 8, 32)
    plain, stream, normed = (
        FeedForward(SMALL),
        Residual(SMALL),
        NormedBlock(SMALL),
    )
    torch.testing.assert_close(plain.body(x), plain.mlp(plain.attn(x)))
    assert not plain.body(x).allclose(x)
    # if both branches return 0, the stream does not change
    for rung in (stream, normed):
        for part in (rung.attn.c_proj, rung.mlp[2]):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
    assert stream.body(x).equal(x)
    assert normed(x).equal(x)


def test_figure_9_parameters_of_the_notebooks_models():
    model = FullGPT(LARGE)
    assert count(model) == 5_468_993
    assert count(model.blocks[0]) == 1_773_312
    assert count(model.wte) == 24_960
    assert count(model.wpe) == 98_304
    assert count(model.ln_f) == 768
    assert count(model.lm_head) == 25_025
    assert count(FullGPT(LARGE.replace(n_head=16))) == 5_468_993
    # mingpt_style has biases in its projections, but not in its head
    own = count(mingpt_style.build_model(LARGE))
    assert own == 5_468_993 + 3 * 3 * 384 - 65
    bigram, positions, *_ = RUNGS.values()
    assert [count(bigram(SMALL)), count(positions(SMALL))] == [4225, 4481]
    assert count(OneHead(SMALL.replace(n_embd=16, n_head=1))) == 3041
    heads = MultiHead(SMALL, project=False)
    assert count(heads) == 3072
    assert not list(heads.buffers())  # the model stores no mask


# Numbers printed in the texts ------------------------------------------------


def printed(text, start, *shape):
    """Return the values of a tensor that a text prints from `start` on."""
    numbers = re.findall(
        r"-?(?:inf|\d+\.(?:\d+(?:e[+-]\d+)?)?)", text[text.index(start) :]
    )
    wanted = math.prod(shape)
    return torch.tensor([float(n) for n in numbers[:wanted]]).view(shape)


def test_figure_19_the_mask_and_softmax_of_the_post(sibling):
    post = (sibling / "texts" / "gpt-from-scratch.md").read_text("utf-8")
    scores = printed(post, "[[[[-0.6319,", 3, 2, 3, 3)
    shown = printed(post, "[[[[1.0000, 0.0000, 0.0000],", 3, 2, 3, 3)
    assert scores.masked_fill(~causal_mask(3), -math.inf).equal(scores)
    q, k = scores.nan_to_num(neginf=0) * math.sqrt(3), torch.eye(3)
    k = k.expand_as(q)  # so that q k^T / sqrt(d_k) equals the scores
    _, p_attn = annotated.attention(q, k, k, causal_mask(3))
    assert (p_attn - shown).abs().max() < 6e-5


def test_figures_6_20_and_24_of_the_notebook(sibling, shakespeare):
    notebook = (sibling / "texts" / "lets-build-gpt.txt").read_text("utf-8")
    hidden = printed(notebook, "[[0., -inf,", 8, 8).isneginf()
    assert hidden.equal(~causal_mask(8)[0, 0])
    x = printed(notebook, "[[-0.1816,  0.1048],", 1, 8, 2)
    after = notebook[notebook.index("0.4340,  0.5938") :]
    means = printed(after, "[[-0.1816,", 1, 8, 2)
    for average in (average_by_loop, average_by_matrix, average_by_softmax):
        assert (average(x) - means).abs().max() < 6e-5
    # the notebook prints four windows of the text, and their targets
    rows = notebook.split("tensor([[41", 1)[1].split("-->")[0]
    rows = re.findall(r"\[((?:\d+, *){7}\d+)\]", "[[41" + rows)
    rows = [list(map(int, row.split(","))) for row in rows]
    char = load_tokenizer("char", shakespeare)
    texts = [
        char.decode([*x, y[-1]])
        for x, y in zip(rows[:4], rows[4:], strict=True)
    ]
    places = [shakespeare.index(text) for text in texts[:3]]
    assert places == [486268, 404717, 322729]
    assert texts[3] == "thousand "
