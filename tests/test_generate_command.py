"""gpt-duet generate, convert, tokenizers, and compare --weights."""

import io
import json
import re
import sys
from functools import partial

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import shared.cli
from shared import GPTConfig, generate, load_tokenizer
from shared.checkpoint import load_checkpoint, save_checkpoint, small_model
from shared.checkpoint.config_json import our_config
from shared.cli import generate as command
from shared.comparison.styles import enlarged_random_weights
from shared.console import progress
from shared.protocol import load_style
from shared.tokenization.texts import text_stamp

STYLES = ("annotated", "mingpt_style")
SMALL = ("--n-layer=1", "--n-head=2", "--n-embd=16", "--block-size=8")
BYTES = GPTConfig(vocab_size=256, block_size=8, n_layer=1, n_head=2, n_embd=16)


@pytest.fixture
def run(run_command):
    return partial(run_command, shared.cli.main, "gpt-duet")


@pytest.fixture
def weights(tmp_path):
    """A checkpoint over bytes, as transformers would save it."""
    state = enlarged_random_weights(load_style("mingpt_style"), BYTES, seed=1)
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
def test_both_styles_write_the_same(run, words, note):
    texts = []
    for style in STYLES:
        status, out, err = run("generate", "--style", style, *words)
        assert status == 0
        assert out.startswith("The assert statement")
        assert style in err
        assert note in err
        texts.append(out)
    assert texts[0] == texts[1]


