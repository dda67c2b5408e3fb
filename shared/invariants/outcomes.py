"""Turn the result or the exception of a check into an outcome, in stages.

STAGES lists the stages. Each gets a run and an Outcome, and returns an
Outcome. For a new rule about statuses, add a stage and a test of it.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..proof.proof import Proof
from ..running.errors import (
    FailureAt,
    HookRaised,
    ModelRaised,
    NotFinite,
    SkipCheck,
    UnusableModel,
    causes_of,
    place_of,
    places_in,
    sentence,
)
from ..running.places import place_of_def
from ..running.ranks import current
from ..running.subject import Subject
from ..running.variant import build
from ..settings import NEVER
from .checks import CHECKS
from .report import BAD

if TYPE_CHECKING:
    from .runner import Run

PROOFS = {  # for each check with a proof: the objects that its codes number
    "check_causality": "positions",
    "check_batch_independence": "rows",
    "check_documents": "documents",
}
MUST = "check_causality"  # this check must be proved if require_proof is set


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check.

    Attributes:
        name: the name of the check.
        status: passed, failed, skipped, expected, error, or parted if the
            processes took different paths.
        message: one or a few sentences.
        error: the exception of the check, if any.
        proof: the proof for the check, if one was tried.
        expected: why the user expects a failure, or None.
    """

    name: str
    status: str
    message: str
    error: Exception | None = None
    proof: Proof | None = None
    expected: str | None = None


def outcome_of(name: str, error: Exception) -> Outcome:
    """Return the outcome of a check that raised an exception."""
    if isinstance(error, SkipCheck):
        return Outcome(name, "skipped", str(error), error)
    if isinstance(error, AssertionError | UnusableModel):
        return Outcome(name, "failed", str(error), error)
    place = "" if isinstance(error, HookRaised) else place_of(error)
    if place:
        message = f"the model raised {sentence(error)} ({place})"
        return Outcome(name, "failed", message, error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = (
        f"a fault of the check, not of the model: {sentence(error)} "
        f"({Path(frame.filename).name}:{frame.lineno})"
    )
    return Outcome(name, "error", message, error)


def places_of(outcome: Outcome, subject: Subject) -> list[dict[str, Any]]:
    """Return the lines of a failure, each with a file and a line number."""
    if outcome.status not in BAD:
        return []
    places = places_in(outcome.error)
    # the check failed because its required proof is open
    if outcome.error is None and outcome.proof:
        open_ = [one.place for one in outcome.proof.open]
        if outcome.proof.never_given:
            model = build(subject)
            call = getattr(type(model), "forward", model)
            open_.insert(0, place_of_def(call))
        places = places_in(FailureAt("", *open_))
    return places


# --- Stages ------------------------------------------------------------------


def first_cause(run: "Run", outcome: Outcome) -> Outcome:
    """Report a cause once, in the first check that fails because of it."""
    name, error = outcome.name, outcome.error
    if not isinstance(error, AssertionError | UnusableModel):
        return outcome
    line = outcome.proof.culprit if outcome.proof else None
    at = (line.path, line.line) if line else None
    same, keys = causes_of(error, at)
    causes = run.causes
    known = (*CHECKS[name].implied_by, *same)
    first = next((causes[k] for k in known if k in causes), name)
    leak = name in PROOFS and not isinstance(error, ModelRaised | NotFinite)
    if leak and (name == MUST or first not in PROOFS):
        # a leak is reported even if another check has failed for this cause
        first = name
    causes |= dict.fromkeys([name, *keys], first)
    if first == name:
        return outcome
    message = f"see {first}: {outcome.message}"
    return replace(outcome, status="skipped", message=message)


def require_proof(run: "Run", outcome: Outcome) -> Outcome:
    """Fail a passed check that lacks a proof which the user requires."""
    if outcome.status != "passed" or not run.proofs or outcome.name != MUST:
        return outcome
    proof = outcome.proof
    whole = proof and not (proof.partial or proof.never_given)
    if proof and whole and ((run.conditions and proof.holds) or proof.proved):
        return outcome
    first = _to_be_given(proof.never_given) if proof else ""
    message = f"a proof is required: {first}{outcome.message}"
    return replace(outcome, status="failed", message=message)


def _to_be_given(names: list[str]) -> str:
    """Say how the user can give arguments that no tried call had."""
    if not names:
        return ""
    first = names[0]
    were = "argument {} was" if len(names) == 1 else "arguments {} were"
    return (
        f"{were.format(', '.join(names))} never given: --documents {first}, "
        f"--input {first}=my_pkg:make, or --input {first}={NEVER}; "
    )


def worst_of_processes(run: "Run", outcome: Outcome) -> Outcome:
    """Return the worst outcome of all processes."""
    ranks, proof = current(), outcome.proof
    if ranks is None:
        return outcome
    evidence = 0 if proof is None else proof.holds + proof.proved
    status, message = ranks.worst(
        outcome.name, outcome.status, outcome.message, evidence
    )
    proof = None if ranks.weaker else proof
    return replace(outcome, status=status, message=message, proof=proof)


def mark_expected(run: "Run", outcome: Outcome) -> Outcome:
    """Give an expected failure a status that does not count as failed."""
    why = outcome.expected
    if why is None or outcome.status not in ("passed", "failed"):
        return outcome
    if outcome.status == "passed":
        message = f"{outcome.message}; expected to fail: {why}"
        return replace(outcome, message=message)
    # forget places: an expected failure's line may have another fault
    for key in [k for k in run.causes if isinstance(k, tuple)]:
        del run.causes[key]
    message = f"{why}: {outcome.message}"
    return replace(outcome, status="expected", message=message)


STAGES: tuple[Callable[["Run", Outcome], Outcome], ...] = (
    first_cause,
    require_proof,
    worst_of_processes,
    mark_expected,
)
