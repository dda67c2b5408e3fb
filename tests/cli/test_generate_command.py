"""The commands generate, convert and tokenizers, and compare --weights."""

import json
import re
import sys
from unittest.mock import Mock

import pytest
import tiktoken
import torch

from gpt_duet import (
    GPTConfig,
    generate,
    generation,
    load_tokenizer,
    mingpt_style,
)
from gpt_duet.agreement import enlarged_random_weights
from gpt_duet.checkpoint import load_checkpoint, save_checkpoint
from gpt_duet.protocol import load_style
from gpt_duet.training.recipe import Recipe
from gpt_duet.training.run_folder import Facts
from gpt_duet.training.run_folder import save as save_run
from gpt_duet.training.trainer import Trainer

STYLES = ("annotated", "mingpt_style")
SMALL = ("--n-layer=1", "--n-head=2", "--n-embd=16", "--block-size=8")
BYTES = GPTConfig(vocab_size=256, block_size=8, n_layer=1, n_head=2, n_embd=16)


THEIRS = ("--weights={weights}", "--tokenizer=bytes")


@pytest.fixture
def weights(tmp_path):
    """Write a checkpoint as transformers would; each byte is a token."""
    state = enlarged_random_weights(mingpt_style, BYTES, seed=1)
    state = {name: 4 * tensor for name, tensor in state.items()}
    save_checkpoint(tmp_path / "weights", state, BYTES)
    return tmp_path / "weights"


# generate ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ([], "trained on Python's documentation"),
        (["--weights=random"], "random, seed 0"),
        (["--n-layer=2"], "random, seed 0"),
        (["--tokenizer=bytes"], "random, seed 0"),
    ],
)
def test_both_styles_write_the_same(done, words, note):
    texts = set()
    for style in STYLES:
        out, err = done("generate", "--style", style, *words)
        assert out.startswith("The assert statement")
        assert style in err
        assert note in err
        texts.add(out)
    assert len(texts) == 1


def test_the_ids_equal_those_of_transformers(done, weights):
    found = load_checkpoint(weights)
    model = load_style("annotated").from_gpt2(found.state, found.config)
    prompt = torch.tensor([load_tokenizer("bytes").encode("she")])
    want = generate(model, prompt, 9)[0].tolist()
    out, err = done(
        "generate", "--weights", weights, "--tokenizer=bytes", "--ids",
        "--prompt=she", "--new-tokens=9", "--style=annotated",
    )  # fmt: skip
    assert out.splitlines()[-1] == " ".join(map(str, want))
    assert "as transformers saves it" in err
    assert "n_head 2 (config.json)" in err


def test_a_batch_repeats_each_prompt(done):
    batch = ("generate", *SMALL, "--batch=3", "--ids")
    out, err = done(*batch, "--new-tokens=2")
    texts, ids = out.splitlines()[::2], out.splitlines()[1::2]
    decode = load_tokenizer("duet-1k").decode
    assert texts == [decode(list(map(int, row.split()))) for row in ids]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert "3, of at most 5 tokens" in err
    out, _ = done(*batch, "--temperature=1")
    assert len(set(out.splitlines())) > 2  # the rows of a batch differ


def test_a_stream_writes_the_same_as_all_at_once(done, weights):
    common = (
        "generate", "--weights", weights, "--tokenizer=bytes",
        "--temperature=2", "--new-tokens=40", "--prompt=ä",
    )  # fmt: skip
    whole, streamed = done(*common), done(*common, "--stream")
    assert whole == streamed
    assert "\ufffd" in whole[0]  # the text ends in an incomplete character


def test_settings_are_printed_and_have_an_effect(done):
    texts = []
    for words, note in (
        ((), "greedy"),
        (("--top-k=1",), "temperature 1, top-k 1, seed 0"),
        (("--temperature=1",), "temperature 1, seed 0"),
        (("--temperature=1",), "temperature 1, seed 0"),
        (("--top-p=0.9", "--seed=3"), "temperature 1, top-p 0.9, seed 3"),
        (("--preset=gpt2",), "the preset's 50,257 tokens cut to 1,024"),
    ):
        text, err = done("generate", *SMALL, *words)
        assert note in err
        texts.append(text)
    greedy, top, drawn, again, *others = texts
    assert greedy == top != drawn
    assert drawn == again not in others


def test_generate_writes_everything_to_json(done, tmp_path):
    file = tmp_path / "out.json"
    out, _ = done(
        "generate", *SMALL, "--prompt=a", "--prompt=b", "--json", file,
        "--new-tokens=3", "--activation=relu",
    )  # fmt: skip
    found = json.loads(file.read_text())
    assert found["texts"] == out.removesuffix("\n").split("\n")
    assert [len(row) for row in found["tokens"]] == [4, 4]
    assert found["config"]["activation"] == "relu"
    assert found["prompts"] == ["a", "b"]


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_generate_computes_in_the_requested_precision(
    done, monkeypatch, name, dtype
):
    stream = Mock(side_effect=generation.stream_tokens)
    monkeypatch.setattr(generation, "stream_tokens", stream)
    common = ("generate", *SMALL, "--prompt=she")
    out, err = done(*common, "--style", name, "--dtype", dtype)
    assert out.startswith("she")
    assert f"{dtype} on cpu" in err
    parameters = stream.call_args.args[0].parameters()
    assert {p.dtype for p in parameters} == {getattr(torch, dtype)}


