"""Users' models: how the kit builds, calls, reads and describes them."""

import json
import random
import re
import threading
from collections import namedtuple
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from broken_models import BROKEN
from known_gpts import AutoregressiveModel, GPTConfig, MinGPT, NanoGPT
from rows import slow_unless
from small_gpt import (
    BLOCK,
    DIM,
    GPT,
    MLP,
    VOCAB,
    Attention,
    CachedGPT,
    Padded,
    Unlimited,
    cross_entropy,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpt_duet.invariants import (
    UnusableModel,
    check_model,
    influence,
    meet,
)
from gpt_duet.invariants.checks import shape
from gpt_duet.running.model.sizes import (
    has_position_table,
    padding_ids,
)
from gpt_duet.running.rounding import put_back_after
from gpt_duet.running.variant import own

pytestmark = pytest.mark.usefixtures("one_layer", "calls_of_a_second")

BUILDS = {model.name: model.build for model in BROKEN}

# --- How a model is read, called and built -----------------------------------


def forward(change):
    """Return a subclass of the small GPT whose forward is `change`."""
    return type(change.__name__, (GPT,), {"forward": change})


Answer = namedtuple("Answer", "loss logits")


@dataclass
class Data:
    state: torch.Tensor
    log_probs: torch.Tensor


FORMS = {
    "tuple": lambda s: (s, None),
    "loss first": lambda s: (s.sum(), s),
    "state first": lambda s: (s[..., :4], s),
    # at one of the first two sizes, both parts are as wide as the scores
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
    def answer(self, tokens):
        return FORMS[name](GPT.forward(self, tokens))

    subject = meet(forward(answer))
    variant = own(subject)
    # the scores are found even if all axes have the same size
    for size in ((3, 6), (VOCAB, VOCAB)):
        tokens = torch.randint(VOCAB, size)
        expected = GPT.forward(variant.model.eval(), tokens)
        if name == "dataclass":
            expected = expected.log_softmax(-1)
        torch.testing.assert_close(variant.scores(tokens), expected)
    several = "the model answers with 2 tensors of scores: the first is"
    assert any(several in note for note in subject.notes) == (name == "heads")


@pytest.mark.parametrize(
    "given",
    [
        *("input_ids", "idx", "tokens", "x", "something"),
        *("mask=None, *, input_ids", "embeddings=None, input_ids=None"),
    ],
)
def test_tokens_are_passed_in_the_right_argument(given):
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


def test_weights_are_restored_if_a_forward_raises():
    weight = torch.ones(3)
    with suppress(KeyError), put_back_after([weight]):
        weight.add_(1)
        raise KeyError
    assert weight.equal(torch.ones(3))


@pytest.mark.slow
def test_a_model_that_cannot_be_copied_passes():
    model = MinGPT(GPTConfig())
    report = check_model(model, budget=600)
    assert report.ok, str(report)
    assert "a copy's function reads transformer.h." in report.notes[0]
    (causality,) = (r for r in report.results if "causality" in r.name)
    reason = "larger weights (the model cannot be copied"
    assert f"; not tried: {reason}" in causality.message
    assert re.search(r"\d+ passed \(\d+ of them in part\)", report.verdict)
    assert all(p.grad is None for p in model.parameters())
    model = GPT()
    model.lock = threading.Lock()
    report = check_model(model, checks=["causality"], block_size=8)
    assert "cannot be copied (TypeError: cannot pickle" in report.notes[0]
    (result,) = json.loads(report.to_json())["results"]
    assert result["not_tried"].startswith(reason)
    report = check_model(lambda: MinGPT(GPTConfig(block_size=8, n_layer=1)))
    assert report.ok, str(report)
    assert report.notes == []
    assert "not tried: larger" not in str(report)


@pytest.mark.unhooked  # not with --check-shapes, which draws random numbers
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


def test_names_print_no_escape_codes():
    class Coloured(GPT):
        def add_parts(self, dim):
            never_used = nn.Parameter(torch.zeros(dim))
            self.register_parameter("\x1b[31mred", never_used)

    shown = str(check_model(Coloured, checks=["gradient_flow"]))
    assert r"\x1b[31mred" in shown
    assert "\x1b" not in shown


SIZED = {
    "config": SimpleNamespace(n_vocab=VOCAB, n_ctx=8),
    "cfg": {"vocabulary_size": VOCAB, "seq_len": 8},
    "args": namedtuple("Args", "vocab_size max_seqlen")(VOCAB, 8),
    "params": SimpleNamespace(padded_vocab_size=VOCAB, max_seq_len=8),
    "hparams": {"num_tokens": VOCAB, "max_target_positions": np.int64(8)},
}


@pytest.mark.parametrize("place", SIZED)
def test_sizes_are_found_in_each_place(place):
    class Sized(Unlimited):
        def add_parts(self, dim):
            del self.vocab_size, self.block_size
            setattr(self, place, SIZED[place])

    subject = meet(Sized)
    assert (subject.vocab_size, subject.block_size) == (VOCAB, 8)


def test_padding_ids_are_found_in_each_place():
    class Padded(GPT):
        config = SimpleNamespace(pad_token_id=5)
        pad_id = 3

        def add_parts(self, dim):
            self.wte = nn.Embedding(VOCAB, dim, padding_idx=0)

    assert padding_ids(Padded()) == [0, 3, 5]
    assert padding_ids(GPT()) == padding_ids(GPT().forward) == []


@pytest.mark.parametrize(
    ("found", "shapes"),
    [
        (True, {"wte": (17, 8), "where": (32, 8)}),
        (True, {"wte": (17, 8), "where": (34, 8)}),  # two rows for padding
        (True, {"wte": (17, 8), "held.pos_table": (8, 32)}),
        (True, {"held.wpe": (32,)}),
        (False, {"wte": (17, 8), "where": (35, 8)}),
        (False, {"wte": (17, 8), "biases": (32, 2)}),
        (False, {"wte": (17, 8), "held.cosines": (32, 8)}),
        (False, {"wte": (32, 8)}),
        (False, {}),
    ],
)
def test_a_position_table_has_the_width_of_the_token_table(found, shapes):
    model = nn.Module()
    model.held = nn.Module()
    for name, sizes in shapes.items():
        if name.startswith("held."):
            model.held.register_buffer(name[5:], torch.zeros(sizes))
        else:
            model.add_module(name, nn.Embedding(*sizes))
    vocab = shapes.get("wte", (17,))[0]
    assert has_position_table(model, 32, vocab) == found
    assert not has_position_table(len, 32, vocab)


def test_a_tile_size_is_not_a_length():
    class Tiled(Unlimited):
        config = SimpleNamespace(max_position_embeddings=BLOCK, block_size=4)

        def add_parts(self, dim):
            self.block_size = 4

    assert meet(Tiled).block_size == BLOCK


# --- Mistakes: one line, with the numbers -----------------------------------


def raising():
    raise FileNotFoundError("no weights at weights.pt")


def narrow():
    return nn.Embedding(65, 30)


def lazy():
    return nn.Sequential(nn.Embedding(65, 8), nn.LazyLinear(65))


def lazy_buffer():
    return nn.Sequential(nn.Embedding(65, 8), nn.LazyBatchNorm1d(affine=False))


def a_trace():
    return torch.jit.trace(nn.Linear(8, 65), torch.zeros(2, 8))


def part_traced():
    return nn.Sequential(a_trace())


def exported():
    tokens = torch.zeros(2, 8, dtype=torch.long)
    return torch.export.export(GPT().eval(), (tokens,)).module()


SIZES = {"vocab_size": 65, "block_size": 8}


class LossOnly(GPT):
    def forward(self, input_ids, target_ids):
        scores = super().forward(input_ids)
        return cross_entropy(scores[:, :-2], target_ids[:, 2:])


class Compared(MLP):
    def __eq__(self, other):
        return self is other


MISTAKES = [
    ("a text", SIZES, "got str"),
    (raising, SIZES, "raising raised FileNotFoundError"),
    (lambda: 3, SIZES, "returned no model but int"),
    (partial(GPT, mlp=Compared), SIZES, "'Compared'.* needs a __hash__"),
    (GPT(mlp=Compared), SIZES, "'Compared'.* needs a __hash__"),
    (nn.Embedding, SIZES, "Embedding is a class"),
    (narrow, SIZES | {"checks": ["purity"]}, r"6, 65\).*got shape \(2, 6, 30"),
    (
        LossOnly,
        {"checks": ["purity"]},
        r"got shape \(\), a loss: give the model a method forward_logits",
    ),
    (lambda: narrow().half, SIZES, "raised TypeError"),
    (narrow, {"block_size": 8}, "give vocab_size"),
    (narrow, {"vocab_size": 65}, "give block_size"),
    (GPT, {"vocab_size": 99}, f"99.*vocab_size={VOCAB}"),
    (GPT, {"block_size": -3}, "block_size.*-3"),
    (GPT, {"vocab_size": True}, "vocab_size.*True"),
    (lambda: len, {"vocab_size": 1, "block_size": 4}, "at least 2.*got 1"),
    (GPT, {"outputs": "probabilities"}, "'probabilities'"),
    (GPT, {"checks": ["caution"]}, "check_caution"),
    (GPT, {"expected_failures": {"check_x": ""}}, "check_x"),
    (GPT, {"layout": "bb"}, "layout must be one of bt, tb"),
    (lazy, SIZES, r"1\.weight of Sequential has no shape yet"),
    (lazy_buffer, SIZES, r"1\.running_mean of Sequential has no shape yet"),
    (a_trace, SIZES, "before torch.jit.trace, or a function of the ids"),
    (part_traced, SIZES, "give the model before torch.jit.trace"),
    (exported, {}, "no train and eval mode.*torch.export, or a function"),
]


@pytest.mark.parametrize(("model", "settings", "words"), MISTAKES)
def test_a_mistake_is_one_line(model, settings, words):
    with pytest.raises(ValueError, match=words) as caught:
        check_model(model, **settings)
    assert "\n" not in str(caught.value)
    if model is raising:
        assert isinstance(caught.value.__cause__, FileNotFoundError)


# --- One cause, one failure -------------------------------------------------


@forward
def refuses_one_row(self, tokens):
    if tokens.size(0) == 1:
        raise RuntimeError("one row is too few")
    return GPT.forward(self, tokens)


@forward
def cannot_go_back(self, tokens):
    """Change in place a tensor that the backward pass needs."""
    return GPT.forward(self, tokens).tanh().mul_(2)


class FailsInTraining(GPT):
    def body(self, x, mask):
        return x.view(-1, 13) if self.training else super().body(x, mask)


class MaskTooFar(CachedGPT):
    def sees(self, i, j):
        return j <= i + 1


class Blind(Attention):
    def forward(self, x, mask):
        return super().forward(torch.zeros_like(x), mask)


BLIND = type("No", (GPT,), {"mixer": Blind})


class OverTheBatch(GPT):
    """The last norm uses statistics over all rows and positions."""

    def add_parts(self, dim):
        self.ln = nn.BatchNorm1d(dim)

    def scores(self, x):
        return self.head(self.ln(x.mT).mT)


# model, failed check, words of its message, number of checks that refer to it
ONE_CAUSE = [
    (
        refuses_one_row,
        "shape",
        r"too few \(test_model_reading\.py, line \d+\)",
        6,
    ),
    (cannot_go_back, "finite", "in the backward pass in eval mode", 3),
    (FailsInTraining, "shape", "in train mode", 7),
    (BUILDS["no_mask"], "causality", "position 0 sees token 1", 2),
    (MaskTooFar, "causality", "position 0 sees token 1", 3),
    (BUILDS["embedding_renormalised"], "purity", "", 1),
    (BUILDS["dropout_in_eval"], "determinism", "from a fixed random state", 2),
    (BUILDS["state_kept"], "determinism", "start each call from the state", 0),
    (BUILDS["cache_never_reset"], "determinism", "start each call from", 0),
    (BUILDS["state_of_its_own"], "determinism", "start each call from", 0),
]
# One model always raises, one raises only in train mode, and one leaks.
ONE_OF_EACH = (refuses_one_row, FailsInTraining, MaskTooFar)


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("model", "check", "words", "others"),
    slow_unless(lambda model, *_: model in ONE_OF_EACH, ONE_CAUSE),
)
def test_one_cause_is_one_failure(model, check, words, others, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    report = check_model(model, budget=450)
    assert report.failed == [f"check_{check}"], str(report)
    said = [*report.notes, *(result.message for result in report.results)]
    assert any(re.search(words, text) for text in said)
    assert sum(f"see check_{check}" in text for text in said) == others


def test_a_leak_and_a_shape_of_one_line_both_fail():
    report = check_model(OverTheBatch, budget=900)
    assert report.failed == ["check_shape", "check_causality"], str(report)
    said = [result.message for result in report.results]
    assert "more than 1 value per channel" in said[0]
    assert sum("see check_causality" in text for text in said) == 2


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (BLIND, ["order_sensitivity", "context_use", "signal"]),
        (BLIND, ["context_use", "signal"]),
        (BUILDS["mask_transposed"], ["causality", "order_sensitivity"]),
        (
            BUILDS["capacity_over_batch"],
            ["batch_independence", "prefix_consistency"],
        ),
    ],
)
def test_the_first_of_checks_names_the_cause(build, names):
    first, *others = check_model(build, checks=names).results
    assert first.name == f"check_{names[0]}"
    assert first.status == "failed"
    for result in others:
        assert result.status == "skipped"
        assert result.message.startswith(f"see {first.name}: ")


