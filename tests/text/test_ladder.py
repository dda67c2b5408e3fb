"""A lecture's ladder of models: averages, heads, and the ladder command."""

import math
import re

import html5lib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt_duet import GPTConfig
from gpt_duet.cli.ladder import COLUMNS
from gpt_duet.comparison.page.ladder import new_code
from gpt_duet.mingpt_style.ladder import RUNGS, Positions
from gpt_duet.mingpt_style.ladder_heads import (
    Head,
    average_by_loop,
    average_by_matrix,
    average_by_softmax,
)
from gpt_duet.testing.strategies import random_tokens, seeds

CONFIG = GPTConfig(
    vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, dropout=0.1
)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 8), seeds)
def test_three_ways_to_average_agree(batch, time, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, time, width, generator=generator)
    loop = average_by_loop(x)
    assert (average_by_matrix(x) - loop).abs().max() < 1e-6
    assert (average_by_softmax(x) - loop).abs().max() < 1e-6
    # the first average is the first vector, and the last is the mean of all
    torch.testing.assert_close(loop[:, 0], x[:, 0])
    torch.testing.assert_close(loop[:, -1], x.mean(1))


def test_scores_are_divided_by_the_root_of_the_heads_own_size():
    # the notebook divides by the root of the model's width: by 4 instead of 2
    head = Head(n_embd=16, head_size=4).double()
    x = torch.randn(1, 3, 16).double()
    q, k, v = head.query(x), head.key(x), head.value(x)
    want = []
    for t in range(3):
        scores = (k[0, : t + 1] @ q[0, t]) / 2
        want.append(scores.softmax(0) @ v[0, : t + 1])
    torch.testing.assert_close(head(x)[0], torch.stack(want))


@pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)
def test_every_rung_learns(rung):
    model = rung(CONFIG).train()
    x = random_tokens(CONFIG, 8, 8)
    y = (x * 3 + 1) % 11  # each token determines the next
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(60):
        loss = model(x, y)[1]
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(losses[0] - math.log(11)) < 1.5
    assert losses[-1] < losses[0] / 2


@pytest.fixture
def climb(duet, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    text, out = tmp_path / "text", tmp_path / "ladder.png"
    text.write_text("the cat sat on the mat. " * 40)
    common = (f"--file={text}", f"--out={out}", "--steps=20",
              "--eval-batches=2")  # fmt: skip

    def climb(*words):
        return *duet("ladder", *common, *words), out

    return climb


def test_a_rung_whose_loss_is_nan_ends_the_command(climb):
    status, _, err, picture = climb("--lr=1e30")
    assert status == 1
    last = err.strip().splitlines()[-1]
    assert re.match(r"gpt-duet: bigram table: the .* is nan at step \d", last)
    assert not picture.exists()


def test_ctrl_c_keeps_the_picture(climb, monkeypatch):
    built = []

    def interrupted(config):
        built.append(config)
        if len(built) == 2:  # the first model is built for the estimate
            raise KeyboardInterrupt
        return Positions(config)

    monkeypatch.setitem(RUNGS, "+ positions", interrupted)
    status, out, err, picture = climb()
    assert (status, out.count("\n")) == (130, 2)
    assert err.splitlines()[-1] == "gpt-duet: stopped"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    built.clear()
    monkeypatch.setitem(RUNGS, "bigram table", interrupted)
    assert climb()[0] == 130
    assert not picture.exists()  # because no rung is finished


def test_a_row_is_printed_when_its_rung_ends(climb, monkeypatch):
    built = []

    def stops(config):
        built.append(config)
        if len(built) > 1:  # the first model is built for the estimate
            raise ValueError("stopped here")
        return Positions(config)

    monkeypatch.setitem(RUNGS, "+ positions", stops)
    status, out, err, _ = climb()
    assert (status, err.splitlines()[-1]) == (2, "gpt-duet: stopped here")
    heading, row = out.splitlines()
    assert heading.split() == " ".join(COLUMNS).split()
    assert row.startswith("bigram table   ")


def test_the_ladder_command_trains_every_rung(climb, tmp_path):
    page = tmp_path / "ladder.html"
    status, out, err, picture = climb(
        "--batch-size=4", "--n-embd=8", "--n-head=2", "--n-layer=1",
        f"--html={page}",
    )  # fmt: skip
    assert status == 0
    assert re.search(r"^time +about \d+ s in all$", err, re.M)
    lines = out.splitlines()[1:]
    assert [line.split("  ")[0] for line in lines] == list(RUNGS)
    V, C = 11, 8  # number of characters, width of the features
    assert f" {V * V} " in lines[0]
    assert f" {V * C + 8 * C + C * V + V} " in lines[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    html5lib.HTMLParser(strict=True).parse(text)
    assert text.count("<polyline") == sum(range(1, 9))
    assert text.count(">step 0<") == 8
    assert "n_layer blocks have n_layer times as many" in text
    losses = re.findall(r"Validation loss ([\d.]+)", text)
    assert all(loss in line for loss, line in zip(losses, lines, strict=True))


@pytest.mark.unhooked  # --check-shapes changes sources
def test_new_lines_of_a_rung_are_in_no_lower_rung():
    code = new_code(list(RUNGS.values()))
    written = [
        [(line.code.striptags().strip(), new) for line, new in piece]
        for rung in code
        for piece in rung
    ]
    once = [lines[0][0] for lines in written]
    # each part is shown once, at its first use
    assert len(set(once)) == len(once)
    assert once[:4] == [
        "class Bigram(Rung):", "class Positions(Rung):",
        "class Head(nn.Module):", "class OneHead(Positions):",
    ]  # fmt: skip
    assert "class NormedBlock(nn.Module):" in once  # used in a comprehension
    heads = dict(written[once.index("class ManyHeads(OneHead):")])
    assert heads["self.attn = MultiHead(config, project=False)"]
    assert not heads["super().__init__(config)"]
