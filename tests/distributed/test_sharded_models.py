"""Models sharded over processes are checked together and stopped together."""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial

import pytest
import sharded_models
import torch
import torch.distributed as dist

from gpt_duet.distributed.diff import ShardedDiff
from gpt_duet.distributed.parameters import differs_how
from gpt_duet.proof.engine import follow
from gpt_duet.proof.shadows import Shadows
from gpt_duet.running.ranks import (
    in_fully_shard,
    local,
    on_any,
    together,
    union,
)
from gpt_duet.tracing.lines import first_in_two_texts

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def start(*args, processes=2):
    return subprocess.Popen(
        [sys.executable, *TORCHRUN, str(processes), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Make a process group of a single process, for the collectives."""
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def through(collective, leak=False):
    """Run a collective on 4 tokens, and return their dependency codes."""

    def run(tokens, targets):
        x = tokens.double().unsqueeze(2)
        return collective(x.flip(1) if leak else x)

    run.reset = lambda: None
    run.shadows = partial(Shadows, [])
    return follow(run, torch.tensor([[3, 1, 2, 0]]))


def gather_list(x):
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x.contiguous())
    return parts[0]


def gather_tensor(x):
    whole = torch.empty_like(x)
    dist.all_gather_into_tensor(whole, x.contiguous())
    return whole


def reduce_in_place(x):
    x = x.clone()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x


def reduce_scatter(x):
    part = torch.empty_like(x)
    dist.reduce_scatter_tensor(part, x.contiguous())
    return part


def all_to_all(x):
    came = torch.empty_like(x)
    dist.all_to_all_single(came, x.contiguous())
    return came


def broadcast(x):
    x = x.clone()
    dist.broadcast(x, 0)
    return x


def functional(x):
    from torch.distributed import _functional_collectives as functions

    return functions.all_reduce(x.contiguous(), "sum", dist.group.WORLD) * 1


@pytest.mark.parametrize(
    "collective",
    [
        gather_list,
        gather_tensor,
        reduce_in_place,
        reduce_scatter,
        all_to_all,
        broadcast,
        functional,
    ],
)
def test_codes_go_through_collectives(one_process, collective):
    sound, leak = through(collective), through(collective, leak=True)
    assert not sound.open()
    assert sound.reached.tolist() == [[0, 1, 2, 3]]
    assert leak.reached.tolist() == [[3, 2, 1, 0]]
    assert not sound.notes.unknown


@pytest.mark.parametrize("collective", [gather_list, gather_tensor])
def test_the_first_line_is_not_in_a_collective(one_process, collective):
    def scores(x):
        y = collective(x)
        return y + y.flip(1)

    text = torch.rand(2, 2**17, 1)
    other = torch.cat([text[:, :3], torch.rand(2, 2**17 - 3, 1)], 1)
    runs = partial(scores, text), partial(scores, other)
    line = first_in_two_texts(scores, runs, text.shape[:2], 3, 0.0)
    assert line.place.code == "y.flip(1)"


FOUND = {
    "ranks": 2, "same": True, "apart": 2e-15, "rounding": 5e-11, "values": 66,
    "matched": 65, "sliced": 25, "partial": 5, "weights": "weights were split",
}  # fmt: skip
COUNT = "65 of 66 values matched (25 sliced, 5 partial sums)"
SAME = "scores 2e-15 apart, rounding can cause up to 5e-11; weights were split"


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (
            {"gradients": 30},
            f"one function over 2 ranks: 30 gradients equal; {COUNT}; {SAME}",
        ),
        (
            {},
            "one function over 2 ranks: gradients were not compared; "
            f"{COUNT}; {SAME}",
        ),
        (
            {"gradients": 30, "partial_gradients": ("a", "b")},
            "one function over 2 ranks: 30 gradients equal, 2 of them as the "
            "sum over the ranks, which the training code must compute; "
            f"{COUNT}; {SAME}",
        ),
        (
            {"same": False, "gradient": "that of a differs", "gradients": 30},
            "one function over 2 ranks, another gradient: that of a differs; "
            f"{COUNT}; {SAME}",
        ),
        (
            {"same": False, "apart": 2.0, "where": "a.py:1", "cause": "b"},
            "two functions over 2 ranks: they first differ at a.py:1: b; "
            f"scores 2 apart, {COUNT}; weights were split",
        ),
    ],
)
def test_a_finding_of_several_ranks_is_one_sentence(facts, sentence):
    found = ShardedDiff(**FOUND | facts)
    assert found.sentence == sentence
    assert found.to_json()["sentence"] == sentence


def test_code_that_shards_a_model_is_recognised(monkeypatch):
    package = "torch.distributed.fsdp"
    monkeypatch.setitem(sys.modules, package, sys)
    assert not in_fully_shard()
    inside = {"__name__": f"{package}.some", "asked": in_fully_shard}
    assert eval("(lambda: asked())()", inside)


def test_one_process_checks_without_a_group():
    weight = torch.nn.Parameter(torch.ones(2))
    assert local(weight) is weight
    assert on_any(True)
    assert not on_any(False)
    assert union([(1, "a"), (2, "b"), (1, "a")]) == [(1, "a"), (2, "b")]
    with together("nothing"):
        pass


def found_by(*names, processes=2):
    """Run sharded_models.py; return its findings by the name of the model."""
    process = start(
        "-m", "tests.zoo.sharded_models", *names, processes=processes
    )
    out, errors = process.communicate(timeout=600)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    found = {found.pop("model"): found for found in map(json.loads, lines)}
    assert process.returncode == 0, (sorted(found), errors[:2000])
    return found


def differences(case, found):
    """Yield each finding that differs from what the case requires."""
    diff = found.pop("diff", None)
    if case.left is not None:
        if diff["same"] != case.same:
            yield diff
        yield from (w for w in case.says if w not in diff["sentence"])
    status, message = found.pop(case.fails, ("failed", case.words))
    if status != "failed" or not re.search(case.words, message):
        yield case.fails, status, message
    yield from (r for r in found.items() if r[1][0] in ("failed", "error"))
    if case.proved and not found["causality"][1].startswith("proved"):
        yield found["causality"]


def test_a_multiple_of_a_gradient_is_told_from_another_gradient():
    want = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    for factor, words in (
        (1 + 1e-9, ""),
        (2.0, "is 2 times that"),
        (-0.5, "is -0.5 times that"),
        (0.0, "is 0 times that"),
    ):
        assert differs_how(factor * want, want, 1e-6, 1e-30) == words
    said = differs_how(want.flip(0), want, 1e-6, 1e-30)
    assert said == "is 3 apart (of up to 4) from that"


@pytest.mark.slow
def test_sharded_models_get_the_right_verdict():
    found = found_by()
    assert [*found] == [*sharded_models.CASES]
    wrong = {
        name: unlike
        for name, case in sharded_models.CASES.items()
        if (unlike := [*differences(case, found[name])])
    }
    assert not wrong


@pytest.mark.slow
def test_four_ranks_hold_a_quarter_each():
    names = "tensor parallel", "zigzag", "bias on every rank"
    found = found_by(*names, processes=4)
    assert [found[name]["diff"]["same"] for name in names] == [1, 1, 0]
    assert found["tensor parallel"]["diff"]["partial"] == 5
    sentence = found["bias on every rank"]["diff"]["sentence"]
    assert "contains it 4 times" in sentence


@pytest.mark.slow
def test_the_command_compares_on_all_ranks():
    process = start(
        "-m", "gpt_duet", "diff", "tests.zoo.sharded_models:single",
        "tests.zoo.sharded_models:NoReduction",
    )  # fmt: skip
    out, _ = process.communicate(timeout=120)
    said = "two functions over 2 ranks: they first differ at tests/"
    assert out.startswith(said)
    assert out.count("an all_reduce is missing") == 1
    assert process.returncode == 1


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_with_a_sentence():
    process = start(
        "-m", "gpt_duet", "check", "tests.zoo.sharded_models:killed",
        "--only", "shape", "--only", "determinism", "--budget", "40s",
    )  # fmt: skip
    began = time.monotonic()
    out, errors = process.communicate(timeout=120)
    assert time.monotonic() - began < 60
    assert out.count("check_shape") == 1
    assert "gpt-duet: rank 0" in errors
    assert "another rank ended" in errors
    assert "check_determinism" in errors
    assert process.returncode != 0
