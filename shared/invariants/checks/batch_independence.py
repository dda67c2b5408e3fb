"""Rows of a batch do not depend on each other."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..cases import (
    CAUSALITY,
    EVAL,
    MASKED,
    ROWS,
    TRAIN_WITHOUT_GRADIENTS,
    Case,
    cases_of,
)
from ..check import SkipCheck, Subject, check
from ..dependence.prover import prove_rows
from ..errors import ModelRaised, NotFinite
from ..model.inputs import MASK, PADDING, SHOWN, Input
from ..model.inputs import shown as padding
from ..rounding import Gap, dtype_name, real_gap
from ..tokens import SHORT, draw, others
from ..variant import Variant, both, precise

LEFT = next(case for case in MASKED if case.visible == SHOWN["a left-padded"])
COUNTED = "position_ids"
FEW = 5  # rows that are each tried
FEWER = 3  # of a heavy model
MANY = (16, 33)
DRAWS = "in train mode random draws depend on the tokens"


@check(share=1)
def check_batch_independence(subject: Subject) -> str:
    """A row's scores depend on no other row, nor their number or order.

    Why: statistics over the batch make evaluation depend on who else is in
    it, and carry one sequence's future into another.
    How: a proof, as in check_causality, with rows in place of positions, in
    both orders. A proof does not see what depends on the number of rows or
    on a row's place: so a batch is compared with each row alone, another
    order, twice over, and other rows; one row changed among equal ones. Where
    shapes and so dropout masks are the same, in train mode, too.
    Reports: huggingface/transformers 18809, one example changes the others
    of its batch.
    """
    if subject.fit_rows(2) < 2:
        raise SkipCheck("the model takes one row")
    subject.require_no_noise()
    subject.require_no_state()
    generator, notes, tested = subject.generator(), set[str](), False
    proof = prove_rows(subject)
    for variant, time, rows in _sizes(subject):
        crowd = variant.case.crowd
        # where it takes seconds, a crowd is called only if there is no limit
        share = 0 if crowd and subject.takes_seconds(rows * time) else 1 / 2
        with subject.budget.part(variant.case.name, time, share):
            try:
                notes |= _try(variant, time, rows, generator)
                tested = True
            except AssertionError as error:
                if proof is None or proof.culprit is None:
                    raise
                text = f"{error}; let through at {proof.culprit}"
                raise AssertionError(text) from error
    found = [str(proof)] * (proof is not None)
    if tested:
        how = "tested: " * (proof is not None)
        found.append(f"{how}alone, reordered, repeated, among others")
    # NaN behind padding is the matter of check_finite and check_causality
    with subject.budget.part(), suppress(ModelRaised, NotFinite):
        notes |= {*_padded(subject)}
    return "; ".join([*found, *sorted(notes)])


def _sizes(subject: Subject) -> Iterator[tuple[Variant, int, int]]:
    """Yield a variant, a length and a number of rows; train mode, too."""
    variants = both(subject)  # the larger one is made where it is needed
    fresh = next(variants)
    few = FEWER if subject.heavy else FEW
    seven, crowd = subject.lengths.fit(7), subject.lengths.fit(128)
    for case in cases_of(ROWS, subject):  # every case, at one short length
        one = fresh.run_as(case)
        if case.crowd:
            yield one, crowd, one.rows_at_once(crowd)
        else:
            yield one, seven, few
    for variant, time in _variants(fresh, variants, subject):
        rows = 2 if few * time * subject.vocab_size > 1 << 26 else few
        for case in (EVAL, TRAIN_WITHOUT_GRADIENTS):
            yield variant.run_as(case), time, rows
    for rows in MANY:
        yield fresh, seven, rows


def _padded(subject: Subject) -> Iterator[str]:
    """Say whether a text that a mask pads on the left is the text alone."""
    time = subject.lengths.fit(8)
    if LEFT not in cases_of(CAUSALITY, subject) or time < 4:
        return
    variant, tokens = precise(subject), subject.draw(1, time)
    shown = LEFT.shown(time)
    alone = partial(variant.scores, tokens[:, shown])

    def gap(case: Case) -> Gap | None:
        padded = variant.run_as(case)
        return real_gap(
            variant.model, lambda: padded.scores(tokens)[:, shown], alone
        )

    found = gap(LEFT)
    if found is None:
        return
    words = (
        f"a text behind masked padding has other scores than alone: by "
        f"{found.size:.2g}"
    )
    if COUNTED not in subject.caller.arguments:
        yield f"{words}: do positions count the padding?"
        return
    case = replace(LEFT, given=Input(COUNTED, PADDING, COUNTED, _counted))
    mended = gap(case) is None
    yield f"{words}{', not with position_ids from the mask' * mended}"


def _counted(
    tokens: Int[Tensor, "batch time"], lengths: list[int]
) -> dict[str, Tensor]:
    """Return a mask that hides padding, and positions that do not count it."""
    mask = padding(LEFT.visible or (0.0, 1.0), tokens)
    return {MASK: mask, COUNTED: (mask.cumsum(1) - 1).clamp(min=0)}


def _variants(
    fresh: Variant, larger: Iterator[Variant], subject: Subject
) -> Iterator[tuple[Variant, int]]:
    for time in subject.fit(1, 2):
        yield fresh, time
    for variant in larger:
        yield variant, subject.lengths.fit(7)
    longest = subject.block_size
    if longest > SHORT:
        yield precise(subject, longest), longest


def _try(
    variant: Variant, time: int, rows: int, generator: torch.Generator
) -> set[str]:
    """Compare a batch with others; return notes for the report."""
    vocab, training = variant.subject.vocab_size, variant.case.training
    tokens = draw(vocab, rows, time, generator)
    short = time <= SHORT and rows <= FEW
    some = range(rows) if short else (0, rows - 1)
    batch = _Batch(variant, tokens)
    if not training:  # other shapes have other dropout masks
        batch.compare_shapes(some, short)
    for row in sorted({0, 1 % rows, rows - 1}) if short else some:
        replaced = others(tokens, vocab, generator)
        replaced[row] = tokens[row]
        batch.compare(row, replaced, row, "with the other rows replaced")
        if short:
            far = (row + 1) % rows
            equal = tokens[row].repeat(rows, 1)
            changed = equal.clone()
            changed[far] = others(equal[far], vocab, generator)
            what = f"with row {far} changed among equal rows"
            same = _Batch(variant, equal)
            same.compare(row, changed, row, what)
            batch.notes |= same.notes
    return batch.notes


class _Batch:
    """A batch and its scores, to be compared with other batches."""

    def __init__(self, variant: Variant, tokens: Int[Tensor, "rows time"]):
        self.variant, self.tokens = variant, tokens
        self.scores = variant.scores(tokens)
        self.notes: set[str] = set()

    def compare_shapes(self, some: Iterable[int], short: bool) -> None:
        """Require the same of rows alone, in another order, and repeated."""
        rows, order = len(self.tokens), self.tokens.roll(1, 0)
        for row in some:
            self.compare(row, self.tokens[row : row + 1], 0, "alone")
        moved = self.variant.scores(order)
        for row in some:
            new = (row + 1) % rows
            self.compare(row, order, new, "in another order", moved)
        if short:
            self.compare(0, self.tokens.repeat(2, 1), rows, "repeated")

    def compare(
        self,
        row: int,
        others: Int[Tensor, "others time"],
        other: int,
        what: str,
        others_scores: Float[Tensor, "others time vocab"] | None = None,
    ) -> None:
        """Require the scores of a row to be those of the same one in others.

        What was done to the batch is said in a failure.
        """
        variant, training = self.variant, self.variant.case.training
        if others_scores is None:
            others_scores = variant.scores(others)
        gap = real_gap(
            variant.model,
            lambda: variant.scores(self.tokens)[row],
            lambda: variant.scores(others)[other],
            (self.scores[row], others_scores[other]),
        )
        if gap is None:
            return
        if training and variant.draws(self.tokens) != variant.draws(others):
            self.notes.add(DRAWS)
            return
        rows, time = self.tokens.shape
        raise AssertionError(
            f"row {row} of a batch of {rows} depends on other rows: {what} (a "
            f"batch of {len(others)}), its scores at position {gap.at[0]} "
            f"move by {gap.size:.2g} at length {time} "
            f"({dtype_name(self.scores.dtype)}{variant.conditions}; "
            f"rounding there is {gap.noise:.1g})"
        )
