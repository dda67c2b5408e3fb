"""The proofs of a model: about positions, rows and documents."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import torch

from ..running.documents import UNLIKE, Packing, split
from ..running.losses import added_to, scores_and_loss, shifts_of
from ..running.subject import Subject
from ..running.variant import precise
from ..running.ways import (
    CAUSALITY,
    EVAL,
    LOSSES,
    TARGETS,
    TRAIN,
    TRAIN_TARGETS,
    cases_of,
    followed_cases,
    losses_with_arguments,
)
from .chains import Chains
from .codes import CODES, FREE
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
from .proof import Open, Proof
from .prover import prove
from .runs import runs_of

MAIN = EVAL, TRAIN  # each length is proved in these
ROWS = 3  # of a batch


def prove_positions(
    subject: Subject, lengths: Iterable[int] | None = None
) -> Proof:
    """Prove that no score depends on a later token, in each case."""
    runs = runs_of(subject, lengths=lengths)
    cases = [*followed_cases(subject)]
    if subject.sees is not None:
        runs = replace(runs, chains=Chains(subject.sees))
    elif TRAIN_TARGETS in subject.unanswered:  # only a loss may come back
        cases += [LOSSES, *losses_with_arguments(subject)]
        runs = replace(runs, loss_order=_order_of_targets(subject))
    proof, by_targets = prove(runs, MAIN, cases), cases_of(CAUSALITY, subject)
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
    runs = runs_of(subject, (RISING_ROWS, FALLING_ROWS), lengths)
    return prove(runs, tuple(replace(case, rows=rows) for case in MAIN))


def prove_documents(subject: Subject, way: Packing) -> Proof:
    """Prove that no score depends on another document of its row.

    The documents of the rows stand in other places; where a call takes one
    row, those of texts of other lengths do.
    """
    longest = [] if subject.heavy else [subject.block_size]
    rows = 1 if way.single else subject.fit_rows(UNLIKE)
    lengths = subject.fit(3, 8, 20, *longest)
    if rows == 1:
        lengths = subject.fit(*lengths, *(max(lengths) - k for k in (1, 2, 3)))
    places = {time: k for k, time in enumerate(lengths[::-1][:UNLIKE])}

    def lengths_of(time: int, row: int) -> list[int]:
        return split(time, row if rows > 1 else places.get(time, 0))

    def codes(count: int, time: int) -> Codes:
        each = [torch.tensor(lengths_of(time, row)) for row in range(count)]
        ids = [torch.arange(len(n)).repeat_interleave(n) for n in each]
        return torch.stack(ids).to(CODES)

    orders = (
        Order("documents", codes),
        Order("documents", lambda b, t: codes(b, t).max() - codes(b, t)),
    )
    main = tuple(
        replace(way.case(lengths_of, training), rows=rows)
        for training in (False, True)
    )
    others = [
        replace(case, how=f"{case.how} and targets", targets=True)
        for case, usual in zip(main, (TARGETS, TRAIN_TARGETS), strict=True)
        if usual.fits(subject.caller) and usual not in subject.unanswered
    ]
    return prove(runs_of(subject, orders, lengths), main, others)


def unreached(subject: Subject, time: int) -> list[int]:
    """Return the tokens that no operation leads from to the last scores.

    Python code that reads tokens leads anywhere.
    """
    if subject.in_arrays:
        return []
    runs = runs_of(subject, lengths=[time])
    run, tokens = runs.of(EVAL), runs.text(EVAL, time).tokens
    reached = []
    for order in (POSITIONS, BACKWARDS):
        found = follow(run, tokens, None, order)
        if any(code > FREE for code in found.notes.reads.values()):
            return []
        reached.append(int(found.reached[0, -1]))
    most, least = reached[0], time - 1 - reached[1]
    return [t for t in range(time) if not least <= t <= most]
