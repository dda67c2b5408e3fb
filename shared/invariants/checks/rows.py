"""Rows of a batch do not know of each other."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..model.subject import Subject
from ..model.tokens import draw, others
from ..search.copies import awake
from ..search.leaks import Mode, Search
from ..search.rounding import floor_of, gaps, is_real, rounding


def check_batch_independence(subject: Subject) -> str:
    """A row's scores depend on no other row, nor their number or order.

    Why: statistics over the batch make evaluation depend on who else is in
    it, and carry one sequence's future into another.
    How: a batch against each row alone, against the rows in another order,
    twice over, and with the other rows replaced; one row changed among
    equal ones. The last two in train mode, too, with one dropout seed: only
    there do shapes and so dropout masks stay the same.
    Cost: some 15 forwards of a few rows at each of three lengths.
    Reports: huggingface/transformers 18809, one example changes the others
    of its batch.
    """
    search = Search(subject, subject.precise())
    generator = torch.Generator().manual_seed(subject.seed)
    longest = subject.block_size
    for time in sorted({1, min(2, longest), min(7, longest)}):
        _try(search, time, generator)
    if longest > 16:
        _try(search, longest, generator, rows=2 if subject.heavy else 3)
    notes = ""
    copy = awake(subject)
    if copy is not None:
        words = "with larger weights"
        _try(Search(subject, copy, words), min(7, longest), generator)
    if search.unsteady:
        notes = (
            "; in train mode random draws depend on the tokens, which "
            "cannot be compared"
        )
    return f"alone, reordered, repeated, among others{notes}"


def _try(
    search: Search, time: int, generator: torch.Generator, rows: int = 5
) -> None:
    vocab = search.subject.vocab_size
    if rows * time * vocab > 1 << 26:
        rows = 2
    tokens = draw(vocab, rows, time, generator)
    quiet = Mode()
    at = range(rows) if time <= 16 else (0, rows - 1)
    whole = search.run(tokens, quiet)
    for row in at:
        alone = tokens[row : row + 1]
        _same(search, quiet, tokens, whole, row, alone, 0, "alone")
    order = torch.arange(rows).roll(1)
    moved = search.run(tokens[order], quiet)
    for row in at:
        new = (row + 1) % rows
        what = "in another order"
        _same(
            search, quiet, tokens, whole, row, tokens[order], new, what, moved
        )
    if time <= 16:
        twice = tokens.repeat(2, 1)
        what = "repeated"
        _same(search, quiet, tokens, whole, 0, twice, rows, what)
    for mode in (quiet, Mode("in train mode", training=True)):
        whole = search.run(tokens, mode)
        for row in at if time > 16 else sorted({0, 1 % rows, rows - 1}):
            replaced = others(tokens, vocab, generator)
            replaced[row] = tokens[row]
            what = "with the other rows replaced"
            _same(search, mode, tokens, whole, row, replaced, row, what)
            equal = tokens[row].repeat(rows, 1)
            changed = equal.clone()
            far = (row + 1) % rows
            changed[far] = others(equal[far], vocab, generator)
            what = f"with row {far} changed among equal rows"
            if time <= 16:
                left = search.run(equal, mode)
                _same(search, mode, equal, left, row, changed, row, what)


def _same(
    search: Search,
    mode: Mode,
    left: Int[Tensor, "rows time"],
    scores: Float[Tensor, "rows time vocab"],
    row: int,
    right: Int[Tensor, "others time"],
    other: int,
    what: str,
    others_scores: Float[Tensor, "others time vocab"] | None = None,
) -> None:
    """Compare one row's scores, which are known, in another batch."""

    def difference() -> Tensor:
        a = search.run(left, mode)[row]
        return search.run(right, mode)[other] - a

    a = scores[row]
    if others_scores is None:
        others_scores = search.run(right, mode)
    b = others_scores[other]
    moved = gaps(a, b)
    position = int(moved.argmax())
    noise = rounding(a)
    size = float(moved[position])
    if not size > floor_of(a.dtype) * noise:
        return
    if mode.training and not search.same_draws(left, right, mode):
        search.unsteady = True
        return
    if is_real(search.model, lambda: difference()[position], noise):
        words = "".join(f", {w}" for w in (mode.words, search.weights) if w)
        raise AssertionError(
            f"row {row} of a batch of {len(left)} depends on other rows: "
            f"{what} (a batch of {len(right)}), its scores at position "
            f"{position} move by {size:.2g} at length {left.size(1)} "
            f"({str(a.dtype).removeprefix('torch.')}{words}; rounding there "
            f"is {noise:.1g})"
        )
