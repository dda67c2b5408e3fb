"""Which models the benchmarks time, and which they refuse.

No test depends on timing. No test needs an accelerator, because calls to one
are replaced and recorded.
"""

import itertools
import sys
from dataclasses import replace
from unittest.mock import Mock

import line_program
import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss, one_hot

from gpt_duet import annotated
from gpt_duet.benchmarks import machine, memory
from gpt_duet.benchmarks.gates import require_as_eager, require_sound
from gpt_duet.benchmarks.measure import training_step
from gpt_duet.benchmarks.models import (
    Candidate,
    build_peers,
    build_styles,
)
from gpt_duet.benchmarks.peers import PEERS, TorchDecoder, build_peer
from gpt_duet.benchmarks.plan import CPU, PRESETS, Tokens, make_plan
from gpt_duet.benchmarks.run import run_plan
from gpt_duet.benchmarks.work import cache_bytes, count_work
from gpt_duet.config import GPTConfig
from gpt_duet.mingpt_style import build_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDE = {"n_layer": 2, "n_head": 4, "n_embd": 128, "vocab_size": 65}
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 4, "vocab_size": 11}
TINY = GPTConfig(**SMALL, block_size=8, dropout=0.0)


def small_plan(**changes):
    sizes = {"block_size": 8, **SMALL, **changes.pop("sizes", {})}
    return make_plan(
        "gpt-nano", (1,), (4,), sizes=sizes, **{"rounds": 1, **changes}
    )


def tokens_of(time, vocab_size=65, rows=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (rows, time), generator=generator)


def peer_of(name, plan):
    (peer,), _ = build_peers(replace(plan, peers=(name,)))
    return peer


@pytest.fixture
def _small_limits(monkeypatch):
    monkeypatch.setattr(machine, "SQUARE", 16)
    monkeypatch.setattr(machine, "MOVED", 2**12)


# --- Models are refused if they see later tokens or return no scores


class Maskless(TorchDecoder):
    """A decoder without a mask: each position sees the whole text."""

    def forward(self, tokens):
        pos = torch.arange(tokens.size(1))
        return self.head(self.encoder(self.wte(tokens) + self.wpe(pos)))


@pytest.mark.parametrize("time", [64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_mask_is_found_in_every_precision(dtype, time):
    names = ("transformers", "transformers-eager", "torch-encoder")
    tokens = tokens_of(time)
    plan = make_plan(
        "gpt-nano", (2,), (time,), sizes=WIDE, dtypes=(dtype,), peers=names
    )
    styles, _ = build_styles(plan, tokens)
    peers, _ = build_peers(plan)
    for candidate in (*styles, *peers):
        assert require_sound(candidate, tokens, 65) > 0
    model = Maskless(plan.config).to(dtype).eval()
    with pytest.raises(ValueError, match="theirs sees the future"):
        require_sound(Candidate("theirs", model, model), tokens, 65)


def hot(tokens):
    return one_hot(tokens, 65).bfloat16()


SEES = "sees the future: tokens from"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda t: hot(t)[:, -1],
            r"answers \(2, 65\); expected \(2, 64, 65\)",
        ),
        pytest.param(
            lambda t: "text", "answers str; ", marks=pytest.mark.unhooked
        ),
        (lambda t: 1 / 0, "cannot be run: ZeroDivisionError"),
        (lambda t: hot(t) * float("nan"), SEES),
        (lambda t: hot(t.flip(1)), SEES),
        (lambda t: hot(t.roll(-1, 1)), SEES),  # scores of the next position
        (lambda t: hot(t[:, -1:].expand_as(t)), SEES),
        (lambda t: hot(t.unflatten(1, (-1, 8)).flip(2).flatten(1)), SEES),
        # in bfloat16, the effect of one token on these scores is rounded away
        (lambda t: hot(t) + ((t + 1) % 65 / 16).mean().bfloat16(), SEES),
    ],
)
def test_a_model_that_sees_later_tokens_is_refused(call, words):
    with pytest.raises(ValueError, match=f"^theirs .*{words}") as error:
        require_sound(Candidate("theirs", None, call), tokens_of(64), 65)
    assert "\n" not in str(error.value)


def test_rounding_on_an_accelerator_is_not_a_leak():
    ran = itertools.count()
    model = Candidate("a", None, lambda t: hot(t) * (1 + next(ran) % 2 / 128))
    require_sound(model, tokens_of(64), 65)


def test_styles_that_differ_are_not_timed(monkeypatch):
    whole = annotated.from_gpt2

    def wrong(state, config):
        shifted = {"ln_f.bias": state["ln_f.bias"] + 1}
        return whole(state | shifted, config)

    monkeypatch.setattr(annotated, "from_gpt2", wrong)
    with pytest.raises(ValueError, match="the styles differ by"):
        run_plan(small_plan(peers=()))


