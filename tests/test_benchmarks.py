"""The benchmarks as a user calls them; no real time decides a test."""

import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarks import app as commands
from benchmarks import machine, measure, output
from benchmarks.models import build_peers
from benchmarks.peers import PEERS
from benchmarks.plan import Tokens, make_plan
from benchmarks.work import least_bytes
from mingpt_style import GPT
from shared.comparison.benchmark_results import read_results
from shared.console import run

TOY = ["--preset", "gpt-nano", "--vocab-size", 11]
SMALL = [*TOY, "--batch", 1, "--time", 4]
FAST = [*SMALL, "--rounds", 2]
DECODE = [*TOY, "--new-tokens", 1, "--prompt", 2, "--rounds", 1]
LIMITS = ["matmul 16 x 16", "copy of 1 MiB", "read of 1 MiB"]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """A quiet machine, measured in no time, and threads put back."""
    monkeypatch.setattr(machine, "SQUARE", 16)
    monkeypatch.setattr(machine, "MOVED", 2**20)
    monkeypatch.setattr(output, "load", lambda: 0.5)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(run_command):
    """Run the benchmarks: stdout, or of a mistake its line on stderr."""
    main = partial(run, commands.main)

    def bench(*words, status=0):
        found, out, err = run_command(main, "benchmarks", *words)
        assert found == status, err
        assert status == 130 or (out if status == 2 else err) == ""
        assert err.count("\n") == (status in (2, 130))
        return err or out

    return bench


def rows_of(path):
    return {
        row.name: row for one in read_results(path).runs for row in one.rows
    }


# Every kind of measurement, at toy size


def test_forward_with_everything(bench, tmp_path):
    pytest.importorskip("x_transformers")
    file, plot = tmp_path / "found.json", tmp_path / "found.svg"
    out = bench(
        "forward", *FAST, "--own", "--profile", "--threads", 1,
        "--json", file, "--plot", plot,
    )  # fmt: skip
    for word in ("threads 1", "tokens/s", "of peak",
                 "in float32 the styles agree to",
                 "annotated-own: with its own LayerNorm"):  # fmt: skip
        assert word in out
    rows = rows_of(file)
    assert [*rows] == [
        "annotated", "mingpt_style", "annotated-own",
        "transformers", "transformers-eager", "transformers-one-gelu",
        "torch-encoder", "x-transformers", *LIMITS,
    ]  # fmt: skip
    assert all(len(row.seconds) == 2 for row in rows.values())
    machine = read_results(file).machine
    assert machine["torch"] == torch.__version__
    assert machine["accelerator"] == "none"
    models = [row for row in rows.values() if not row.limit]
    # x-transformers makes a few more products
    assert len({row.flops for row in models[:-1]}) == 1
    for row in models:
        assert row.peak_bytes > 4 * 4 * 11
        assert row.first_seconds > 0
        assert row.operations
        assert row.name in out
    assert plot.read_text().startswith("<?xml")


def test_a_sweep_over_batch_and_time(bench, tmp_path):
    file = tmp_path / "found.json"
    torch.set_num_threads(2)
    bench(
        "forward", *TOY, "--batch", "1,2", "--time", "2,4,8",
        "--rounds", 1, "--peers", "none", "--log-probs", "--json", file,
    )  # fmt: skip
    found = read_results(file).runs
    asked = [(r.setting["batch"], r.setting["time"]) for r in found]
    assert asked == [(b, t) for b in (1, 2) for t in (2, 4, 8)]
    assert {r.setting["threads"] for r in found} == {1}  # small work
    assert torch.get_num_threads() == 2
    assert {row.output for r in found for row in r.models} == {"log-probs"}
    assert [r.row("annotated").tokens for r in found] == [2, 4, 8, 4, 8, 16]
    work = [r.row("annotated").flops for r in found]
    assert work[3:] == [2 * flops for flops in work[:3]]


