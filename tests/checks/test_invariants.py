"""The checks run on both styles and on the zoo; tools use the checks."""

import importlib
import json
import subprocess
import sys
from functools import partial
from threading import Thread

import pytest
import torch
from broken_models import (
    BROKEN,
    SLOW,
    AverageOfTrainingNotSaved,
    BiasOfTrainingNotSaved,
    as_parameters,
)
from correct_models import CORRECT
from measurements import MEASUREMENTS
from small_gpt import BLOCK, GPT, VOCAB

from gpt_duet.comparison.values import diff_by_value, diff_cache
from gpt_duet.config import GPTConfig
from gpt_duet.invariants import (
    CHECKS,
    check_model,
    influence,
    meet,
    parametrize_with_checks,
    prove_causality,
    save_map,
    text_map,
)
from gpt_duet.tracing.pictures import (
    CAUSAL,
    LEAK,
    NONE,
    colours,
    draw_map,
)

CAUSALITY = "check_causality"
PURITY = "check_purity"
SHARES = [name for name, check in CHECKS.items() if check.share]
CONFIG = GPTConfig(65, 16, n_layer=1, n_head=4, n_embd=32)
# These models leak only if two or three arguments are given together. Checks
# try that last. If each call takes a second, no time is left for it.
TRIED_LAST = (
    "mask_and_targets_open",
    "mask_and_positions_open",
    "packed_and_trained_open",
)
BUILDS = {model.name: model.build for model in BROKEN}


def annotated():
    return importlib.import_module("gpt_duet.annotated").build_model(CONFIG)


def mingpt_style():
    return importlib.import_module("gpt_duet.mingpt_style").build_model(CONFIG)


def leaky():
    return BUILDS["no_mask"]()


@parametrize_with_checks(
    [annotated, mingpt_style], checks=sorted(CHECKS.keys() - {SLOW, PURITY})
)
def test_both_styles_pass_each_check_that_applies(model, check):
    # neither style takes documents, and annotated has no loss
    lacks = {annotated: ("check_loss",)}.get(model, ())
    lacks = ("check_documents", *lacks)
    try:
        found = check(model)
    except pytest.skip.Exception:
        found = None
    assert (found is None) == (check.__name__ in lacks)


@pytest.mark.unhooked  # not with --check-shapes, which draws random numbers
@parametrize_with_checks([annotated, mingpt_style], checks=[PURITY])
def test_both_styles_pass_check_purity(model, check):
    check(model)


@pytest.mark.slow
@parametrize_with_checks([annotated, mingpt_style], checks=[SLOW])
def test_both_styles_pass_check_entropy_bound(model, check):
    check(model)


# --- Models broken on purpose, and correct ones ------------------------------


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize("model", as_parameters(BROKEN))
def test_a_broken_model_is_caught_by_its_check(model):
    (result,) = model.assert_caught().results
    assert result.message
    if model.check == CAUSALITY:
        assert not result.proof["proved"]


@pytest.mark.parametrize(
    "kind", [BiasOfTrainingNotSaved, AverageOfTrainingNotSaved]
)
def test_a_saved_value_of_training_is_not_a_fault(kind):
    saved = type(kind.__name__, (kind,), {"saved": True})
    (result,) = check_model(saved, checks=["state_dict"]).results
    assert result.status == "passed", result.message


@pytest.mark.slow
@pytest.mark.usefixtures("calls_of_a_second")
@pytest.mark.parametrize(
    "model",
    as_parameters(
        b for b in BROKEN if b.check in SHARES and b.name not in TRIED_LAST
    ),
)
def test_a_broken_model_with_slow_calls_is_caught(model):
    model.assert_caught()


@pytest.mark.slow
@pytest.mark.usefixtures("one_layer", "calls_of_a_second")
@pytest.mark.parametrize("model", as_parameters(b for b in BROKEN if b.only))
def test_a_fault_of_one_property_fails_only_its_check(model):
    others = CHECKS.keys() - {SLOW, model.check}
    report = model.report(checks=others, budget=300)
    assert report.ok, str(report)


def is_accused_of_nothing(model, report):
    assert report.ok, str(report)
    for proof in [r.proof for r in report.results if CAUSALITY == r.name]:
        holds = proof and (proof["proved"] or proof["conditional"])
        assert holds is (not model.open)


