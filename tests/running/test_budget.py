"""The cases that checks try, and those left out when time runs out.

Times are simulated, not measured.
"""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rows import slow_unless
from small_gpt import BLOCK, GPT, VOCAB
from torch import nn
from torch.overrides import TorchFunctionMode

from gpt_duet import GPTConfig
from gpt_duet.invariants import (
    CHECKS,
    SkipCheck,
    check_model,
    meet,
    parametrize_with_checks,
)
from gpt_duet.invariants.checks.dtype.other_device import elsewhere
from gpt_duet.invariants.leaks import trials
from gpt_duet.invariants.runner import FIRST_OF_HEAVY, Run
from gpt_duet.mingpt_style import build_model
from gpt_duet.proof import Proof
from gpt_duet.running import rounding, tokens
from gpt_duet.running.budget import (
    DEFAULT_SECONDS,
    HEAVY_SECONDS,
    Budget,
)
from gpt_duet.running.model.building import Builder
from gpt_duet.running.rounding import gaps, is_real
from gpt_duet.running.tokens import splits_to_try
from gpt_duet.running.variant import larger, own, precise
from gpt_duet.scoring import check_scorer
from gpt_duet.settings import OPTIONS

# Tests replace this function so that no model is proved, because
# check_causality tries fewer cases of a proved model.
NO_PROOF = "gpt_duet.invariants.checks.causality.prove_positions"


def only(build, check, **settings):
    """Return the result of a single check."""
    return check_model(build, checks=[check], **settings).results[0]


# --- Ids, lengths and splits -------------------------------------------------


def test_splits_are_ends_powers_and_random_ones():
    def splits(time, *count):
        return splits_to_try(time, torch.Generator(), *count)

    assert splits(5, 4) == [1, 2, 3, 4]
    near = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99}
    assert near < {*splits(100)}
    assert {1, 99} < {*splits(100, 4)}
    assert [len(splits(100, n)) for n in (2, 4, 8, 24)] == [4, 4, 8, 24]


def test_three_lengths_in_a_row_are_a_span():
    assert tokens.spans([9, 2, 3, 3, 5, 6, 7, 8]) == "2, 3, 5-9"


def test_texts_differ_from_the_split_on_and_may_be_padded():
    subject = meet(GPT)
    for trial in trials(subject, Proof(holds=False)):
        if trial.variant.case.how or trial.name:
            continue
        for split, a, b in zip(
            trial.splits, trial.base, trial.changed, strict=True
        ):
            assert (a != b).tolist().index(True) == split
        if trial.time == 8 and len(trial.splits) == 7:
            changes = (trial.base != trial.changed).sum(1).tolist()
            assert 1 in changes  # some text has only one changed token
            assert any(len({*a[:4].tolist()}) == 1 for a in trial.base)
            break


@pytest.mark.parametrize(("heavy", "doubled"), [(1 << 40, 128), (0, 0)])
def test_a_heavy_model_is_tried_and_unchanged(heavy, doubled, monkeypatch):
    monkeypatch.setattr("gpt_duet.running.subject.HEAVY", heavy)
    monkeypatch.setattr(NO_PROOF, lambda subject: Proof(holds=False))
    seen = set()

    class Noting(GPT):
        window = 40

        def forward(self, tokens):
            seen.add((tokens.size(1), self.wte.weight.dtype))
            return super().forward(tokens)

    build = partial(Noting, block_size=128)
    message = only(build, "causality", budget=math.inf).message
    assert message.startswith("not proved: ; tested: in ")
    assert ("in float64" in message) == (heavy > 0)
    assert re.search(r": [^;]*, (2[4-9]|3.) of 127 at 128", message)
    edges = {31, 32, 33, 39, 40, 41, 63, 64, 65, 81, 127, 128}
    lengths = {time for time, _ in seen}
    assert lengths >= {2, 3, 5, 8, 16, 128}
    assert heavy == 0 or lengths >= edges
    in_double = {time for time, dtype in seen if dtype == torch.float64}
    assert max(in_double, default=0) == doubled


