"""What the checks try and name: ids, lengths, weights, places, dtypes."""

import pytest
import torch
from small_gpt import BLOCK, GPT, VOCAB
from torch import nn

from gpt_duet.invariants import Subject, check_model, parametrize_with_checks
from gpt_duet.invariants.checks.causality import KINDS, _Causality
from gpt_duet.invariants.model import tokens
from gpt_duet.invariants.model.costs import Costs
from gpt_duet.invariants.model.elsewhere import elsewhere
from gpt_duet.invariants.model.tokens import splits_to_try
from gpt_duet.invariants.search.larger_weights import amplified
from gpt_duet.invariants.search.tolerance import is_real


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
        (1 << 40, [30, 31, 32, 4, 4, 4, 4, 8, 8, 8, 8, 24], 128),
        (0, [4, 31, 4, 4, 4, 4, 4, 4, 4, 4, 4, 24], 16),
    ],
)
def test_a_heavy_model_is_tried_at_fewer_splits_and_stays_as_it_is(
    heavy, counts, double, monkeypatch
):
    monkeypatch.setattr("shared.invariants.model.subject.HEAVY", heavy)
    seen = set()

    class Noting(GPT):
        window = 40

        def forward(self, tokens):
            seen.add((tokens.size(1), self.wte.weight.dtype))
            return super().forward(tokens)

    message = only(lambda: Noting(block_size=128), "causality").message
    lengths = [31, 32, 33, 39, 40, 41, 63, 64, 65, 81, 127, 128]
    told = [
        f"{count} of {time - 1} at {time}"
        for count, time in zip(counts, lengths, strict=True)
    ]
    assert message == ", ".join(["every split of every length to 16", *told])
    assert {time for time, _ in seen} == {*range(1, 17), *lengths}
    in_double = {time for time, dtype in seen if dtype == torch.float64}
    assert max(in_double) == double


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
