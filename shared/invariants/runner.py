"""Runs the checks on a model, one after the other."""

import io
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from .checks import CHECKS, SLOW
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
    on_result: Callable[[CheckResult], None] | None = None,
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
        on_result: called with each result as it comes.

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
        )
    report = Report(subject.name, subject.vocab_size, subject.block_size)
    training = getattr(model_or_factory, "training", None)
    try:
        for name in names:
            with redirect_stdout(printed):
                result = run_check(subject, name, expected, report)
            report.results.append(result)
            if on_result is not None:
                on_result(result)
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
) -> CheckResult:
    """Run one check and return its outcome; only Ctrl-C gets through."""
    start = time.perf_counter()
    status, detail = "passed", ""
    try:
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
        if first != name:
            status, message = "skipped", f"see {first}: {message}"
    except Exception as error:
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
