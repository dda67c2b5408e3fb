"""gpt-duet diff LEFT RIGHT compares two models by value."""

import json
import re
from functools import partial

import pytest
from safetensors.torch import load_file

# the shape checks wrap each call, so their frames and operations would be
# recorded like those of the model
pytestmark = pytest.mark.unhooked

GPT = """
import torch
from torch import nn

class GPT(nn.Module):
    vocab_size, block_size = 29, 16

    def __init__(self, seed=0, vocab=29, width=16, act="gelu", layers=3):
        super().__init__()
        torch.manual_seed(seed)
        self.vocab_size = vocab
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.layers[1].act = getattr(nn.functional, act)
        self.head = nn.Linear(width, vocab)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

class Layer(nn.Module):
    act = staticmethod(nn.functional.gelu)

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

def broken():
    raise RuntimeError("no weights here")

def memory():
    sizes = [(rows, time) for rows in range(9) for time in range(17)]
    kept = {size: torch.randn(*size, 29) for size in sizes}
    def run(idx):
        return kept[tuple(idx.shape)]
    run.vocab_size = 29
    return run
"""


@pytest.fixture
def diff(duet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(GPT)
    return partial(duet, "diff")


def test_diff_finds_both_styles_of_the_small_model_to_be_one_function(diff):
    status, out, err = diff("annotated", "mingpt_style", "--width", 130)
    assert status == 0, err
    assert err == ""
    heading = "annotated mingpt_style shape apart"
    assert out.splitlines()[1].split() == heading.split()
    assert "layers 1 to 3 run the same lines" in out
    assert "self.activation(self.w_1(x))" in out
    assert "masked scores, inside" in out
    assert "\nlines of only one side: 3; --all shows them\n" in out
    assert "on the way to" not in out
    assert "1\u00d724\u00d7128" in out
    assert out.splitlines()[-1].startswith("one function: ")
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    _, out, _ = diff("annotated", "mingpt_style", "--width", 130, "--all")
    assert "lines of one side" not in out
    assert "on the way to" in out


def test_diff_shows_the_numbers_of_one_position(done):
    words = ("annotated", "mingpt_style", "--width", 150, "--position", 3)
    lines = iter(done("diff", *words, "--layer", 0)[0].splitlines())
    below = next(lines for line in lines if "scores.softmax" in line)
    numbers = next(line for line in below if line[:1].isdigit()).split()
    assert sum(map(float, numbers[:4])) == pytest.approx(1, abs=1e-3)
    # probabilities of positions 0 to 3, which position 3 sees
    assert "0" not in numbers[:4]
    # position 3 does not see later positions
    assert numbers[4:] == ["0", "0", "..."]


def test_diff_names_the_line_where_two_files_differ(diff, tmp_path):
    targets = ["theirs/model.py:GPT", "mine/model.py:GPT(act='relu')"]
    status, out, err = diff(*targets, "--tokens=1,2,3,4,5", "--json=x.json")
    assert (status, err) == (1, "")
    *_, sentence = out.splitlines()
    assert sentence.startswith("they first differ at mine/model.py:")
    assert ", layer 1: its inputs are equal, no value " in sentence
    assert "nearest is theirs/model.py:" in sentence
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["models"] == targets
    assert found["sentence"] == sentence
    assert found["parted"]["layer"] == 1
    assert found["pairs"][0]["shape"] == [1, 5, 16]


@pytest.mark.usefixtures("diff")
@pytest.mark.parametrize("width", [60, 119])
def test_a_narrow_diff_by_value_is_stacked(done, width):
    words = ("theirs/model.py:GPT", "mine/model.py:GPT", "--width", width)
    lines = done("diff", *words)[0].splitlines()
    assert max(map(len, lines[:-1])) <= width
    first = next(i for i, line in enumerate(lines) if "self.wte(idx)" in line)
    assert "self.wte(idx)" in lines[first + 1]


def test_diff_shows_the_requested_layer(diff):
    words = ("theirs/model.py:GPT", "mine/model.py:GPT", "--layer")
    status, out, _ = diff(*words, 2)
    assert status == 0
    assert "layer 2" in out
    assert "self.up(x)" in out
    assert "self.wte(idx)" not in out
    status, out, err = diff(*words, 3)
    assert (status, out) == (2, "")
    assert "no layer 3" in err


@pytest.mark.usefixtures("diff")
def test_a_text_is_tokenized(done):
    expression = "mine/model.py:GPT(vocab=1024)"
    words = (expression, expression, "--text=def f(x):")
    assert "one function: " in done("diff", *words)[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine/model.py:GPT(vocab=31)"], "29 tokens, mine/model.py:GPT"),
        (["mine/model.py:GPT", "--tokens=" + "1," * 20 + "1"], "21 tokens"),
        (["mine/model.py:GPT", "--tokens=1,x"], 'like "1,2,3"'),
        (["mine/model.py:GPT", "--tokens=1,2", "--position=2"],
         "must be from 0 to 1, got 2"),
        (["mine/model.py:GPT", "--tokens=1,77"], "token 77 is not in the"),
        (["mine/model.py:GPT", "--text=a", "--tokens=1"], "not both"),
        (["mine/model.py:GPT", "mine/model.py:GPT"], "two models, got 3"),
        (["mine/model.py:GPT", "--json=nowhere/x.json"], "no folder nowhere"),
        (["mine/model.py:broken"], "broken raised RuntimeError: no weights"),
        (["mine/model.py:memory"], "no floating values of "),
        (["mine/model.py:GPT(seed=1)"], "share no value"),
        (["mine/model.py:GPT(width=8)"], "share no value"),
        (["mine/model.py:nothing"], "no 'nothing'"),
        (["annotated"], "the sizes of annotated are defaults (vocab_size 65,"),
        (["annotated", "--vocab-size=29"],
         "defaults (vocab_size 29, block_size 64, n_layer 2, n_head 4, n_embd "
         "32): set its vocabulary with --vocab-size, or all sizes with an "
         "expression, as "
         '"gpt_duet.annotated.model:build_model(GPTConfig(...))"'),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_ends_in_one_line(diff, words, message):
    status, out, err = diff("theirs/model.py:GPT", *words)
    assert status == 2
    assert out == ""
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("gpt-duet: ")


@pytest.mark.parametrize(
    "option", ["--tokens=1", "--layer=1", "--all", "--json=x"]
)
def test_a_concept_with_tokens_is_refused(refused, option):
    assert "requires two models" in refused("diff", "attention", option)


def test_a_recording_is_written_and_compared(diff, duet, tmp_path):
    target, file = "mine/model.py:GPT", "reference.safetensors"
    status, out, err = duet("record", target, "--out", file, "--gradients")
    assert (status, err) == (0, "")
    assert out == "16 values: reference.safetensors\n"
    status, out, err = diff(target, file)
    assert (status, err) == (0, "")
    assert re.search(r"abilities .* apart, .*, 16 gradients equal", out)
    relu = "mine/model.py:GPT(act='relu')"
    status, out, err = diff(relu, file, "--json=x.json")
    assert (status, err) == (1, "")
    assert re.search(r"they first differ at \d+ layer 1 model.py:33 gelu", out)
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["parted"]["left"]["op"] == "relu"
    duet("record", relu, "--out", "relu.safetensors")
    status, out, err = diff(file, "relu.safetensors")
    assert (status, err) == (1, "")
    assert re.search(r"they first differ at \d+ layer 1 model.py:33 relu", out)
    duet("record", relu, "--out", "five.safetensors", "--statistics")
    status, out, err = diff(target, "five.safetensors")
    assert (status, err) == (1, "")
    assert re.search(r"they first differ at \d+ layer 1 model.py:33 relu", out)
    assert "only by mean, deviation, least, most and norm" in out
    for words in ((), ("relu.safetensors",)):
        _, _, err = diff(target, *(words or (target,)), "--ignore", "preatt")
        assert "has an array 'preatt'" in err.splitlines()[-1]
    words = target, file, "--table", "table.json", "--scores"
    names = load_file(tmp_path / file)
    scores = next(name for name in names if name.endswith("22 head"))
    for table, status, said in (
        ("[]", 2, "must hold only"),
        ('{"layers.{i}": "head"}', 2, "no value of the right is named 'head'"),
        ('{"layers.{i}.up": "layer {i} model.py:33 up"}', 0, "one function"),
        ('{"layers.1.up": "layer 0 model.py:33 up"}', 1, "they first differ"),
    ):
        (tmp_path / "table.json").write_text(table)
        assert diff(*words, scores)[0] == status, table
        assert said in " ".join(diff(*words, scores)[1:]), table
    assert "has an array 'logits'" in diff(*words, "logits")[2]
    assert diff(target, "no.npz")[2] == "gpt-duet: there is no file no.npz\n"


def test_diff_compares_decoding_with_a_cache(diff, tmp_path):
    (tmp_path / "kept.py").write_text(
        "from gpt_duet.mingpt_style import GPT\n"
        "from gpt_duet.config import GPTConfig\n"
        "class Late(GPT):\n"
        "    def decode(self, tokens, cache):\n"
        "        off = 1e-6 * (tokens == 7)[..., None]\n"
        "        return super().decode(tokens, cache) * (1 + off)\n"
        "def build():\n"
        "    return Late(GPTConfig(29, 16, n_layer=2, n_head=2, n_embd=8))\n"
        "class Bare(Late):\n"
        "    init_cache = None\n"
        "def bare():\n"
        "    return Bare(build().config)\n"
    )
    for style, how in (("mingpt_style", ")"), ("annotated", " of with_")):
        status, out, err = diff("--cache", style)
        assert (status, err) == (0, "")
        words = f"decoding with a cache (init_cache and decode{how}"
        assert words in " ".join(out.split())
        assert "24 positions" in out
    words = ("--cache", "kept.py:build", "--tokens=1,2,7,4", "--json=x.json")
    status, out, err = diff(*words)
    assert (status, err) == (1, "")
    said = "first differs from the full pass at position 2"
    assert said in out.splitlines()[-1]
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["position"] == 2
    assert found["tokens"] == [1, 2, 7, 4]
    for given, message in (
        (["kept.py:bare"], "no cache was found"),
        (["mingpt_style", "annotated"], "makes a cache, as my_pkg:make_cach"),
        (["m:cache", "annotated", "annotated"], "takes one model, got 2"),
        (["mingpt_style", "--html=x.html"], "--html requires two models"),
        (["kept.py:build", "--tokens=1"], "at least 2 tokens, got 1"),
    ):
        status, _, err = diff("--cache", *given)
        assert status == 2
        assert message in err.splitlines()[-1]


KV = """
import torch

class KVCache:
    def __init__(self, batch, rows=None):
        self.seen = torch.empty(batch, 0, dtype=torch.long)
"""
SUMS = """
import torch
from torch import nn
from kv import KVCache

class Sums(nn.Module):
    vocab_size, block_size = 11, 8
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)
    def forward(self, idx, kv_cache=None):
        new = idx.size(1)
        if kv_cache is not None:
            idx = kv_cache.seen = torch.cat([kv_cache.seen, idx], 1)
        return self.head(self.table(idx).cumsum(1))[:, -new:]

def make(batch):
    return KVCache(batch)
"""


def test_a_cache_is_named_in_one_way_in_each_command(diff, duet, tmp_path):
    """The check also finds a class that the model's file imports."""
    (tmp_path / "kv.py").write_text(KV)
    (tmp_path / "sums.py").write_text(SUMS)
    _, out, _ = duet("check", "sums.py:Sums", "--only", "cache")
    assert "decoding: kv_cache=KVCache()" in " ".join(out.split())
    maker = ("--cache", "sums.py:make")
    _, out, _ = duet("check", "sums.py:Sums", "--only=cache", *maker)
    assert "decoding: kv_cache=make()" in " ".join(out.split())
    status, out, _ = diff("sums.py:Sums", *maker)
    assert (status, "kv_cache=make()" in out) == (0, True), out


def test_diff_takes_a_dtype_and_a_tolerance(diff):
    words = ("theirs/model.py:GPT", "mine/model.py:GPT(act='silu')")
    assert diff(*words, "--dtype=float32")[0] == 1
    assert diff(*words[:1] * 2, "--dtype=bfloat16")[0] == 0
    assert diff(*words, "--tolerance=0.9")[0] == 0
    assert "dtype must be float32" in diff(*words, "--dtype=int8")[2]


def test_diff_compares_gradients(diff, tmp_path):
    source = (tmp_path / "mine" / "model.py").read_text()
    source = source.replace("return x + self.d", "return x.detach() + self.d")
    (tmp_path / "mine" / "model.py").write_text(source)
    words = ("theirs/model.py:GPT", "mine/model.py:GPT", "--gradients")
    status, out, err = diff(*words)
    assert (status, err) == (1, "")
    sentence = out.splitlines()[-1]
    assert sentence.startswith("one function, another gradient: that of ")
    assert "layers.1.down.bias" in sentence
    assert "the right detaches at mine/model.py:33 `detach`" in sentence
    assert "another gradient" not in diff(*words[:2])[1]
