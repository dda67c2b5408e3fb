"""The small trained model in the package: its settings and its loss."""

import re
import subprocess

import pytest
import torch

from gpt_duet import load_tokenizer
from gpt_duet.checkpoint import SMALL_MODEL, load_checkpoint
from gpt_duet.protocol import load_style
from gpt_duet.training import make_small_model
from gpt_duet.training.make_small_model import bits_a_byte, mean_loss_of

# This text was written for this test; the model was not trained on it.
TEXT = """\
The "retry" statement
*********************

The "retry" statement is used to run a block of statements again when an
exception is raised in it.  The optional expression is evaluated first; if it
is false, the exception is raised again.

   retry_stmt ::= "retry" [expression] ":" suite

If the suite is executed without an exception, the "else" clause is executed.
A "return" statement in the suite ends the function, as in a "try" statement.

Note: names that are bound in the suite are local to the function.
"""
NATS, BITS = 2.971605, 1.272739


@pytest.mark.parametrize("style", ["annotated", "mingpt_style"])
def test_both_styles_reach_the_documented_loss(style):
    found = load_checkpoint(SMALL_MODEL)
    weights = found.to(torch.device("cpu"), torch.float32)
    model = load_style(style).from_gpt2(weights, found.config).eval()
    tokenizer = load_tokenizer("duet-1k")
    ids = tokenizer.encode(TEXT)
    nats = mean_loss_of(model, torch.tensor(ids))
    assert nats == pytest.approx(NATS, abs=1e-6)
    assert bits_a_byte(nats, ids, tokenizer) == pytest.approx(BITS, abs=1e-6)


def test_the_folder_of_the_small_model_is_small_and_complete():
    assert (SMALL_MODEL / "model.safetensors").stat().st_size < 2 * 2**20
    found = load_checkpoint(SMALL_MODEL)
    assert found.config.vocab_size == load_tokenizer("duet-1k").n_vocab
    assert found.config.tie_weights


def test_the_script_trains_and_writes_a_model(
    tmp_path, monkeypatch, capsys, done
):
    folder = tmp_path / "small"
    sizes = "--n-layer 1 --n-head 1 --n-embd 8 --block-size 16 --steps 1"
    recipe = f"--style mingpt_style --tokenizer duet-1k {sizes} --seed 0"
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: done(*command[3:])
    )
    monkeypatch.setattr(make_small_model, "RECIPE", recipe)
    monkeypatch.setattr(make_small_model, "default_text", lambda: TEXT)
    monkeypatch.setattr("sys.argv", ["make_small_model", f"--out={folder}"])
    make_small_model.main()
    out = capsys.readouterr().out
    found = load_checkpoint(folder)
    assert (found.config.n_layer, found.config.block_size) == (1, 16)
    state = found.to(torch.device("cpu"), torch.float32)
    model = load_style("annotated").from_gpt2(state, found.config).eval()
    ids = torch.tensor(load_tokenizer("duet-1k").encode(TEXT))
    trained_on = ids[: len(ids) * 9 // 10]
    (printed,) = re.findall("trained on: 137 tokens, (.*) nats a token", out)
    assert len(trained_on) == 137
    nats = mean_loss_of(model, trained_on)
    assert float(printed) == pytest.approx(nats, abs=2e-6)