# Compiled models


def test_a_style_is_compiled_in_one_graph(monkeypatch):
    compile_ = Mock(side_effect=lambda run, **_how: run)
    monkeypatch.setattr(torch, "compile", compile_)
    style = Candidate("a", None, torch.abs, note="tied").with_log_probs()
    quick = style.compiled()
    assert (quick.name, quick.output) == ("a compiled", "log-probs")
    x = torch.randn(3, 5)
    assert torch.equal(quick.scores(x), x.abs().log_softmax(-1))
    Candidate("b", None, abs, style=False).compiled()
    asked = [call.kwargs["fullgraph"] for call in compile_.call_args_list]
    assert asked == [True, False]


@pytest.mark.usefixtures("_small_limits")
@pytest.mark.parametrize("kind", ["forward", "train-step"])
def test_a_model_that_compiling_changes_is_not_timed(monkeypatch, kind):
    """The model is miscompiled either with or without gradients."""

    def compile_(run, **how):
        def compiled(tokens):
            scores = run(tokens)
            wrong = torch.is_grad_enabled() == (kind == "train-step")
            return scores * (1.01 if wrong else 1)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_)
    plan = small_plan(kind=kind, compile=True, peers=())
    with pytest.raises(ValueError, match="compiled differs from the eager"):
        run_plan(plan)


@pytest.mark.parametrize("factor", [1 + 1e-4, 1 + 1e-2])
def test_a_compiled_model_may_differ_by_the_rounding_of_sums(factor):
    tokens, scores = tokens_of(8, 11), torch.randn(2, 8, 11)
    eager, quick = (
        Candidate("a", None, lambda _, each=each: each)
        for each in (scores, factor * scores)
    )
    if factor == 1 + 1e-4:
        require_as_eager(quick, eager, tokens)
    else:
        with pytest.raises(ValueError, match="it is not timed"):
            require_as_eager(quick, eager, tokens)


# Styles and peers


def test_timed_styles_return_their_usual_scores():
    tokens = tokens_of(8, 11)
    styles, _ = build_styles(small_plan(own=True), tokens)
    outputs = [style.output for style in styles]
    assert outputs == ["log-probs", "logits", "log-probs"]
    with torch.no_grad():
        a, b, own = (s.with_log_probs().scores(tokens) for s in styles)
    torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    assert not torch.equal(a, own)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_our_parameters_and_does_not_look_ahead(name):
    if name == "x-transformers":
        pytest.importorskip("x_transformers")
    config = make_plan("S2").config
    for tie in (True, False):
        with torch.device("meta"):
            model, _ = build_peer(name, config.replace(tie_weights=tie))
            ours = build_model(config.replace(tie_weights=tie))
        peer = Candidate(name, model, model)
        assert peer.compared(Candidate("ours", ours, ours)) == ""
    for preset in PRESETS:
        sizes = {"n_layer": 2, "vocab_size": 65, "block_size": 32}
        plan = make_plan(preset, times=(32,), sizes=sizes)
        require_sound(peer_of(name, plan), tokens_of(32), 65)


def test_a_row_states_its_difference_in_parameters():
    for model, expected in (
        (nn.Linear(900, 1, bias=False), "-3.4% parameters"),
        (nn.Linear(930, 1), ""),
    ):
        ours = Candidate("ours", nn.Linear(932, 1, bias=False), abs)
        assert Candidate("x", model, abs).compared(ours) == expected


# Counted operations and bytes


def formula(config, batch, time):
    L, D, F = config.n_layer, config.n_embd, config.inner_size
    matrices = L * (4 * D**2 + 2 * D * F) + config.vocab_size * D
    return 2 * batch * time * matrices + 4 * L * batch * time**2 * D


@pytest.mark.parametrize("inner", [None, 6])
def test_torch_counts_the_operations_of_the_formula(inner):
    plan = small_plan(sizes={"n_inner": inner}, peers=("torch-encoder",))
    tokens = tokens_of(8, 11, rows=3)
    styles, _ = build_styles(plan, tokens)
    peers, _ = build_peers(plan)
    expected = formula(plan.config, 3, 8)
    for candidate in (*styles, *peers):
        counted, _ = count_work(lambda c=candidate: c.scores(tokens), None)
        assert counted == expected, candidate.name
    assert torch.backends.mha.get_fastpath_enabled()


