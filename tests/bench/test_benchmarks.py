"""The benchmarks run as a user runs them; no test depends on real timing.

Tests of columns and of comparisons are in test_benchmark_tables.py.
"""

import inspect
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt_duet import processes, timing
from gpt_duet.annotated import DecoderModel
from gpt_duet.benchmark_results import Row, Run, read_results
from gpt_duet.benchmarks import app as commands
from gpt_duet.benchmarks import everything, machine, measure, output
from gpt_duet.benchmarks import run as whole
from gpt_duet.benchmarks.models import Candidate, build_peers
from gpt_duet.benchmarks.peers import PEERS
from gpt_duet.benchmarks.plan import CPU, PRESETS, Tokens, make_plan
from gpt_duet.benchmarks.work import cache_bytes
from gpt_duet.console import run
from gpt_duet.invariants import check_model
from gpt_duet.mingpt_style import GPT
from gpt_duet.processes import GRACE

TOY = ["--preset", "gpt-nano", "--vocab-size", 11]
SMALL = [*TOY, "--batch", 1, "--time", 4]
FAST = [*SMALL, "--rounds", 2]
DECODE = [*TOY, "--new-tokens", 1, "--prompt", 2, "--rounds", 1]
LIMITS = ["matmul 16 x 16", "copy of 1 MiB", "read of 1 MiB"]
LIMITS += ["read of 0 MiB"]


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch):
    """Make measurements short and their load low; restore the thread count."""
    monkeypatch.setattr(machine, "SQUARE", 16)
    monkeypatch.setattr(machine, "MOVED", 2**20)
    machine.limits.cache_clear()
    monkeypatch.setattr(output, "load", lambda: 0.5)
    monkeypatch.setattr(
        everything, "run_alone", lambda work, tell, *limit: work(tell)
    )
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def bench(run_command):
    """Return a function that runs the benchmarks and returns what they print.

    If the command fails, return its line on standard error instead.
    """
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


