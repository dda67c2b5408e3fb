"""The controls of a proof: its rules and its runs against plain runs.

A rule of ours may be wrong, and code may see that it is followed. So tokens
are changed, and the scores of plain runs are compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..running.ranks import on_any
from ..running.rounding import minus
from ..running.tolerances import (
    SPREAD_OF_ANOTHER_PROGRAM,
    SPREAD_OF_ANOTHER_PROGRAM_IN_16_BITS,
)
from ..running.ways import AUTOCAST, Case
from .codes import FREE
from .engine import Order, Recorded, changed, control
from .proof import Open
from .runs import Runs, Text
from .shadows import OUTSIDE, Notes

CONTROL = 5  # tokens of the text in which each is changed
LONG_CONTROL = 64  # at most, of a second one
FEWER = 3  # of a heavy model

Steps = dict[tuple[Order, int], Recorded | None]


@dataclass(frozen=True)
class Known:
    """The results of the runs so far; later runs go on from them.

    Attributes:
        notes: what the proof rests on.
        routing: whether routing counts as known.
        controlled: paths whose rules were compared with changed tokens.
        unfollowed: paths of runs with draws, once run unfollowed as well.
    """

    notes: Notes
    routing: bool = False
    controlled: frozenset[int] = frozenset()
    unfollowed: frozenset[int] = frozenset()

    @property
    def may_part(self) -> bool:
        """Whether other tokens may take another path, by the conditions.

        Weights and random numbers that code reads are the same in each run.
        """
        reads = self.notes.reads.values()
        return bool(self.notes.routed) or any(code > FREE for code in reads)


def draws(runs: Runs, case: Case) -> bool:
    """Whether a run may draw other random numbers where it is followed."""
    return case.training or runs.subject.noisy


def other_program(
    runs: Runs, case: Case, time: int, scores: Tensor
) -> Open | None:
    """Return what is open if a run gives other scores where it is followed.

    A module of torch's takes other kernels where no mode sees it. In train
    mode these may draw other random numbers.
    """
    if draws(runs, case):
        return None
    text = runs.text(case, time)
    everywhere = torch.ones_like(text.tokens, dtype=torch.bool)
    plain = runs.of(case).unfollowed(text.tokens, text.targets)
    apart = _apart(case, plain, scores, everywhere)
    if not apart:
        return None
    words = "the model computes other scores where it is not followed"
    return Open(f"{case.name}: {words}, {apart}")


def moves_unfollowed(
    runs: Runs, case: Case, text: Text, before: Tensor, known: Known
) -> Open | None:
    """Return what is open if later tokens move a score in a plain run.

    Numbers may be written where no mode sees it, at a single length.
    """
    run, subject = runs.of(case), runs.subject
    for order in runs.orders_of(case, text.tokens):
        codes = order.codes(*text.tokens.shape)
        middle, generator = codes.median(), subject.generator()
        late = codes > middle
        still = order.allowed(*text.tokens.shape) <= middle
        other = changed(
            text.tokens,
            late,
            subject.vocab_size,
            generator,
            runs.special,
            0.5,
        )
        scores = run.unfollowed(other, text.targets)
        apart = _apart(case, scores, before, still)
        if on_any(bool(apart)):
            with subject.budget.overtime():
                wrong = wrong_rule(runs, case, [text.time], known, {})
            where = apart or "on another rank"
            words = "scores move where it is not followed"
            return wrong or Open(f"{case.name}: {words}, {where}")
    return None


def _apart(case: Case, scores: Tensor, before: Tensor, where: Tensor) -> str:
    """Say how far scores are apart, "" where rounding may explain it."""
    rows, time = scores.shape[:2]
    shown = case.shown(rows, time).to(scores.device)
    where = where.to(scores.device) & shown
    apart = minus(scores, before).abs().amax(-1)
    most = float(apart.masked_fill(~where, 0.0).max())
    coarse = case == AUTOCAST or scores.element_size() < 4
    share = SPREAD_OF_ANOTHER_PROGRAM
    if coarse:
        share = SPREAD_OF_ANOTHER_PROGRAM_IN_16_BITS
    # NaN is for check_finite
    if not most > share * float(before[shown].std()):
        return ""
    return f"{most:.2g} apart at length {time}"


def control_sizes(runs: Runs, lengths: list[int]) -> set[int]:
    """Return a short length, and a longer one unless the model is heavy.

    There the rules are compared with changed tokens.
    """
    heavy, fit = runs.subject.heavy, runs.subject.lengths.fit
    few = FEWER if heavy else CONTROL
    short = [t for t in lengths if few // 2 < t <= few]
    long = [t for t in lengths if t <= LONG_CONTROL and not heavy]
    return {max(short, default=fit(few)), *sorted(long)[-1:]}


def wrong_rule(
    runs: Runs, case: Case, lengths: list[int], known: Known, steps: Steps
) -> Open | None:
    """Change tokens one by one; return a wrong rule, or where paths differ.

    Args:
        runs: the model.
        case: how it runs.
        lengths: at which it is proved.
        known: what the runs so far have shown.
        steps: those of runs that were followed already.
    """
    run, subject = runs.of(case), runs.subject
    sizes = sorted(control_sizes(runs, lengths))
    texts = [runs.text(case, size) for size in sizes]
    turns = [(t, o) for t in texts for o in runs.orders_of(case, t.tokens)]
    for text, order in turns:
        found = control(
            run,
            text.tokens,
            text.targets,
            subject.vocab_size,
            order,
            known.routing,
            subject.seed,
            steps.get((order, text.time)),
            runs.special,
        )
        if found.wrong is not None:
            name, place = found.wrong
            words = f"numbers change that cannot by the rule of {name}"
            if name == OUTSIDE:
                words = "numbers that no operation made depend on tokens"
            return Open(f"{place}: {words}", place)
        if on_any(bool(found.parted and not known.may_part)):
            at = found.parted or "on another rank"
            return Open(f"{at}: other tokens take another path", found.parted)
    return None
