"""check_scorer fails each broken scorer and passes each sound one."""

import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scorers import (
    FILE,
    MARK,
    SCORERS,
    TIME,
    one_pass,
    two_passes,
    uniform,
)
from small_gpt import VOCAB

from gpt_duet import check_scorer
from gpt_duet.invariants import UnusableModel
from gpt_duet.scoring.scores import diff_scores

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def checked(make, **settings):
    settings = {"block_size": TIME, "budget": math.inf} | settings
    return check_scorer(make, vocab_size=VOCAB, **settings)


@pytest.mark.parametrize("row", SCORERS, ids=lambda row: row.make.__name__)
def test_a_broken_scorer_fails_the_check_of_its_property(row):
    report = checked(row.make, **row.settings)
    assert {*report.failed} == row.fails, report
    assert not report.errors, report
    said = " ".join(str(report).split())
    assert all(words in said for words in row.words), report


def raising(where):
    """Return a scorer that raises always, or only if a certain id occurs."""

    def make():
        def score(tokens):
            if where == "always" or (tokens[1:] == MARK).any():
                raise KeyError("no such id")
            return one_pass()(tokens)

        return score

    return make


def test_a_scorer_that_raises_has_no_verdict():
    """It counts as neither sound nor broken; a message names its line."""
    with pytest.raises(UnusableModel, match=r"KeyError: .*test_scorers.py, l"):
        checked(raising("always"))
    # no text has this id, but the checks replace tokens by it
    report = checked(raising("at times"), bos=MARK, block_size=8)
    assert not report.ok
    assert not report.failed, report
    assert "no verdict: score of 8 tokens raised KeyError" in str(report)


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (one_pass, {"bos": VOCAB}, "bos must be an id from 0 to 16, got 17"),
        (one_pass, {"documents": len}, "documents must be an id"),
        (one_pass, {"block_size": 7}, "block_size must be at least 8, got 7"),
        (one_pass, {"state": "old"}, "state must be"),
        (lambda: 3, {}, "make_score must return score"),
        (lambda: len, {}, "score returned int for 32 tokens"),
        (lambda: lambda t: t[None], {}, r"of shape \(1, 32\) for 32 tokens"),
        (lambda: lambda t: [(len(t), -1.0)], {}, "position 32 for 32 tokens"),
    ],
)
def test_a_mistake_is_one_line(make, settings, words):
    with pytest.raises(ValueError, match=words):
        checked(make, **settings)


def test_a_time_limit_cuts_off_the_end():
    make = partial(uniform, 50_000)
    report = check_scorer(make, vocab_size=50_000, budget=0.5)
    assert not report.failed, report
    assert any(result.not_tried for result in report.results), report
    assert "of 50,000)" in str(report)


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (lambda s: s, r"^one scorer: scores differ by up to 0 \("),
        (lambda s: s.half(), r"^one scorer: scores differ by up to 0\.00"),
        (lambda s: s / math.log(2), r"position 1 \(token 1\).* right .* bits"),
        (lambda s: s.index_fill(0, torch.tensor([4]), -3.0), "at position 5 "),
        (lambda s: torch.cat([s[:1] * math.nan, s[1:]]), "only one side: 1$"),
    ],
)
def test_diff_scores_names_where_two_scorers_differ(right, words, tmp_path):
    scores = one_pass()(torch.tensor(TEXT))
    file = tmp_path / "engine.npz"
    np.savez(file, tokens=TEXT, log_probs=right(scores).numpy())
    found = diff_scores(one_pass, file)
    assert re.search(words, found.sentence), found.sentence
    assert found.same == words.startswith("^"), found.sentence


def test_files_of_another_text_are_refused(tmp_path):
    file = tmp_path / "engine.npz"
    np.savez(file, tokens=TEXT, log_probs=np.zeros(3))
    with pytest.raises(ValueError, match="has 3 scores for 15 tokens"):
        diff_scores(one_pass, file)
    with pytest.raises(
        ValueError, match="another text: 15 ids, but the given text has 2"
    ):
        diff_scores(one_pass, file, [1, 2])
    with pytest.raises(ValueError, match="no tokens: give a text"):
        diff_scores(one_pass, two_passes)


@pytest.fixture
def here(tmp_path, monkeypatch, duet):
    monkeypatch.chdir(tmp_path)
    # so that a slow machine prints no line about its slowness
    monkeypatch.setattr("gpt_duet.cli.check.SILENCE", 600.0)
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "ids.txt").write_text("1 2 3\n4 5\n")
    return duet


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        pytest.param(
            "mine:make --vocab-size 11 --documents 3",
            0,
            "6 passed",
            marks=pytest.mark.slow,
        ),
        (
            "mine:peek --vocab-size 11 --bytes-per-token mine:characters",
            1,
            "3 passed, 3 failed",
        ),
        ("mine:raises --vocab-size 11", 2, "(mine.py, line 16)"),
        ("mine:table --vocab-size 11", 2, "gives Tensor"),
        ("mine:make", 2, "--scorer requires --vocab-size"),
        ("mine:make --vocab-size 11 --only shape", 2, "takes no --only"),
        ("mine:make --vocab-size 11 mine:x", 2, "--scorer takes no model"),
    ],
)
def test_the_command_checks_a_scorer(here, words, status, said):
    found = here("check", "--block-size", 8, "--scorer", *words.split())
    assert found[0] == status, found
    assert said in " ".join(found[1:]), found


def test_an_option_for_scorers_requires_a_scorer(here):
    found = here("check", "annotated", "--bos", 1)
    assert found == (2, "", "gpt-duet: --bos requires --scorer\n")


def test_the_command_compares_two_scorers(here):
    both = "diff", "--scores", "mine:make"
    assert here(*both, "mine:make", "ids.txt")[0] == 0
    status, out, _ = here(*both, "mine:peek", "1,2,3", "--json", "out.json")
    assert status == 1
    assert "they first differ at position 1 (token 2): " in out
    assert json.loads(Path("out.json").read_text())["first"] == 1
    assert "neither a file nor ids" in here(*both, "mine:peek", "no.txt")[2]
    assert "takes LEFT RIGHT TEXT" in here(*both)[2]
    assert "(mine.py, line 16)" in here(*both, "mine:raises", "1,2")[2]