@pytest.mark.slow
def test_a_forward_is_timed_with_every_option(bench, tmp_path):
    pytest.importorskip("x_transformers")
    file, plot = tmp_path / "found.json", tmp_path / "found.svg"
    out = bench(
        "forward", *FAST, "--own", "--threads", 1,
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
    assert {len(row.seconds) for row in rows.values() if not row.limit} == {2}
    machine = read_results(file).machine
    assert machine["torch"] == torch.__version__
    assert machine["accelerator"] == "none"
    models = [row for row in rows.values() if not row.limit]
    # x-transformers, the last model, needs a few more products
    assert len({row.flops for row in models[:-1]}) == 1
    for row in models:
        assert row.peak_bytes > 4 * 4 * 11
        assert row.first_seconds > 0
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
    # one thread, because the work is small
    assert {r.setting["threads"] for r in found} == {1}
    assert torch.get_num_threads() == 2
    assert {row.output for r in found for row in r.models} == {"log-probs"}
    assert [r.row("annotated").tokens for r in found] == [2, 4, 8, 4, 8, 16]
    work = [r.row("annotated").flops for r in found]
    assert work[3:] == [2 * flops for flops in work[:3]]


def test_generation_is_timed_at_toy_size(bench, tmp_path, monkeypatch):
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
    # both styles have a cache, are optimized, and read each token once
    optimized = [type(call.args[0]) for call in optimize.call_args_list]
    assert optimized == [DecoderModel, GPT] * 2
    config = make_plan("gpt-nano", sizes={"vocab_size": 11}).config
    cache = sum(cache_bytes(config, 1, past, 4) for past in (3, 4))
    matrices = 3 * 12 * 48**2 + 11 * 48
    # the biases, the norms, and a row of each table
    small = 3 * (9 * 48 + 4 * 48) + 2 * 48 + 2 * 48
    moved = 2 * 4 * (matrices + small + 11) + cache
    ours, theirs, half, annotated = map(first.row, (
        "mingpt_style", "transformers", "mingpt_style bfloat16", "annotated",
    ))  # fmt: skip
    # annotated also has a bias in its generator
    assert annotated.least_bytes - moved == 2 * 4 * 11
    assert ours.least_bytes == theirs.least_bytes == moved
    assert 2 * half.least_bytes == moved
    assert ours.tokens == 2
    # at least the scores of two tokens are allocated
    assert all(row.peak_bytes > 2 * 2 * 11 for row in first.models)
    # the cache holds the prompt and the first new token
    assert ours.cache_bytes == cache_bytes(config, 1, 4, 4)
    assert annotated.cache_bytes == ours.cache_bytes
    for row in first.models:
        assert 0 < row.first_token < row.seconds[0]
        assert len(row.between_tokens) == 3
    assert "first token" in out
    assert (first.setting["prompt"], first.setting["new"]) == (3, 2)
    assert second.setting["prompt"] == 5
    assert "time" not in first.setting


def test_each_token_is_timed(monkeypatch):
    """The clock advances only when a token is chosen."""
    now, costs = [0.0], iter([9, 9, 9, 5, 1, 2, 9, 9, 9, 7, 1, 4])

    def scores(tokens):
        now[0] += next(costs)
        return torch.eye(11)[tokens]

    monkeypatch.setattr(measure, "clock_for", lambda device: lambda: now[0])
    plan = make_plan("gpt-nano", (1,), (3,), 3, {"vocab_size": 11})
    run = measure.Decoding(
        Candidate("a", scores, scores), Tokens(plan, 1, 3), 3
    )
    # the warm-up before each round does not count
    assert [run.timed(), run.timed()] == [8, 12]
    assert run.facts(1) == {
        "first_token": 5, "between_tokens": [1.5, 1.9, pytest.approx(1.99)],
    }  # fmt: skip
    assert run.facts(2)["first_token"] == 6
    assert run.facts(2)["between_tokens"][0] == 1.5


def test_a_training_step_is_timed_at_toy_size(bench, tmp_path):
    file, forward = tmp_path / "found.json", tmp_path / "forward.json"
    bench("train-step", *FAST, "--json", file)
    bench("forward", *FAST, "--peers", "none", "--json", forward)
    rows = rows_of(file)
    assert {"annotated", "mingpt_style", "transformers"} <= {*rows}
    ours = rows["mingpt_style"]
    assert ours.flops == 3 * rows_of(forward)["mingpt_style"].flops
    # the gradients alone take 4 bytes a parameter
    assert ours.peak_bytes > 4 * ours.parameters


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"preset": "S1", "budget": 50, "rounds": 10, "kind": "forward"}),
        # no preset, because these are not the sizes of S1
        (["forward", "--n-layer", 1], {"preset": ""}),
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
def test_each_command_runs_its_measurement(
    bench, monkeypatch, words, expected
):
    plans = []
    monkeypatch.setattr(
        whole, "run_plan", lambda plan, tell: plans.append(plan) or []
    )
    bench(*words)
    (plan,) = plans
    assert {name: getattr(plan, name) for name in expected} == expected


# The command line


@pytest.mark.unhooked  # --check-shapes expects another class of context
def test_gpt_duet_bench_passes_its_arguments_on(duet, refused):
    assert "rounds must be at" in refused("bench", "forward", "--rounds=0")
    assert "Usage: gpt-duet bench" in duet("bench", "-h")[1]


# All measurements in one call


@pytest.fixture
def _toy_presets(monkeypatch):
    toy = {"vocab_size": 11, "n_layer": 1, "n_head": 1, "n_embd": 4}
    monkeypatch.setitem(PRESETS, "S1", (toy | {"block_size": 4}, 1, 4))
    for name in ("S2", "S3"):
        monkeypatch.delitem(PRESETS, name)
    monkeypatch.setattr(
        everything, "make_plan",
        lambda preset, *sizes, **how: make_plan(
            "S1", *(((1,), (2,), 2) if sizes else ()), peers=(),
            **{k: v for k, v in how.items() if k != "peers"},
        ),
    )  # fmt: skip
    monkeypatch.setattr(everything, "CHECKED", make_plan("S1").config)


