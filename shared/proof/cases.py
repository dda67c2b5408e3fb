"""The proof of one case: it is followed at each length, and controlled."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..running.budget import OutOfTime
from ..running.errors import ModelRaised
from ..running.places import Place
from ..running.ranks import current, on_any
from ..running.ways import Case
from .controls import (
    Known,
    Steps,
    control_sizes,
    draws,
    moves_unfollowed,
    other_program,
    wrong_rule,
)
from .engine import Followed, Found, Order, Recorded, follow
from .explain import explain
from .proof import Open
from .runs import Runs, Text


@dataclass(frozen=True)
class CaseVerdict:
    """The result of following a case.

    Attributes:
        case: how the model ran.
        known: what the proof knows after it.
        lengths: at which the case is proved.
        open: what keeps the proof open, a sentence each; (): it is proved.
        at: the length at which it is open, if it is about one.
        culprit, way, in_chunks, position: as an Explained has them.
        cut: whether the time ended before some length.
        uncontrolled: whether the time ended before the control of the rules.
        raised: what the model raised at a length, or "".
    """

    case: Case
    known: Known
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
    runs: Runs, case: Case, lengths: Iterable[int], known: Known
) -> CaseVerdict:
    """Prove one case at some lengths; stop at what is open first.

    Args:
        runs: the model.
        case: how it runs.
        lengths: of the texts, in the order in which they are tried.
        known: what earlier cases have shown.
    """
    verdict = CaseVerdict(case, known)
    try:
        run = runs.of(case)
    except Exception:  # no copy, or none in this dtype
        return verdict
    lengths = [*lengths]
    sizes, steps, last = control_sizes(runs, lengths), Steps(), None
    for time in lengths:
        text = runs.text(case, time)
        # ranks may part, each at another step: they are recorded together
        keep = time in sizes and not case.losses and current() is None
        try:
            seen = _follow(runs, run, text, verdict.known, keep)
            leak, after = None, seen.known
            if seen.open is None:
                leak, after = _moved(runs, case, seen)
        except OutOfTime:
            verdict = replace(verdict, cut=True)
            break
        except ModelRaised as error:
            if not _runs_unfollowed(run, text):
                verdict = replace(verdict, raised=str(error))
                if not verdict.lengths and time > 1:  # it does not run so
                    break
                continue
            words = f"{case.name}: it cannot be followed ({error})"
            return replace(verdict, open=(Open(words),))
        verdict = replace(verdict, known=after)
        if leak is not None:
            return replace(verdict, open=(leak,), at=time)
        if seen.open is not None:
            return _explained(runs, verdict, seen, seen.open)
        verdict = replace(verdict, lengths=(*verdict.lengths, time))
        steps, last = steps | seen.steps, seen
    return verdict if last is None else _control(runs, verdict, last, steps)


@dataclass(frozen=True)
class _Seen:
    """A text, followed in each order.

    Attributes:
        text: the text.
        found: what the last run showed.
        known: what the proof knows after it.
        steps: of the runs, where they are kept.
        open: the order in which something is open.
    """

    text: Text
    found: Found
    known: Known
    steps: Steps
    open: Order | None = None


def _follow(
    runs: Runs, run: Followed, text: Text, known: Known, keep: bool
) -> _Seen:
    """Follow a text in each order, until something is open."""
    case, steps, seen = run.variant.case, Steps(), None
    for order in runs.orders_of(case, text.tokens):
        found, known, tape = _follow_in(order, run, text, known, keep)
        steps[order, text.time] = tape
        seen = _Seen(text, found, known, steps)
        left = on_any(bool(found.notes.left))
        if left or found.open(case.shown(*text.tokens.shape)):
            return replace(seen, open=order)
    assert seen is not None
    return seen


def _follow_in(
    order: Order, run: Followed, text: Text, known: Known, keep: bool
) -> tuple[Found, Known, Recorded | None]:
    """Follow a text in one order; if it is open, with routing as known."""
    shown = run.variant.case.shown(*text.tokens.shape)
    first, tape = None, None
    for routing in sorted({known.routing, True}):
        tape = Recorded() if keep else None
        found = follow(run, text.tokens, text.targets, order, routing, tape)
        first = first or found
        if not found.open(shown):
            first, known = found, replace(known, routing=routing)
            break
    assert first is not None
    notes = known.notes.joined(first.notes)
    return first, replace(known, notes=notes), tape


def _moved(runs: Runs, case: Case, seen: _Seen) -> tuple[Open | None, Known]:
    """Return a leak that shows only in a plain run.

    A case that draws has a run more, once for each sequence of operations.
    """
    known, path, text = seen.known, seen.found.path, seen.text
    if runs.subject.heavy or case.losses or on_any(known.may_part):
        return None, known
    before = seen.found.scores
    if before is None or draws(runs, case):
        if not on_any(path not in known.unfollowed):
            return None, known
        known = replace(known, unfollowed=known.unfollowed | {path})
        before = runs.of(case).unfollowed(text.tokens, text.targets)
    return moves_unfollowed(runs, case, text, before, known), known


def _runs_unfollowed(run: Followed, text: Text) -> bool:
    """Whether the model answers in a plain run."""
    try:
        run(text.tokens, text.targets)
    except ModelRaised:
        return False
    return True


def _explained(
    runs: Runs, verdict: CaseVerdict, seen: _Seen, order: Order
) -> CaseVerdict:
    case, time, routing = verdict.case, seen.text.time, seen.known.routing
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
    """Compare the last run with a plain one, and its rules with changes."""
    case, known, done = verdict.case, verdict.known, verdict.lengths
    path, scores = last.found.path, last.found.scores
    try:
        if scores is not None:
            apart = other_program(runs, case, done[-1], scores)
            if apart is not None:
                return replace(verdict, open=(apart,), at=done[-1])
        if on_any(path not in known.controlled):
            wrong = wrong_rule(runs, case, [*done], known, steps)
            if wrong is not None:
                return replace(verdict, open=(wrong,))
            known = replace(known, controlled=known.controlled | {path})
    except OutOfTime:
        return replace(verdict, uncontrolled=True)
    return replace(verdict, known=known)
