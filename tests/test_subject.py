"""How a model is built, called and read, whatever it answers with."""

import json
import random
import re
import threading
from collections import namedtuple
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_gpt import BLOCK, GPT, VOCAB, Unlimited
from torch import nn

from gpt_duet.invariants import Subject, check_model
from gpt_duet.invariants.model.sizes import padding_ids
from gpt_duet.invariants.search.tolerance import put_back_after

pytestmark = pytest.mark.usefixtures("one_layer", "calls_of_a_second")

Answer = namedtuple("Answer", "loss logits")


@dataclass
class Data:
    state: torch.Tensor
    log_probs: torch.Tensor


class Wrapped(nn.Module):
    """A sound model whose answer is put in another form."""

    vocab_size, block_size = VOCAB, BLOCK

    def __init__(self, form):
        super().__init__()
        self.gpt = GPT()
        self.form = form

    def forward(self, tokens):
        return self.form(self.gpt(tokens))


FORMS = {
    "tuple": lambda s: (s, None),
    "loss first": lambda s: (s.sum(), s),
    "state first": lambda s: (s[..., :4], s),
    # as wide as the scores at one of the two sizes that are tried first
    "wide by chance": lambda s: (-s if len(s) == 3 else s[..., :4], s),
    "heads": lambda s: [s, -s],
    "nested": lambda s: (s.mean(), (s, {"cache": s[0]})),
    "dict": lambda s: {"hidden": s[..., :8], "logits": s},
    "dict without a name": lambda s: {"out": s},
    "named tuple": lambda s: Answer(s.mean(), s),
    "dataclass": lambda s: Data(s[..., :2], s.log_softmax(-1)),
    "object": lambda s: SimpleNamespace(logits=s, other="text"),
    "vocabulary second": lambda s: s.mT,
    "batch times time": lambda s: s.flatten(0, 1),
    "time first": lambda s: s.transpose(0, 1),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read_as_the_same_scores(name):
    subject = Subject(lambda: Wrapped(FORMS[name]))
    model = subject.build().eval()
    # sizes that could be mistaken for each other change nothing
    for size in ((3, 6), (VOCAB, VOCAB)):
        tokens = torch.randint(VOCAB, size)
        expected = model.gpt(tokens)
        if name == "dataclass":
            expected = expected.log_softmax(-1)
        torch.testing.assert_close(subject.scores(model, tokens), expected)
    several = "the model answers with 2 tensors of scores: the first is"
    assert any(several in note for note in subject.notes) == (name == "heads")


@pytest.mark.parametrize(
    "given",
    [
        *("input_ids", "idx", "tokens", "x", "something"),
        *("mask=None, *, input_ids", "embeddings=None, input_ids=None"),
    ],
)
def test_tokens_are_given_where_they_belong(given):
    *others, name = re.findall(r"\b(?!None)\w+", given)
    space = {"GPT": GPT}
    exec(
        f"class Model(GPT):\n"
        f"    def forward(self, {given}):\n"
        f"        assert {[None for _ in others]} == [{', '.join(others)}]\n"
        f"        return GPT.forward(self, {name})\n",
        space,
    )
    assert check_model(space["Model"], checks=["shape"]).ok


def test_log_probs_of_the_protocol_are_preferred():
    class Both(GPT):
        def forward(self, tokens):
            raise RuntimeError("forward was called")

        def log_probs(self, tokens):
            return GPT.forward(self, tokens).log_softmax(-1)

    assert check_model(Both, checks=["shape", "normalised"]).ok
    with pytest.raises(ValueError, match="forward was called"):
        check_model(Both, outputs="logits")


@pytest.mark.parametrize("kept_by_a_factory", [False, True])
def test_a_module_is_left_as_it_was(kept_by_a_factory):
    model = GPT().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert check_model((lambda: model) if kept_by_a_factory else model).ok
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())
    assert not model._forward_hooks


class Closure(GPT):
    """Keeps a module in a lambda too, as minGPT does: copies share it."""

    def add_parts(self, dim):
        self.extra = extra = nn.Linear(dim, dim)
        self.also = lambda x: extra(x)

    def scores(self, x):
        return super().scores(x + self.also(x))


def test_weights_are_put_back_where_a_forward_raises():
    weight = torch.ones(3)
    with suppress(KeyError), put_back_after([weight]):
        weight.add_(1)
        raise KeyError
    assert weight.equal(torch.ones(3))