def test_bytes_read_equal_those_counted_by_hand():
    tokens = tokens_of(3, 11, rows=1)
    model = build_model(TINY)
    _, read = count_work(lambda: model(tokens), model)
    weights = sum(p.numel() for p in model.parameters())
    tables = (11 + 8) * 4
    # 3 rows of each of two tables, 4 wide
    assert read == 4 * (weights - tables + 2 * 3 * 4)
    _, read = count_work(lambda: [model(tokens) for _ in range(9)], model)
    assert read == 4 * weights  # a row counts once, however often it is read
    assert count_work(lambda: model(tokens), model.forward)[1] is None
    # if a matrix is sliced, only the bytes of the slice count
    cut = nn.Linear(4, 6, bias=False)
    _, read = count_work(lambda: torch.ones(1, 4) @ cut.weight[:2].t(), cut)
    assert read == 4 * 2 * 4
    # keys and values of 5 tokens, 4 wide, in 2 layers
    assert cache_bytes(TINY, 3, 5, 4) == 3 * 4 * 2 * 5 * 4 * 2


def test_a_training_step_learns():
    plan = small_plan()
    assert plan.config.dropout == 0  # a step without dropout
    tokens = Tokens(plan, 2, 8)
    styles, _ = build_styles(plan, tokens.ids)
    for style in styles:
        expected = style.model.log_probs(tokens.ids).flatten(0, 1)
        step = training_step(style, tokens)
        losses = [step() for _ in range(60)]
        first = nll_loss(expected, tokens.targets.flatten()).item()
        assert losses[0] == pytest.approx(first, abs=1e-5)
        assert losses[-1] < losses[0] - 1e-3
        assert all(p.grad is None for p in style.model.parameters())
    with pytest.raises(ValueError, match="a is not a module: it cannot train"):
        training_step(Candidate("a", abs, abs), tokens)


@pytest.mark.usefixtures("_small_limits")
def test_every_round_has_other_tokens(monkeypatch):
    plan = small_plan(rounds=3, peers=())
    with monkeypatch.context() as patch:
        draw = Mock(side_effect=Tokens.draw)
        patch.setattr(Tokens, "draw", lambda *given: draw(*given))
        run_plan(plan)
    assert [c.args[1] for c in draw.call_args_list][-3:] == [0, 1, 2]
    tokens = Tokens(plan, 2, 50)
    tokens.draw(0)
    assert tokens.ids.shape == (2, 50)
    assert tokens.ids.unique().tolist() == [*range(11)]
    assert torch.equal(tokens.targets[:, :-1], tokens.ids[:, 1:])
    again = Tokens(plan, 2, 50)
    again.draw(1)
    assert not again.ids.equal(tokens.ids)
    again.draw(0)
    assert again.ids.equal(tokens.ids)


# The machine


def test_a_machines_limits_are_named_by_their_size(monkeypatch):
    meta = torch.device("meta")
    limits = machine.limit_tasks(torch.bfloat16, meta).items()
    assert {name: work for name, (_, work) in limits} == {
        "matmul 8192 x 8192": {"flops": 2 * 8192**3},
        "copy of 128 MiB": {"least_bytes": 2 * 2**27},
        "read of 128 MiB": {"least_bytes": 2**27},
        "read of 16 MiB": {"least_bytes": 2**24},
    }
    monkeypatch.setattr(machine, "SQUARE", 16)
    monkeypatch.setattr(machine, "MOVED", 2**24)
    tasks = machine.limit_tasks(torch.float32, CPU)
    square, copy, *reads = (run for run, _ in tasks.values())
    assert count_work(square, None)[0] == 2 * 16**3
    assert copy().unique().tolist() == [1]
    assert [4 * int(read()) for read in reads] == [2**24, 2**21]


def test_peak_memory_is_the_largest_sum_at_one_time():
    a = torch.ones(1000, 100)  # 400 kB of float32

    def run():
        b = a + 1
        c = b * 2
        del b
        return c.sum()

    found = memory.peak_bytes(run, CPU)
    assert 800_000 <= found < 802_000
    assert 400_000 <= memory.peak_bytes(lambda: a + 1, CPU) < 401_000


def test_memory_on_an_accelerator_is_what_torch_reports(monkeypatch):
    module = Mock()
    module.memory_allocated.return_value = 100
    module.max_memory_allocated.return_value = 350
    for says, peak in ((module, 250), (object(), None)):
        monkeypatch.setattr(
            torch, "get_device_module", Mock(return_value=says)
        )
        assert memory.peak_bytes(int, torch.device("cuda")) == peak


@pytest.mark.unhooked
def test_a_program_answers_a_batch_row_by_row():
    name = f"exec:{sys.executable} {line_program.__file__} sound"
    plan = small_plan(sizes={"vocab_size": line_program.VOCAB})
    peer = peer_of(name, plan)
    tokens = tokens_of(4, line_program.VOCAB, rows=3)
    scores = peer.scores(tokens)
    assert scores.shape == (3, 4, line_program.VOCAB)
    for row, ids in zip(scores, tokens.tolist(), strict=True):
        expected = torch.tensor(line_program.scores(ids))
        assert torch.allclose(row, expected, 1e-6)
    with pytest.raises(ValueError, match="benchmark's vocabulary is 11"):
        peer_of(name, small_plan())