@pytest.mark.slow
@pytest.mark.usefixtures("calls_of_a_second")
@pytest.mark.parametrize("model", as_parameters(CORRECT))
def test_a_correct_model_passes_every_check(model, monkeypatch):
    """A check that runs out of time is run once more, with more time."""
    monkeypatch.setattr(GPT, "layers", 1 + model.deep)
    checks = CHECKS.keys() - {SLOW}
    for budget in (300, 600):
        report = model.report(checks=checks, budget=budget)
        is_accused_of_nothing(model, report)
        late = [r.name for r in report.results if "no time: " in r.message]
        if not (checks := late):
            break
    assert not late


@pytest.mark.slow
@pytest.mark.parametrize("model", as_parameters(CORRECT)[3::6])
def test_a_correct_model_of_two_layers_passes_with_all_the_time(model):
    is_accused_of_nothing(model, model.report())


def test_lazily_imported_names_are_listed():
    names = {}
    exec("from gpt_duet.invariants import *", names)
    assert names["check_model"] is check_model
    assert "prove_causality" in dir(sys.modules["gpt_duet.invariants"])


def test_every_check_explains_itself_and_has_models_that_break_it():
    for name, check in CHECKS.items():
        for part in ("Why:", "How:", "If it fails:", "Reports:"):
            assert part in check.__doc__, (name, part)
    assert CHECKS.keys() == MEASUREMENTS.keys()
    assert CHECKS.keys() == {model.check for model in BROKEN if model.only}


# --- The text of a failure --------------------------------------------------


def test_the_case_in_a_message_can_be_reproduced():
    report = check_model(leaky, checks=["causality"])
    words = report.results[0].message.replace(";", "").split()
    old, new = (int(words[words.index(w) + 1]) for w in ("from", "to"))
    size = float(words[words.index("by") + 1])
    first = int(words[words.index("ids") + 1])
    torch.manual_seed(0)
    model = leaky().double().eval()
    one, two = (model(torch.tensor([[first, t]]))[0, 0] for t in (old, new))
    moved = float((one - two).detach().abs().max())
    assert moved == pytest.approx(size, rel=0.05)


