"""What the checks try and name: ids, lengths, weights, places, dtypes."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from broken_models import BROKEN
from small_gpt import BLOCK, GPT, MLP, VOCAB, Attention, Block
from torch import nn

from gpt_duet.invariants import Subject, check_model
from gpt_duet.invariants.checks.causality import KINDS, _Causality
from gpt_duet.invariants.checks.gradients import _some
from gpt_duet.invariants.checks.limits import _ids_to_try
from gpt_duet.invariants.model import tokens
from gpt_duet.invariants.model.costs import Costs
from gpt_duet.invariants.model.elsewhere import elsewhere
from gpt_duet.invariants.model.tokens import lengths_to_try, splits_to_try
from gpt_duet.invariants.parametrize import BoundCheck, Subjects
from gpt_duet.invariants.search.larger_weights import (
    _matrices,
    amplified,
    scale_alone,
)
from gpt_duet.invariants.search.tolerance import is_real, nudged
from gpt_duet.invariants.search.trial import Mode

BUILDS = {model.name: model.build for model in BROKEN}


def only(build, check, **settings):
    """The result of one check."""
    return check_model(build, checks=[check], **settings).results[0]


# --- Ids, lengths and splits -------------------------------------------------


def test_ids_of_a_large_vocabulary_are_its_ends_powers_and_some():
    subject = Subject(GPT)

    def ids(vocab, parameters=0):
        subject.vocab_size, subject.parameters = vocab, parameters
        return _ids_to_try(subject, torch.Generator()).tolist()

    for vocab, parameters, ends in (
        (50257, 0, {32767, 32768, 50256}),
        (1 << 15, 0, {16383, 16384, 32767}),
        (1 << 14, 1 << 23, {8191, 8192, 16383}),
    ):
        some = ids(vocab, parameters)
        assert {0, 1, 2, 3, 4, 7, 8, 1023, 1024} | ends <= {*some}
        assert 500 < len(some) < 560
        assert some == sorted({*some})
        assert max(some) < vocab
    assert ids(1 << 14, 1 << 22) == [*range(1 << 14)]
    assert ids(5, 1 << 23) == [*range(5)]


def test_lengths_near_edges_and_windows_are_tried():
    plain = object()
    windowed = SimpleNamespace(window=24, chunk_size=10)
    assert lengths_to_try(plain, 16) == []
    assert lengths_to_try(plain, 32) == [31, 32]
    assert lengths_to_try(plain, 64) == [31, 32, 33, 63, 64]
    assert lengths_to_try(plain, 200) == [
        31, 32, 33, 63, 64, 65, 127, 128, 129, 199, 200,
    ]  # fmt: skip
    assert lengths_to_try(windowed, 60) == [
        21, 23, 24, 25, 31, 32, 33, 49, 59, 60,
    ]  # fmt: skip


def test_splits_are_the_ends_neighbours_of_powers_and_some():
    def splits(time, *count):
        return splits_to_try(time, torch.Generator(), *count)

    assert splits(25) == [*range(1, 25)]
    assert splits(5, 4) == [1, 2, 3, 4]
    near = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99}
    assert near < {*splits(100)}
    assert len(splits(100)) == 24
    assert {1, 99} < {*splits(100, 4)}
    assert [len(splits(100, n)) for n in (2, 4, 8)] == [4, 4, 8]
    assert len(splits(5000)) == 38  # there are more neighbours than 24
    assert splits(100) == sorted({*splits(100)})


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


def test_a_mask_shows_its_share_of_a_length():
    mode = Mode(visible=(0.3, 0.7))
    assert [mode.shown(time) for time in (9, 10)] == [range(2, 7), range(3, 7)]
    assert Mode().shown(9) == range(9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_changed_from_a_split_on(kind):
    causality, splits = _Causality(Subject(GPT)), [1, 4, 7]
    causality.padding = [0, VOCAB - 1]
    base, changed = causality._rows(8, splits, kind)
    for split, a, b in zip(splits, base, changed, strict=True):
        differs = (a != b).tolist()
        assert not any(differs[:split])
        assert differs[split]
        if kind == "token":
            assert sum(differs) == 1
        elif kind == "padding":
            assert {*b[split:].tolist()} <= {0, VOCAB - 1}
        else:
            assert all(differs[split:])
        if kind == "left":
            assert len({*a[:4].tolist()}) == 1
        if kind == "suffix":
            assert a.equal(base[0])
            assert len({*a.tolist()}) == 8  # at even lengths no id twice
    odd, _ = causality._rows(VOCAB, splits, kind)
    assert len({*odd[0].tolist()}) < VOCAB


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


def test_every_weight_is_nudged_up_or_down_and_put_back():
    model, seen = nn.Linear(50, 50), []
    before = model.weight.detach().clone()
    for seed in (1, 2):
        with nudged(model, 2**-6, seed):
            seen.append((model.weight.detach() / before - 1) * 2**6)
    assert model.weight.equal(before)
    assert not seen[0].equal(seen[1])
    for share in seen:
        assert share.abs().max() < 1.001
        assert -0.9 > share.min()
        assert share.max() > 0.9
        assert share.mean().abs() < 0.1


def test_a_backward_pass_is_two_forwards_and_float64_doubles():
    costs = Costs(token=1.0, call=100.0)
    assert costs.of(10) == 110
    assert costs.of(10, 2, grad=True) == 230
    assert costs.of(10, grad=True, double=True) == 160
    costs.heavy = True  # its calls read the weights
    assert costs.of(10, double=True) == 220


# --- Larger weights ----------------------------------------------------------


def frozen_and_tied():
    model = GPT()
    model.head.weight = model.wte.weight
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    nn.init.zeros_(model.head.bias[:3].detach())
    return model


@pytest.mark.parametrize("by_outputs", [True, False])
def test_larger_weights_leave_tables_biases_and_frozen_ones(by_outputs):
    subject = Subject(frozen_and_tied)
    before = dict(subject.precise().named_parameters())
    if by_outputs:
        model = amplified(subject)
    else:
        for p in _matrices(model := subject.precise()):
            scale_alone(p, 1.5)
    kept = {"wte.weight", "wpe.weight", "blocks.0.mlp.up.weight"}
    sizes = {}
    for name, p in model.named_parameters():
        if name in kept or p.ndim == 1:  # a bias of 0 is drawn anew
            same = before[name] == p
            assert same[before[name] != 0].all(), name
            assert p.all() or not by_outputs
        else:
            factor = (p / before[name]).detach()
            assert factor.min() > 1.01, name
            torch.testing.assert_close(factor, factor[:1, :1].expand_as(p))
            sizes[name] = p.square().mean().mul(p.size(1)).sqrt().item()
    assert len(sizes) == 7
    alike = [*sizes.values()] == pytest.approx([1.5] * 7)
    assert alike != by_outputs  # one looks at outputs, one at numbers alone


# --- What a failure names ----------------------------------------------------


def test_a_number_that_is_none_is_named_by_its_place():
    class NoNumber(GPT):
        def forward(self, tokens):
            scores = super().forward(tokens)
            first = tokens[:, :1] == VOCAB - 1
            late = torch.arange(tokens.size(1)) > 4
            return scores.masked_fill((first & late).unsqueeze(2), math.nan)

    message = only(NoNumber, "finite").message
    assert message == (
        "13.75% of the scores are NaN or infinite at length 16 in eval mode, "
        "first at position 5 with only the last id"
    )


def test_a_long_list_of_names_is_cut_and_counted():
    assert _some(["a", "b"], 2) == "a, b"
    assert _some(["a", "b", "c"], 1) == "a and 2 more"


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


def test_attention_is_as_sure_in_the_fused_kernel():
    class Fused(Attention):
        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, mask)

    class OneAxisLess(Fused):
        def attend(self, q, k, v, mask):
            flat = (x.flatten(0, 1) for x in (q, k, v))
            return super().attend(*flat, mask).view_as(q)

    messages = {
        only(lambda kind=kind: GPT(mixer=kind), "signal").message
        for kind in (Attention, Fused, OneAxisLess)
    }
    assert messages == {
        "every part moves; first choices of attention get 0.10"
    }


def test_attention_that_is_trained_or_does_no_harm_is_told():
    times_the_root = BUILDS["times_the_root"]
    assert "may have decided" in only(times_the_root(), "signal").message
    narrow = only(lambda: GPT(dim=4, mixer=times_the_root.mixer), "signal")
    assert narrow.status == "passed"
    assert "multiplied by 2, where 1 / sqrt(4) = 0.5" in narrow.message


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
    check = BoundCheck(
        "check_causality", Subjects(vocab_size=VOCAB, block_size=BLOCK)
    )
    with pytest.raises(AssertionError, match="should have shape"):
        check(lambda: nn.Embedding(VOCAB, 30))


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1])
def test_seeds_beyond_numpys_are_taken(seed):
    assert only(GPT, "shape", seed=seed).status == "passed"
