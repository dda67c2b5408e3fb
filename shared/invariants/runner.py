"""Runs the checks on a model, one after the other."""

import difflib
import io
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, Unpack

from ..notebooks import progress
from ..proof.proof import Proof
from ..running.budget import DEFAULT, HEAVY, Budget, OutOfTime
from ..running.context import isolated, one_run
from ..running.errors import (
    FoundOut,
    Leaked,
    SkipCheck,
)
from ..running.meeting import meet
from ..running.ranks import Parted, current, together
from ..settings import (
    CheckSettings,
    Settings,
    completed,
    settings_in,
    takes,
)
from .checks import CHECKS
from .outcomes import (
    MUST,
    PROOFS,
    STAGES,
    Outcome,
    outcome_of,
    places_of,
)
from .report import CheckResult, Report

FIRST = ("check_shape", MUST)  # where time is short
BRIEF = 0.8  # weight of a check that may take all of the time left


@takes(CheckSettings)
@one_run
def check_model(
    model_or_factory: Any,
    *,
    debug: bool = False,
    on_progress: Callable[[Report], None] | None = None,
    **settings: Unpack[CheckSettings],
) -> Report:
    """Run the checks on a model and report what holds.

    Args:
        model_or_factory: an nn.Module, a callable from (batch, time) ids to
            scores, or a function without arguments that builds one of these
            (preferred: each check then has a fresh model).
        debug: let an exception that no check expects end the run.
        on_progress: called with the report before the first check, as
            each one ends, and when one says how far it is. None: a notebook
            or a terminal shows the check under way, once it takes long.
        **settings: vocab_size, block_size, outputs, seed, device, layout,
            cache, inputs and documents, as the README describes them;
            compile: whether the model is compiled as well, and that program
            compared with it;
            checks: names of those to run; None: all but the slow one;
            expected_failures: reasons by name of a check: such a failure has
            the status "expected";
            threads: on the CPU; None: one for a small model;
            budget: seconds; what finds most is tried first, and the report
            says what was not tried. None: 130 for a model of over 2 million
            parameters, 225 for others. math.inf: all is tried;
            require_proof: let check_causality fail where it is not proved;
            allow_routing: let a proof under a condition be enough for that:
            texts that route tokens, or choose a path, as the one did that
            was followed.

    Returns:
        The report: print it, or read .ok, .failed and .results.

    Raises:
        ValueError: for a model that cannot be built, called or read, an
            unknown check, and sizes that contradict the model's own.
    """
    settings["checks"] = names = choose_checks(settings.get("checks"))
    expected = full_names(settings.get("expected_failures"))
    printed = io.StringIO()
    with redirect_stdout(printed), together("meeting the model"):
        run = Run(model_or_factory, **settings)
    subject = run.subject
    report = Report(
        subject.name,
        subject.vocab_size,
        subject.block_size,
        names=run.names,
        plan=run.plan,
        left_out=[name for name in CHECKS if name not in names],
        never_given=[*subject.never_given],
    )

    with progress(wanted=on_progress is None) as line:

        def show(report: Report) -> None:
            if not line.disable:
                line.set_description_str(report.under_way)

        announce = on_progress or show

        def tell(text: str) -> None:
            report.interim = text
            announce(report)
            report.interim = ""

        run.subject.budget.tell = tell
        try:
            announce(report)
            for name in report.names:
                if CHECKS[name].slow:
                    tell(f"{name} trains the model, which takes a while")
                with redirect_stdout(printed):
                    result, error = run.check(name, expected.get(name))
                if error is not None and result.status == "error" and debug:
                    raise error
                notes = getattr(error, "__notes__", [])
                if notes and result.status == "failed":
                    report.details[name] = "\n".join(notes)
                report.results.append(result)
                announce(report)
        except KeyboardInterrupt:
            report.interrupted = True
            report.results += [
                CheckResult(name, "skipped", "interrupted", 0.0)
                for name in report.names[len(report.results) :]
            ]
    report.notes = run.notes
    if lines := printed.getvalue().splitlines():
        words = f"the model printed {len(lines)} lines, the first: "
        report.notes.append(f"{words}{lines[0][:80]!r}")
    return report


