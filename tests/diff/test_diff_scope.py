"""Models are compared on more texts, in both modes, with other weights."""

import copy
import json
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hidden_pairs import FORMS, PAIRS, TWINS, VOCAB, Original
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from gpt_duet import (
    annotated,
    assert_same_values,
    diff_by_value,
    mingpt_style,
    record_values,
)
from gpt_duet.checkpoint.other_layouts import with_prefix
from gpt_duet.comparison.values import widening
from gpt_duet.comparison.values.dropping import AtTheMean
from gpt_duet.config import GPTConfig
from gpt_duet.running import subject
from gpt_duet.running.operations import below_autograd, operations_through

pytestmark = pytest.mark.unhooked


QUICK = {
    *("a window of 64", "a rotary that changes past 32 tokens"),
    *("a padding id that is zeroed", "rows that mix"),
    *("a clip of queries", "a clamp of scores", "a missing qkv bias"),
    *("two norms swapped", "a mask of -1e4"),
    *("dropout that is missing in train mode", "dropout after the sum"),
}
NAMED = "other names of weights, a kernel"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in PAIRS
    ],
)
def test_a_difference_that_one_text_hides_is_found(name):
    right, word = PAIRS[name]
    assert diff_by_value(Original(), right(), quick=True).same
    found = diff_by_value(Original(), right())
    assert not found.same, found.sentence
    place = found.parted and found.parted.right.code
    assert word in f"{found.sentence} {place}", found.sentence


@pytest.mark.parametrize("name", TWINS)
def test_a_sound_port_is_one_function_in_all_runs(name):
    right = TWINS[name]()
    for sides in ((Original(), right), (right, Original())):
        found = diff_by_value(*sides)
        assert found.same, found.sentence
        assert "2 rows, padded" in found.sentence


def test_the_sentence_and_json_say_what_was_compared():
    found = diff_by_value(Original(), TWINS["dropout by a mask"]())
    assert re.search(
        r"; compared at 16 tokens; scores at \d+ lengths to 130, 2 rows, "
        r"padded, \d+ special ids; with redrawn zeros and ones and larger "
        r"weights; train mode$",
        found.sentence,
    ), found.sentence
    data = json.loads(json.dumps(found.to_json()))
    compared = data["compared"]
    assert data["trial"] is None
    assert max(compared["lengths"]) == 130
    assert compared["batch"] == 2
    assert {0, 96} <= {*compared["ids"]}
    assert compared["sizes"] == [1.5, 30.0, 300.0]
    assert compared["trained"] is True
    assert compared["dropped"] is None


def test_quick_compares_one_text_and_says_so():
    found = diff_by_value(Original(), Original(), quick=True)
    assert found.sentence.endswith("; compared at 16 tokens only")
    assert not found.to_json()["compared"]["lengths"]


def test_assert_same_values_compares_as_much():
    right, _ = PAIRS["a window of 64"]
    assert_same_values(Original(), right(), quick=True)
    said = r"^at 65 tokens: they first differ at "
    with pytest.raises(AssertionError, match=said):
        assert_same_values(Original(), right())


def test_a_finding_in_train_mode_names_lines_of_both_sides():
    right, _ = PAIRS["dropout of another probability"]
    found = diff_by_value(Original(), right())
    assert re.match(
        r"one function in eval mode, another in train mode: only Original "
        r"drops 0\.1 of [\d,]+ numbers at \S*hidden_pairs\.py:\d+ `F\.dropout",
        found.sentence,
    ), found.sentence
    dropped = found.to_json()["compared"]["dropped"]
    assert dropped["fault"] is True
    assert dropped["right"][0]["share"] == 0.2


def test_a_port_without_dropout_is_noted_but_passes():
    found = diff_by_value(Original(), TWINS["a port without dropout"]())
    assert found.same
    assert found.sentence.endswith("; train mode but for dropout")
    (note,) = found.scope.notes
    assert "Written is written without dropout" in note
    assert note in str(found)


