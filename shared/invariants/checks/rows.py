"""Rows of a batch do not depend on each other."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..model.subject import Subject
from ..model.tokens import SHORT, draw, others
from ..search.larger_weights import Searches
from ..search.leaks import Search
from ..search.tolerance import dtype_name, real_gap
from ..search.trial import EVAL, Mode


def check_batch_independence(subject: Subject) -> str:
    """A row's scores depend on no other row, nor their number or order.

    Why: statistics over the batch make evaluation depend on who else is in
    it, and carry one sequence's future into another.
    How: a batch against each row alone, another order, twice over, and other
    rows; one row changed among equal ones. Where shapes and so dropout masks
    are the same, in train mode, too.
    Cost: some 15 forwards of a few rows at each of three lengths.
    Reports: huggingface/transformers 18809, one example changes the others
    of its batch.
    """
    subject.require_no_noise()
    searches, generator = Searches(subject), subject.generator()
    search = searches.fresh
    longest = subject.block_size
    for time in subject.fit(*((1, 7) if subject.heavy else (1, 2, 7))):
        _try(search, time, generator)
    if longest > SHORT:
        search = Search(subject, subject.precise(long=True))
        _try(search, longest, generator, rows=2 if subject.heavy else 3)
    for larger in searches.larger:
        _try(larger, subject.lengths.fit(7), generator)
    found = "alone, reordered, repeated, among others"
    if search.draws_differ:
        return f"{found}; in train mode random draws depend on the tokens"
    return found


def _try(
    search: Search, time: int, generator: torch.Generator, rows: int = 5
) -> None:
    vocab = search.subject.vocab_size
    if rows * time * vocab > 1 << 26:
        rows = 2
    tokens = draw(vocab, rows, time, generator)
    short = time <= SHORT
    some = range(rows) if short else (0, rows - 1)
    if not search.has_time(time, rows, 3):
        return
    batch = _Batch(search, EVAL, tokens)
    for row in some:
        batch.compare(row, tokens[row : row + 1], 0, "alone")
    order = tokens.roll(1, 0)
    moved = search.run(order)
    for row in some:
        new = (row + 1) % rows
        batch.compare(row, order, new, "in another order", moved)
    if short:
        batch.compare(0, tokens.repeat(2, 1), rows, "repeated")
    for mode in (EVAL, Mode("in train mode", training=True)):
        calls = 9 if short else 3
        if not search.has_time(time, rows, calls, mode, what="replaced,"):
            continue
        if mode.training:
            batch = _Batch(search, mode, tokens)
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
                _Batch(search, mode, equal).compare(row, changed, row, what)


class _Batch:
    """A batch and its scores, to be compared with other batches."""

    def __init__(
        self, search: Search, mode: Mode, tokens: Int[Tensor, "rows time"]
    ):
        self.search = search
        self.mode = mode
        self.tokens = tokens
        self.scores = search.run(tokens, mode)

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
        search, mode = self.search, self.mode
        if others_scores is None:
            others_scores = search.run(others, mode)
        gap = real_gap(
            search.model,
            lambda: search.run(self.tokens, mode)[row],
            lambda: search.run(others, mode)[other],
            (self.scores[row], others_scores[other]),
        )
        if gap is None:
            return
        if mode.training and not search.same_draws(self.tokens, others, mode):
            search.draws_differ = True
            return
        rows, time = self.tokens.shape
        raise AssertionError(
            f"row {row} of a batch of {rows} depends on other rows: {what} (a "
            f"batch of {len(others)}), its scores at position {gap.at[0]} "
            f"move by {gap.size:.2g} at length {time} "
            f"({dtype_name(self.scores.dtype)}{search.conditions(mode)}; "
            f"rounding there is {gap.noise:.1g})"
        )