def test_without_the_small_model_weights_are_random(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(small_model, "SMALL_MODEL", tmp_path)
    status, _, err = run("generate")
    assert status == 0
    assert "random" in err
    assert "small trained model is not there" in err


def test_the_ids_are_those_of_the_library(run, weights):
    checkpoint = load_checkpoint(weights)
    model = load_style("annotated").from_gpt2(
        checkpoint.state, checkpoint.config
    )
    prompt = torch.tensor([load_tokenizer("bytes").encode("she")])
    want = generate(model, prompt, 9)[0].tolist()
    status, out, err = run(
        "generate", "--weights", weights, "--tokenizer=bytes", "--ids",
        "--prompt=she", "--new-tokens=9", "--style=annotated",
    )  # fmt: skip
    assert status == 0
    assert out.splitlines()[-1] == " ".join(map(str, want))
    assert "as transformers saves it" in err
    assert "n_head 2 (config.json)" in err


@pytest.mark.parametrize("style", STYLES)
def test_prompts_of_different_lengths_are_their_own(run, weights, style):
    common = (
        "generate", "--weights", weights, "--tokenizer=bytes", "--ids",
        "--dtype=float64", "--style", style,
    )  # fmt: skip
    prompts = ("a", "a prompt longer than the block", "bc")
    _, out, err = run(*common, *(f"--prompt={p}" for p in prompts))
    assert "3, of 1 and 2 and 30 tokens; the model sees the last 8" in err
    together = [x for x in out.splitlines() if x.replace(" ", "").isdigit()]
    alone = [
        run(*common, f"--prompt={p}")[1].splitlines()[-1] for p in prompts
    ]
    assert together == alone


def test_a_batch_repeats_each_prompt(run):
    status, out, err = run(
        "generate", *SMALL, "--batch=3", "--ids", "--new-tokens=2"
    )
    ids = out.splitlines()[1::2]
    assert status == 0
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert "3, of 5 tokens" in err
    _, out, _ = run(
        "generate", *SMALL, "--batch=3", "--ids", "--temperature=1"
    )
    assert len(set(out.splitlines())) > 2  # sampled rows go their own ways


def test_a_stream_writes_the_same_as_all_at_once(run, weights):
    common = (
        "generate", "--weights", weights, "--tokenizer=bytes",
        "--temperature=2", "--new-tokens=40", "--prompt=ä",
    )  # fmt: skip
    whole, streamed = run(*common), run(*common, "--stream")
    assert whole == streamed
    assert "\ufffd" in whole[1]  # half characters did come up


def test_settings_are_told_and_make_a_difference(run):
    def out(*settings):
        return run("generate", *SMALL, *settings)

    assert "the likeliest token each time" in out()[2]
    assert "temperature 1, top-k 5, seed 0" in out("--top-k=5")[2]
    assert (
        "temperature 1, top-p 0.5, seed 3" in out("--top-p=0.5", "--seed=3")[2]
    )
    assert out("--top-k=1")[1] == out()[1]
    assert out("--temperature=1")[1] == out("--temperature=1")[1]
    assert out("--temperature=1")[1] != out("--temperature=1", "--seed=1")[1]


def test_everything_in_json(run, tmp_path):
    file = tmp_path / "out.json"
    status, out, _ = run(
        "generate", *SMALL, "--prompt=a", "--prompt=b", "--json", file,
        "--new-tokens=3", "--activation=relu",
    )  # fmt: skip
    found = json.loads(file.read_text())
    assert status == 0
    assert found["texts"] == out.removesuffix("\n").split("\n")
    assert [len(row) for row in found["tokens"]] == [4, 4]
    assert found["config"]["activation"] == "relu"
    assert found["prompts"] == ["a", "b"]


def test_a_preset_keeps_to_the_tokens_there_are(run):
    status, _, err = run(
        "generate", "--preset=gpt2", "--n-layer=1", "--n-head=2",
        "--n-embd=16", "--new-tokens=2",
    )  # fmt: skip
    assert status == 0
    assert "its 50,257 tokens cut to the tokenizer's" in err


def test_characters_of_a_file(run, tmp_path):
    (tmp_path / "text").write_text("abc ")
    status, out, err = run(
        "generate", *SMALL, "--tokenizer=char", "--file", tmp_path / "text",
        "--prompt=a cab", "--new-tokens=20",
    )  # fmt: skip
    assert status == 0
    assert len(out) == 5 + 20 + 1
    assert set(out) <= set("abc \n")
    stamp = text_stamp("abc ")
    assert f"char, 4 tokens from {tmp_path / 'text'}, sha256 {stamp}" in err


def test_no_new_tokens_is_the_prompt(run):
    assert run("generate", *SMALL, "--new-tokens=0", "--prompt=ä!")[:2] == (
        0,
        "ä!\n",
    )


def test_a_terminal_is_not_steered(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert command._printable("ä\n\x1b[2J\x07") == "ä\n\\x1b[2J\\x07"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert command._printable("\x1b[2J") == "\x1b[2J"


@pytest.mark.parametrize(
    ("terminal", "patience", "bar"),
    [(True, -1.0, True), (False, -1.0, False), (True, 60.0, False)],
)
def test_a_bar_comes_when_it_takes_long(monkeypatch, terminal, patience, bar):
    monkeypatch.setattr("shared.console.PATIENCE", patience)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal)
    with progress(console, 3) as show:
        for done in range(3):
            show(done, "new tokens")
    assert ("new tokens" in screen.getvalue()) == bar
    assert bar or screen.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--style=nope"], "no style 'nope'"),
        (["--style=.nope"], "no style '.nope'"),
        (["--style="], "no style ''"),
        (["--style=os"], "'os' is no style: it has no build_model"),
        (["--prompt="], "--prompt is empty"),
        (["--prompt=\ud800"], "--prompt is not UTF-8"),
        (["--new-tokens=-1"], "--new-tokens must be at least 0, got -1"),
        ([f"--new-tokens={10**30}"], "--new-tokens must be at most 2,147"),
        (["--temperature=-1"], "temperature must be .* got -1.0"),
        (["--temperature=nan"], "temperature must be .* got nan"),
        (["--top-p=0"], r"top_p must be in \(0, 1\], got 0.0"),
        (["--top-p=1.1"], r"top_p must be in \(0, 1\], got 1.1"),
        (["--top-k=0"], "top_k must be at least 1, got 0"),
        (["--batch=0"], "--batch must be at least 1, got 0"),
        (["--batch=2", "--stream"], "one row, and there are 2"),
        ([f"--seed={2**63}"], f"seed must be at most .* got {2**63}"),
        (["--tokenizer=nope"], "unknown tokenizer 'nope'; known: duet-1k"),
        (["--tokenizer=char", "--prompt=\u65e5"], "1 characters are not"),
        (["--file=x"], "--file is for --tokenizer char, not for duet-1k"),
        (
            ["--dtype=int8"],
            "dtype must be float32 or float64 or bfloat16, got 'int8'",
        ),
        (["--device=nowhere"], "no device 'nowhere' here"),
        (["--n-head=3"], "n_embd=128 and n_head=3"),
        (["--activation=silu"], "activation must be one of relu"),
        (["--weights=/nowhere"], "there is no folder /nowhere"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, arguments, message):
    out_file = tmp_path / "out.json"
    status, out, err = run("generate", *arguments, "--json", out_file)
    assert status == 2
    assert out == ""
    assert err.startswith("gpt-duet: ")
    assert err.count("\n") == 1
    assert re.search(message, err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
def test_it_writes_in_the_precision_asked_for(run, monkeypatch, style, name):
    stream_tokens, dtypes = command.stream_tokens, set()

    def watched(model, *arguments, **settings):
        dtypes.update(p.dtype for p in model.parameters())
        return stream_tokens(model, *arguments, **settings)

    monkeypatch.setattr(command, "stream_tokens", watched)
    status, out, err = run(
        "generate", *SMALL, "--prompt=she", "--style", style, "--dtype", name
    )
    assert status == 0, err
    assert out.startswith("she")
    assert f"{name} on cpu" in err
    assert dtypes == {getattr(torch, name)}


def test_a_tokenizer_of_another_vocabulary(run, weights):
    status, out, err = run("generate", "--weights", weights)
    assert (status, out) == (2, "")
    assert "duet-1k has 1024 tokens, the checkpoint 256" in err


def test_weights_bring_their_own_sizes(run, weights):
    common = ("generate", "--weights", weights, "--tokenizer=bytes")
    for option in ("--preset=gpt2", "--n-layer=2", "--block-size=4"):
        status, _, err = run(*common, option)
        assert status == 2
        assert f"leave {option.split('=')[0]} out" in err
    status, _, err = run(*common, "--n-head=4")
    assert (status, "n_head is 2, --n-head says 4" in err) == (2, True)


def test_weights_of_nan_are_told(run, weights):
    state = load_checkpoint(weights).state
    nan = {name: torch.full_like(t, torch.nan) for name, t in state.items()}
    save_file(nan, weights / "model.safetensors")
    status, out, err = run(
        "generate", "--weights", weights, "--tokenizer=bytes"
    )
    assert (status, out) == (2, "")
    assert "row 0 has no distribution to choose from" in err


# compare --weights ---------------------------------------------------------


def test_compare_takes_weights(run, weights, tmp_path):
    file = tmp_path / "out.json"
    status, out, _ = run(
        "compare", "--weights", weights, "--tokenizer=bytes", "--text=she",
        "--dtype=float64", "--json", file,
    )  # fmt: skip
    found = json.loads(file.read_text())
    assert status == 0
    assert "one function" in out
    assert str(weights) in found["weights"]
    assert 0 < found["differences"]["log_probs"] < 1e-12
    assert found["config"]["n_embd"] == 16


def test_compare_refuses_another_vocabulary(run, weights):
    status, _, err = run("compare", "--weights", weights)
    assert status == 2
    assert "duet-1k has 1024 tokens, the checkpoint 256" in err


# convert -------------------------------------------------------------------


def test_there_and_back(run, weights, tmp_path):
    nano, again = tmp_path / "nano", tmp_path / "again"
    status, out, _ = run(
        "convert", "--weights", weights, "--to=nanogpt", "--out", nano
    )
    assert status == 0
    assert "as transformers saves it" in out
    assert f"{nano}; for minGPT" in out
    status, out, _ = run(
        "convert", "--weights", nano, "--to=gpt2", "--out", again
    )
    assert status == 0
    assert "a state dict of minGPT" in out
    first, last = load_checkpoint(weights), load_checkpoint(again)
    assert first.config == last.config
    assert all(first.state[k].equal(last.state[k]) for k in first.state)


@pytest.mark.parametrize(
    ("changes", "whose"),
    [
        ({"tie_weights": True, "activation": "gelu"}, "for nanoGPT"),
        ({"activation": "gelu_tanh"}, "for minGPT"),
        ({"activation": "relu"}, "neither nanoGPT"),
        ({"tie_weights": True}, "has its head tied, gelu_tanh"),
    ],
)
def test_whose_state_dict_it_is(run, tmp_path, changes, whose):
    config = BYTES.replace(**changes)
    state = enlarged_random_weights(load_style("mingpt_style"), config, seed=1)
    save_checkpoint(tmp_path / "a", state, config)
    status, out, _ = run(
        "convert", "--weights", tmp_path / "a", "--to=nanogpt", "--out",
        tmp_path / "b",
    )  # fmt: skip
    assert status == 0
    assert whose in out


def test_what_cannot_be_converted(run, weights, tmp_path):
    def refused(*arguments):
        before = sorted(tmp_path.rglob("*"))
        status, out, err = run("convert", *arguments)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert sorted(tmp_path.rglob("*")) == before
        return err

    out = tmp_path / "out"
    into = ("--out", out, "--to")
    assert "got 'scratch'" in refused("--weights", weights, *into, "scratch")
    assert "is not empty" in refused(
        "--weights", weights, "--to=gpt2", "--out", weights
    )
    assert "there is no folder" in refused(
        "--weights", weights, "--to=gpt2", "--out", out / "deep"
    )
    (weights / "config.json").unlink()
    assert "give --n-head and --activation" in refused(
        "--weights", weights, *into, "gpt2"
    )
    (weights / "config.json").write_text(our_config(BYTES.replace(n_embd=8)))
    assert "says n_embd is 8, the weights have 16" in refused(
        "--weights", weights, *into, "gpt2"
    )
    torch.save({}, weights / "model.safetensors")
    assert "is a pickle" in refused("--weights", weights, *into, "gpt2")


# tokenizers ----------------------------------------------------------------


def test_tokenizers_are_listed_without_a_network(run, tmp_path, monkeypatch):
    import socket

    import tiktoken

    def refuse(*_arguments, **_named):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    tiktoken.list_encoding_names()
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run("tokenizers")
    assert status == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "The network was not asked" in out
    for name in ("duet-1k", "bytes", "char"):
        assert lines[name].split()[1] == "yes"
    assert "1,024" in lines["duet-1k"]
    for name in tiktoken.list_encoding_names():
        assert lines[name].split()[1] == "no"
        assert f"not cached in {tmp_path}" in lines[name]


def test_a_cached_tokenizer_is_listed(run, r50k_base, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run("tokenizers")
    lines = {x.split()[0]: x.split() for x in out.splitlines() if x}
    assert lines["r50k_base"][1:3] == ["yes", "50,257"]
