"""Run the checks on a model, one after another."""

import difflib
import io
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, Unpack

from ..notebooks import progress
from ..proof.proof import Proof
from ..running.budget import (
    DEFAULT_SECONDS,
    HEAVY_SECONDS,
    Budget,
    OutOfTime,
)
from ..running.context import isolated, one_run, return_memory
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

FIRST = ("check_shape", MUST)  # checks that run first if time is short
# For a heavy model, checks that need few calls run before those that may run
# out of time.
FIRST_OF_HEAVY = (
    *FIRST,
    "check_finite",
    "check_vocabulary",  # needs memory: before other copies are kept
    "check_length_limit",
    "check_cache",
    "check_normalised",
    "check_initial_loss",
    "check_signal",
)


@takes(CheckSettings)
@one_run
def check_model(
    model_or_factory: Any,
    *,
    debug: bool = False,
    on_progress: Callable[[Report], None] | None = None,
    **settings: Unpack[CheckSettings],
) -> Report:
    """Run the checks on a model and report the results.

    Args:
        model_or_factory: an nn.Module, a callable from (batch, time) ids to
            scores, or a function without arguments that builds one of these
            (preferred: each check then has a fresh model).
        debug: whether an exception that no check expects ends the run.
        on_progress: called with the report before the first check, when each
            check ends, and when a check reports its progress. None: a notebook
            or a terminal shows the running check if it takes long.
        **settings: vocab_size, block_size, outputs, seed, device, layout,
            cache, inputs and documents, as the page of settings describes
            them. `compile`: also compile the model, and compare the compiled
            program with the original. `checks`: names of the checks to run;
            None means all except the slow one. `expected_failures`: reasons by
            name of a check. Such a failure gets the status "expected".
            `threads`: threads on the CPU; None means one for a small model.
            `budget`: seconds. The cases that find most faults come first, and
            the report lists those not tried. None: 130 for a model of over 2
            million parameters, 225 for others. math.inf: all cases.
            `require_proof`: let check_causality fail if it is not proved.
            `allow_routing`: with require_proof, also accept a proof that holds
            only if texts route tokens, or choose a path through the code, as
            the proof's text did.

    Returns:
        The report: print it, or read .ok, .failed and .results.

    Raises:
        ValueError: for a model that cannot be built, called or read, for an
            unknown check, or for sizes that contradict the model's own.
    """
    settings["checks"] = choose_checks(settings.get("checks"))
    expected = full_names(settings.get("expected_failures"))
    printed = io.StringIO()
    with redirect_stdout(printed), together("meeting the model"):
        run = Run(model_or_factory, **settings)
    report = run.new_report()
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
                _add(report, result, error)
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


def _add(report: Report, result: CheckResult, error: Exception | None) -> None:
    """Add a result to a report, and a failure's notes as its details."""
    notes = getattr(error, "__notes__", [])
    if notes and result.status == "failed":
        report.details[result.name] = "\n".join(notes)
    report.results.append(result)


class Run:
    """Runs checks on one model, for `check_model` and in pytest.

    A Run has the facts about the model, the budget, and the first failure of
    each cause. The outcome of a check passes through the stages of
    outcomes.py. Arguments and errors are those of `check_model`; names of
    checks are full names.
    """

    # the check that reports scores which differ between ranks
    SAME = "check_determinism"

    def __init__(
        self, model_or_factory: Any, **settings: Unpack[CheckSettings]
    ):
        given = completed("check_model", CheckSettings, settings)
        own = {one.name: given[one.name] for one in settings_in(Settings)}
        checks, budget = choose_checks(given["checks"]), given["budget"]
        with isolated(given["seed"]):
            if (ranks := current()) is not None:
                # forget distances of an earlier model's scores
                ranks.apart = 0.0, ""
            self.subject = meet(model_or_factory, **own)
            if "check_shape" not in checks:
                self.subject.require_scores()
            self.threads, self.proofs = (
                given["threads"],
                given["require_proof"],
            )
            self.conditions = given["allow_routing"]
            # by cause of failures: the check that failed first
            self.causes: dict[object, str] = {}
            heavy, self.plan = self.subject.heavy, ""
            short = heavy or budget is not None
            if budget is None:
                budget = HEAVY_SECONDS if heavy else DEFAULT_SECONDS
                if any(CHECKS[name].slow for name in checks):
                    budget = math.inf
            self.subject = replace(self.subject, budget=Budget(budget))
            # time is short: the main checks come first
            if short and budget < math.inf:
                first = FIRST_OF_HEAVY if heavy else FIRST
                early = [name for name in first if name in checks]
                checks = [*early, *(n for n in checks if n not in early)]
                self.plan = (
                    f"at most {budget:.0f} s for {self.subject.parameters:,} "
                    f"parameters; --thorough tries all"
                )
            self.names, self._left = checks, [*checks]

    def new_report(self) -> Report:
        """Return a report on the model, without results."""
        return Report(
            self.subject.name,
            self.subject.vocab_size,
            self.subject.block_size,
            names=self.names,
            plan=self.plan,
            left_out=[name for name in CHECKS if name not in self.names],
            never_given=[*self.subject.never_given],
        )

    @property
    def notes(self) -> list[str]:
        """Return notes on unusual facts about the model."""
        notes = [*self.subject.builder.notes, *self.subject.notes]
        return list(dict.fromkeys(notes))

    def check(
        self, name: str, expected: str | None = None
    ) -> tuple[CheckResult, Exception | None]:
        """Run one check; return its outcome, and the exception that it raised.

        `expected` is the reason why a failure is expected, if it is.
        """
        budget = self.subject.budget
        calls, backwards = budget.calls, budget.backwards
        if self.subject.heavy:
            return_memory()
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
        """Run one check; return its outcome, not yet changed by STAGES."""
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
        weights = [CHECKS[n].weight for n in self._left]
        share = CHECKS[name].share
        budget = self.subject.budget
        budget.start(name, share / (share + sum(weights)) if share else 1.0)
        budget.require()  # raises OutOfTime before the check makes a copy
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
    """Return full names of checks, in the order of the report.

    Args:
        names: names of checks, with or without "check_"; None means all except
            the slow one.

    Raises:
        ValueError: for an unknown name; the message has the known names.
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
    """Return the reasons under the full names of their checks.

    Raises:
        ValueError: for an unknown name.
    """
    return {choose_checks([n])[0]: why for n, why in (reasons or {}).items()}