def test_vectors_without_a_counterpart_are_noted():
    """The vectors differ in name and in value, so they are not paired."""
    left, right = (TWINS[name]() for name in (NAMED, "a port without dropout"))
    left.wq.bias.data[0] = 1e-30  # so that the bias is not all zeros
    found = diff_by_value(left, right)
    assert "w.qkv_bias" in found.scope.constant, found.scope
    assert any("a missing one would not show" in n for n in found.scope.notes)
    assert found.same, found.sentence


def test_a_recording_has_one_text(tmp_path):
    path = tmp_path / "right.safetensors"
    record_values(Original(), None, path)
    found = diff_by_value(Original(), path)
    assert found.sentence.endswith(
        "; compared at 16 tokens: one text, with the weights as they are"
    )


def test_models_given_are_left_as_they_were():
    left, right = Original().eval(), Original().train()
    before = [copy.deepcopy(m.state_dict()) for m in (left, right)]
    assert diff_by_value(left, right).same
    for model, state in zip((left, right), before, strict=True):
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert (left.training, right.training) == (False, True)


def test_functions_are_compared_on_other_texts():
    """One function uses NumPy; the others are plain functions in torch."""
    table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
    known = torch.from_numpy(table)

    def numpy_window(ids):
        ids = np.asarray(ids)
        return table[ids] + float(ids.shape[1] > 64) * table[0]

    def plain(ids):
        return known[ids]

    def mixed(ids):
        return known[ids] + known[ids].mean(0) - known[ids][0]

    for right, word in ((numpy_window, "tokens"), (mixed, "on 2 rows")):
        found = diff_by_value(plain, right, vocab_size=VOCAB)
        assert not found.same, found.sentence
        assert word in found.sentence, found.sentence
    found = diff_by_value(plain, plain, vocab_size=VOCAB)
    assert found.same
    assert "train mode" not in found.sentence


class Masked(Original):
    """A model that takes a padding mask, but ignores it unless `obeys`."""

    def __init__(self, obeys=True):
        super().__init__()
        self.obeys = obeys

    def forward(self, ids, attention_mask=None):
        self.seen = attention_mask if self.obeys else None
        return super().forward(ids)

    def mask(self, scores):
        scores = super().mask(scores)
        if self.seen is None:
            return scores
        return scores.masked_fill(self.seen[:, None, None] == 0, -1e9)


def test_a_padding_mask_that_is_ignored_is_found():
    found = diff_by_value(Masked(), Masked())
    assert found.same, found.sentence
    assert "2 rows, padded, a padding mask" in found.sentence
    found = diff_by_value(Masked(), Masked(obeys=False))
    assert not found.same
    assert re.match(
        r"on 2 rows with a left-padded attention mask: two functions: scores "
        r"\S+ apart, rounding explains",
        found.sentence,
    ), found.sentence


DROPS = {
    "module": nn.Dropout(0.25),
    "of columns": nn.Dropout1d(0.25),
    "in place": lambda x: F.dropout(x.clone(), 0.25, True, inplace=True),
    "bernoulli": lambda x: (
        x * torch.bernoulli(torch.full_like(x, 0.75)) / 0.75
    ),
    "bernoulli in place": (
        lambda x: x.div(0.75) * torch.empty_like(x).bernoulli_(0.75)
    ),
    "below": lambda x: x * (torch.rand_like(x) < 0.75) / 0.75,
    "above": lambda x: x * (torch.rand(x.shape) > 0.25).to(x.dtype) / 0.75,
    "where": lambda x: torch.where(torch.rand_like(x) < 0.75, x / 0.75, 0.0),
    "masked": (
        lambda x: x.masked_fill(~(torch.rand_like(x) < 0.75), 0.0) / 0.75
    ),
}