@pytest.mark.parametrize("check", ["causality", "gradient_flow"])
def test_each_batch_is_compared_with_its_counterpart(check, monkeypatch):
    monkeypatch.setattr(tokens, "TOKENS_AT_ONCE", 32)
    result = only(lambda: GPT(block_size=12), check)
    assert result.status == "passed"
    assert "rows depend" not in result.message


@pytest.mark.parametrize(
    ("dtype", "units"),
    [(torch.float64, 2**20), (torch.float32, 2**8), (torch.bfloat16, 16)],
)
def test_without_weights_the_bound_on_rounding_is_larger(dtype, units):
    unit = torch.finfo(dtype).eps
    for factor, real in ((0.5, False), (2, True)):
        difference = torch.full((3,), factor * units * unit, dtype=dtype)
        assert is_real(len, (difference + 0).clone, unit) == real


# --- Larger weights ----------------------------------------------------------


def frozen_and_tied():
    model = GPT()
    model.head.weight = model.wte.weight
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    nn.init.zeros_(model.head.bias[:3].detach())
    return model


def test_larger_weights_exclude_tables_biases_and_frozen():
    subject = meet(frozen_and_tied)
    before = dict(precise(subject).model.named_parameters())
    kept = {"wte.weight", "wpe.weight", "blocks.0.mlp.up.weight"}
    for name, p in larger(subject).model.named_parameters():
        gain = before[name].ndim == 1 and (before[name] == 1).all()
        if gain:  # gains are drawn, because gains of ones could hide a fault
            assert 0.5 <= p.min() < 0.7 < 0.8 < p.max() <= 1, name
        elif name in kept or p.ndim == 1:  # in a bias, only zeros are redrawn
            assert (before[name] == p)[before[name] != 0].all(), name
            assert p.all()
        else:
            factor = (p / before[name]).detach()
            assert factor.min() > 1.01, name
            torch.testing.assert_close(factor, factor[:1, :1].expand_as(p))


def test_invalid_ids_are_given_only_on_the_cpu():
    def function(tokens):
        return torch.zeros(*tokens.shape, VOCAB, device=tokens.device)

    class Back(GPT):
        def scores(self, x):
            return super().scores(x).cpu()

    sizes = {"vocab_size": VOCAB, "block_size": 8, "device": "meta"}
    with elsewhere():
        result = only(function, "vocabulary", **sizes)
        moved = only(lambda: GPT(layers=1), "vocabulary", device="meta")
        device = only(lambda: GPT(layers=1), "dtype", device="meta")
        left = only(lambda: Back(layers=1), "dtype", device="meta")
    assert left.message == "on meta the answer is on cpu"
    assert result.message == "a function on meta cannot be moved"
    assert moved.status == "passed"
    assert device.message.endswith(", meta")


def test_unreadable_scores_fail_in_pytest():
    test = parametrize_with_checks(
        [lambda: nn.Embedding(VOCAB, 30)],
        checks=["causality"],
        vocab_size=VOCAB,
        block_size=BLOCK,
    )
    model, check = test.args[1][0].values
    with pytest.raises(AssertionError, match="should have shape"):
        check(model)


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1])
def test_seeds_may_exceed_those_of_numpy(seed):
    assert only(GPT, "shape", seed=seed).status == "passed"


# --- When time is short ------------------------------------------------------

LONG = GPTConfig(vocab_size=31, block_size=128, n_layer=2, n_head=2, n_embd=8)


class Leaky(GPT):
    """After the first block, some positions get a bit of a later token."""

    layers = 2

    def __init__(self, at=1, ahead=1, least=2):
        super().__init__(LONG.vocab_size, LONG.block_size)
        self.at, self.ahead, self.least = at, ahead, least

    def body(self, x, mask):
        odd = torch.arange(x.size(1), device=x.device).view(-1, 1) % 2
        for i, block in enumerate(self.blocks):
            x = block(x, mask)
            if i == self.at and x.size(1) >= self.least:
                x = x + 1e-3 * odd * x.roll(-self.ahead, 1)
        return x


@pytest.fixture
def heavy(monkeypatch):
    monkeypatch.setattr("gpt_duet.running.subject.HEAVY", 0)


