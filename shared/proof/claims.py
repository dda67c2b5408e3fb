"""Prove the independence of a model's positions, rows and documents."""

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

MAIN = EVAL, TRAIN  # the cases in which each length is proved
ROWS = 3  # rows of a batch


def prove_positions(
    subject: Subject, lengths: Iterable[int] | None = None
) -> Proof:
    """Prove that no score depends on a later token, in each case."""
    runs = runs_of(subject, lengths=lengths)
    cases = [*followed_cases(subject)]
    if subject.sees is not None:
        runs = replace(runs, chains=Chains(subject.sees))
    elif TRAIN_TARGETS in subject.unanswered:  # targets may give a loss
        cases += [LOSSES, *losses_with_arguments(subject)]
        runs = replace(runs, loss_order=_order_of_targets(subject))
    proof, tried = prove(runs, MAIN, cases), cases_of(CAUSALITY, subject)
    proof.never_given = [*subject.never_given]
    proof.without = [*subject.without]
    output = subject.caller.output
    chosen = getattr(output, "__name__", output)  # function's name, or path
    proof.scores = str(chosen or subject.reader.where)
    proof.declared = [*subject.caller.never]
    followed = (*proof.modes, *proof.left_out)
    if proof.holds and LOSSES in tried and LOSSES.name not in followed:
        text = "with targets the model returns only a loss, not scores"
        proof.leave_open(Open(text))
        proof.at = LOSSES, subject.lengths.fit(8)
    # check_causality can show a leak in a loss only if it also tries that loss
    if proof.at and proof.at[0].losses and proof.at[0] not in tried:
        proof.at = None
    return proof


def _order_of_targets(subject: Subject) -> Order:
    """Return AS_GIVEN if the caller shifts the targets, else SHIFTED.

    If that is unclear, return SHIFTED, the order that allows less.
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
    """Prove that rows are independent; return None for only one row."""
    rows = subject.fit_rows(ROWS)
    if rows < 2:
        return None
    longest = [] if subject.heavy else [subject.block_size]
    lengths = subject.fit(1, 7, *longest)
    runs = runs_of(subject, (RISING_ROWS, FALLING_ROWS), lengths)
    return prove(runs, tuple(replace(case, rows=rows) for case in MAIN))


def prove_documents(subject: Subject, way: Packing) -> Proof:
    """Prove that no score depends on another document in the same row.

    Each row of a batch has different boundaries between documents. If a call
    takes only one row, each length of text gets different boundaries.
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
    """Return positions whose tokens cannot reach the last position's scores.

    If Python code reads a token, return []: that token may reach any score.
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
