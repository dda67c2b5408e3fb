"""Rows of a batch do not depend on each other."""

from collections.abc import Iterable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..check import Budget, Round, Subject, check
from ..copies import precise
from ..dependence.prove import prove_rows
from ..larger_weights import both
from ..leaks import LeakFinder
from ..rounding import dtype_name, real_gap
from ..tokens import SHORT, draw, others
from ..variant import Variant
from ..ways import CROWD, EVAL, ROWS, TRAIN_WITHOUT_GRADIENTS, ways_of

FEW = 5  # rows that are each tried
MANY = (16, 33)


@check(calls=250, rows=60, share=1)
def check_batch_independence(subject: Subject, budget: Budget) -> str:
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
    subject.require_no_noise()
    subject.require_no_state()
    generator, finder = subject.generator(), LeakFinder()
    for round, _ in budget.affordable(_rounds(subject, budget)):
        try:
            _try(round, generator, finder)
        except AssertionError as error:
            proof = budget.proof = prove_rows(subject, budget)
            if proof is None or proof.way is None:
                raise
            place = proof.way.culprit
            raise AssertionError(f"{error}; let through at {place}") from error
    found = "alone, reordered, repeated, among others"
    proof = budget.proof = prove_rows(subject, budget)
    if proof is not None:
        found = f"{proof}; tested: {found}"
    if finder.draws_differ:
        return f"{found}; in train mode random draws depend on the tokens"
    return found


def _rounds(subject: Subject, budget: Budget) -> Iterator[Round]:
    """Yield lengths and weights; in train mode, too."""
    longest = subject.block_size
    fresh, *enlarged = both(subject, budget)
    seven, crowd = subject.lengths.fit(7), subject.lengths.fit(128)
    for way in ways_of(ROWS, subject):  # all of them, at one short length
        one = fresh.run_as(way)
        if way is CROWD:
            yield Round(one, crowd, rows=one.rows_at_once(crowd), calls=5)
        else:
            yield Round(one, seven, rows=5, calls=12)
    sizes = [(fresh, time) for time in subject.fit(1, 2)]
    sizes += [(variant, seven) for variant in enlarged]
    if longest > SHORT:
        sizes.append((precise(subject, budget, longest), longest))
    for variant, time in sizes:
        rows = 5
        if rows * time * subject.vocab_size > 1 << 26:
            rows = 2
        for way, calls in ((EVAL, 12), (TRAIN_WITHOUT_GRADIENTS, 9)):
            calls = calls if time <= SHORT else calls // 2
            one = variant.run_as(way)
            yield Round(one, time, rows=rows, calls=calls, share=1 / 2)
    for rows in MANY:
        yield Round(fresh, seven, rows=rows, calls=5)


def _try(round: Round, generator: torch.Generator, finder: LeakFinder) -> None:
    variant, rows, time = round.variant, round.rows, round.time
    vocab, training = variant.subject.vocab_size, variant.way.training
    tokens = draw(vocab, rows, time, generator)
    short = time <= SHORT
    short = short and rows <= FEW
    some = range(rows) if short else (0, rows - 1)
    batch = _Batch(variant, finder, tokens)
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
            same = _Batch(variant, finder, equal)
            same.compare(row, changed, row, what)


class _Batch:
    """A batch and its scores, to be compared with other batches."""

    def __init__(
        self,
        variant: Variant,
        finder: LeakFinder,
        tokens: Int[Tensor, "rows time"],
    ):
        self.variant, self.finder = variant, finder
        self.tokens = tokens
        self.scores = variant.scores(tokens)

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
        variant, training = self.variant, self.variant.way.training
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
            self.finder.draws_differ = True
            return
        rows, time = self.tokens.shape
        raise AssertionError(
            f"row {row} of a batch of {rows} depends on other rows: {what} (a "
            f"batch of {len(others)}), its scores at position {gap.at[0]} "
            f"move by {gap.size:.2g} at length {time} "
            f"({dtype_name(self.scores.dtype)}{variant.conditions}; "
            f"rounding there is {gap.noise:.1g})"
        )
