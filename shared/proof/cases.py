"""Prove one case (a way to call the model), and test the proof's rules.

To follow a text is to run the model on it with dependency codes (codes.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..running.budget import OutOfTime
from ..running.errors import ModelRaised
from ..running.places import Place
from ..running.ranks import current, on_any
from ..running.ways import Case
from .controls import (
    SoFar,
    Steps,
    control_sizes,
    draws,
    moves_unfollowed,
    other_program,
    wrong_rule,
)
from .engine import Found, ModelRun, Order, Recorded, follow
from .explain import explain
from .proof import Open
from .runs import Runs, Text


@dataclass(frozen=True)
class CaseVerdict:
    """The result of proving one case.

    Attributes:
        case: the case.
        so_far: what all runs of the model have shown by the end of the case.
        lengths: the lengths of text at which the case is proved.
        open: sentences that say why the proof is open; () if it is complete.
        at: the length at which the proof is open; None if at every length.
        culprit, way, in_chunks, position: as in Explained (explain.py).
        cut: whether time ran out before all lengths were proved.
        uncontrolled: whether time ran out before the rules were tested.
        raised: the model's exception at some length, or "".
    """

    case: Case
    so_far: SoFar
    lengths: tuple[int, ...] = ()
    open: tuple[Open, ...] = ()
    at: int | None = None
    culprit: Place | None = None
    way: str = ""
    in_chunks: bool = False
    position: int | None = None
    cut: bool = False
    uncontrolled: bool = False
    raised: str = ""


def prove_case(
    runs: Runs, case: Case, lengths: Iterable[int], so_far: SoFar
) -> CaseVerdict:
    """Prove a case at each length in turn; stop where the proof is open.

    Args:
        runs: the model.
        case: how the model runs.
        lengths: lengths of the texts, in the order to try them.
        so_far: what the runs of earlier cases have shown.
    """
    verdict = CaseVerdict(case, so_far)
    try:
        run = runs.of(case)
    except Exception:  # the model has no copy, or no copy of this dtype
        return verdict
    lengths = [*lengths]
    sizes, steps, last = control_sizes(runs, lengths), Steps(), None
    for time in lengths:
        text = runs.text(case, time)
        # On several ranks keep no steps, because ranks may run different
        # operations. The test of the rules then records its own steps.
        keep = time in sizes and not case.losses and current() is None
        try:
            seen = _follow(runs, run, text, verdict.so_far, keep)
            leak, after = None, seen.so_far
            if seen.open_in is None:
                leak, after = _moved(runs, case, seen)
                leak = leak or _not_a_number(case, seen)
        except OutOfTime:
            verdict = replace(verdict, cut=True)
            break
        except ModelRaised as error:
            if not _runs_unfollowed(run, text):
                verdict = replace(verdict, raised=str(error))
                if not verdict.lengths and time > 1:  # assume it always raises
                    break
                continue
            words = f"{case.name}: it cannot be followed ({error})"
            return replace(verdict, open=(Open(words),))
        verdict = replace(verdict, so_far=after)
        if leak is not None:
            return replace(verdict, open=(leak,), at=time)
        if seen.open_in is not None:
            return _explained(runs, verdict, seen, seen.open_in)
        verdict = replace(verdict, lengths=(*verdict.lengths, time))
        steps, last = steps | seen.steps, seen
    return verdict if last is None else _control(runs, verdict, last, steps)


@dataclass(frozen=True)
class _Seen:
    """A text that was followed in each `Order`, and the results.

    Attributes:
        text: the text.
        found: the result of the run in the last order.
        so_far: what all runs have shown, including the runs of this text.
        steps: the operations of each run, by order and length; None if not
            kept.
        open_in: the first order in which the proof is open, or None.
    """

    text: Text
    found: Found
    so_far: SoFar
    steps: Steps
    open_in: Order | None = None


def _follow(
    runs: Runs, run: ModelRun, text: Text, so_far: SoFar, keep: bool
) -> _Seen:
    """Follow a text in each `Order`, up to one that leaves the proof open."""
    case, steps, seen = run.variant.case, Steps(), None
    for order in runs.orders_of(case, text.tokens):
        found, so_far, tape = _follow_in(order, run, text, so_far, keep)
        steps[order, text.time] = tape
        seen = _Seen(text, found, so_far, steps)
        left = on_any(bool(found.notes.left))
        if left or found.open(case.shown(*text.tokens.shape)):
            return replace(seen, open_in=order)
    assert seen is not None
    return seen


def _follow_in(
    order: Order, run: ModelRun, text: Text, so_far: SoFar, keep: bool
) -> tuple[Found, SoFar, Recorded | None]:
    """Follow a text in one order; if needed, take routing ids as known."""
    shown = run.variant.case.shown(*text.tokens.shape)
    first, tape = None, None
    for routing in sorted({so_far.routing, True}):
        tape = Recorded() if keep else None
        given = text.tokens, text.targets, order, routing
        heavy = run.variant.subject.heavy
        found = follow(run, *given, tape, lean=heavy)
        first = first or found
        if not found.open(shown):
            first, so_far = found, replace(so_far, routing=routing)
            break
    assert first is not None
    notes = so_far.notes.joined(first.notes)
    return first, replace(so_far, notes=notes), tape


def _moved(runs: Runs, case: Case, seen: _Seen) -> tuple[Open | None, SoFar]:
    """Return a leak that shows only in a run without dependency codes.

    A case that draws random numbers is checked once per operation sequence.
    """
    so_far, path, text = seen.so_far, seen.found.path, seen.text
    if runs.subject.heavy or case.losses or on_any(so_far.may_part):
        return None, so_far
    before = seen.found.scores
    if before is None or draws(runs, case):
        if not on_any(path not in so_far.unfollowed):
            return None, so_far
        so_far = replace(so_far, unfollowed=so_far.unfollowed | {path})
        before = runs.of(case).unfollowed(text.tokens, text.targets)
    return moves_unfollowed(runs, case, text, before, so_far), so_far


def _not_a_number(case: Case, seen: _Seen) -> Open | None:
    """Return that a score is NaN although an attention mask shows it.

    A proof assumes finite numbers, and would hold for such a score in vain.
    """
    scores = seen.found.scores
    if case.visible is None or scores is None:
        return None
    nan = scores.isnan().any(-1).cpu() & case.shown(*seen.text.tokens.shape)
    if not on_any(bool(nan.any())):
        return None
    return Open(f"{case.name}: scores that the mask shows are NaN")


def _runs_unfollowed(run: ModelRun, text: Text) -> bool:
    """Return whether the model runs on a text if it carries no codes."""
    try:
        run(text.tokens, text.targets)
    except ModelRaised:
        return False
    return True


def _explained(
    runs: Runs, verdict: CaseVerdict, seen: _Seen, order: Order
) -> CaseVerdict:
    case, time, routing = verdict.case, seen.text.time, seen.so_far.routing
    with runs.subject.budget.overtime():
        why = explain(runs, case, time, order, seen.found, routing)
    return replace(
        verdict,
        open=why.open,
        at=time if why.at_length else None,
        culprit=why.culprit,
        way=why.way,
        in_chunks=why.in_chunks,
        position=why.position,
    )


def _control(
    runs: Runs, verdict: CaseVerdict, last: _Seen, steps: Steps
) -> CaseVerdict:
    """Compare the last run with one that carries no codes; test the rules."""
    case, so_far, done = verdict.case, verdict.so_far, verdict.lengths
    path, scores = last.found.path, last.found.scores
    try:
        if scores is not None:
            apart = other_program(runs, case, done[-1], scores)
            if apart is not None:
                return replace(verdict, open=(apart,), at=done[-1])
        if on_any(path not in so_far.controlled):
            wrong = wrong_rule(runs, case, [*done], so_far, steps)
            if wrong is not None:
                return replace(verdict, open=(wrong,))
            so_far = replace(so_far, controlled=so_far.controlled | {path})
    except OutOfTime:
        return replace(verdict, uncontrolled=True)
    return replace(verdict, so_far=so_far)
