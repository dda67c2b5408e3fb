"""Runs the checks on a model, one after the other."""

import io
import math
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from .checks import CHECKS, COPIES, COSTS, IMPLIED, SHARES, SLOW
from .errors import SkipCheck, UnusableModel, cause_of, place_of, sentence
from .model.randomness import isolated
from .model.subject import Subject
from .report import CheckResult, Report

DEFAULT = 225.0  # seconds: to meet the model takes some, too
FIRST = ("check_shape", "check_causality")  # where time is short


def check_model(
    model_or_factory: Any,
    *,
    vocab_size: int | None = None,
    block_size: int | None = None,
    outputs: str = "auto",
    checks: Collection[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    layout: str = "bt",
    threads: int | None = None,
    budget: float | None = None,
    debug: bool = False,
    on_progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run the checks on a model and report what holds.

    Args:
        model_or_factory: an nn.Module, a callable from (batch, time) ids to
            scores, or a function without arguments that builds one of these
            (preferred: each check then has a fresh model).
        vocab_size: number of tokens; None: as the model declares it.
        block_size: longest sequence to try; None: as the model declares it.
        outputs: "logits", "log_probs" or "auto".
        checks: names of those to run; None: all but the slow one.
        expected_failures: reasons by name of a check: such a failure has
            the status "expected".
        seed: of weights and tokens.
        device: where to run; None: where the model is.
        layout: "tb" for a model that takes (time, batch).
        threads: on the CPU; None: one for a small model.
        budget: seconds; what finds most is tried first, and the report
            says what was left out. None: four minutes where all would take
            longer; math.inf: all is tried.
        debug: let an exception that no check expects end the run.
        on_progress: called with the report before the first check, as
            each one ends, and when one has something to tell before.

    Returns:
        The report: print it, or ask for .ok, .failed and .results.

    Raises:
        ValueError: for a model that cannot be built, called or read, an
            unknown check, and sizes that contradict the model's own.
    """
    names = choose_checks(checks)
    expected = dict(expected_failures or {})
    choose_checks(expected)
    printed = io.StringIO()
    with redirect_stdout(printed), isolated(seed):
        subject = Subject(
            model_or_factory,
            vocab_size=vocab_size,
            block_size=block_size,
            outputs=outputs,
            seed=seed,
            device=device,
            layout=layout,
        )
        if "check_shape" not in names:
            subject.require_scores()
        report = Report(
            subject.name,
            subject.vocab_size,
            subject.block_size,
            asked=names,
            estimates=dict.fromkeys(names, 0.0),
            left_out=[name for name in CHECKS if name not in names],
        )
        with subject.few_threads(threads):
            budget = _plan(subject, report, budget)

    def tell(text: str) -> None:
        report.interim = text
        on_progress(report)
        report.interim = ""

    subject.tell = tell
    training = getattr(model_or_factory, "training", False)
    try:
        on_progress(report)
        for name in report.asked:
            least = 0.0 if name in SHARES else report.estimates[name]
            seconds = _allowance(subject, report, budget)
            if seconds <= 0 or seconds < least:
                words = f"no time: about {report.estimates[name]:.0f} s, "
                words += f"{max(seconds, 0):.0f} left of {budget:.0f}"
                result = CheckResult(name, "skipped", words, 0.0)
            else:
                subject.costs.start(subject.costs.spent + seconds)
                with redirect_stdout(printed), subject.few_threads(threads):
                    result = run_check(subject, name, expected, report, debug)
            report.results.append(result)
            on_progress(report)
    except KeyboardInterrupt:
        report.interrupted = True
        report.results += [
            CheckResult(name, "skipped", "interrupted", 0.0)
            for name in report.asked[len(report.results) :]
        ]
    finally:
        if isinstance(model_or_factory, torch.nn.Module):
            model_or_factory.train(training)
    report.notes = list(dict.fromkeys(subject.notes))
    if lines := printed.getvalue().splitlines():
        words = f"the model printed {len(lines)} lines, the first: "
        report.notes.append(f"{words}{lines[0][:80]!r}")
    return report


def _plan(subject: Subject, report: Report, budget: float | None) -> float:
    """Estimate what checks take, and return the seconds that there are."""
    if subject.fault:
        return math.inf
    try:
        finite = subject.measure()
    except AssertionError:  # a check will tell
        return math.inf
    costs, time = subject.costs, subject.block_size
    for name in report.asked:
        calls, rows = COSTS[name]
        copies = COPIES.get(name, 2) * costs.build
        report.estimates[name] = costs.of(rows * time, calls) + copies
    total = sum(report.estimates.values())
    if budget is None:
        slow = sum(report.estimates[n] for n in SLOW & {*report.asked})
        budget = DEFAULT + slow if total - slow > DEFAULT else math.inf
    if total <= budget:
        return math.inf
    report.plan = (
        f"one forward of {time:,} tokens takes {costs.of(time):.2g} s: "
        f"about {_words(budget)}; --thorough tries all, in {_words(total)}"
    )
    if finite:  # what matters most
        report.asked.sort(key=lambda name: name not in FIRST)
    costs.begin(budget)
    return budget


def _words(seconds: float) -> str:
    """Return a time as one says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes"


def _allowance(subject: Subject, report: Report, budget: float) -> float:
    """Return the seconds that the next check may spend.

    Those that ask as they go share what the others will leave: at least half
    of what there is.
    """
    left = budget - subject.costs.spent
    name, *rest = report.asked[len(report.results) :]
    if name not in SHARES:
        return left
    fixed = sum(report.estimates[n] for n in rest if n not in SHARES)
    shares = sum(SHARES.get(n, 0) for n in (name, *rest))
    return max(left - fixed, left / 2) * SHARES[name] / shares


def choose_checks(names: Collection[str] | None) -> list[str]:
    """Return full names of checks, in the order of the list.

    Args:
        names: with or without "check_"; None: all but the slow one.

    Raises:
        ValueError: for an unknown name, with those known.
    """
    if names is None:
        return [name for name in CHECKS if name not in SLOW]
    if isinstance(names, str):
        names = [names]
    full = {n if n.startswith("check_") else f"check_{n}" for n in names}
    unknown = sorted(full - CHECKS.keys())
    if unknown:
        raise ValueError(
            f"unknown check {', '.join(unknown)}; known: {', '.join(CHECKS)}"
        )
    return [name for name in CHECKS if name in full]


def run_check(
    subject: Subject,
    name: str,
    expected: Mapping[str, str],
    report: Report,
    debug: bool = False,
) -> CheckResult:
    """Run one check and return its outcome; only Ctrl-C gets through."""
    start = time.perf_counter()
    costs = subject.costs
    calls, backwards = costs.calls, costs.backwards
    status, detail, subject.less = "passed", "", ""
    try:
        if subject.fault and name != "check_shape":
            raise SkipCheck("see check_shape")
        with isolated(subject.seed):
            message = CHECKS[name](subject)
        if left_out := costs.not_tried():
            if not costs.granted:
                raise SkipCheck(f"no time for {left_out}")
            message += f"; no time for {left_out}"
        if subject.less:
            message = f"less tested, {subject.less}: {message}"
        if name in expected:
            message = f"{message}; expected to fail: {expected[name]}"
    except SkipCheck as skip:
        status, message = "skipped", str(skip)
    except (AssertionError, UnusableModel) as error:
        status, message = "failed", str(error)
        detail = "\n".join(getattr(error, "__notes__", []))
        first = subject.failed_first.setdefault(cause_of(error), name)
        failed = subject.failed_first.values()
        first = next((n for n in IMPLIED.get(name, ()) if n in failed), first)
        if first != name:
            status, message = "skipped", f"see {first}: {message}"
    except Exception as error:
        if debug:
            raise
        if place := place_of(error):
            status = "failed"
            message = f"the model raised {sentence(error)} ({place})"
        else:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            status = "error"
            message = (
                f"a fault of the check, not of the model: {sentence(error)} "
                f"({Path(frame.filename).name}:{frame.lineno})"
            )
    if status == "failed" and name in expected:
        status, message = "expected", f"{expected[name]}: {message}"
    if detail and status == "failed":
        report.details[name] = detail
    return CheckResult(
        name,
        status,
        message,
        time.perf_counter() - start,
        costs.calls - calls,
        costs.backwards - backwards,
        subject.less if status == "passed" else "",
    )