@pytest.mark.usefixtures("_toy_presets")
def test_all_results_go_into_one_file(bench, tmp_path, monkeypatch):
    file, asked = tmp_path / "found.json", []
    monkeypatch.setattr(everything, "DTYPES", ("float32",))
    monkeypatch.setattr(
        torch, "compile", lambda call, **how: asked.append(how) or call
    )
    monkeypatch.setattr(
        everything, "check_model", partial(check_model, checks=["shape"])
    )
    monkeypatch.setattr(
        everything.subprocess, "run",
        lambda words, **how: SimpleNamespace(
            returncode=asked.append(words), stdout="x\n5 passed in 2s\n"
        ),
    )  # fmt: skip
    bench("--all", "--json", file)
    runs = read_results(file).runs
    kinds = [run.what for run in runs]
    assert kinds == ["forward", "generate", "checks", "checks", "tests",
                     "forward", "parts"]  # fmt: skip
    assert [run.setting.get("compile") for run in runs[:6:5]] == [False, True]
    assert [row.name for row in runs[6].rows] == [
        "forward S1 float32", "generate float32", "checks of annotated",
        "checks of mingpt_style", "tests", "compiled S1 float32",
    ]  # fmt: skip
    assert not runs[6].notes
    names = {row.name: row.note for row in runs[2].rows}
    assert names["check_shape"].startswith("passed: ")
    assert runs[4].rows[0].note == "passed: 5 passed in 2s"
    assert "gpu" in asked[0]
    # a failing test gives status 1, and later parts are still measured
    monkeypatch.setattr(everything.subprocess, "run", Mock(
        return_value=SimpleNamespace(returncode=1, stdout="", stderr="bad")
    ))  # fmt: skip
    monkeypatch.setattr(
        everything, "check_model", Mock(side_effect=IndexError("no memory"))
    )
    out = bench("--all", "--json", file, status=1)
    runs = read_results(file).runs
    assert [run.what for run in runs] == kinds[:2] + kinds[4:]
    words = "checks of annotated: ended with IndexError: no memory"
    assert words in " ".join(out.split())
    assert runs[2].rows[0].note == "failed: bad"


def measured(what):
    return [Run(what, {}, [Row("a", [1.0])])]


