"""What the checks try, and what of it where time is short.

Times are set, not measured.
"""

import math
import re
import time
from functools import partial

import pytest
import torch
from small_gpt import BLOCK, GPT, VOCAB, CacheWithMask, Padded, TrainableGPT
from torch import nn
from torch.overrides import TorchFunctionMode

from gpt_duet import GPTConfig
from gpt_duet.invariants import (
    CHECKS,
    check_model,
    meet,
    parametrize_with_checks,
    rounding,
    tokens,
)
from gpt_duet.invariants.budget import Budget, measured
from gpt_duet.invariants.copies import precise
from gpt_duet.invariants.costs import Costs, Needs
from gpt_duet.invariants.dependence import Proof
from gpt_duet.invariants.larger_weights import larger
from gpt_duet.invariants.other_device import elsewhere
from gpt_duet.invariants.rounding import gaps, is_real
from gpt_duet.invariants.runner import measure
from gpt_duet.invariants.tokens import splits_to_try
from gpt_duet.invariants.trials import KINDS, Texts
from mingpt_style import build_model

# check_causality tests a model less once it is proved
NO_PROOF = "shared.invariants.checks.causality.prove_positions"
SHARES = [name for name, check in CHECKS.items() if check.needs.share]


def only(build, check, **settings):
    """The result of one check."""
    return check_model(build, checks=[check], **settings).results[0]


# --- Ids, lengths and splits -------------------------------------------------


def test_splits_are_the_ends_neighbours_of_powers_and_some():
    def splits(time, *count):
        return splits_to_try(time, torch.Generator(), *count)

    assert splits(5, 4) == [1, 2, 3, 4]
    near = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99}
    assert near < {*splits(100)}
    assert {1, 99} < {*splits(100, 4)}
    assert [len(splits(100, n)) for n in (2, 4, 8, 24)] == [4, 4, 8, 24]


def test_three_lengths_in_a_row_are_a_span():
    assert tokens.spans([9, 2, 3, 3, 5, 6, 7, 8]) == "2, 3, 5-9"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_from_a_split_on(kind):
    subject, splits = meet(GPT), [1, 4, 7]
    texts = Texts(subject, subject.generator())
    texts.padding = [0, VOCAB - 1]
    (trial,) = texts.trials(8, (kind,), splits)
    base, changed = trial.base, trial.changed
    for split, a, b in zip(splits, base, changed, strict=True):
        differs = (a != b).tolist()
        assert differs.index(True) == split
        if kind == "padding":
            assert {*b[split:].tolist()} <= {0, VOCAB - 1}
        else:
            assert sum(differs) == (1 if kind == "token" else 8 - split)
        if kind == "left":
            assert len({*a[:4].tolist()}) == 1
    if kind == "suffix":  # at even lengths no id twice
        assert len({*base[0].tolist()}) == 8


@pytest.mark.parametrize("score", [0.0, math.nan])
def test_a_copy_a_call_and_a_token_are_timed(score, monkeypatch):
    times = [5.0]
    monkeypatch.setattr(
        "shared.invariants.budget.perf_counter", lambda: times[-1]
    )

    def build():
        times.append(times[-1] + 3)

    def call(model, length):
        slow = 20 if len(times) == 2 else 0  # the first call
        times.append(times[-1] + slow + length / 2)
        return torch.full((2,), score)

    costs, finite = measured(build, call, (2, 8), True)
    assert costs == Costs(call=1.0, token=3 / 8, build=3.0, heavy=True)
    assert finite == math.isfinite(score)


def test_a_backward_pass_is_two_forwards_and_float64_doubles():
    costs = Costs(token=1.0, call=100.0)
    assert costs.of(10, 2, grad=True) == 230
    assert costs.of(10, grad=True, double=True) == 160
    budget = Budget()
    budget.costs = costs
    scores = torch.ones(2, 5, 3, requires_grad=True) * 1
    budget.charge(scores)
    scores.sum().backward()
    assert (budget.calls, budget.backwards) == (1, 1)
    assert budget.spent == pytest.approx(330, abs=1)