class TimeFirst(GPT):
    """A wrapper that takes tokens and masks as (time, batch)."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens, attention_mask=None):
        masks = () if attention_mask is None else (attention_mask.mT,)
        return self.inner(tokens.mT, *masks).transpose(0, 1)


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("no_mask", "inner.blocks.0.mixer"),
        ("packed_row_unmasked", "in train mode"),
        ("padding_in_training", "in train mode with a left-padded"),
    ],
)
def test_a_leak_is_found_with_time_as_first_axis(fault, where):
    report = check_model(
        lambda: TimeFirst(BUILDS[fault]()), checks=["causality"], layout="tb"
    )
    assert report.failed == ["check_causality"]
    assert where in report.results[0].message


@pytest.mark.usefixtures("one_layer", "calls_of_a_second")
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_blocks_work(length):
    report = check_model(lambda: GPT(block_size=length))
    assert report.ok, str(report)
    calls = {r.name: (r.forwards, r.backwards) for r in report.results}
    assert min(calls["check_gradient_flow"]) > 0


# --- The runner -------------------------------------------------------------


def test_a_result_counts_the_calls_of_its_own_check_only():
    alone = check_model(GPT, checks=["finite"]).results[0]
    after = check_model(GPT, checks=["shape", "finite"]).results[1]
    assert after.name == alone.name == "check_finite"
    assert after.forwards == alone.forwards > 0


def test_report_as_table_json_and_exception():
    came = []
    report = check_model(
        leaky,
        checks=["causality", "cache", "shape"],
        on_progress=lambda report: came.append(len(report.results)),
    )
    assert came == [0, 1, 2, 3]
    assert (report.ok, report.failed) == (False, ["check_causality"])
    statuses = [result.status for result in report.results]
    assert statuses == ["passed", "failed", "skipped"]
    content = json.loads(report.to_json())
    assert content["failed"] == ["check_causality"]
    assert content["results"][1]["message"] in report.results[1].message
    with pytest.raises(AssertionError, match="position 0 sees token 1"):
        report.raise_for_failures()
    head, columns, shape, *_, last = str(report).splitlines()
    assert repr(report) == str(report)  # pytest shows a report by its repr
    assert head == f"leaky: {VOCAB} tokens, sequences to {BLOCK}"
    assert columns.split() == ["check", "s", "what", "was", "found"]
    assert shape.split()[:2] == ["check_shape", "passed"]
    others = f"{len(CHECKS) - 3} others not run (check --list shows them)"
    assert last == f"1 passed, 1 failed, 1 skipped; {others}"
    assert "check_causality:\ninfluence" in str(report)
    narrow = report.table(width=70)
    assert max(map(len, narrow.splitlines())) <= 70
    assert narrow.split() == str(report).split()


def test_expected_failures_do_not_count():
    reasons = {"causality": "it is an encoder", "check_shape": "none"}
    checks = ["causality", "shape"]
    report = check_model(leaky, checks=checks, expected_failures=reasons)
    assert (report.ok, report.failed) == (True, [])
    shape, causality = report.results
    assert (shape.status, causality.status) == ("passed", "expected")
    assert "expected to fail" in shape.message
    assert causality.message.startswith("it is an encoder")
    report.raise_for_failures()


class Mixed(GPT):
    """An encoder in which one line also mixes the rows of a batch."""

    def scores(self, x):
        return super().scores(x + x.mean((0, 1)))


def test_an_expected_failure_hides_no_other_of_its_line():
    names = ["causality", "batch_independence"]
    for reasons, failed in ((None, names[:1]), ({names[0]: ""}, names[1:])):
        report = check_model(Mixed, checks=names, expected_failures=reasons)
        assert report.failed == [f"check_{name}" for name in failed]


class ThroughNumpy(GPT):
    """A sound GPT whose proof is open: its numbers leave torch."""

    def scores(self, x):
        return (
            super().scores(x) + torch.from_numpy(x.detach().numpy())[..., :1]
        )


def test_rows_without_a_proof_are_tried():
    report = check_model(ThroughNumpy, checks=["batch_independence"])
    (found,) = report.results
    assert found.status == "passed"
    assert "tested: alone, reordered, repeated" in found.message


def test_the_number_of_threads_is_one_or_as_requested():
    seen = []

    class Told(GPT):
        def forward(self, tokens):
            seen.append(torch.get_num_threads())
            return super().forward(tokens)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for asked, count in ((None, 1), (3, 3)):
            check_model(Told, checks=["shape"], threads=asked)
            assert (seen[-1], torch.get_num_threads()) == (count, 2)
        mark = parametrize_with_checks([Told], checks=["shape"])
        model, check = mark.args[1][0].values
        check(model)
        assert (seen[-1], torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


def test_a_leak_that_pytest_reports_comes_with_its_map():
    mark = parametrize_with_checks([leaky], checks=["causality"])
    model, check = mark.args[1][0].values
    with pytest.raises(AssertionError, match="position 0") as caught:
        check(model)
    (drawn,) = caught.value.__notes__
    assert len(drawn.splitlines()) > 5


def test_parametrize_names_and_marks():
    def test(model, check):
        pass

    mark = parametrize_with_checks(
        [GPT, GPT, type("GPT(11,\n  8)", (GPT,), {}), leaky],
        checks=["shape", "causality"],
        expected_failures=lambda model: (
            {"causality": "a reason"} if model is leaky else {}
        ),
        strict=True,
    )(test).pytestmark[0]
    ids = [parameter.id for parameter in mark.args[1]]
    assert ids == [
        f"{model}-check_{name}"
        for model in ("GPT", "GPT#2", "GPT(11, 8)", "leaky")
        for name in ("shape", "causality")
    ]
    marks = [list(p.marks) for p in mark.args[1]]
    assert marks[:-1] == [[]] * 7
    assert marks[-1][0].kwargs == {"reason": "a reason", "strict": True}
    model, check = mark.args[1][-1].values
    assert repr(check) == "check_causality"
    with pytest.raises(AssertionError, match="position 0 sees token 1"):
        check(model)
    with pytest.raises(TypeError, match="vocabulary"):
        parametrize_with_checks([GPT], vocabulary=5)


def test_checks_of_a_model_prepare_it_once():
    built = []

    def build():
        built.append(1)
        return GPT()

    mark = parametrize_with_checks([build, GPT], checks=["shape", "finite"])
    rows = [parameter.values for parameter in mark.args[1]]
    for row, count in ((0, 2), (0, 1), (2, 0), (0, 2)):
        built.clear()
        model, check = rows[row]
        check(model)
        assert len(built) == count


FAILING = """
import pytest
from torch import nn
from gpt_duet import check_model, parametrize_with_checks