def test_other_checks_report_a_leak_without_causality():
    only = ["causal_gradients", "prefix_consistency"]
    assert len(check_model(BUILDS["no_mask"], checks=only).failed) == 2
    dropping = BUILDS["dropout_in_eval"].keywords
    both = partial(BUILDS["mask_one_too_far"], **dropping)
    report = check_model(both, checks=["causality"])
    assert "position 0 sees token 1" in report.results[0].message


@pytest.mark.unhooked
def test_an_error_of_the_kit_is_not_a_failure_of_the_model(monkeypatch):
    monkeypatch.setattr(shape, "draw", None)
    report = check_model(GPT, checks=["shape", "finite"])
    assert [r.status for r in report.results] == ["error", "passed"]
    assert "not of the model" in report.results[0].message
    line = int(re.findall(r"shape\.py:(\d+)\)", report.results[0].message)[0])
    code = Path(shape.__file__).read_text("utf-8").splitlines()
    assert "= draw(" in code[line - 1]
    assert (report.ok, report.failed) == (False, [])
    assert report.errors == ["check_shape"]
    assert "1 error" in str(report)
    with pytest.raises(AssertionError, match="1 passed, 1 error"):
        report.raise_for_failures()
    with pytest.raises(TypeError):
        check_model(GPT, checks="shape", debug=True)