def test_generate_at_toy_size(bench, tmp_path, monkeypatch):
    file, optimize = tmp_path / "found.json", Mock()
    monkeypatch.setattr(measure, "optimize_for_decoding", optimize)
    out = bench(
        "generate", *TOY, "--prompt", "3,5", "--new", 2, "--rounds", 1,
        "--dtype", "float32,bfloat16", "--json", file,
    )  # fmt: skip
    assert "with a cache" in out
    first, second = read_results(file).runs
    assert [row.name for row in first.rows] == [
        "annotated", "mingpt_style", "annotated bfloat16",
        "mingpt_style bfloat16", "transformers", *LIMITS,
    ]  # fmt: skip
    # only a model with a cache is optimized, and reads each token once
    optimized = [type(call.args[0]) for call in optimize.call_args_list]
    assert optimized == [GPT, GPT]
    config = make_plan("gpt-nano", sizes={"vocab_size": 11}).config
    moved = sum(least_bytes(config, 1, 1, 4, past) for past in (3, 4))
    ours, theirs, half, annotated = map(first.row, (
        "mingpt_style", "transformers", "mingpt_style bfloat16", "annotated",
    ))  # fmt: skip
    assert annotated.least_bytes is None
    assert ours.least_bytes == theirs.least_bytes == moved
    assert 2 * half.least_bytes == moved
    assert ours.tokens == 2
    # two tokens' scores, and what is between
    assert all(row.peak_bytes > 2 * 2 * 11 for row in first.models)
    assert (first.setting["prompt"], first.setting["new"]) == (3, 2)
    assert second.setting["prompt"] == 5
    assert "time" not in first.setting


def test_train_step_at_toy_size(bench, tmp_path):
    file, forward = tmp_path / "found.json", tmp_path / "forward.json"
    bench("train-step", *FAST, "--json", file)
    bench("forward", *FAST, "--peers", "none", "--json", forward)
    rows = rows_of(file)
    assert {"annotated", "mingpt_style", "transformers"} <= {*rows}
    ours = rows["mingpt_style"]
    assert ours.flops == 3 * rows_of(forward)["mingpt_style"].flops
    assert ours.peak_bytes > 4 * ours.parameters  # the gradients at least


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"preset": "S1", "budget": 50, "rounds": 10, "kind": "forward"}),
        (["forward", "--n-layer", 1], {"preset": ""}),  # S1 no longer
        (["forward", "--n-layer", 6, "--threads", 3],
         {"preset": "S1", "threads": 3}),
        (["forward"], {"batches": (8,), "times": (256,), "budget": math.inf}),
        (
            ["generate"],
            {"preset": "gpt2", "batches": [1], "times": [16], "new": 32,
             "rounds": 3, "peers": ["transformers"], "installed": True},
        ),
        (["generate", "--new-tokens", 5], {"new": 5}),
        (["generate", "--new", 5], {"new": 5}),
        (["train-step"], {"preset": "S1", "rounds": 5, "kind": "train-step"}),
        (
            ["forward", "--peers", "none", "--peer", "my.py:build"],
            {"peers": ["my.py:build"], "installed": False},
        ),
    ],
)  # fmt: skip
def test_what_a_command_measures(bench, monkeypatch, words, expected):
    plans = []
    monkeypatch.setattr(
        measure, "measure", lambda plan, tell: plans.append(plan) or []
    )
    bench(*words)
    (plan,) = plans
    assert {name: getattr(plan, name) for name in expected} == expected


# How it is called


@pytest.mark.unhooked  # typer's context is not of the class it names
def test_gpt_duet_bench_hands_its_words_on(duet, refused):
    assert "rounds must be at" in refused("bench", "forward", "--rounds=0")
    assert "Usage: gpt-duet bench" in duet("bench", "-h")[1]


# Someone's own model