class Leaky(nn.Embedding):
    vocab_size, block_size = 5, 4

    def __init__(self):
        super().__init__(5, 5)

    def forward(self, idx):
        return super().forward(idx.flip(1))


class Crashing(Leaky):
    def forward(self, idx):
        if self.training:
            raise RuntimeError("not in train mode")
        return super().forward(idx)


@parametrize_with_checks([Leaky, Crashing], checks=["finite", "causality"])
def test_my_gpt(model, check):
    check(model)


def test_the_whole_report():
    check_model(Leaky, checks=["causality"]).raise_for_failures()
"""


@pytest.mark.unhooked  # --check-shapes adds frames to the traceback
def test_pytest_shows_the_users_line_and_the_message(pytester, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makepyfile(test_mine=FAILING)
    shown = str(pytester.runpytest_inprocess("-q").stdout)
    assert ">       check(model)" in shown or ">   check(model)" in shown
    assert "shared/" not in shown
    assert shown.count("\n") < 120, shown
    leak = "FAILED test_mine.py::test_my_gpt[Leaky-check_causality] - Asserti"
    assert f"{leak}onError: position 0 sees token 1" in shown
    assert 'raise RuntimeError("not in train mode")' in shown


IMPORTS = """
import sys, torch
before = set(sys.modules)
import gpt_duet.invariants
from gpt_duet.invariants import check_model
report = str(check_model(lambda x: torch.zeros(*x.shape, 5), vocab_size=5,
                         block_size=4, checks=["shape"]))
assert "1 passed" in report
print(*{name.split(".")[0] for name in sys.modules.keys() - before})
"""


@pytest.mark.slow
def test_checks_import_little_besides_torch():
    """Neither the import nor a printed report loads the commands' modules."""
    run = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split()) - sys.stdlib_module_names
    ours = {"gpt_duet", "shared", "jaxtyping", "numpy", "torch"}
    # numpy loads modules whose names contain "cython"
    assert not [n for n in loaded - ours if "cython" not in n]


# --- State around a run -----------------------------------------------------


def some_checks(model):
    names = ["shape", "finite", "state_dict", "dtype"]
    report = check_model(model, checks=names)
    assert report.ok, str(report)


def one_check(model):
    mark = parametrize_with_checks([model], checks=["finite"])
    model, check = mark.args[1][0].values
    check(model)
    CHECKS["check_state_dict"](meet(model))


def others(model):
    assert prove_causality(model, lengths=[5]).proved
    assert influence(model, [3, 1, 4], rounds=1).triu(1).eq(0).all()
    assert diff_by_value(model, model).same
    with pytest.raises(ValueError, match="no cache was found"):
        diff_cache(model)


RUNS = (
    some_checks,
    one_check,
    # this is slow because it makes five calls instead of one
    pytest.param(others, marks=pytest.mark.slow),
)


def settings():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_device(),
    )


@pytest.mark.unhooked
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu", torch.bfloat16),
        partial(torch.device, "meta"),
    ],
)
def test_settings_around_a_run_change_nothing(around, run):
    given = GPT()
    with around():
        before = settings()
        if run is not others:
            run(GPT)
        run(given)
        assert settings() == before


@pytest.mark.unhooked
@pytest.mark.parametrize("run", RUNS)
def test_each_part_keeps_its_mode(run):
    given = GPT()
    given.blocks[0].eval()
    modes = [part.training for part in given.modules()]
    run(given)
    assert [part.training for part in given.modules()] == modes