@pytest.mark.parametrize(("heavy", "doubled"), [(1 << 40, 128), (0, 0)])
def test_a_heavy_model_is_tried_at_the_same_splits_and_stays_as_it_is(
    heavy, doubled, monkeypatch
):
    monkeypatch.setattr("shared.invariants.subject.HEAVY", heavy)
    monkeypatch.setattr(NO_PROOF, lambda subject, budget: Proof(proved=False))
    seen = set()

    class Noting(GPT):
        window = 40

        def forward(self, tokens):
            seen.add((tokens.size(1), self.wte.weight.dtype))
            return super().forward(tokens)

    build = partial(Noting, block_size=128)
    message = only(build, "causality", budget=math.inf).message
    lengths = [31, 32, 33, 39, 40, 41, 63, 64, 65, 81, 127, 128]
    counts = [4, 4, 4, 4, 8, 8, 8, 8]
    expected = [
        f"{count} of {time - 1} at {time}"
        for count, time in zip(counts, lengths[3:-1], strict=True)
    ]
    start = "not proved: ; tested: in eval mode: all splits at 2-16, 31-33, "
    assert message.startswith(start + ", ".join(expected))
    assert re.search(
        r"in eval mode: [^;]*, (2[4-9]|3.) of 127 at 128;", message
    )
    assert {time for time, _ in seen} >= {*range(1, 17), *lengths}
    in_double = {time for time, dtype in seen if dtype == torch.float64}
    assert max(in_double, default=0) == doubled


@pytest.mark.unhooked  # the checker of shapes draws random numbers itself
@pytest.mark.parametrize(
    ("kind", "calls", "ids"),
    [
        (TrainableGPT, 916, 141687),
        (Padded, 982, 151731),
        (CacheWithMask, 1195, 153755),
    ],
)
def test_how_much_is_tried(kind, calls, ids, monkeypatch):
    """Other numbers are another power to find faults, and other costs."""
    seen, scores = [], GPT.scores

    def counted(self, x):
        seen.append(len(x) * x.size(1))
        return scores(self, x)

    monkeypatch.setattr(GPT, "scores", counted)
    monkeypatch.setattr(NO_PROOF, lambda subject, budget: Proof(proved=False))
    assert check_model(partial(kind, block_size=128), budget=math.inf).ok
    # another processor's rounding may cost a call more
    assert (len(seen), sum(seen)) == pytest.approx((calls, ids), rel=0.01)


@pytest.mark.parametrize("check", ["causality", "gradient_flow"])
def test_each_batch_of_many_is_compared_with_its_own(check, monkeypatch):
    monkeypatch.setattr(tokens, "TOKENS_AT_ONCE", 32)
    result = only(lambda: GPT(block_size=12), check)
    assert result.status == "passed"
    assert "rows depend" not in result.message


@pytest.mark.parametrize(
    ("dtype", "units"),
    [(torch.float64, 2**20), (torch.float32, 2**8), (torch.bfloat16, 16)],
)
def test_without_weights_to_nudge_rounding_may_be_larger(dtype, units):
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


def test_larger_weights_leave_tables_biases_and_frozen_ones():
    given = meet(frozen_and_tied), Budget()
    before = dict(precise(*given).model.named_parameters())
    kept = {"wte.weight", "wpe.weight", "blocks.0.mlp.up.weight"}
    for name, p in larger(*given).model.named_parameters():
        if name in kept or p.ndim == 1:  # a bias of 0 is drawn anew
            assert (before[name] == p)[before[name] != 0].all(), name
            assert p.all()
        else:
            factor = (p / before[name]).detach()
            assert factor.min() > 1.01, name
            torch.testing.assert_close(factor, factor[:1, :1].expand_as(p))


def test_ids_outside_are_given_on_the_cpu_alone():
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


def test_in_pytest_scores_that_cannot_be_read_are_a_failure():
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
def test_seeds_beyond_numpys_are_taken(seed):
    assert only(GPT, "shape", seed=seed).status == "passed"


# --- Where time is short -----------------------------------------------------

NEEDS = Needs(calls=0, rows=100, share=1)
LONG = GPTConfig(vocab_size=31, block_size=256, n_layer=3, n_head=2, n_embd=16)


class Leaky(GPT):
    """After one layer some positions have a little of what is ahead."""

    layers = 3

    def __init__(self, at=2, ahead=1, least=2):
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
def slow(monkeypatch):
    """Reckon with calls of a large model, 2 s at the longest, and no clock."""

    def take(seconds):
        def measure(subject):
            token = 0.95 * seconds / subject.block_size
            return Costs(0.05 * seconds, token, 0.1, heavy=True), True

        monkeypatch.setattr("shared.invariants.runner.measure", measure)

    take(2.0)
    monkeypatch.setattr("shared.invariants.budget.perf_counter", float)
    return take


@pytest.fixture
def heavy(monkeypatch):
    monkeypatch.setattr("shared.invariants.subject.HEAVY", 0)