@pytest.mark.usefixtures("heavy")
@pytest.mark.parametrize(
    "fault",
    [{"at": 0}, {"at": 1}, {"least": 128}, {"ahead": 100, "least": 128}],
    ids=["first layer", "last layer", "full length only", "far"],
)
def test_a_leak_is_found_in_the_default_time(fault, clock):
    clock(2.0)
    report = check_model(partial(Leaky, **fault))
    assert "check_causality" in report.failed, str(report)
    assert report.plan.startswith("at most 130 s for")


@pytest.mark.slow
@pytest.mark.unhooked  # not with --check-shapes, which draws random numbers
@pytest.mark.usefixtures("heavy")
def test_the_report_states_what_was_tried(clock):
    clock(2.0)
    build = partial(build_model, LONG)
    told = []
    report = check_model(build, on_progress=lambda r: told.append(r.interim))
    assert report.ok, str(report)
    assert [t for t in told if t and "causality: so far in " in t]
    found = {result.name: result.message for result in report.results}
    assert list(found)[:2] == ["check_shape", "check_causality"]
    causality = found["check_causality"]
    assert re.match(r"proved at lengths [\d, andto]+128, in eval", causality)
    assert "; tested: in eval mode" in causality
    assert any("not tried: no time for " in text for text in found.values())
    assert "of them in part" in report.verdict
    again = check_model(build)
    assert [r.message for r in again.results] == list(found.values())


def test_without_time_no_check_copies_the_model(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr("gpt_duet.running.budget.now", lambda: seconds[0])
    run = Run(GPT, budget=60.0)
    seconds[0] = 61.0
    copied = []
    build = Builder.build
    monkeypatch.setattr(
        Builder,
        "build",
        lambda self, *a, **k: copied.append(1) or build(self, *a, **k),
    )
    statuses = {run.check(name)[0].status for name in [*run.names]}
    assert statuses == {"skipped"}
    assert not copied


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize(("free", "dtypes"), [(1e12, 2), (1e3, 1)])
def test_scarce_memory_keeps_a_heavy_model_in_its_own_dtype(
    free, dtypes, monkeypatch
):
    monkeypatch.setattr("gpt_duet.running.subject.HEAVY", 0)
    monkeypatch.setattr("gpt_duet.running.variant.free_bytes", lambda _: free)
    monkeypatch.setattr("gc.collect", lambda: 0)  # takes seconds in all
    seen = set()

    class Noting(GPT):
        def forward(self, tokens):
            seen.add(self.wte.weight.dtype)
            return super().forward(tokens)

    # check_dtype casts a copy, and the others take seconds
    left_out = {"check_dtype", "check_entropy_bound", "check_causality"}
    left_out.add("check_batch_independence")
    names = [name for name in CHECKS if name not in left_out]
    report = check_model(partial(Noting, block_size=16), checks=names)
    assert report.ok, str(report)
    assert len(seen) == dtypes
    told = [n for n in report.notes if "float64 copies need" in n]
    assert len(told) == (dtypes == 1)
    assert check_model(partial(Leaky, at=0), checks=["causality"]).failed


@pytest.mark.unhooked  # not with --check-shapes, which draws random numbers
@pytest.mark.parametrize("name", CHECKS)
def test_without_time_nothing_passes(name, clock):
    clock(2.0)
    report = check_model(
        partial(build_model, LONG), checks=[name], budget=1e-9
    )
    (result,) = report.results
    if result.forwards > 1:  # after the first call, which runs in any case
        assert "no time" in result.message


def test_time_cuts_off_the_end_of_a_part_and_names_it(clock):
    subject = replace(meet(GPT), budget=Budget(10.0))
    clock(1.0)
    budget, variant = subject.budget, own(subject)
    ids = subject.draw(1, BLOCK)
    budget.start("check_x", 0.5)  # half of ten seconds: five
    calls = []
    for name in ("first", "second", "third"):
        with budget.part(name, BLOCK, 1 / 2):
            for _ in range(4):
                variant.scores(ids)
                calls.append(name)
    assert calls == ["first"] * 3 + ["second", "third"]
    at = f"at {BLOCK}"
    assert budget.not_tried == (
        f"no time for all of these: first, second, third {at}"
    )
    with budget.overtime():
        variant.scores(ids)
    with pytest.raises(SkipCheck, match="no time"):
        variant.scores(ids)


@pytest.mark.usefixtures("heavy")
@pytest.mark.parametrize(
    ("closure", "counts"), [(False, range(1, 4)), (True, range(9, 99))]
)
def test_a_model_is_built_once_if_it_can_be_copied(closure, counts):
    built = []

    def build():
        model = build_model(LONG)
        if closure:
            head, x = model.lm_head, torch.zeros(LONG.n_embd)
            model.register_forward_hook(lambda m, a, o: o and (*o, head(x)))
        built.append(model)
        return model

    checks = ["causality", "prefix_consistency", "context_use"]
    report = check_model(build, vocab_size=31, checks=checks, outputs="logits")
    assert report.ok, str(report)
    assert len(built) in counts


def test_gaps_are_the_same_in_blocks(monkeypatch):
    a, b = torch.randn(2, 3, 50, 7)
    a[0, 3, 2], b[1, 4, 5], a[2, 6], b[2, 6] = math.nan, math.inf, 1, 1
    whole = gaps(a, b)
    monkeypatch.setattr(rounding, "SCORES_AT_ONCE", 60)
    assert torch.equal(gaps(a, b), whole)
    assert min(whole[0, 3], whole[1, 4]) > 1e38
    assert whole[2, 6] == 0


class Fetched(TorchFunctionMode):
    """A torch mode that counts the values fetched from the device."""

    HOW = (
        "cpu",
        "item",
        "numpy",
        "tolist",
        "__float__",
        "__int__",
        "__bool__",
    )

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        fetched = name == "to" and "cpu" in map(str, args[1:])
        if fetched or name in self.HOW:
            # the state of a random generator is always on the CPU
            generators = args[0].dtype == torch.uint8
            self.sizes += [] if generators else [args[0].numel()]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name",
    slow_unless("causality".__ne__, ["prefix_consistency", "causality"]),
)
def test_no_table_of_scores_leaves_the_device(name):
    config = replace(LONG, vocab_size=61)
    with Fetched() as fetched:
        report = check_model(partial(build_model, config), checks=[name])
    assert report.ok
    # at most 33 rows of 128 values, one per token; a table of scores is larger
    assert max(fetched.sizes) <= 33 * 128 < 128 * config.vocab_size
    assert len(fetched.sizes) < 11 * report.results[0].forwards