@pytest.mark.slow
@pytest.mark.unhooked
def test_runs_of_several_threads_wait_for_each_other():
    """Threads share the seeds, the hooks and the standard output."""
    found, stdout = [], sys.stdout

    def check_often():
        for _ in range(4):
            checks = ["determinism", "purity", "finite"]
            found.append(check_model(GPT, checks=checks))

    threads = [Thread(target=check_often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.ok for report in found] == [True] * 12
    assert sys.stdout is stdout


# --- The picture ------------------------------------------------------------


def test_influence_is_a_lower_triangle_for_a_causal_model():
    tokens = torch.randint(VOCAB, (12,))
    matrix = influence(GPT, tokens)
    assert matrix.shape == (12, 12)
    assert matrix.triu(1).eq(0).all()
    assert matrix[torch.ones(12, 12).tril().bool()].gt(0).all()
    leak = influence(leaky, tokens)
    assert leak.triu(1).gt(0).sum() == 66


@pytest.mark.unhooked
def test_influence_uses_the_inputs_of_the_model():
    model = next(m for m in BROKEN if m.name == "documents_replace_the_mask")
    ids, docs = torch.arange(6), torch.tensor([[0, 0, 0, 1, 1, 1]])
    matrix = influence(model.build, ids, inputs={"doc_ids": lambda _: docs})
    seen = (matrix > 0).long()
    assert seen.equal((docs.T == docs).long())
    with pytest.raises(ValueError, match="inputs take a function from tok"):
        influence(model.build, ids, inputs={"doc_ids": docs})


@pytest.mark.unhooked
def test_influence_refuses_invalid_sequences():
    assert influence(GPT().double(), [[3, 1, 4]], rounds=1).shape == (3, 3)
    for tokens, words in (
        ([0] * 40, "40 tokens are more than the 32"),
        ([0, 17], "17 is outside the vocabulary of 17"),
        ([-1], "-1 is outside the vocabulary of 17"),
        (torch.zeros(2, 3, dtype=torch.long), "one sequence"),
        ([], "one sequence"),
        ([0.5], "whole numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            influence(GPT, tokens)


def test_the_map_shows_a_leak(tmp_path):
    tokens = torch.randint(VOCAB, (10,))
    sound, leak = influence(GPT, tokens), influence(leaky, tokens)
    assert "X" not in text_map(sound)
    assert text_map(leak).count("X") == 45
    for matrix, count in ((sound, 0), (leak, 45)):
        image = colours(matrix)
        assert 0 <= image.min() <= image.max() <= 1
        red = image[..., 0] - image[..., 2] > 0.3
        assert red.sum() == red.triu(1).sum() == count
    future = torch.ones(10, 10, dtype=torch.bool).triu(1)
    assert colours(sound)[future].equal(colours(sound * 0)[future])

    figure = draw_map(leak)
    axes, words = figure.axes[0], figure.legends[0].get_texts()
    patches = zip(words, figure.legends[0].get_patches(), strict=True)
    shown = {word.get_text(): p.get_facecolor()[:3] for word, p in patches}
    assert shown["leak: a later token is seen"] == LEAK
    assert shown["no influence"] == NONE
    assert shown["large influence"] == CAUSAL
    assert axes.images[0].get_array().shape == (10, 10, 3)
    save_map(leak, tmp_path / "map.png")
    data = (tmp_path / "map.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    save_map(leak, tmp_path / "map.html", "a <leak>")
    page = (tmp_path / "map.html").read_text()
    assert "a &lt;leak&gt;" in page
    assert "45 cells above the diagonal" in page
    assert page.count("<svg") == page.count("</svg>") == 1
    with pytest.raises(ValueError, match=r"map\.gif"):
        save_map(leak, tmp_path / "map.gif")


class Overflowing(GPT):
    """At each position, one score is NaN."""

    def scores(self, x):
        scores = super().scores(x)
        return torch.cat([scores[..., :1] * torch.nan, scores[..., 1:]], -1)


@pytest.mark.slow
@pytest.mark.usefixtures("one_layer")
def test_a_score_that_is_nan_is_one_failure():
    report = check_model(Overflowing, block_size=8)
    assert report.failed == ["check_finite"], str(report)
    said = [result.message for result in report.results]
    assert sum(text.startswith("see check_finite: ") for text in said) == 9
    (alone,) = check_model(
        Overflowing, checks=["causality"], block_size=8
    ).results
    assert "scores that are compared are NaN" in alone.message
