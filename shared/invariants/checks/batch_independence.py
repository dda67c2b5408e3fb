"""Rows of a batch do not depend on each other."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product

import torch
from jaxtyping import Int
from torch import Tensor

from ...proof.claims import prove_rows
from ...proof.proof import Proof
from ...running.errors import FailureAt, ModelRaised, NotFinite
from ...running.model.inputs import MASK, PADDING, SHOWN, Input, Layout
from ...running.model.inputs import shown as padding
from ...running.tokens import SHORT, draw, others
from ...running.variant import Variant, both, gap_between, own, precise
from ...running.ways import (
    CAUSALITY,
    EVAL,
    MASKED,
    ROWS,
    TRAIN_WITHOUT_GRADIENTS,
    cases_of,
)
from ..check import SkipCheck, Subject, check

LEFT = next(case for case in MASKED if case.visible == SHOWN["a left-padded"])
COUNTED = "position_ids"
ROWS_TRIED = 5  # most rows of a batch that are compared
ROWS_TRIED_OF_A_HEAVY_MODEL = 3
MANY = (2, 3, 8, 16, 33)
DRAWS = "in train mode random draws depend on the tokens"


@check(share=2, needs="rows")
def check_batch_independence(subject: Subject) -> str:
    """A row's scores do not depend on other rows, their number or order.

    Why: with statistics over the batch, an evaluation depends on the other
    rows, and one sequence sees another sequence's future.
    How: a proof, as in check_causality, with rows instead of positions. The
    proof cannot find a dependence on the number of rows or on a row's place.
    So the scores of a batch are also compared with those of its rows run
    separately, in another order, repeated, and among other rows. In train mode
    only batches of equal shape are compared, because only these get equal
    dropout masks. If masks or documents are given, the rows are padded or
    packed differently. The tried batches have 1, 2, 3, 5, 8, 16 and 33 rows.
    If it fails: look for a mean or softmax over axis 0, and for layers that
    expect (time, batch).
    Reports: issue huggingface/transformers 18809, rows change other rows.
    """
    if subject.fit_rows(2) < 2:
        raise SkipCheck("the model takes one row")
    subject.require_no_noise()
    subject.require_no_state()
    generator, notes, tested = subject.generator(), set[str](), False
    proof = prove_rows(subject)
    for variant, time, rows in chain(
        _where_open(subject, proof), _sizes(subject)
    ):
        crowd = variant.case.crowd
        # with a share of 0, the large batch runs only without a time limit:
        # its calls take seconds
        share = 0 if crowd and subject.takes_seconds(rows * time) else 1 / 2
        with subject.budget.part(variant.case.name, time, share):
            try:
                notes |= _try(variant, time, rows, generator)
                tested = True
            except AssertionError as error:
                if proof is None or proof.culprit is None:
                    raise
                text = f"{error}; let through at {proof.culprit}"
                raise FailureAt(text, proof.culprit) from error
    found = [] if proof is None else [proof.sentence]
    if tested:
        how = "tested: " * (proof is not None)
        found.append(f"{how}alone, reordered, repeated, among others")
    # check_finite and check_causality report NaN scores after padding
    with subject.budget.part(), suppress(ModelRaised, NotFinite):
        notes |= {*_padded(subject)}
    return "; ".join([*found, *sorted(notes)])


def _where_open(
    subject: Subject, proof: Proof | None
) -> Iterator[tuple[Variant, int, int]]:
    """Yield the call that a proof leaves open, unless `_sizes` covers it.

    `_sizes` covers neither calls after other calls nor other seeds.
    """
    if proof is None or proof.at is None:
        return
    case, time = proof.at
    if proof.worn is not None:
        yield proof.worn, time, ROWS_TRIED
    elif case.seed:
        yield own(subject).run_as(case), time, ROWS_TRIED


def _sizes(subject: Subject) -> Iterator[tuple[Variant, int, int]]:
    """Yield the model in both modes, with a length and a row count."""
    # an iterator: the copy with larger weights is built only when needed
    variants = both(subject)
    fresh, longest = next(variants), subject.block_size
    few = ROWS_TRIED_OF_A_HEAVY_MODEL if subject.heavy else ROWS_TRIED
    seven, crowd = subject.lengths.fit(7), subject.lengths.fit(128)
    # each other case, at one short length
    for case in cases_of(ROWS, subject):
        # another copy for masks, with which some models give NaN in float64
        masked = case.visible is not None
        one = precise(subject, masked=True) if masked else fresh
        one = one.run_as(case)
        if case.crowd:
            yield one, crowd, one.rows_at_once(crowd)
        elif case.given is None or case.given.by_rows:
            yield one, seven, few
    for variant, time in chain(
        ((fresh, time) for time in subject.fit(1, 2)),
        ((enlarged, seven) for enlarged in variants),
        ((precise(subject, t), t) for t in [longest] if t > SHORT),
    ):
        rows = 2 if few * time * subject.vocab_size > 1 << 26 else few
        for case in (EVAL, TRAIN_WITHOUT_GRADIENTS):
            yield variant.run_as(case), time, rows
    for rows, case in product(MANY, (EVAL, TRAIN_WITHOUT_GRADIENTS)):
        yield fresh.run_as(case), seven, rows


def _padded(subject: Subject) -> Iterator[str]:
    """Say whether masked padding on the left changes the scores of a text."""
    time = subject.lengths.fit(8)
    if LEFT not in cases_of(CAUSALITY, subject) or time < 4:
        return
    variant = precise(subject, masked=True)
    tokens = subject.draw(1, time)
    (at,) = LEFT.shown(1, time)
    shown = slice(None), at
    alone = variant, tokens[shown], ...
    found = gap_between((variant.run_as(LEFT), tokens, shown), alone)
    if found is None:
        return
    words = (
        f"a text after masked padding has other scores than without "
        f"padding: by {found.size:.2g}"
    )
    if COUNTED not in subject.caller.arguments:
        yield f"{words}: do positions count the padding?"
        return
    case = replace(LEFT, given=Input(COUNTED, PADDING, COUNTED, _counted))
    mended = not gap_between((variant.run_as(case), tokens, shown), alone)
    yield f"{words}{', not with position_ids from the mask' * mended}"


def _counted(
    tokens: Int[Tensor, "batch time"], layout: Layout
) -> dict[str, Tensor]:
    """Return a mask that hides padding, and positions that do not count it."""
    mask = padding(LEFT.visible or (0.0, 1.0), tokens, layout.places)
    return {MASK: mask, COUNTED: (mask.cumsum(1) - 1).clamp(min=0)}


def _try(
    variant: Variant, time: int, rows: int, generator: torch.Generator
) -> set[str]:
    """Compare a batch with changed batches; return notes for the report."""
    notes = set[str]()
    tokens = draw(variant.subject.vocab_size, rows, time, generator)
    scores, shown = variant.scores(tokens), variant.case.shown(rows, time)

    def of(batch: Batch) -> Variant:
        return variant.run_as(variant.case.at(*batch.places))

    # keeps the scores of the last batch, with which several rows are compared
    of_last = lru_cache(1)(lambda batch: of(batch).scores(batch.tokens))
    for row, batch, place, what in _batches(variant, tokens, generator):
        at = shown[row]  # positions that a mask hides may have any scores
        if not at.any():
            continue
        gap = gap_between(
            (variant, tokens, (row, at)),
            (of(batch), batch.tokens, (place, at)),
            (scores[row, at], of_last(batch)[place, at]),
        )
        if gap is None:
            continue
        draws, other = variant.draws, batch.tokens
        if variant.case.training and draws(tokens) != draws(other):
            notes.add(DRAWS)
            continue
        raise AssertionError(
            f"row {row} of a batch of {rows} depends on other rows: "
            f"{what} (a batch of {len(other)}), its scores at position "
            f"{int(at.nonzero()[gap.at[0], 0])} move by {gap.size:.2g} at "
            f"length {time} {variant.precision(gap.dtype, gap.noise)}"
        )
    return notes


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of a call, each with its place in the whole batch."""

    tokens: Int[Tensor, "rows time"]
    places: tuple[int, ...]


def _batches(
    variant: Variant,
    tokens: Int[Tensor, "rows time"],
    generator: torch.Generator,
) -> Iterator[tuple[int, Batch, int, str]]:
    """Yield a row, a changed batch, the row's place in it, and the change."""
    rows, time = tokens.shape
    places = (*range(rows),)
    short = time <= SHORT and rows <= ROWS_TRIED
    ends = sorted({0, 1 % rows, rows - 1} if short else {0, rows - 1})
    some = range(rows) if short else ends
    # in train mode, batches of another shape have other dropout masks
    if not variant.case.training:
        for row in some:
            yield row, Batch(tokens[row : row + 1], (row,)), 0, "alone"
        order = Batch(tokens.roll(1, 0), (places[-1], *places[:-1]))
        for row in some:
            yield row, order, (row + 1) % rows, "in another order"
        if short:
            twice = Batch(tokens.repeat(2, 1), places * 2)
            yield 0, twice, rows, "repeated"
    for row in ends:
        replaced = others(tokens, variant.subject.vocab_size, generator)
        replaced[row] = tokens[row]
        batch = Batch(replaced, places)
        yield row, batch, row, "with the other rows replaced"
