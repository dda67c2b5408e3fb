"""Strangers' models: one cause is one failure, said where it belongs."""

import random
import re

import torch
from small_gpt import DIM, GPT

from gpt_duet.invariants import CHECKS, check_model
from gpt_duet.invariants.checks import outputs


def found(report):
    """The failures, and what the others were skipped for."""
    skipped = [r.message for r in report.results if r.status == "skipped"]
    return report.failed, [m for m in skipped if m.startswith("see ")]


def message(report, name):
    return next(r.message for r in report.results if r.name == name)


# --- One cause, one failure -------------------------------------------------


class RefusesOneRow(GPT):
    def forward(self, tokens):
        if tokens.size(0) == 1:
            raise RuntimeError("one row is too few")
        return super().forward(tokens)


class CannotGoBack(GPT):
    """Changes in place what the backward pass needs."""

    def add_parts(self, dim):
        self.register_buffer("gain", torch.ones(DIM))

    def scores(self, x):
        x = x * self.gain
        self.gain.fill_(1)
        return super().scores(x)


class FailsInTraining(GPT):
    def body(self, x, mask):
        return x.view(-1, 7) if self.training else super().body(x, mask)


def test_what_others_would_stumble_over_comes_first():
    first = ["check_shape", "check_finite", "check_determinism"]
    assert list(CHECKS)[:3] == first


def test_a_crash_is_told_once_with_the_users_line():
    report = check_model(RefusesOneRow)
    assert found(report)[0] == ["check_shape"], str(report)
    told = message(report, "check_shape")
    assert "RuntimeError: one row is too few" in told
    assert re.search(r"test_meeting\.py, line \d+\)", told), told


def test_a_crash_says_what_was_asked():
    for model, words in (
        (CannotGoBack, "in the backward pass in eval mode"),
        (FailsInTraining, "in train mode"),
    ):
        report = check_model(model)
        failed, elsewhere = found(report)
        assert len(failed) == 1, str(report)
        assert words in message(report, failed[0])
        assert elsewhere
        assert all(m.startswith(f"see {failed[0]}: ") for m in elsewhere)


def test_a_fault_of_the_kit_is_no_failure_of_the_model(monkeypatch):
    monkeypatch.setattr(outputs, "draw", None)
    report = check_model(GPT, checks=["shape", "causality"])
    assert [r.status for r in report.results] == ["error", "passed"]
    assert "not of the model" in report.results[0].message
    assert "outputs.py:" in report.results[0].message
    assert (report.ok, report.failed) == (False, [])
    assert report.errors == ["check_shape"]
    assert "1 error" in str(report)


def test_pythons_random_is_called_that():
    class Draws(GPT):
        def forward(self, tokens):
            random.random()
            return super().forward(tokens)

    report = check_model(Draws, checks=["purity"])
    assert "state of Python's random" in report.results[0].message