PRECISION = torch.set_float32_matmul_precision
EXACT = torch.use_deterministic_algorithms
SETTINGS = {
    "the default dtype": (torch.set_default_dtype, torch.float16, torch.float),
    "the default device": (torch.set_default_device, "meta", None),
    "the number of threads": (torch.set_num_threads, 3, 1),
    "the precision of products": (PRECISION, "medium", "highest"),
    "whether operations must be deterministic": (EXACT, True, False),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_global_settings_are_restored(what):
    change, new, old = SETTINGS[what]

    class Sets(GPT):
        def scores(self, x):
            scores = super().scores(x)
            if self.training:
                change(new)
            return scores

    try:
        report = check_model(Sets, checks=["purity"])
        assert torch.get_default_dtype() == torch.float
    finally:
        change(old)
    words = f"a forward in train mode changes {what}"
    assert report.results[0].message == words


IMPURE = {
    "parameter ln.bias": lambda gpt: gpt.ln.bias.data.add_(1),
    "the gradient of ln.bias": lambda gpt: setattr(
        gpt.ln.bias, "grad", torch.zeros(DIM)
    ),
    "requires_grad of ln.bias": lambda gpt: gpt.ln.bias.requires_grad_(False),
    "buffer kept": lambda gpt: gpt.kept.resize_(2),
    "a forward in eval mode adds buffer late": (
        lambda gpt: gpt.register_buffer("late", torch.zeros(1))
    ),
    "buffer (not saved) gain, and with it the scores": (
        lambda gpt: gpt.gain.add_(torch.is_grad_enabled())
    ),
    "the mode of ln": lambda gpt: gpt.ln.train(),
    "the random state of NumPy": lambda gpt: np.random.rand(),
    "the random state of Python's random": lambda gpt: random.random(),
}


@pytest.mark.parametrize("what", IMPURE)
def test_global_changes_of_a_forward_are_named(what):
    class Impure(GPT):
        def add_parts(self, dim):
            self.register_buffer("kept", torch.zeros(1))
            self.register_buffer("gain", torch.ones(1), persistent=False)

        def scores(self, x):
            IMPURE[what](self)
            return super().scores(x) * self.gain

    report = check_model(Impure, checks=["purity"])
    message = report.results[0].message
    assert message.removeprefix("a forward in eval mode changes ") == what


# --- Refused inputs, and answers in another shape ----------------------------


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("no token_type_ids here", "the model refuses token_type_ids ("),
        ("of another shape", "not tried: "),
    ],
)
def test_an_argument_that_is_refused_is_noted(words, note):
    class Refuses(GPT):
        def forward(self, tokens, token_type_ids=None):
            if token_type_ids is not None:
                raise ValueError(words)
            return super().forward(tokens)

    report = check_model(Refuses, checks=["shape"])
    assert note in "".join(report.notes), report.notes
    refused = "refuses" in note
    assert ("token_type_ids" in report.never_given) != refused


