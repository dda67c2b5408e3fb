"""What is proved: that no later token, and no other row, reaches a score."""

from collections.abc import Iterable

import torch

from ..cases import CAUSALITY, LOSSES, TRAIN_TARGETS, cases_of, followed_cases
from ..documents import Packing, split
from ..subject import Subject
from .engine import (
    BACKWARDS,
    FALLING_ROWS,
    POSITIONS,
    RISING_ROWS,
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
    proof = Prover(subject, lengths=lengths).prove(followed_cases(subject))
    proof.never_given = [*subject.never_given]
    proof.declared = [*subject.caller.never]
    cases = cases_of(CAUSALITY, subject)
    if proof.holds and LOSSES in cases and TRAIN_TARGETS not in cases:
        proof.holds = False
        text = "with targets only a loss comes back, which is not followed"
        proof.open.append(Open(text))
        proof.at = LOSSES, subject.lengths.fit(8)
    return proof


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