@pytest.mark.slow
def test_every_check_runs_on_another_device(style):
    sizes = GPTConfig(17, 32, n_layer=1, n_head=2, n_embd=8)
    with elsewhere():
        report = check_model(
            partial(style.build_model, sizes), device="meta", budget=40
        )
        leaking = check_model(
            Leaky, device="meta", budget=40, checks=["causality"]
        )
    assert report.ok, str(report)
    assert leaking.failed


@pytest.mark.usefixtures("heavy")
def test_checks_of_a_few_calls_come_before_costly_ones_of_a_heavy_model():
    names = Run(GPT).names
    assert names[:2] == ["check_shape", "check_causality"]
    assert sorted(names) == sorted(Run(GPT, budget=math.inf).names)
    cheap = max(map(names.index, FIRST_OF_HEAVY))
    costly = ("check_determinism", "check_loss", "check_gradients")
    assert cheap < min(map(names.index, costly))


def test_a_check_leaves_time_for_costly_ones():
    shares = []

    class Asked(Budget):
        def start(self, name, share):
            if name:
                shares.append(share)
            super().start(name, share)

    for after in ("check_length_limit", "check_gradients"):
        run = Run(GPT, checks=["check_finite", after], budget=1e9)
        run.subject = replace(run.subject, budget=Asked(1e9))
        run.check("check_finite")
    brief, costly = shares
    assert costly < brief < 1


def test_help_docstrings_and_guide_name_the_default_seconds():
    option = next(o for o in OPTIONS if o.name == "budget")
    root = Path(__file__).parents[2]
    guide = (root / "docs" / "explanation" / "time.md").read_text()
    for words in (option.shell.help, check_model.__doc__, guide):
        assert f"{DEFAULT_SECONDS:.0f}" in words
        assert f"{HEAVY_SECONDS:.0f}" in words
    assert f"{DEFAULT_SECONDS:.0f}" in check_scorer.__doc__