@pytest.mark.parametrize(
    ("refused", "note"),
    [
        ((torch.bool,), "not tried with a full boolean attention mask: the "),
        (
            (torch.bool, torch.long),
            "not tried with a full attention mask and with a full boolean ",
        ),
    ],
)
def test_masks_that_are_refused_are_noted_once(refused, note):
    class Refuses(Padded):
        def forward(self, tokens, attention_mask=None):
            if attention_mask is not None and attention_mask.dtype in refused:
                raise TypeError("not this mask")
            return super().forward(tokens, attention_mask)

    (said,) = check_model(Refuses, checks=["shape"]).notes
    assert said.startswith(note)


@forward
def eight_at_a_time(self, tokens):
    if tokens.size(1) % 8:
        raise ValueError(f"{tokens.size(1)} tokens are not a multiple of 8")
    return GPT.forward(self, tokens)


@forward
def two_at_least(self, tokens):
    assert tokens.size(1) > 1
    return GPT.forward(self, tokens)


@forward
def five_at_most(self, tokens):
    assert tokens.size(1) <= 5, "more than 5"
    return GPT.forward(self, tokens)


@forward
def four_rows(self, tokens):
    room = torch.zeros(4, 1, VOCAB, device=tokens.device)[: len(tokens)]
    return room + GPT.forward(self, tokens)