PEER = """
import torch
from torch.nn.functional import one_hot

class Bigram(torch.nn.Embedding):
    vocab_size = property(lambda self: self.num_embeddings)

    # as nanoGPT: all positions only where there are targets
    def forward(self, idx, targets=None):
        scores = super().forward(idx)
        if targets is None:
            return scores[:, -1:], None
        return scores, scores.sum()

def build(config):
    return Bigram(config.vocab_size, config.vocab_size)

def short(config):
    model = build(config)
    model.block_size = 3
    return model

def other_vocabulary(config):
    return Bigram(7, 7)

def bare():
    return lambda tokens: one_hot(tokens, 11).float()

def ahead(config):
    return lambda tokens: one_hot(tokens.flip(1), config.vocab_size).float()

def broken(config):
    raise RuntimeError("no weights")

def number():
    return 3
"""


@pytest.fixture
def own_peer(tmp_path, monkeypatch):
    (tmp_path / "bigram.py").write_text(PEER)
    monkeypatch.chdir(tmp_path)


def test_anyones_model_runs_beside_ours(bench, own_peer):
    bench(
        "forward", *FAST, "--peers", "none", "--json", "found.json",
        "--peer", "bigram.py:build", "--peer", "bigram.py:bare",
    )  # fmt: skip
    rows = rows_of(Path("found.json"))
    assert rows["bigram.py:build"].parameters == 121
    assert "called with targets" in rows["bigram.py:build"].note
    assert "parameters unknown" in rows["bigram.py:bare"].note
    assert rows["bigram.py:bare"].flops == 0
    # alone, and where the reference has no parameters
    for kind, *words in (("forward", *FAST), ("generate", *DECODE)):
        out = bench(
            kind, *words, "--json", "found.json", "--only-peers",
            "--peer", "bigram.py:build", "--peer", "bigram.py:bare",
        )  # fmt: skip
        assert "x bigram.py:bare" in out
        (found,) = read_results(Path("found.json")).runs
        names = [row.name for row in found.models]
        assert names == ["bigram.py:build", "bigram.py:bare"]
    assert "targets; without a cache" in found.models[0].note


def test_anyones_model_decodes_greedily_from_its_scores(own_peer):
    plan = make_plan(
        "gpt-nano", (2,), (3,), 4, {"vocab_size": 11}, kind="generate",
        styles=(), peers=("bigram.py:bare",),
    )  # fmt: skip
    (peer,), _ = build_peers(plan)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = measure.decode(peer, ids, 4)
    assert found.tolist() == [[1, 2, 3, 3, 3, 3, 3], [4, 5, 6, 6, 6, 6, 6]]


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("nowhere:build", "no module 'nowhere'"),
        ("bigram", "no peer 'bigram'.*transformers"),
        ("bigram.py:ahead", "sees the future"),
        ("bigram.py:broken", "cannot be built.*no weights"),
        (
            "bigram.py:other_vocabulary",
            r"vocabulary is 11 \(--vocab-size sets it\), but .*=7",
        ),
        ("bigram.py:number", "builds int"),
        ("bigram.py:short", "reads at most 3 tokens, and a text of 4"),
    ],
)
def test_a_peer_that_cannot_be_timed(bench, own_peer, peer, message):
    err = bench("forward", *FAST, "--peers", "none", "--peer", peer, status=2)
    assert re.search(message, err)


