"""The checks themselves: both styles, the zoo, and what is built on them."""

import json
import re
import zlib

import pytest
import torch
from broken_models import BROKEN
from correct_models import CORRECT
from small_gpt import BLOCK, DIM, GPT, INF, VOCAB, Attention, Mixer, causal
from torch import nn

from shared.config import GPTConfig
from shared.invariants import (
    CHECKS,
    check_model,
    influence,
    parametrize_with_checks,
    save_map,
    text_map,
)
from shared.invariants.pictures import draw_map
from shared.protocol import load_style

SLOW = "check_entropy_bound"
PURITY = "check_purity"
CONFIG = GPTConfig(65, 64, n_layer=2, n_head=4, n_embd=32)


def annotated():
    return load_style("annotated").build_model(CONFIG)


def mingpt_style():
    return load_style("mingpt_style").build_model(CONFIG)


@parametrize_with_checks(
    [annotated, mingpt_style], checks=sorted(CHECKS.keys() - {SLOW, PURITY})
)
def test_both_styles(model, check):
    check(model)


@pytest.mark.unhooked  # the checker of shapes draws random numbers itself
@parametrize_with_checks([annotated, mingpt_style], checks=[PURITY])
def test_both_styles_leave_the_world_as_it_was(model, check):
    check(model)


@pytest.mark.slow
@parametrize_with_checks([annotated, mingpt_style], checks=[SLOW])
def test_both_styles_learn_no_more_than_there_is(model, check):
    check(model)


@pytest.mark.unhooked  # the checker of shapes draws random numbers itself
@pytest.mark.parametrize(
    ("build", "left_out"),
    [(annotated, ["check_cache"]), (mingpt_style, [])],  # one has a cache
)
def test_nothing_of_the_styles_is_left_out(build, left_out):
    report = check_model(build)
    assert report.ok, str(report)
    skipped = [r.name for r in report.results if r.status == "skipped"]
    assert skipped == left_out
    assert {r.name for r in report.results} == CHECKS.keys() - {SLOW}


# --- The zoo ----------------------------------------------------------------


