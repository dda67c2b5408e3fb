"""What the checks try and name: ids, lengths, weights, places, dtypes."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from broken_models import BROKEN
from small_gpt import BLOCK, GPT, MLP, VOCAB, Attention, Block
from torch import nn

from gpt_duet.invariants import (
    Subject,
    check_model,
    parametrize_with_checks,
)
from gpt_duet.invariants.checks.causality import KINDS, _Causality
from gpt_duet.invariants.model import tokens
from gpt_duet.invariants.model.costs import Costs
from gpt_duet.invariants.model.elsewhere import elsewhere
from gpt_duet.invariants.model.tokens import lengths_to_try, splits_to_try
from gpt_duet.invariants.search.larger_weights import (
    amplified,
)
from gpt_duet.invariants.search.tolerance import is_real
from gpt_duet.invariants.search.trial import Mode

BUILDS = {model.name: model.build for model in BROKEN}


def only(build, check, **settings):
    """The result of one check."""
    return check_model(build, checks=[check], **settings).results[0]


# --- Ids, lengths and splits -------------------------------------------------


def test_ids_of_a_large_vocabulary_are_its_ends_powers_and_some():
    seen = set()

    class Noting(GPT):
        def forward(self, tokens):
            if tokens.numel() > 64:
                seen.update(tokens.unique().tolist())
            return super().forward(tokens)

    sizes = {"vocab_size": 50257, "block_size": 64, "dim": 2}
    assert only(lambda: Noting(**sizes), "vocabulary").status == "passed"
    assert {0, 1, 2, 3, 4, 7, 8, 1023, 1024, 32767, 32768, 50256} <= seen
    assert 500 < len(seen) < 560


def test_lengths_near_windows_are_tried():
    windowed = SimpleNamespace(window=24, chunk_size=10)
    assert lengths_to_try(windowed, 60) == [
        21, 23, 24, 25, 31, 32, 33, 49, 59, 60,
    ]  # fmt: skip


def test_splits_are_the_ends_neighbours_of_powers_and_some():
    def splits(time, *count):
        return splits_to_try(time, torch.Generator(), *count)

    assert splits(5, 4) == [1, 2, 3, 4]
    near = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99}
    assert near < {*splits(100)}
    assert {1, 99} < {*splits(100, 4)}
    assert [len(splits(100, n)) for n in (2, 4, 8, 24)] == [4, 4, 8, 24]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_from_a_split_on(kind):
    causality, splits = _Causality(Subject(GPT)), [1, 4, 7]
    causality.padding = [0, VOCAB - 1]
    base, changed = causality._rows(8, splits, kind)
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


def test_a_mask_shows_its_share_of_a_length():
    mode = Mode(visible=(0.3, 0.7))
    assert [mode.shown(time) for time in (9, 10)] == [range(2, 7), range(3, 7)]


def test_a_backward_pass_is_two_forwards_and_float64_doubles():
    costs = Costs(token=1.0, call=100.0)
    assert costs.of(10, 2, grad=True) == 230
    assert costs.of(10, grad=True, double=True) == 160
    scores = torch.ones(2, 5, 3, requires_grad=True) * 1
    costs.charge(scores)
    scores.sum().backward()
    assert (costs.calls, costs.backwards, costs.reckoned) == (1, 1, 330)


@pytest.mark.parametrize(
    ("heavy", "counts", "double"),
    [
        (
            False,
            {31: 30, 32: 31, 33: 32, 63: 4, 64: 8, 65: 8, 127: 8, 128: 24},
            128,
        ),
        (
            True,
            {31: 4, 32: 31, 33: 4, 63: 4, 64: 4, 65: 4, 127: 4, 128: 24},
            16,
        ),
    ],
)
def test_a_heavy_model_is_tried_at_fewer_splits_and_stays_as_it_is(
    heavy, counts, double, monkeypatch
):
    monkeypatch.setattr(
        "shared.invariants.model.subject.HEAVY", 0 if heavy else 1 << 40
    )
    seen = set()

    class Noting(GPT):
        def forward(self, tokens):
            seen.add((tokens.size(1), self.wte.weight.dtype))
            return super().forward(tokens)

    message = only(lambda: Noting(block_size=128), "causality").message
    told = [f"{n} of {time - 1} at {time}" for time, n in counts.items()]
    assert message == ", ".join(["every split of every length to 16", *told])
    assert {time for time, _ in seen} == {*range(1, 17), *counts}
    in_double = {time for time, dtype in seen if dtype == torch.float64}
    assert max(in_double) == double


@pytest.mark.parametrize("check", ["causality", "gradient_flow"])
def test_each_batch_of_many_is_compared_with_its_own(check, monkeypatch):
    monkeypatch.setattr(tokens, "TOKENS_AT_ONCE", 32)
    result = only(lambda: GPT(block_size=12), check)
    assert result.status == "passed"
    assert "rows depend" not in result.message


@pytest.mark.parametrize(
    ("dtype", "units", "real"),
    [
        (torch.float64, 2**19, False),
        (torch.float64, 2**21, True),
        (torch.float32, 2**7, False),
        (torch.float32, 2**9, True),
        (torch.bfloat16, 8, False),
        (torch.bfloat16, 32, True),
    ],
)
def test_without_weights_to_nudge_rounding_may_be_larger(dtype, units, real):
    unit = torch.finfo(dtype).eps
    difference = torch.full((3,), units * unit, dtype=dtype)
    assert is_real(len, lambda: difference + 0, unit) == real


# --- Larger weights ----------------------------------------------------------


def frozen_and_tied():
    model = GPT()
    model.head.weight = model.wte.weight
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    nn.init.zeros_(model.head.bias[:3].detach())
    return model


def test_larger_weights_leave_tables_biases_and_frozen_ones():
    subject = Subject(frozen_and_tied)
    before = dict(subject.precise().named_parameters())
    kept = {"wte.weight", "wpe.weight", "blocks.0.mlp.up.weight"}
    for name, p in amplified(subject).named_parameters():
        if name in kept or p.ndim == 1:  # a bias of 0 is drawn anew
            assert (before[name] == p)[before[name] != 0].all(), name
            assert p.all()
        else:
            factor = (p / before[name]).detach()
            assert factor.min() > 1.01, name
            torch.testing.assert_close(factor, factor[:1, :1].expand_as(p))


# --- What a failure names ----------------------------------------------------


class InPlace(Block):
    def forward(self, x, mask):
        x += self.mixer(self.norm_1(x), mask)
        x += self.mlp(self.norm_2(x))
        return x


def test_the_place_is_found_where_a_model_works_in_place():
    class Leaky(GPT):
        def embed(self, tokens):
            x = self.wte(tokens)
            x += self.position_vectors(tokens)
            return x

    leaky = BUILDS["no_mask"].keywords
    result = only(lambda: Leaky(block=InPlace, **leaky), "causality")
    assert "first seen at blocks.0.mixer (no_mask)" in result.message


def test_the_place_is_where_more_than_rounding_comes_in():
    class Rounding(Block):
        def forward(self, x, mask):
            x = super().forward(x, mask)
            total = 1e3 * x.sum(1, keepdim=True)
            return x + ((x + total) - total - x)

    class LeaksLater(GPT):
        def add_parts(self, dim):
            self.blocks[0] = Rounding(Attention, MLP, self.norm, dim)

    leaky = BUILDS["no_mask"].keywords
    message = only(lambda: LeaksLater(**leaky), "causality").message
    assert "first seen at blocks.1.mixer (no_mask)" in message


def test_draws_that_depend_on_the_tokens_are_told():
    class Draws(GPT):
        def embed(self, tokens):
            at = torch.arange(1, tokens.size(1) + 1)
            if self.training:
                torch.rand(int((tokens * at**2).sum()) % 997)
            return F.dropout(super().embed(tokens), 0.1, self.training)

    for check, words in (
        ("causality", "shape of random draws depends on the tokens"),
        ("batch_independence", "random draws depend on the tokens"),
    ):
        assert words in only(lambda: Draws(block_size=8), check).message


def test_one_position_that_float64_breaks_is_enough_to_go_without_it():
    class Before(Attention):
        def weights(self, scores, mask):
            """Those of strictly earlier positions, in single precision."""
            mask = mask.tril(-1)
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~mask, lowest).float()
            return (scores.softmax(-1) * mask).to(self.out.weight)

    subject = Subject(lambda: GPT(mixer=Before, layers=1))
    assert subject.precise().head.weight.dtype == torch.float32
    assert "in float64 the scores are NaN or infinite" in subject.notes[-1]


# --- Models that cannot be changed -------------------------------------------


def test_a_function_without_gradient_and_larger_weights_is_not_accused():
    table = torch.randn(VOCAB, VOCAB, dtype=torch.float64)

    def fading(tokens):
        """A memory of which a fifth is left a step later."""
        states, state = [], 0
        for x in (F.one_hot(tokens, VOCAB).double() @ table).unbind(1):
            states.append(state := 0.2 * state + x)
        return torch.stack(states, 1)

    report = check_model(fading, vocab_size=VOCAB, block_size=BLOCK + 8)
    assert report.ok, str(report)
    said = {r.name.removeprefix("check_"): r.message for r in report.results}
    assert "less tested, a function has no weights" in said["causality"]
    assert said["causal_gradients"] == (
        "no embedding of the tokens can be found"
    )
    assert "memory fades below rounding" in said["context_use"]
    assert said["gradients"] == "a function has no weights"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (BUILDS["times_the_root"](), "may have decided"),
        (
            lambda: GPT(dim=4, mixer=BUILDS["times_the_root"].mixer),
            "2 parts choose positions",  # narrow heads do no harm
        ),
    ],
)
def test_attention_that_is_trained_or_narrow_is_not_judged(build, words):
    result = only(build, "signal")
    assert result.status == "passed"
    assert words in result.message


class Back(GPT):
    def scores(self, x):
        return super().scores(x).cpu()


def test_ids_outside_are_given_on_the_cpu_alone():
    def function(tokens):
        return torch.zeros(*tokens.shape, VOCAB, device=tokens.device)

    sizes = {"vocab_size": VOCAB, "block_size": 8, "device": "meta"}
    with elsewhere():
        result = only(function, "vocabulary", **sizes)
        moved = only(lambda: GPT(layers=1), "vocabulary", device="meta")
        device = only(lambda: GPT(layers=1), "dtype", device="meta")
        left = only(lambda: Back(layers=1), "dtype", device="meta")
    assert result.message == "a function on meta cannot be moved"
    assert moved.status == "passed"
    assert device.message.endswith(", meta")
    assert left.message == "on meta the answer is on cpu"


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