def test_a_peer_that_is_not_installed_is_said_so(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for words in (["forward", *FAST], ["generate", *DECODE]):
        assert "transformers was not run: ModuleNotFoundError" in bench(*words)
        err = bench(*words, "--peers", "transformers", status=2)
        assert "transformers cannot be built: ModuleNotFoundError" in err
    # transformers says so, too, of what is there and broken: nameless
    broken = ModuleNotFoundError("Failed to import:\nno symbol")
    monkeypatch.setitem(PEERS, "transformers", Mock(side_effect=broken))
    err = bench("forward", *FAST, status=2)
    assert "cannot be built: ModuleNotFoundError: Failed to import:" in err


# Old results


def test_old_results_are_compared(bench, tmp_path, monkeypatch):
    seconds = [1.0]
    monkeypatch.setattr(
        measure,
        "interleave",
        lambda runs, count, _before, _budget, found: found.update(
            {name: seconds * count for name in runs}
        ),
    )
    old = tmp_path / "old.json"
    words = ["forward", *FAST, "--peers", "none"]
    bench(*words, "--json", old)
    out = bench(*words, "--compare", old)
    assert "0 of 2 slower: by more than 10%" in out
    seconds[0] = 1.2
    out = bench(*words, "--compare", old, status=1)
    assert "2 of 2 slower: by more than 10%" in out
    assert "1.200" in out
    more = ["--tolerance", 0.25, "--rounds", 3]  # the latest word counts
    bench(*words, *more, "--compare", old)
    # what cannot be compared is refused before anything is measured
    monkeypatch.setattr(measure, "measure", None)
    content = json.loads(old.read_text())
    both = "no equal setting .*has: forward.* batch 1, .*this call has: forw"
    for change, more, line in (
        ({}, ["--batch", 3], f"{both}.*batch 3"),
        ({}, ["--threads", 7], f"{both}.*threads 7"),
        ({}, ["--compile"], both),
        ({"machine": {"processor": "Z80"}}, [], "another machine"),
        ({"runs": []}, [], "no equal setting"),
    ):
        old.write_text(json.dumps(content | change))
        err = bench(*words, *more, "--compare", old, status=2)
        assert re.search(line, err)


def test_ctrl_c_keeps_whole_rounds(bench, tmp_path, monkeypatch):
    draw, last = Tokens.draw, 2

    def interrupted(tokens, number):
        if number == last:
            raise KeyboardInterrupt
        draw(tokens, number)

    monkeypatch.setattr(Tokens, "draw", interrupted)
    file = tmp_path / "found.json"
    words = ["forward", *FAST, "--rounds", 5, "--peers", "none"]
    words += ["--json", file]
    assert bench(*words, status=130) == "gpt-duet: stopped\n"
    assert {len(row.seconds) for row in rows_of(file).values()} == {2}
    file.unlink()
    last = 0
    assert bench(*words, status=130) == "gpt-duet: stopped\n"
    assert not file.exists()


# Mistakes


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("forward --batch 0", ["batch", "at least 1", "0"]),
        ("forward --time 8,x", ["time", "'x'"]),
        ("forward --budget nan", ["budget", "nan"]),
        ("forward --preset huge", ["'huge'", "S1", "gpt2"]),
        ("forward --preset gpt2 --time 2048", ["2048", "1024"]),
        ("forward --device toaster", ["'toaster'"]),
        ("forward --dtype float8", ["'float8'", "bfloat16"]),
        ("forward --dtype float32,float16", ["one dtype"]),
        ("forward --styles annotated,", ["styles", "empty"]),
        ("forward --plot a.gif", [".svg or .png", "a.gif"]),
        ("forward --json no/where.json", ["no folder"]),
        ("forward --json a.svg --plot a.svg", ["one file"]),
        ("forward --tolerance -1", ["tolerance", "-1"]),
        ("forward --new 3", ["--new-tokens", "generate", "forward"]),
        ("forward --only-peers", ["--only-peers takes --peer"]),
        ("generate --compile", ["generate takes no", "--compile"]),
        ("generate --new 1020", ["1036", "1024"]),
        ("generate --peers torch-encoder", ["transformers", "'tor"]),
    ],
)
def test_a_mistake_ends_in_one_line(
    bench, tmp_path, monkeypatch, words, found
):
    monkeypatch.chdir(tmp_path)
    err = bench(*words.split(), status=2)
    assert all(word in err for word in found), err
    assert not [*tmp_path.iterdir()]


def test_a_dtype_that_the_device_lacks(bench, monkeypatch):
    def mm(a, b):
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", mm)
    err = bench("forward", *FAST, "--dtype", "float16", status=2)
    assert "cpu has no float16" in err
