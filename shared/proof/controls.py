"""Test the rules and the runs of a proof, by comparison with plain runs.

A rule may be wrong. So tokens are changed, and only entries with large enough
codes may change. A model may compute something else under a torch mode. So its
scores are compared with those of plain runs, which carry no codes.
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
from .engine import Order, Recorded, changed, try_changed_tokens
from .proof import Open
from .runs import Runs, Text
from .shadows import OUTSIDE, Notes

CONTROL_TOKENS = 5  # length of the first text to test; each token is changed
LONG_CONTROL_TOKENS = 64  # most tokens of the second text to test
HEAVY_CONTROL_TOKENS = 3  # tokens of the first text, for a heavy model

Steps = dict[tuple[Order, int], Recorded | None]


@dataclass(frozen=True)
class SoFar:
    """Findings of a proof's earlier runs, for use in its later runs.

    Attributes:
        notes: the assumptions of the proof.
        routing: whether ids that route tokens (to experts) count as known.
        controlled: hashes of the sequences of operations whose rules were
            tested with changed tokens.
        unfollowed: hashes of the sequences with random draws that were also
            run without codes.
    """

    notes: Notes
    routing: bool = False
    controlled: frozenset[int] = frozenset()
    unfollowed: frozenset[int] = frozenset()

    @property
    def may_part(self) -> bool:
        """Return whether tokens may choose which path the code takes.

        Weights and random draws do not count, because all runs share them.
        """
        reads = self.notes.reads.values()
        return bool(self.notes.routed) or any(code > FREE for code in reads)


def draws(runs: Runs, case: Case) -> bool:
    """Return whether a run with codes may draw other random numbers."""
    return case.training or runs.subject.noisy


def other_program(
    runs: Runs, case: Case, time: int, scores: Tensor
) -> Open | None:
    """Return a reason if the scores differ in a run without codes.

    In a plain run, torch's modules may choose other kernels. In train mode
    these may draw other random numbers, so such runs are not compared.
    """
    if draws(runs, case):
        return None
    text = runs.text(case, time)
    everywhere = torch.ones_like(text.tokens, dtype=torch.bool)
    plain = runs.of(case).unfollowed(text.tokens, text.targets)
    apart = _apart(case, plain, scores, everywhere)
    if not apart:
        return None
    words = "the model computes different scores in a plain run"
    return Open(f"{case.name}: {words}, {apart}")


def moves_unfollowed(
    runs: Runs, case: Case, text: Text, before: Tensor, so_far: SoFar
) -> Open | None:
    """Return a reason if later tokens change a score in a run without codes.

    The codes may miss a write to a tensor, perhaps only at one length.
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
                wrong = wrong_rule(runs, case, [text.time], so_far, {})
            where = apart or "on another rank"
            words = "scores change in a plain run"
            return wrong or Open(f"{case.name}: {words}, {where}")
    return None


def _apart(case: Case, scores: Tensor, before: Tensor, where: Tensor) -> str:
    """Say how far two runs' scores differ; "" if only by rounding."""
    rows, time = scores.shape[:2]
    shown = case.shown(rows, time).to(scores.device)
    where = where.to(scores.device) & shown
    apart = minus(scores, before).abs().amax(-1)
    most = float(apart.masked_fill(~where, 0.0).max())
    coarse = case == AUTOCAST or scores.element_size() < 4
    share = SPREAD_OF_ANOTHER_PROGRAM
    if coarse:
        share = SPREAD_OF_ANOTHER_PROGRAM_IN_16_BITS
    # `not >` lets a NaN pass: check_finite reports it
    if not most > share * float(before[shown].std()):
        return ""
    return f"{most:.2g} apart at length {time}"


def control_sizes(runs: Runs, lengths: list[int]) -> set[int]:
    """Return lengths at which changed tokens test the rules.

    They are a short length and, unless the model is heavy, a longer length.
    """
    heavy, fit = runs.subject.heavy, runs.subject.lengths.fit
    few = HEAVY_CONTROL_TOKENS if heavy else CONTROL_TOKENS
    short = [t for t in lengths if few // 2 < t <= few]
    long = [t for t in lengths if t <= LONG_CONTROL_TOKENS and not heavy]
    return {max(short, default=fit(few)), *sorted(long)[-1:]}


def wrong_rule(
    runs: Runs, case: Case, lengths: list[int], so_far: SoFar, steps: Steps
) -> Open | None:
    """Change tokens; report a wrong rule, or code that branches on a token.

    Args:
        runs: the model.
        case: how the model runs.
        lengths: lengths at which the case is proved.
        so_far: what the runs so far have shown.
        steps: the operations of runs that were already followed, by order and
            length.
    """
    run, subject = runs.of(case), runs.subject
    for size in sorted(control_sizes(runs, lengths)):
        text = runs.text(case, size)
        orders = runs.orders_of(case, text.tokens)
        found = try_changed_tokens(
            run,
            text.tokens,
            text.targets,
            subject.vocab_size,
            orders,
            so_far.routing,
            subject.seed,
            [steps.get((order, text.time)) for order in orders],
            runs.special,
        )
        if found.wrong is not None:
            name, place = found.wrong
            words = f"numbers change against the rule of {name}"
            if name == OUTSIDE:
                words = "numbers that no operation made depend on tokens"
            return Open(f"{place}: {words}", place)
        if on_any(bool(found.parted and not so_far.may_part)):
            at = found.parted or "on another rank"
            return Open(f"{at}: other tokens take another path", found.parted)
    return None