@pytest.mark.usefixtures("slow", "heavy")
@pytest.mark.parametrize(
    "fault",
    [{"at": 0}, {"at": 2}, {"least": 256}, {"ahead": 200, "least": 256}],
    ids=["first layer", "last layer", "full length only", "far"],
)
def test_a_leak_is_found_in_the_default_time(fault):
    report = check_model(partial(Leaky, **fault))
    assert "check_causality" in report.failed, str(report)
    assert report.plan.startswith("one forward of 256 tokens takes 2 s: about")


@pytest.mark.unhooked  # the shape checks draw random numbers
def test_the_report_says_what_was_tried(slow, heavy, monkeypatch):
    build = partial(build_model, LONG)
    told = []
    report = check_model(build, on_progress=lambda r: told.append(r.interim))
    assert report.ok, str(report)
    assert [t for t in told if t and "causality: so far in eval mode" in t]
    found = {result.name: result.message for result in report.results}
    assert list(found)[:2] == ["check_shape", "check_causality"]
    causality = found["check_causality"]
    assert re.match(r"proved at lengths [\d, andto]+256, in eval", causality)
    assert "; tested: in eval mode" in causality
    assert "not tried: no time for " in found["check_causal_gradients"]
    assert "of them in part" in report.verdict
    again = check_model(build)
    assert [r.message for r in again.results] == list(found.values())
    slow(0.001)
    assert not check_model(build, checks=["shape"]).plan
    # a heavy model has the time of 500 forwards
    assert "about 0 s" in check_model(build).plan


@pytest.mark.unhooked  # the shape checks draw random numbers
@pytest.mark.parametrize("name", SHARES)
def test_without_time_nothing_passes(name, slow):
    report = check_model(partial(build_model, LONG), checks=[name], budget=0.1)
    assert [r.status for r in report.results] == ["skipped"], str(report)
    assert "no time for" in report.results[0].message
    slow(1e-6)
    report = check_model(partial(build_model, LONG), checks=["purity"])
    assert report.ok


def test_swaps_far_apart_are_left_out_where_they_take_too_long():
    budget = Budget()
    budget.plan(Costs(token=1.0), {"check_order_sensitivity": NEEDS}, 256, 4e3)
    assert not budget.start("check_order_sensitivity")
    CHECKS["check_order_sensitivity"](meet(partial(build_model, LONG)), budget)
    assert budget.not_tried == "no time for rounds in eval mode, swaps"


def test_what_calls_take_beyond_their_reckoning_counts(monkeypatch):
    now, budget = "shared.invariants.budget.perf_counter", Budget()
    monkeypatch.setattr(now, lambda: 100.0)
    budget.plan(Costs(token=1.0), {"check_x": NEEDS}, 100, 50.0)
    budget.start("check_x")
    assert budget.left == 50
    monkeypatch.setattr(now, lambda: 107.0)
    assert budget.left == 43
    budget.charge(torch.zeros(3, 3, 1))
    assert budget.left == 41


@pytest.mark.usefixtures("heavy")
@pytest.mark.parametrize(
    ("closure", "counts"), [(False, range(1, 4)), (True, range(9, 99))]
)
def test_copies_are_made_of_one_model_where_it_can_be_copied(closure, counts):
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
    monkeypatch.setattr(rounding, "BLOCK", 60)
    assert torch.equal(gaps(a, b), whole)
    assert min(whole[0, 3], whole[1, 4]) > 1e38
    assert whole[2, 6] == 0


class Fetched(TorchFunctionMode):
    """Notes how many numbers are fetched from where they were computed."""

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
        if name in self.HOW or (name == "to" and "cpu" in map(str, args[1:])):
            self.sizes.append(args[0].numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["causality", "prefix_consistency"])
def test_no_table_of_scores_leaves_the_device(name):
    with Fetched() as fetched:
        report = check_model(partial(build_model, LONG), checks=[name])
    assert report.ok
    assert max(fetched.sizes) <= 24 * LONG.block_size  # gaps, not scores
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


def test_a_forward_is_measured_on_the_clock():
    class Sleepy(nn.Embedding):
        vocab_size, block_size = 5, 64

        def forward(self, tokens):
            time.sleep(0.01 + 0.001 * tokens.size(1))
            return super().forward(tokens)

    costs, finite = measure(meet(lambda: Sleepy(5, 5)))
    assert finite
    assert 0.01 < costs.call < 0.05
    assert 0.07 < costs.of(64) < 0.3
