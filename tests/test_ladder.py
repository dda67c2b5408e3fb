"""The rungs: each a model of the contract, each with one idea more."""

import math
import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import random_tokens, seeds

import shared.cli
from mingpt_style.heads import (
    Head,
    average_by_loop,
    average_by_matrix,
    average_by_softmax,
)
from mingpt_style.ladder import RUNGS
from shared import GPTConfig, generate
from shared.protocol import LanguageModel

CONFIG = GPTConfig(
    vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, dropout=0.1
)
HEARS = [name for name in RUNGS if RUNGS[name].__name__ not in
         ("Bigram", "Positions")]  # fmt: skip


@pytest.fixture(params=RUNGS)
def rung(request):
    return RUNGS[request.param](CONFIG).double().eval()


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 8), seeds)
def test_three_ways_to_average_are_one(batch, time, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, time, width, generator=generator)
    loop = average_by_loop(x)
    assert (average_by_matrix(x) - loop).abs().max() < 1e-6
    assert (average_by_softmax(x) - loop).abs().max() < 1e-6
    # by hand: the first is itself, the last is the mean of all
    torch.testing.assert_close(loop[:, 0], x[:, 0])
    torch.testing.assert_close(loop[:, -1], x.mean(1))


def test_every_rung_keeps_the_contract(rung):
    assert isinstance(rung, LanguageModel)
    for batch, time in ((1, 1), (3, 8), (2, 5)):
        tokens = random_tokens(CONFIG, batch, time)
        out = rung.log_probs(tokens)
        assert out.shape == (batch, time, 11)
        torch.testing.assert_close(
            out.exp().sum(-1), torch.ones(batch, time).double()
        )
    with pytest.raises(ValueError, match=r"9 tokens .* 8 positions"):
        rung.log_probs(random_tokens(CONFIG, 1, 9))
    assert generate(rung, tokens, 20).shape == (2, 25)


def test_no_rung_sees_the_future(rung):
    tokens = random_tokens(CONFIG, 2, 8)
    full = rung.log_probs(tokens)
    for t in range(1, 8):
        other = tokens.clone()
        other[:, t:] = (other[:, t:] + 1) % 11
        assert rung.log_probs(other)[:, :t].equal(full[:, :t])


@pytest.mark.parametrize("name", HEARS)
def test_a_rung_with_attention_hears_all_of_the_past(name):
    rung = RUNGS[name](CONFIG).double().eval()
    tokens = random_tokens(CONFIG, 1, 8)
    last = rung.log_probs(tokens)[:, -1]
    for t in range(8):
        other = tokens.clone()
        other[:, t] = (other[:, t] + 1) % 11
        assert not torch.allclose(rung.log_probs(other)[:, -1], last), t
    turned = tokens[:, [1, 0, *range(2, 8)]]
    if not turned.equal(tokens):
        assert not torch.allclose(rung.log_probs(turned)[:, -1], last)


def test_the_first_two_rungs_do_not_hear():
    assert len(HEARS) == len(RUNGS) - 2
    for name in RUNGS.keys() - set(HEARS):
        rung = RUNGS[name](CONFIG).eval()
        tokens = random_tokens(CONFIG, 1, 8)
        other = tokens.clone()
        other[:, :-1] = 0
        assert rung.log_probs(other)[:, -1].equal(
            rung.log_probs(tokens)[:, -1]
        )


def test_the_loss_is_the_cross_entropy_of_the_targets(rung):
    x, y = random_tokens(CONFIG, 2, 8), random_tokens(CONFIG, 2, 8, seed=1)
    logits, loss = rung(x, y)
    picked = rung.log_probs(x).gather(-1, y[..., None])
    torch.testing.assert_close(loss, -picked.mean())
    assert rung(x)[1] is None
    torch.testing.assert_close(rung(x)[0], logits)


def test_scores_are_divided_by_the_root_of_the_heads_own_size():
    # the notebook divides by the root of the width: by 4, not by 2
    head = Head(n_embd=16, head_size=4).double()
    x = torch.randn(1, 3, 16).double()
    q, k, v = head.query(x), head.key(x), head.value(x)
    want = []
    for t in range(3):
        scores = (k[0, : t + 1] @ q[0, t]) / 2
        want.append(scores.softmax(0) @ v[0, : t + 1])
    torch.testing.assert_close(head(x)[0], torch.stack(want))


def test_every_rung_learns(rung):
    rung.float().train()
    x = random_tokens(CONFIG, 8, 8)
    y = (x * 3 + 1) % 11  # what follows is a function of the token
    optimizer = torch.optim.AdamW(rung.parameters(), lr=3e-2)
    first = None
    for _ in range(60):
        loss = rung(x, y)[1]
        first = first or float(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(first - math.log(11)) < 1.5
    assert float(loss.detach()) < first / 2


def test_a_rung_that_falls(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat. " * 40)
    out = tmp_path / "ladder.png"
    arguments = ["--steps=20", "--eval-batches=2", "--lr=1e30"]
    monkeypatch.setattr(
        sys, "argv",
        ["gpt-duet", "ladder", f"--file={text}", f"--out={out}", *arguments],
    )  # fmt: skip
    with pytest.raises(SystemExit) as exit_:
        shared.cli.main()
    assert exit_.value.code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(r"gpt-duet: bigram table: the .* is nan at step \d", last)
    assert not out.exists()


def test_the_command_climbs(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat. " * 40)
    out = tmp_path / "ladder.png"
    monkeypatch.setenv("COLUMNS", "140")
    arguments = [
        "ladder", f"--file={text}", "--steps=20", "--batch-size=4",
        "--eval-batches=2", "--n-embd=8", "--n-head=2", "--n-layer=1",
        f"--out={out}",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["gpt-duet", *arguments])
    with pytest.raises(SystemExit) as exit_:
        shared.cli.main()
    assert not exit_.value.code
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("  ")[0] for line in lines] == list(RUNGS)
    V, C = 11, 8  # the characters of the text; the width
    assert f" {V * V} " in lines[0]
    assert f" {V * C + 8 * C + C * V + V} " in lines[1]
    assert out.read_bytes().startswith(b"\x89PNG")