def test_a_terminal_gets_no_escape_codes_from_a_text(done, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    words = ("--new-tokens=0", "--prompt=ä\n\x1b[2J\x07")
    for more in ((), ("--stream",)):
        out, _ = done("generate", *SMALL, *words, *more)
        assert out == "ä\n\\x1b[2J\\x07\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*THEIRS, "--preset=gpt2"], "leave out --preset"),
        ([*THEIRS, "--n-layer=2"], "leave out --n-layer"),
        ([*THEIRS, "--n-head=4"], "n_head is 2, --n-head says 4"),
        (["--weights={weights}"], "duet-1k has 1024 tokens, the checkpoint 2"),
        (["--style=nope"], "no style 'nope'"),
        (["--prompt="], "--prompt is empty"),
        (["--prompt=\ud800"], "--prompt is not UTF-8"),
        (["--new-tokens=-1"], "--new-tokens must be at least 0, got -1"),
        (["--temperature=-1"], "temperature must be .* got -1.0"),
        (["--batch=0"], "--batch must be at least 1, got 0"),
        (["--batch=2", "--stream"], "one continuation, got 2"),
        ([f"--seed={2**63}"], f"seed must be at most .* got {2**63}"),
        (["--tokenizer=nope"], "unknown tokenizer 'nope'; known: duet-1k"),
        (["--tokenizer=char", "--prompt=\u65e5"], "1 characters are not"),
        (["--dtype=int8"], "be float32 or float64 or bfloat16, got 'int8'"),
        (["--weights=/nowhere"], "there is no folder /nowhere"),
        (["--checkpoint=x", "--n-embd=8"], "this: leave out --n-embd"),
    ],
)
def test_bad_input_is_one_line(refused, weights, arguments, message):
    words = [word.format(weights=weights) for word in arguments]
    out = weights.parent / "out.json"
    assert re.search(message, refused("generate", *words, "--json", out))
    assert not out.exists()


def test_compare_takes_weights(done, weights, tmp_path):
    file = tmp_path / "out.json"
    out, _ = done(
        "compare", "--weights", weights, "--tokenizer=bytes", "--text=she",
        "--dtype=float64", "--json", file,
    )  # fmt: skip
    found = json.loads(file.read_text())
    assert "one function" in out
    assert str(weights) in found["weights"]
    assert 0 < found["differences"]["log_probs"] < 1e-12
    assert found["config"]["n_embd"] == 16


# convert -------------------------------------------------------------------


def test_weights_converted_there_and_back_are_the_same(
    done, weights, tmp_path
):
    nano, again = tmp_path / "nano", tmp_path / "again"
    out, _ = done(
        "convert", "--weights", weights, "--to=nanogpt", "--out", nano
    )
    assert "as transformers saves it" in out
    assert "for nanoGPT or minGPT with an untied head and gelu_tanh" in out
    out, _ = done("convert", "--weights", nano, "--to=gpt2", "--out", again)
    assert "a state dict of minGPT" in out
    first, last = load_checkpoint(weights), load_checkpoint(again)
    assert first.config == last.config
    assert all(first.state[k].equal(last.state[k]) for k in first.state)


@pytest.mark.parametrize("layout", ["gpt2", "nanogpt"])
def test_a_converted_run_keeps_its_characters(done, tmp_path, layout):
    torch.manual_seed(0)
    config = BYTES.replace(vocab_size=3, tie_weights=True)
    model, ids = mingpt_style.build_model(config), torch.arange(99) % 3
    facts = Facts(
        style="mingpt_style", dtype="float32", tokenizer="char",
        characters="abc",
    )  # fmt: skip
    save_run(tmp_path, Trainer(model, ids, ids, Recipe()), facts)
    new = tmp_path / "new"
    out, _ = done("convert", "--checkpoint", tmp_path, "--to", layout,
                 "--out", new)  # fmt: skip
    assert "mingpt_style, after 0 of" in out
    written = [
        done("generate", *source, "--prompt=abc", "--new-tokens=20")[0]
        for source in (("--checkpoint", tmp_path), ("--weights", new))
    ]
    assert written[0] == written[1] != ""


# tokenizers ----------------------------------------------------------------


def test_tokenizers_are_listed_without_a_network(
    done, empty_cache, no_network, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    known = tiktoken.registry.ENCODING_CONSTRUCTORS
    monkeypatch.setitem(known, "plugin", lambda: 1 / 0)
    reader = tiktoken.load.read_file
    out, _ = done("tokenizers")
    # the command has restored tiktoken's reader
    assert tiktoken.load.read_file is reader
    assert list(empty_cache.iterdir()) == []
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "The network was not used" in out
    for name in ("duet-1k", "bytes", "char"):
        assert lines[name].split()[1] == "yes"
    assert "1,024" in lines["duet-1k"]
    for name in tiktoken.list_encoding_names():
        reason = "division by zero" if name == "plugin" else "not cached"
        assert lines[name].split() == [name, "no", *reason.split()]


def test_a_cached_tokenizer_is_listed(done, r50k_base, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, _ = done("tokenizers")
    lines = {x.split()[0]: x.split() for x in out.splitlines() if x}
    assert lines["r50k_base"][1:3] == ["yes", "50,257"]