def test_a_model_whose_copy_is_none_is_not_accused():
    model = Closure()
    report = check_model(model)
    assert report.ok, str(report)
    assert "a copy still calls extra" in report.notes[0]
    (causality,) = (r for r in report.results if "causality" in r.name)
    assert causality.message.startswith("less tested, the model cannot be")
    assert " less tested: the model cannot be copied" in report.verdict
    assert all(p.grad is None for p in model.parameters())
    model = GPT()
    model.lock = threading.Lock()
    report = check_model(model, checks=["causality"])
    assert "cannot be copied (TypeError: cannot pickle" in report.notes[0]
    (result,) = json.loads(report.to_json())["results"]
    assert result["less"].startswith("the model cannot be copied")
    report = check_model(Closure)
    assert report.ok, str(report)
    assert report.notes == []
    assert "less" not in str(report)


@pytest.mark.unhooked  # the checker of shapes draws random numbers itself
def test_global_random_states_are_left_as_they_were():
    def drawn(between):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        between()
        return torch.rand(1), random.random(), np.random.rand()

    assert drawn(lambda: check_model(GPT)) == drawn(lambda: None)


def test_the_same_seed_gives_the_same_report():
    def outcome(seed):
        report = check_model(GPT, checks=["initial_loss"], seed=seed)
        return report.results[0].message

    assert outcome(1) == outcome(1) != outcome(2)


def test_a_model_that_prints_is_reported(capsys):
    class Chatty(GPT):
        def forward(self, tokens):
            print("called with", tuple(tokens.shape))
            return super().forward(tokens)

    report = check_model(Chatty, checks=["shape"])
    assert "printed" in report.notes[-1]
    assert "called with" in report.notes[-1]
    assert capsys.readouterr().out == ""


SIZED = {
    "config": SimpleNamespace(n_vocab=VOCAB, n_ctx=8),
    "cfg": {"vocabulary_size": VOCAB, "seq_len": 8},
    "args": namedtuple("Args", "vocab_size max_seqlen")(VOCAB, 8),
    "params": SimpleNamespace(padded_vocab_size=VOCAB, max_seq_len=8),
    "hparams": {"num_tokens": VOCAB, "max_target_positions": np.int64(8)},
}


@pytest.mark.parametrize("place", SIZED)
def test_sizes_are_read_where_they_are(place):
    class Sized(Unlimited):
        def add_parts(self, dim):
            del self.vocab_size, self.block_size
            setattr(self, place, SIZED[place])

    subject = Subject(Sized)
    assert (subject.vocab_size, subject.block_size) == (VOCAB, 8)


def test_ids_of_padding_are_read_where_they_are():
    class Padded(GPT):
        config = SimpleNamespace(pad_token_id=5)
        pad_id = 3

        def add_parts(self, dim):
            self.wte = nn.Embedding(VOCAB, dim, padding_idx=0)

    assert padding_ids(Padded()) == [0, 3, 5]
    assert padding_ids(GPT()) == padding_ids(GPT().forward) == []


def test_a_tile_is_no_length():
    class Tiled(Unlimited):
        config = SimpleNamespace(max_position_embeddings=BLOCK, block_size=4)

        def add_parts(self, dim):
            self.block_size = 4

    assert Subject(Tiled).block_size == BLOCK


# --- Mistakes: one line, with the numbers -----------------------------------


def raising():
    raise FileNotFoundError("no weights at weights.pt")


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(65, 30)

    def forward(self, tokens):
        return self.table(tokens)


class NeedsConfig(nn.Module):
    def __init__(self, config):
        super().__init__()


SIZES = {"vocab_size": 65, "block_size": 8}
MISTAKES = [
    ("a text", SIZES, "got str"),
    (raising, SIZES, "raising raised FileNotFoundError"),
    (lambda: 3, SIZES, "returned no model but int"),
    (NeedsConfig, SIZES, "NeedsConfig is a class"),
    (Narrow, SIZES | {"checks": ["purity"]}, r"6, 65\).*got shape \(2, 6, 30"),
    (lambda: Narrow().double().half, SIZES, "raised TypeError"),
    (Narrow, {"block_size": 8}, "give vocab_size"),
    (Narrow, {"vocab_size": 65}, "give block_size"),
    (GPT, {"vocab_size": 99}, f"99.*vocab_size={VOCAB}"),
    (GPT, {"block_size": -3}, "block_size.*-3"),
    (GPT, {"vocab_size": True}, "vocab_size.*True"),
    (lambda: len, {"vocab_size": 1, "block_size": 4}, "at least 2.*got 1"),
    (GPT, {"outputs": "probabilities"}, "'probabilities'"),
    (GPT, {"checks": ["caution"]}, "check_caution"),
    (GPT, {"expected_failures": {"check_x": ""}}, "check_x"),
    (GPT, {"layout": "bb"}, "layout must be one of bt, tb"),
]


@pytest.mark.parametrize(("model", "settings", "words"), MISTAKES)
def test_a_mistake_is_one_line(model, settings, words):
    with pytest.raises(ValueError, match=words) as caught:
        check_model(model, **settings)
    assert "\n" not in str(caught.value)
    if model is raising:
        assert isinstance(caught.value.__cause__, FileNotFoundError)