@given(st.lists(st.floats(0, 1000)))
def test_bench_all_ends_in_time_and_names_each_part(needed):
    """The whole run ends in time, however long each part would take."""
    now, kept = [0.0], []

    def run_alone(work, tell, name, module, seconds):
        takes = needed[int(name)]
        now[0] += min(takes, seconds + GRACE)
        if takes > seconds:
            raise TimeoutError
        return work(tell)

    made = {str(n): lambda tell: measured("x") for n in range(len(needed))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(everything.time, "monotonic", lambda: now[0])
        patch.setattr(everything, "run_alone", run_alone)
        patch.setattr(everything, "parts", lambda device: made)
        *found, last = everything.measure_all(CPU, str, kept.append)
    assert now[0] <= everything.SECONDS + GRACE < 8 * 60
    begun = [row.name for row in last.rows]
    left_out = [note.partition(": not run: no time left (")[0]
                for note in last.notes]  # fmt: skip
    assert begun + left_out == [*made]
    stopped = [row for row in last.rows if row.note]
    assert all(row.note.startswith("stopped") for row in stopped)
    assert len(found) + len(stopped) == len(begun) == len(kept)
    # the first parts have a minute each: if that is enough, none is cut short
    for row, takes in zip(last.rows[:7], needed, strict=False):
        assert not (row.note and max(needed[:7]) <= everything.SHARE), takes


@pytest.mark.parametrize("killed", [True, False])
def test_a_stop_keeps_the_finished_parts(tmp_path, monkeypatch, killed):
    file = tmp_path / "found.json"

    def second(tell):
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise measure.Stopped(measured("half"))

    made = {"a": lambda tell: measured("a"), "b": second, "c": None}
    monkeypatch.setattr(everything, "parts", lambda device: made)
    where, status = output.Output(CPU, {"json": file}), 1
    every = partial(everything.measure_all, CPU, keep=where.keep)
    if killed:
        if (child := os.fork()) == 0:
            try:
                every(str)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    else:
        with pytest.raises(KeyboardInterrupt):
            where.take(every)
    *found, last = read_results(file).runs
    assert [run.what for run in found] == ["a", "half"][: 2 - killed]
    notes = ["b: not run", "c: not run"] if killed else ["c: not run"]
    assert last.notes == notes


def answers(tell):
    tell("begun")
    return 3


def is_stopped(tell):
    try:
        tell("begun")
        time.sleep(60)
    except KeyboardInterrupt:
        return "so far"


def is_deaf(tell):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_stopped(tell)


def fails(tell):
    raise OSError("no disk")


def dies(tell):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_slowly(tell):
    inspect.getclosurevars(tell).nonlocals["pipe"].close()
    time.sleep(0.2)
    os._exit(7)


@pytest.mark.parametrize(
    ("work", "grace", "expected"),
    [
        (answers, 99, 3),
        (is_stopped, 99, "so far"),
        (is_deaf, 0, TimeoutError("a took 5 s")),
        (fails, 99, ValueError("no disk")),
        (dies, 99, ValueError("a ended .*status -9 .too little memory.*")),
        (dies_slowly, 99, ValueError("a ended its process with status 7,")),
    ],
)  # fmt: skip
def test_a_process_is_stopped_after_its_time(
    monkeypatch, work, grace, expected
):
    now = [0.0]
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: fork)
    monkeypatch.setattr(processes, "GRACE", grace)
    monkeypatch.setattr(
        processes, "time", SimpleNamespace(monotonic=lambda: now[0])
    )

    def tell(told):
        assert told == "begun"
        now[0] = 6.0 * (work is not answers)

    run = partial(processes.run_alone, work, tell, "a", "json", 5.0)
    if isinstance(expected, Exception):
        with pytest.raises(type(expected), match=str(expected)):
            run()
    else:
        assert run() == expected


# A user's own model

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

def few_ids():
    table = one_hot(torch.arange(7), 11).float()
    return lambda tokens: table[tokens]

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


def test_a_users_model_runs_next_to_ours(bench, own_peer):
    bench(
        "forward", *FAST, "--peers", "none", "--json", "found.json",
        "--peer", "bigram.py:build", "--peer", "bigram.py:bare",
    )  # fmt: skip
    rows = rows_of(Path("found.json"))
    assert rows["bigram.py:build"].parameters == 121
    assert "called with targets" in rows["bigram.py:build"].note
    assert "parameters unknown" in rows["bigram.py:bare"].note
    assert rows["bigram.py:bare"].flops == 0
    # without the styles, the last peer is the reference; it has no parameters
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


OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab=7, width=10, length=6):
        super().__init__()
        self.vocab_size, self.block_size = vocab, length
        self.table = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.table(ids))

def build(width=10):
    return Model(width=width)

def configured(config):
    return Model(config.vocab_size, config.n_embd, config.block_size)

def many():
    return Model(vocab=9)