def cases(zoo):
    """Each as a parameter of a test; those that take long are slow."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=pytest.mark.slow
            if getattr(case, "check", "") == SLOW
            or case.vocab_size > 10_000
            or case.block_size > 100
            else (),
        )
        for case in zoo
    ]


def run(case, checks=None):
    return check_model(
        case.build,
        vocab_size=case.vocab_size,
        block_size=case.block_size,
        outputs=getattr(case, "outputs", "auto"),
        checks=checks,
    )


@pytest.mark.parametrize("case", cases(BROKEN))
def test_a_broken_model_is_caught_by_its_check(case):
    report = run(case, [case.check])
    assert report.failed == [case.check], str(report)
    assert "check itself" not in report.results[0].message


@pytest.mark.parametrize("case", cases(b for b in BROKEN if b.only))
def test_and_by_no_other_where_no_other_can_see_it(case):
    report = run(case, CHECKS.keys() - {SLOW, case.check})
    assert report.ok, str(report)


@pytest.mark.parametrize("case", cases(CORRECT))
def test_a_correct_model_is_accused_of_nothing(case):
    report = run(case)
    assert report.ok, str(report)


# --- What a failure says ----------------------------------------------------


class NoMask(Attention):
    def hide(self, scores, mask):
        return scores


class OffByOne(Attention):
    def hide(self, scores, mask):
        size = mask.size(-1)
        late = torch.ones(size, size, dtype=torch.bool).tril(1)
        return scores.masked_fill(~late, -INF)


class BlockSummary(Mixer):
    """Each position gets the mean of its block of four, later ones too."""

    def __init__(self, dim):
        super().__init__(dim)
        self.mixer = Attention(dim)
        self.summary = nn.Linear(dim, dim)

    def forward(self, x, mask):
        x = self.mixer(x, mask)
        means = [b.mean(1, keepdim=True).expand_as(b) for b in x.split(4, 1)]
        return x + self.summary(torch.cat(means, 1))


class SmallMask(Attention):
    def hide(self, scores, mask):
        return scores.masked_fill(~mask, -1e4)


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (
            NoMask,
            r"position 0 sees token 1: at length 2, changing token 1 from "
            r"\d+ to \d+ moves the scores of position 0 by [\d.e-]+ "
            r"\(float64; rounding there is [\de-]+\); first seen at "
            r"blocks\.0\.mixer \(NoMask\); tokens \d+ \d+",
        ),
        (OffByOne, r"position 0 sees token 1: .*blocks\.0\.mixer \(OffByOne"),
        (
            BlockSummary,
            r"position 0 sees token 1: .*blocks\.0\.mixer \(BlockSummary",
        ),
        (
            SmallMask,
            r"position 0 sees token 1: .*weights scaled up.*"
            r"blocks\.\d\.mixer \(SmallMask",
        ),
    ],
)
def test_a_leak_is_named_with_its_smallest_case_and_place(mixer, words):
    report = check_model(lambda: GPT(mixer=mixer), checks=["causality"])
    assert report.failed == ["check_causality"]
    message = report.results[0].message
    assert re.search(words, message), message
    assert "X" in report.details["check_causality"]


def test_what_the_message_says_can_be_reproduced():
    report = check_model(lambda: GPT(mixer=NoMask), checks=["causality"])
    words = report.results[0].message.split()
    old, new = (int(words[words.index(w) + 1]) for w in ("from", "to"))
    size = float(words[words.index("by") + 1])
    first = int(words[words.index("tokens") + 1])
    torch.manual_seed(0)
    model = GPT(mixer=NoMask).double().eval()
    one, two = (model(torch.tensor([[first, t]]))[0, 0] for t in (old, new))
    moved = float((one - two).detach().abs().max())
    assert moved == pytest.approx(size, rel=0.05)


def test_a_leak_of_one_millionth_is_seen():
    class Faint(GPT):
        def scores(self, x):
            scores = super().scores(x)
            return scores + 1e-6 * scores.mean(1, keepdim=True)

    assert not check_model(Faint, checks=["causality"]).ok


def test_noise_is_no_leak():
    """Sums over all positions, whose effect is rounding alone."""

    class Noisy(GPT):
        def scores(self, x):
            scores = super().scores(x)
            total = scores.sum(1, keepdim=True)
            return scores + ((scores + total) - total - scores)

    scores = Noisy().double()(torch.randint(VOCAB, (2, BLOCK)))
    assert torch.isfinite(scores).all()
    report = check_model(Noisy)
    assert report.ok, str(report)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_blocks_work(length):
    report = check_model(lambda: GPT(block_size=length))
    assert report.ok, str(report)


# --- The runner -------------------------------------------------------------


def leaky():
    return GPT(mixer=NoMask)


def test_report_as_table_json_and_exception():
    report = check_model(leaky, checks=["causality", "cache", "shape"])
    assert not report.ok
    assert report.failed == ["check_causality"]
    assert [r.status for r in report.results] == [
        "passed",
        "failed",
        "skipped",
    ]
    assert all(r.seconds >= 0 for r in report.results)
    table = str(report)
    assert "check_causality" in table
    assert "1 passed, 1 failed, 1 skipped" in table
    content = json.loads(report.to_json())
    assert content["failed"] == ["check_causality"]
    assert content["results"][1]["message"] in report.results[1].message
    with pytest.raises(AssertionError, match="position 0 sees token 1"):
        report.raise_for_failures()
    check_model(GPT, checks=["shape"]).raise_for_failures()


def test_expected_failures_do_not_count():
    reason = "it is an encoder"
    report = check_model(
        leaky,
        checks=["causality", "shape"],
        expected_failures={"check_causality": reason, "check_shape": "none"},
    )
    assert report.ok
    assert report.failed == []
    shape, causality = report.results
    assert shape.status == "passed"
    assert "expected to fail" in shape.message
    assert causality.status == "expected"
    assert causality.message.startswith(reason)
    report.raise_for_failures()


def test_an_interrupt_ends_with_the_table_so_far():
    class Stopped(GPT):
        calls = 0

        def forward(self, tokens):
            Stopped.calls += 1
            if Stopped.calls > 30:
                raise KeyboardInterrupt
            return super().forward(tokens)

    report = check_model(Stopped)
    assert report.interrupted
    assert not report.ok
    assert report.results[0].status == "passed"
    assert report.results[-1].message == "interrupted"
    assert len(report.results) == len(CHECKS) - 1
    assert "interrupted" in str(report)


def test_every_check_explains_itself():
    for name, check in CHECKS.items():
        text = check.__doc__
        for part in ("Why:", "How:", "Cost:", "Reports:"):
            assert part in text, (name, part)


def test_parametrize_names_and_marks():
    def test(model, check):
        pass

    mark = parametrize_with_checks(
        [GPT, lambda: GPT(vocab=5), leaky],
        checks=["shape", "causality"],
        expected_failures={"check_causality": "a reason"},
    )(test).pytestmark[0]
    ids = [parameter.id for parameter in mark.args[1]]
    assert ids == [
        f"{model}-check_{name}"
        for model in ("GPT", "GPT", "leaky")
        for name in ("shape", "causality")
    ]
    marks = [[m.name for m in p.marks] for p in mark.args[1]]
    assert marks == [[], ["xfail"]] * 3
    model, check = mark.args[1][5].values
    with pytest.raises(AssertionError, match="position 0 sees token 1"):
        check(model)


# --- The picture ------------------------------------------------------------


def test_influence_is_a_lower_triangle_for_a_causal_model():
    tokens = torch.randint(VOCAB, (12,))
    matrix = influence(GPT, tokens)
    assert matrix.shape == (12, 12)
    assert matrix.triu(1).eq(0).all()
    assert matrix[torch.ones(12, 12).tril().bool()].gt(0).all()
    leak = influence(leaky, tokens)
    assert leak.triu(1).gt(0).sum() == 66


def test_influence_is_what_a_changed_token_does():
    tokens = [3, 1, 4, 1, 5]
    matrix = influence(GPT().double(), tokens, rounds=1)
    assert matrix.shape == (5, 5)
    with pytest.raises(ValueError, match="40 tokens are more than the 32"):
        influence(GPT, [0] * 40)
    with pytest.raises(ValueError, match="17 is outside the vocabulary of 17"):
        influence(GPT, [0, 17])
    with pytest.raises(ValueError, match="one sequence"):
        influence(GPT, torch.zeros(2, 3, dtype=torch.long))


def test_the_map_shows_a_leak(tmp_path):
    tokens = torch.randint(VOCAB, (10,))
    sound, leak = influence(GPT, tokens), influence(leaky, tokens)
    assert "X" not in text_map(sound)
    assert text_map(leak).count("X") == 45
    for matrix, red in ((sound, False), (leak, True)):
        image = draw_map(matrix).int()
        is_red = (image[..., 0] - image[..., 2]) > 80
        assert bool(is_red.any()) is red

    save_map(leak, tmp_path / "map.png")
    data = (tmp_path / "map.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    start = data.index(b"IDAT") + 4
    size = int.from_bytes(data[start - 8 : start - 4], "big")
    rows = zlib.decompress(data[start : start + size])
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert len(rows) == height * (3 * width + 1)

    save_map(leak, tmp_path / "map.html", "a <leak>")
    page = (tmp_path / "map.html").read_text()
    assert "a &lt;leak&gt;" in page
    assert page.count("<rect") == 100
    assert "45 cells above the diagonal" in page
    with pytest.raises(ValueError, match=r"map\.gif"):
        save_map(leak, tmp_path / "map.gif")


# --- Other people's models --------------------------------------------------


def transformers_model(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 65, "num_hidden_layers": 2, "hidden_size": 32}
    heads = {"num_attention_heads": 4, "intermediate_size": 48}
    grouped = heads | {"num_key_value_heads": 2, "max_position_embeddings": 64}
    config, model = {
        "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "mamba": ("MambaConfig", "MambaForCausalLM"),
        "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
        "bert": ("BertConfig", "BertLMHeadModel"),
    }[name]
    extra = {
        "gpt2": {"n_positions": 32, "n_head": 4},
        "llama": grouped,
        "mamba": {"state_size": 4},
        "mixtral": grouped | {"num_local_experts": 4},
        "bert": heads | {"is_decoder": False, "max_position_embeddings": 32},
    }[name]
    settings = getattr(transformers, config)(**sizes, **extra)
    return lambda: getattr(transformers, model)(settings)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba", "mixtral"])
def test_models_of_transformers_pass(name):
    report = check_model(transformers_model(name), block_size=32)
    assert report.ok, str(report)


def test_an_encoder_of_transformers_is_no_decoder():
    report = check_model(
        transformers_model("bert"), block_size=32, checks=["causality"]
    )
    assert report.failed == ["check_causality"]
    assert "BertSelfAttention" in report.results[0].message


def test_the_small_gpt_of_these_tests_is_causal():
    assert causal(torch.zeros(1), 3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert GPT()(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, VOCAB)
    assert DIM % 2 == 0