class Run:
    """Runs checks on one model, for `check_model` and in pytest.

    It holds the subject, the budget, and which failure came first. What a
    check came to passes the stages of outcomes.py, in their order. Arguments
    and errors are those of `check_model`, names of checks are in full.
    """

    SAME = "check_determinism"  # first says that ranks return other scores

    def __init__(
        self, model_or_factory: Any, **settings: Unpack[CheckSettings]
    ):
        given = completed("check_model", CheckSettings, settings)
        own = {one.name: given[one.name] for one in settings_in(Settings)}
        checks, budget = choose_checks(given["checks"]), given["budget"]
        with isolated(given["seed"]):
            if (ranks := current()) is not None:
                ranks.apart = 0.0, ""  # of another model
            self.subject = meet(model_or_factory, **own)
            if "check_shape" not in checks:
                self.subject.require_scores()
            self.threads, self.proofs = (
                given["threads"],
                given["require_proof"],
            )
            self.conditions = given["allow_routing"]
            self.causes: dict[object, str] = {}  # the check that failed first
            heavy, self.plan = self.subject.heavy, ""
            short = heavy or budget is not None
            if budget is None:
                budget = HEAVY if heavy else DEFAULT
                if any(CHECKS[name].slow for name in checks):
                    budget = math.inf
            self.subject = replace(self.subject, budget=Budget(budget))
            if short and budget < math.inf:  # the main checks go first
                first = (*FIRST, "check_cache") if heavy else FIRST
                checks = sorted(checks, key=lambda name: name not in first)
                self.plan = (
                    f"at most {budget:.0f} s for {self.subject.parameters:,} "
                    f"parameters; --thorough tries all"
                )
            self.names, self._left = checks, [*checks]

    @property
    def notes(self) -> list[str]:
        """Notes on what is unusual about the model."""
        notes = [*self.subject.builder.notes, *self.subject.notes]
        return list(dict.fromkeys(notes))

    def check(
        self, name: str, expected: str | None = None
    ) -> tuple[CheckResult, Exception | None]:
        """Run one check; return its outcome, and what it raised.

        Expected is the reason for which a failure is expected.
        """
        budget = self.subject.budget
        calls, backwards = budget.calls, budget.backwards
        outcome = replace(self._call(name), expected=expected)
        for stage in STAGES:
            outcome = stage(self, outcome)
        error, proof = outcome.error, outcome.proof
        result = CheckResult(
            name,
            outcome.status,
            outcome.message,
            budget.elapsed,
            budget.calls - calls,
            budget.backwards - backwards,
            self._not_tried(outcome),
            None if proof is None else proof.to_dict(),
            error.facts if isinstance(error, Leaked) else None,
            places_of(outcome, self.subject),
        )
        return result, error

    def _call(self, name: str) -> Outcome:
        """Run one check and return what it came to, before any stage."""
        if name in self._left:
            self._left.remove(name)
        if (ranks := current()) is not None:
            ranks.begin(name)
        try:
            outcome = Outcome(name, "passed", self._run(name))
        except Exception as error:
            if isinstance(error, FoundOut):
                self.subject = replace(self.subject, **error.facts)
            outcome = outcome_of(name, error)
        except Parted as parted:
            outcome = Outcome(name, "parted", str(parted))
        return replace(outcome, proof=self._proof(name))

    def _not_tried(self, outcome: Outcome) -> str:
        if isinstance(outcome.error, OutOfTime):
            return str(outcome.error)
        passed = outcome.status == "passed"
        return self.subject.budget.not_tried if passed else ""

    def _proof(self, name: str) -> Proof | None:
        return self.subject.proofs.get(PROOFS.get(name, ""))

    def _run(self, name: str) -> str:
        """Run a check and return its message."""
        weights = [CHECKS[n].share or BRIEF for n in self._left]
        share = CHECKS[name].share
        budget = self.subject.budget
        budget.start(name, share / (share + sum(weights)) if share else 1.0)
        if self.subject.fault and name != "check_shape":
            raise SkipCheck("see check_shape")
        seed, few_threads = self.subject.seed, self.subject.few_threads
        with isolated(seed), few_threads(self.threads):
            message = CHECKS[name](self.subject)
        if self.SAME not in self._left and (ranks := current()) is not None:
            share, other_scores = ranks.apart
            if share > 1:
                raise AssertionError(other_scores)
        not_tried, proof = budget.not_tried, self._proof(name)
        if budget.nothing_tried and not (proof and proof.holds):
            raise OutOfTime(not_tried)
        return f"{message}; not tried: {not_tried}" if not_tried else message


def choose_checks(names: Collection[str] | None) -> list[str]:
    """Return full names of checks, in the order of the list.

    Args:
        names: with or without "check_"; None: all but the slow one.

    Raises:
        ValueError: for an unknown name, with those known.
    """
    if names is None:
        return [name for name, c in CHECKS.items() if not c.slow]
    if isinstance(names, str):
        names = [names]
    full = {n if n.startswith("check_") else f"check_{n}" for n in names}
    unknown = sorted(full - CHECKS.keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], CHECKS)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        hint = hint or f"; known: {', '.join(CHECKS)}"
        raise ValueError(f"unknown check {', '.join(unknown)}{hint}")
    return [name for name in CHECKS if name in full]


def full_names(reasons: Mapping[str, str] | None) -> dict[str, str]:
    """Return reasons by the full names of checks.

    Raises:
        ValueError: for an unknown name.
    """
    return {choose_checks([n])[0]: why for n, why in (reasons or {}).items()}
