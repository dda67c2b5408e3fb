"""What is proved: that no later token, and no other row, reaches a score."""

from collections.abc import Iterable
from contextlib import suppress

import torch

from ..cases import CAUSALITY, LOSSES, TRAIN_TARGETS, cases_of, followed_cases
from ..documents import Packing, split
from ..losses import added_to, scores_and_loss, shifts_of
from ..subject import Subject
from ..variant import precise
from .engine import (
    AS_GIVEN,
    BACKWARDS,
    FALLING_ROWS,
    POSITIONS,
    RISING_ROWS,
    SHIFTED,
    Codes,
    Order,
    follow,
)
from .lattice import CODES, FREE
from .proof import Open, Proof
from .prover import Prover

ROWS = 3  # of a batch


def prove_positions(
    subject: Subject, lengths: Iterable[int] | None = None
) -> Proof:
    """Prove that no score depends on a later token, in each case."""
    prover = Prover(subject, lengths=lengths)
    cases = [*followed_cases(subject)]
    if TRAIN_TARGETS in subject.unanswered:  # a loss may come back alone
        cases.append(LOSSES)
        prover.loss_order = _order_of_targets(subject)
    proof, by_targets = prover.prove(cases), cases_of(CAUSALITY, subject)
    proof.never_given = [*subject.never_given]
    proof.declared = [*subject.caller.never]
    followed = (*proof.modes, *proof.left_out)
    if proof.holds and LOSSES in by_targets and LOSSES.name not in followed:
        proof.holds = False
        text = "with targets only a loss comes back, which is not followed"
        proof.open.append(Open(text))
        proof.at = LOSSES, subject.lengths.fit(8)
    if proof.at is not None and proof.at[0] not in by_targets:
        proof.at = None if proof.at[0].losses else proof.at
    return proof


def _order_of_targets(subject: Subject) -> Order:
    """Return whether targets are the next tokens, or are shifted inside.

    Where that is not clear, the order that allows less.
    """
    variant = precise(subject)
    tokens, *targets = subject.draw(6, 7).split(2)
    with suppress(AssertionError):
        scores = variant.scores(tokens)
        found = [scores_and_loss(variant, tokens, t)[1] for t in targets]
        losses = [loss for loss in found if loss is not None]
        if len(losses) == len(targets):
            shifts = shifts_of(scores, targets[0], losses[0])
            shifts |= added_to(scores, targets, losses)[0]
            return AS_GIVEN if shifts == {0} else SHIFTED
    return SHIFTED


def prove_rows(subject: Subject) -> Proof | None:
    """Prove that no score depends on another row; None: it takes no two."""
    rows = subject.fit_rows(ROWS)
    if rows < 2:
        return None
    longest = [] if subject.heavy else [subject.block_size]
    lengths = subject.fit(1, 7, *longest)
    orders = (RISING_ROWS, FALLING_ROWS)
    return Prover(subject, orders, lengths, rows).prove()


def prove_documents(subject: Subject, way: Packing) -> Proof:
    """Prove that no score depends on another document of its row."""

    def codes(rows: int, time: int) -> Codes:
        ids = torch.arange(len(split(time)), dtype=CODES)
        ids = ids.repeat_interleave(torch.tensor(split(time)))
        return ids.expand(rows, time)

    orders = (
        Order("documents", codes),
        Order("documents", lambda b, t: codes(b, t).max() - codes(b, t)),
    )
    longest = [] if subject.heavy else [subject.block_size]
    main = [way.case(split, training) for training in (False, True)]
    lengths = subject.fit(3, 8, 20, *longest)
    return Prover(subject, orders, lengths, main=main).prove()


def unreached(subject: Subject, time: int) -> list[int]:
    """Return the tokens that no operation leads from to the last scores.

    Python code that reads tokens leads anywhere.
    """
    if subject.in_arrays:
        return []
    prover = Prover(subject, lengths=[time])
    run = prover.run_of(prover.main[0])
    tokens, _ = prover.texts(prover.main[0], time)
    least, most = 0, time - 1
    for order in (POSITIONS, BACKWARDS):
        found = follow(run, run.parameters, tokens, None, order)
        if any(code > FREE for code in found.notes.reads.values()):
            return []
        reached = int(found.reached[0, -1])
        if order is POSITIONS:
            most = reached
        else:
            least = time - 1 - reached
    return [t for t in range(time) if not least <= t <= most]