@pytest.mark.parametrize("autograd", [True, False])
@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_dropout_at_its_mean_changes_nothing(drop, autograd):
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    below = nullcontext() if autograd else below_autograd()
    with below, operations_through(AtTheMean()) as mean:
        y = drop(x)
    torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-6)
    assert [round(loss.share, 6) for loss in mean.losses] == [0.25]
    assert not mean.others


def test_a_random_mask_that_is_not_dropout_is_refused():
    """The mask raises, so the models are not compared in train mode."""
    x = torch.randn(2, 6, 8)
    with (
        pytest.raises(ValueError, match="uses a random mask"),
        operations_through(AtTheMean()),
    ):
        x[torch.rand_like(x) < 0.1] = 0.0


def test_a_random_draw_elsewhere_is_not_dropout():
    with below_autograd(), operations_through(AtTheMean()) as mean:
        torch.randn(3)
    assert not mean.losses
    assert len(mean.others) == 1


def test_fresh_styles_are_redrawn_on_both_sides():
    """One side packs queries, keys and values; all norms start as ones."""
    config = GPTConfig(29, 16, n_layer=2, n_head=4, n_embd=32, norm_eps=1e-5)
    torch.manual_seed(0)
    right = mingpt_style.build_model(config)
    left = annotated.from_gpt2(mingpt_style.to_gpt2(right), config)
    for sides in ((left, right), (right, left)):
        found = diff_by_value(*sides)
        assert found.same, found.sentence
        assert found.scope.redrawn > 20
        assert found.scope.sizes
        assert found.scope.constant == ("generator.proj.bias",)


def transformers_gpt2(state):
    sizes = GPT2Config(
        vocab_size=29, n_positions=16, n_layer=1, n_head=2, n_embd=16,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
        attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(sizes)
    model.load_state_dict(with_prefix(state))
    return model


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_the_implementation_of_dropout_is_free(share):
    """Both models have equal weight names, and dropout at the same places."""
    config = GPTConfig(29, 16, n_layer=1, n_head=2, n_embd=16, norm_eps=1e-5)
    torch.manual_seed(0)
    right = mingpt_style.build_model(replace(config, dropout=share))
    left = transformers_gpt2(mingpt_style.to_gpt2(right))
    found = diff_by_value(left, right)
    assert found.same, found.sentence
    dropped = found.scope.dropped
    if share:
        assert dropped is None
        assert found.sentence.endswith("; train mode")
    else:
        assert dropped.right == ()
        assert len(dropped.left) == 4
        assert found.sentence.endswith("; train mode but for dropout")


@pytest.mark.parametrize("name", FORMS)
def test_weights_in_another_form_are_left_as_they_are(name):
    """These models use a copy or product of a weight; a redraw misses it."""
    left, right = (build() for build in FORMS[name])
    for sides in ((left, right), (right, left)):
        found = diff_by_value(*sides)
        assert found.same, found.sentence


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a missing qkv bias", "with redrawn zeros and ones, matrices scaled"),
        ("rows that mix", "with redrawn zeros and ones, matrices scaled"),
    ],
)
def test_a_large_model_gets_rows_and_weights_in_one_call(
    name, words, monkeypatch
):
    monkeypatch.setattr(subject, "HEAVY", 10)
    monkeypatch.setattr(widening, "SHARE_OF_HEAVY", 1000.0)
    found = diff_by_value(Original(), Original())
    assert found.same, found.sentence
    scope = found.scope
    assert (scope.lengths, scope.batch, scope.sizes) == ((33, 65), 2, (2.0,))
    right, _ = PAIRS[name]
    found = diff_by_value(Original(), right())
    assert not found.same
    assert found.sentence.startswith(words), found.sentence


def test_a_large_model_without_time_says_so(monkeypatch):
    monkeypatch.setattr(subject, "HEAVY", 10)
    monkeypatch.setattr(widening, "SHARE_OF_HEAVY", 0.0)
    found = diff_by_value(Original(), Original())
    assert found.same
    assert found.sentence.endswith("; compared at 16 tokens only")
    assert sum("time is up" in note for note in found.scope.notes) == 4
