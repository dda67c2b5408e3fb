"""Runs the checks on a model, one after the other."""

import io
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from .checks import CHECKS, FORWARDS, IMPLIED, SLOW
from .errors import SkipCheck, UnusableModel, cause_of, place_of, sentence
from .model.randomness import isolated
from .model.subject import Subject
from .report import CheckResult, Report


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
        budget: seconds; a check that is likely to end later is skipped.
        debug: let an exception that no check expects end the run.
        on_progress: called with the report before the first check, and as
            each one ends.

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
            estimates=_estimates(subject, names, threads),
            left_out=[name for name in CHECKS if name not in names],
        )
    training = getattr(model_or_factory, "training", None)
    try:
        on_progress(report)
        for name in names:
            likely_end = report.seconds + report.estimates[name]
            if budget is not None and likely_end > budget:
                words = (
                    f"about {report.estimates[name]:.0f} s, which goes beyond "
                    f"the {budget:.0f} s there are"
                )
                result = CheckResult(name, "skipped", words, 0.0)
            else:
                with redirect_stdout(printed), subject.few_threads(threads):
                    result = run_check(subject, name, expected, report, debug)
            report.results.append(result)
            on_progress(report)
    except KeyboardInterrupt:
        report.interrupted = True
        done = len(report.results)
        report.results += [
            CheckResult(name, "skipped", "interrupted", 0.0)
            for name in names[done:]
        ]
    finally:
        if training is not None and isinstance(
            model_or_factory, torch.nn.Module
        ):
            model_or_factory.train(training)
    report.notes = list(dict.fromkeys(subject.notes))
    lines = printed.getvalue().splitlines()
    if lines:
        report.notes.append(
            f"the model printed {len(lines)} lines, the first: "
            f"{lines[0][:80]!r}"
        )
    return report


def _estimates(
    subject: Subject, names: list[str], threads: int | None
) -> dict[str, float]:
    """Return about how many seconds each check takes, from one forward."""
    if subject.fault:
        return dict.fromkeys(names, 0.0)
    model = subject.build()
    tokens = torch.zeros(1, subject.block_size, dtype=torch.long)
    try:
        with isolated(subject.seed), subject.few_threads(threads):
            subject.scores(model, tokens)  # the first call is slower
            start = time.perf_counter()
            subject.scores(model, tokens).sum().item()  # waits for a device
    except AssertionError:  # a check will tell
        return dict.fromkeys(names, 0.0)
    seconds = time.perf_counter() - start
    if subject.heavy:  # fewer long sequences are tried
        seconds /= 4
    return {name: FORWARDS.get(name, 50) * seconds for name in names}


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
    report: Report | None = None,
    debug: bool = False,
) -> CheckResult:
    """Run one check and return its outcome; only Ctrl-C gets through."""
    start = time.perf_counter()
    status, detail = "passed", ""
    try:
        if subject.fault and name != "check_shape":
            raise SkipCheck("see check_shape")
        with isolated(subject.seed):
            message = CHECKS[name](subject)
        if name in expected:
            message = f"{message}; expected to fail: {expected[name]}"
    except SkipCheck as skip:
        status, message = "skipped", str(skip)
    except (AssertionError, UnusableModel) as error:
        status, message = "failed", str(error)
        detail = "\n".join(getattr(error, "__notes__", []))
        first = subject.told.setdefault(cause_of(error), name)
        if IMPLIED.get(name) in subject.told.values():
            first = IMPLIED[name]
        if first != name:
            status, message = "skipped", f"see {first}: {message}"
    except Exception as error:
        if debug:
            raise
        place = place_of(error)
        status = "failed" if place else "error"
        message = (
            f"the model raised {sentence(error)} ({place})"
            if place
            else f"a fault of the check, not of the model: {_ours(error)}"
        )
    if status == "failed" and name in expected:
        status, message = "expected", f"{expected[name]}: {message}"
    if detail and report is not None and status == "failed":
        report.details[name] = detail
    return CheckResult(name, status, message, time.perf_counter() - start)


def _ours(error: BaseException) -> str:
    """Return an exception of the kit's own, with its file and line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{sentence(error)} ({Path(frame.filename).name}:{frame.lineno})"