"""


def test_a_models_own_sizes_are_shown(bench, tmp_path, monkeypatch):
    """The bytes, operations and sizes shown are those of the user's model."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    alone = ["--only-peers", "--rounds", 1, "--json", "found.json"]
    out = bench("forward", "--peer", "own.py:build", *alone)
    (found,) = read_results(Path("found.json")).runs
    for name in ("layers", "heads", "width", "shape"):
        assert name not in found.setting
        assert f"{name} " not in found.described()
    sizes = {"vocabulary": 7, "batch": 8, "time": 6}
    assert sizes.items() <= found.setting.items()
    (row,) = found.models
    assert row.parameters == 7 * 10 + 10 * 7 + 7
    assert row.flops == 2 * 8 * 6 * 10 * 7
    # bytes of six rows of the table, of the head, and of all scores
    assert row.least_bytes == 4 * (6 * 10 + 10 * 7 + 7 + 8 * 6 * 7)
    assert f"{row.least_bytes / 1000:.2f} kB" in out
    bench("generate", "--new", 2, "--peer", "own.py:build", *alone)
    (found,) = read_results(Path("found.json")).runs
    assert (found.setting["prompt"], found.setting["vocabulary"]) == (4, 7)
    # if the model has a config, its sizes are used and shown
    bench("forward", *SMALL, "--peer", "own.py:configured", *alone)
    (found,) = read_results(Path("found.json")).runs
    assert found.setting["width"] == 48
    assert found.models[0].parameters == 11 * 48 * 2 + 11
    both = ["--peer", "own.py:build", "--peer", "own.py:many", *alone]
    err = bench("forward", *both, status=2)
    assert "own.py:build has 7, own.py:many has 9" in err


CACHED = """
import torch
from torch import nn

class Sums(nn.Module):
    vocab_size, block_size, read = 7, 8, []
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7)
    def forward(self, idx, kv_cache=None):
        self.read.append(new := idx.size(1))
        if kv_cache is not None:
            idx = torch.cat([*kv_cache[-1:], idx], 1)
            kv_cache.append(idx)
        return self.head(self.table(idx).cumsum(1))[:, -new:]

def make(batch):
    return [torch.empty(batch, 0, dtype=torch.long)]
"""


def test_generation_is_timed_with_a_cache_that_the_user_names(
    tmp_path, monkeypatch
):
    """With the cache, each token is read once, and the ids stay the same."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(CACHED)
    plan = make_plan(
        "gpt-nano", (2,), (3,), 4, {"vocab_size": 7}, kind="generate",
        styles=(), peers=["own.py:Sums"], cache="own.py:make",
    )  # fmt: skip
    (peer,), _ = build_peers(plan)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    peer.model.read.clear()
    found = measure.decode(peer, ids, 4)
    assert peer.model.read == [3, 1, 1, 1]
    assert found.equal(measure.decode(replace(peer, reader=None), ids, 4))


THEIRS = """
from transformers import GPT2Config, GPT2LMHeadModel, logging

def build():
    logging.set_verbosity_error()
    return GPT2LMHeadModel(GPT2Config(
        n_layer=1, n_head=1, n_embd=4, vocab_size=11, n_positions=5,
        bos_token_id=0, eos_token_id=0,
    ))