@forward
def another_width(self, tokens):
    return GPT.forward(self, tokens)[..., :-1]


@forward
def swapped(self, tokens):
    scores = GPT.forward(self, tokens)
    return scores.transpose(0, 1) + scores.mean(0).unsqueeze(1)


@forward
def wants_a_whole(self, tokens):
    return GPT.forward(self, tokens.view(-1).view(tokens.shape))


class Overflows(GPT):
    def add_parts(self, dim):
        self.wte = torch.nn.Embedding(5, dim)


class Shorter(Unlimited):
    def add_parts(self, dim):
        del self.block_size


REFUSES = [  # model, sizes, check_shape's words, status of other checks
    (
        eight_at_a_time,
        {},
        "not a multiple of 8 .*; multiples of 8 from 8",
        "passed",
    ),
    (two_at_least, {}, "lengths from 2 to 32 are answered", "passed"),
    (four_rows, {}, r"shape \(5, 7\).*; 4 rows are answered", "passed"),
    (Shorter, {"block_size": 40}, "lengths from 1 to 32 are", "passed"),
    (wants_a_whole, {}, "are not contiguous", "passed"),
    (another_width, {}, r"6, 17\) .*got shape \(2, 6, 16\)", "skipped"),
    (
        five_at_most,
        {},
        r"^one token is answered, but .* 5.*reading\.py, line \d+\) on",
        "skipped",
    ),
    (Overflows, {}, "of 17 ids some are refused: .*IndexError", "skipped"),
    (swapped, {}, r"have shape \(time, batch, vocab\)", "skipped"),
]


ALSO_RUN = (
    "check_finite",
    "check_determinism",
    "check_causal_gradients",
    "check_batch_independence",
    "check_prefix_consistency",
    "check_order_sensitivity",
)


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("model", "sizes", "words", "others"),
    REFUSES,
    ids=[row[0].__name__ for row in REFUSES],
)
def test_a_shape_is_reported_only_by_its_check(model, sizes, words, others):
    report = check_model(model, **sizes, budget=240)
    assert report.failed == ["check_shape"], str(report)
    assert re.search(words, report.results[0].message), str(report)
    # even eight_at_a_time answers all lengths up to its declared limit
    rest = {r.name: r.status for r in report.results}
    assert rest["check_documents"] == "skipped"
    assert {rest[name] for name in ALSO_RUN} == {others}, str(report)


class OneCache(GPT):
    """A model that keeps the last call's tokens in a mutable default."""

    def forward(self, tokens, cache={}):  # noqa: B006
        x = self.embed(tokens) if hasattr(self, "embed") else tokens
        if "x" in cache:
            x = torch.cat([cache["x"], x], 1)
        cache["x"] = x
        return super().forward(tokens[:, -x.size(1) :])


def test_a_default_that_calls_share_is_named():
    with pytest.raises(UnusableModel, match="share state: the default of cac"):
        meet(OneCache)


def test_refused_ids_are_reported_without_check_shape():
    with pytest.raises(UnusableModel, match="17"):
        check_model(Overflows, checks=["purity"])


def test_a_declared_number_of_rows_is_respected():
    declared = type("Declared", (four_rows,), {"max_batch_size": 4})
    report = check_model(declared, checks=["shape", "finite"])
    assert report.ok, str(report)
    assert report.notes == ["at most 4 rows at once: max_batch_size=4"]


# --- Models in the form in which users write them ----------------------------

STRANGERS = {
    "MinGPT(GPTConfig())": "--thorough",
    "torch.compile(NanoGPT(GPTConfig()))": "--thorough",
    "Llama(ModelArgs(vocab_size=17, n_layers=1, max_seq_len=12))": "",
    "Transformer(ModelConfig(block_size=16, vocab_size=27))": (
        "--thorough --vocab-size 27"
    ),
    "AutoregressiveModel": "--vocab-size 65 --block-size 12 --layout tb",
}
ODD = ("Llama",)  # the models that run on each push


@pytest.mark.unhooked
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(t, marks=[] if t.startswith(ODD) else pytest.mark.slow)
        for t in STRANGERS
    ],
)
def test_one_command_checks_models_of_other_repositories(duet, target):
    file = Path(__file__).parents[1] / "zoo" / "known_gpts.py"
    status, out, err = duet(
        "check", f"{file}:{target}", *STRANGERS[target].split()
    )
    assert status == 0, out + err
    assert "error" not in out


@pytest.mark.unhooked
def test_time_first_is_suggested_and_then_accepted():
    sizes = {"vocab_size": 65, "block_size": 32}
    with pytest.raises(UnusableModel, match=r"\(time, batch\).*--layout tb"):
        check_model(AutoregressiveModel, **sizes)
    matrix = influence(
        AutoregressiveModel, range(9), vocab_size=65, layout="tb"
    )
    assert matrix.triu(1).eq(0).all()
    assert matrix.diagonal().gt(0).all()

    class SeesAll(AutoregressiveModel):
        def forward(self, x):
            self.mask = torch.ones(len(x), len(x), 1, 1)
            return super().forward(x)

    class InPlace(AutoregressiveModel):
        def forward(self, x):
            return super().forward(x.clamp_(min=3))

    for model, check in (
        (SeesAll, "check_causality"),
        (SeesAll, "check_causal_gradients"),
        (InPlace, "check_purity"),
    ):
        report = check_model(model, **sizes, layout="tb", checks=[check])
        assert report.failed == [check], str(report)


def in_parts(model):
    for i, block in enumerate(model.transformer.h):
        model.transformer.h[i] = torch.compile(block)
    return model