"""


def test_a_transformers_model_shows_its_own_sizes(bench, tmp_path):
    pytest.importorskip("transformers")
    file, theirs = tmp_path / "found.json", tmp_path / "theirs.py"
    theirs.write_text(THEIRS)
    out = bench(
        "forward", "--peer", f"{theirs}:build", "--only-peers",
        "--rounds", 1, "--batch", 2, "--json", file,
    )  # fmt: skip
    (found,) = read_results(file).runs
    assert (found.setting["vocabulary"], found.setting["time"]) == (11, 5)
    assert "layers" not in found.setting
    (row,) = found.models
    block = 4 * 12 + 12 + 4 * 4 + 4 + 2 * 4 * 16 + 16 + 4 + 2 * 8
    # 8 weights of the last norm; the head shares the token table
    weights = 11 * 4 + 5 * 4 + block + 8
    assert row.parameters == weights
    assert row.least_bytes == 4 * (weights + 2 * 5 * 11)
    assert row.flops == 2 * 2 * 5 * (12 * 16 + 11 * 4) + 4 * 2 * 25 * 4
    assert "\u2026" not in out  # no value is cut off


def test_limits_are_measured_once_or_not_at_all(bench, tmp_path, monkeypatch):
    file, tasks = tmp_path / "found.json", Mock(wraps=machine.limit_tasks)
    monkeypatch.setattr(machine, "limit_tasks", tasks)
    words = ["forward", *TOY, "--time", "2,4", "--peers", "none"]
    words += ["--rounds", 1, "--json", file]
    bench(*words)
    assert tasks.call_count == 1
    assert {*LIMITS} < {*rows_of(file)}
    out = bench(*words, "--no-limits")
    assert tasks.call_count == 1
    assert not {*LIMITS} & {*rows_of(file)}
    assert "of peak" not in out  # no column "of peak", nor a note about it
    assert "x mingpt_style" in out


def test_json_on_the_standard_output(run_command):
    words = ["forward", *FAST, "--peers", "none", "--json", "-"]
    status, out, err = run_command(
        partial(run, commands.main), "benchmarks", *words
    )
    assert status == 0
    assert json.loads(out)["version"] == 3
    assert "mingpt_style" in err


def test_a_users_model_decodes_greedily_from_its_scores(own_peer):
    plan = make_plan(
        "gpt-nano", (2,), (3,), 4, {"vocab_size": 11}, kind="generate",
        styles=(), peers=("bigram.py:bare",),
    )  # fmt: skip
    (peer,), _ = build_peers(plan)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = measure.decode(peer, ids, 4)
    assert found.tolist() == [[1, 2, 3, 3, 3, 3, 3], [4, 5, 6, 6, 6, 6, 6]]


@pytest.mark.unhooked
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
        ("bigram.py:few_ids", "ids some are refused.*--vocab-size sets it"),
        ("bigram.py:number", "returned no model but int"),
        ("bigram.py:short", "reads at most 3 tokens, but the text has 4"),
    ],
)
def test_a_peer_that_cannot_be_timed_is_named(bench, own_peer, peer, message):
    err = bench("forward", *FAST, "--peers", "none", "--peer", peer, status=2)
    assert re.search(message, err)


def test_a_peer_that_is_not_installed_is_reported(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for words in (["forward", *FAST], ["generate", *DECODE]):
        assert "transformers was not run: ModuleNotFoundError" in bench(*words)
        err = bench(*words, "--peers", "transformers", status=2)
        assert "transformers cannot be built: ModuleNotFoundError" in err
    # if an install is broken, transformers raises this error without a name
    broken = ModuleNotFoundError("Failed to import:\nno symbol")
    monkeypatch.setitem(PEERS, "transformers", Mock(side_effect=broken))
    err = bench("forward", *FAST, status=2)
    assert "cannot be built: ModuleNotFoundError: Failed to import:" in err


# Rounds until a ratio is known, and cold caches


@pytest.mark.parametrize(
    ("noise", "rounds"), [(0.0, 10), (0.05, 50), (0.5, None)]
)
def test_rounds_go_on_until_the_ratio_is_known(
    bench, tmp_path, monkeypatch, noise, rounds
):
    """A noisy model gets more rounds; a drift of all times adds none."""
    numbers, count = random.Random(0), itertools.count(1)

    def watch(run, device):
        own = next(count) % 2
        each = itertools.count(1)
        return lambda: next(each) * (1 + own * noise * numbers.random())

    monkeypatch.setattr(measure, "stopwatch", watch)
    file = tmp_path / "found.json"
    words = [*SMALL, "--peers", "none", "--no-limits", "--until", "1%"]
    out = bench("forward", *words, "--rounds", 60, "--json", file)
    (run,) = read_results(file).runs
    (done,) = {len(row.seconds) for row in run.models}
    error = measure.ratio_error(
        run.reference, {row.name: row.seconds for row in run.models}
    )
    said = f"each ratio is known within {error:.1%} after {done} rounds"
    assert said in " ".join(out.split())
    assert "rounds" not in run.setting
    if rounds is None:
        assert done == 60
        assert f"{said}, not within 1.0%" in " ".join(out.split())
    else:
        assert 10 <= done <= rounds
        assert error <= 0.01


def test_a_single_model_is_timed_until_its_own_time_is_known():
    steady, noisy = [1.0] * 10, [1.0, 2.0] * 5
    assert measure.ratio_error("a", {"a": steady}) == 0
    assert measure.ratio_error("a", {"a": steady[:9]}) == math.inf
    assert measure.ratio_error("a", {"a": noisy}) > 0.1
    assert measure.ratio_error("a", {"a": noisy, "b": noisy}) == 0


@pytest.mark.parametrize("kind", ["forward", "generate"])
def test_caches_are_emptied_before_each_run_and_token(
    bench, tmp_path, monkeypatch, kind
):
    """With --cold the caches are emptied, outside the measured time."""
    clock, flushed = [0.0], []

    def flush():
        clock[0] += 1000.0
        flushed.append(clock[0])

    def tick():
        clock[0] += 0.25
        return clock[0]

    monkeypatch.setattr(measure, "cache_flusher", lambda device: flush)
    for module in (measure, timing):
        monkeypatch.setattr(module, "clock_for", lambda device: tick)
    file = tmp_path / "found.json"
    words = FAST if kind == "forward" else DECODE
    words = [*words, "--peers", "none", "--no-limits"]
    bench(kind, *words, "--cold", "--json", file)
    (run,) = read_results(file).runs
    assert run.setting["cold"] is True
    rounds = len(run.models[0].seconds)
    assert len(flushed) >= rounds * len(run.models)
    assert {s for row in run.models for s in row.seconds} == {0.25}
    flushed.clear()
    bench(kind, *words, "--json", file)
    assert not flushed
    assert "cold" not in read_results(file).runs[0].setting


def test_a_flush_reads_more_memory_than_the_caches_hold(monkeypatch):
    monkeypatch.setattr(machine, "MOVED", 2**20)
    held, zeros = [], torch.zeros

    def kept(size, **how):
        held.append(zeros(size, **how))
        return held[-1]

    monkeypatch.setattr(torch, "zeros", kept)
    flush = machine.cache_flusher(torch.device("cpu"))
    flush()
    flush()
    (memory,) = held
    assert bool((memory == 2).all())
    assert memory.nbytes >= 2**20
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")
    for size in sizes:
        assert memory.nbytes >= 2048 * int(size.read_text().strip(" K\n"))


# Old results


def test_old_results_are_compared(bench, tmp_path, monkeypatch):
    seconds = [1.0]
    monkeypatch.setattr(
        measure,
        "interleave",
        lambda runs, count, _before, _budget, found, _enough: found.update(
            {name: seconds * count for name in runs}
        ),
    )
    old = tmp_path / "old.json"
    words = ["forward", *FAST, "--peers", "none"]
    bench(*words, "--json", old)
    out = bench(*words, "--compare", old)
    assert "0 of 2 slower, by more than 10%; 2 level" in out
    seconds[0] = 1.2
    out = bench(*words, "--compare", old, status=1)
    assert "2 of 2 slower, by more than 10%" in out
    assert "1.200" in out
    # both options are now given twice, and the last value counts
    more = ["--tolerance", 0.25, "--rounds", 3]
    bench(*words, *more, "--compare", old)
    # results that cannot be compared are refused before any measurement
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
    rows = rows_of(file).values()
    assert {len(row.seconds) for row in rows if not row.limit} == {2}
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
        ("forward --until 0", ["until", "a share like 1%, got '0'"]),
        ("forward --until 100%", ["until", "a share like 1%, got '100%'"]),
        ("forward --until a%", ["until", "a share like 1%, got 'a%'"]),
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
        ("forward --all", ["--all takes only --device"]),
        ("--all --rounds 3", ["--all takes only --device"]),
        ("--all --no-limits", ["--all takes only --device"]),
        ("forward --new 3", ["--new-tokens", "generate", "forward"]),
        ("forward --only-peers", ["--only-peers requires --peer"]),
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


def test_a_dtype_that_the_device_lacks_is_reported(bench, monkeypatch):
    def mm(a, b):
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", mm)
    err = bench("forward", *FAST, "--dtype", "float16", status=2)
    assert "cpu has no float16" in err