def in_place(model):
    model.compile()
    return model


@pytest.mark.parametrize("compiled", [torch.compile, in_parts, in_place])
def test_a_compiled_model_is_checked_uncompiled(compiled):
    for model in (
        compiled(NanoGPT(GPTConfig())),
        lambda: compiled(NanoGPT(GPTConfig())),
    ):
        checks = ["shape", "purity", "state_dict", "dtype"]
        report = check_model(model, checks=checks)
        assert report.ok, str(report)
        assert "as it is written, not as compiled" in report.notes[0]


class AnyInputs(GPT):
    """A model that takes *args and **kwargs, as wrappers do."""

    def forward(self, *inputs, **options):
        return super().forward(*inputs, **options)


class Checkpointed(GPT):
    def body(self, x, mask):
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=True)
        return x


class ComplexMLP(MLP):
    def add_parts(self, dim):
        self.turn = nn.Parameter(torch.randn(dim, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(torch.fft.ifft(x.float() * self.turn).real)


class ComplexWeights(GPT):
    mlp = ComplexMLP


def in_parallel():
    return nn.DataParallel(GPT())


def in_processes():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", None, None, 1, 0, store)
    try:
        return nn.parallel.DistributedDataParallel(GPT())
    finally:
        torch.distributed.destroy_process_group()


OF_PYTORCH = {
    AnyInputs: ["shape", "state_dict"],
    in_parallel: ["shape", "state_dict"],
    in_processes: ["shape", "state_dict"],
    Checkpointed: ["causal_gradients", "gradients", "gradient_flow", "loss"],
    ComplexWeights: ["causality", "gradients", "dtype"],
}


@pytest.mark.unhooked
@pytest.mark.parametrize("build", OF_PYTORCH)
def test_models_wrapped_by_pytorch_are_checked(build):
    for model in (build, build()):
        report = check_model(model, checks=OF_PYTORCH[build], block_size=8)
        assert report.ok, str(report)


def test_a_scripted_model_is_checked():
    """A scripted model takes no hooks, and only .to() can cast it."""

    def bigrams():
        parts = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)
        return torch.jit.script(torch.nn.Sequential(*parts))

    report = check_model(bigrams, vocab_size=50, block_size=8)
    assert "error" not in {result.status for result in report.results}
    assert report.failed == ["check_order_sensitivity"], str(report)


class SizesInC(Unlimited):
    """A model that keeps its sizes in an attribute named `c`."""

    def __init__(self, kind):
        super().__init__()
        sizes = {"vocab_size": self.vocab_size, "block_size": 8}
        self.c = kind(sizes)
        del self.vocab_size, self.block_size


@dataclass
class Sizes:
    vocab_size: int
    block_size: int


@pytest.mark.parametrize(
    "kind",
    [dict, lambda sizes: SimpleNamespace(**sizes), lambda s: Sizes(**s)],
)
def test_sizes_are_read_in_attributes_that_hold_settings(kind):
    subject = meet(lambda: SizesInC(kind))
    assert (subject.vocab_size, subject.block_size) == (VOCAB, 8)


def test_a_model_without_sizes_is_told_where_to_put_them():
    with pytest.raises(UnusableModel, match="dataclass, a dict or a namesp"):
        meet(lambda: SizesInC(lambda sizes: None))


class RefusesByShape(nn.Module):
    """Each call raises an error that names the shape of its ids."""

    vocab_size, block_size = VOCAB, 8

    def forward(self, idx):
        raise RuntimeError(f"no room for {tuple(idx.shape)}")


def test_a_model_that_refuses_all_sizes_is_refused_with_its_first_error():
    with pytest.raises(UnusableModel, match=r"no room for \(3, 7\) \("):
        meet(RefusesByShape)


def test_a_window_may_be_given():
    window = BUILDS["window_undeclared"]
    for given, status in ((6, "passed"), (None, "failed"), (14, "failed")):
        report = check_model(window, checks=["context_use"], window=given)
        assert report.results[0].status == status, str(report)
    with pytest.raises(ValueError, match="window must be a positive number"):
        meet(window, window=0)
