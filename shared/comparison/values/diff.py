"""Which line computes what, and where two implementations part."""

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from ...invariants.context import one_run
from ...invariants.meeting.arrays import IN_ARRAYS
from ...invariants.subject import Subject
from .divergence import find_divergence
from .flow import Flow
from .given import (
    DRAWN,
    Model,
    as_tokens,
    drawn,
    require_fit,
    subject_of,
    subjects_of,
)
from .gradients import first_difference
from .matching import ROUNDING_ALONE, Matches, match
from .recording import Recording, scores_of
from .rows import MOVED, Row
from .side import Side, unit_of
from .value_diff import ValueDiff, nearest_values
from .weights import WeightMatch, match_weights


@one_run
def diff_by_value(
    left: Model | Path,
    right: Model | Path,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
    names: tuple[str, str] | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float = 0.0,
    gradients: bool = False,
) -> ValueDiff:
    """Pair the lines of two models by the values they compute.

    Both run in eval mode on the same tokens, in float64 where both can.
    Each brings its own weights. One of the two may be a recording: the path
    of an .npz or a .safetensors with the tokens, and with arrays in the order
    in which they were computed, the scores among them; it stands on the
    right then, and the model runs in the recording's dtype. So does a
    function written in arrays of NumPy or JAX, of which the scores are seen.

    Args:
        left: a model, any callable from (batch, time) ids to scores, or a
            function without arguments that builds one.
        right: another.
        tokens: ids; None: 16 drawn from a seed.
        vocab_size: number of tokens, where a model does not declare it.
        names: what to call the two; None: as their classes.
        dtype: to run both in; None: float64, or that of a recording.
        tolerance: share of a value's largest number that passes as rounding
            in any case.
        gradients: whether to compare the gradients of the weights, too, of
            the mean cross-entropy of the next tokens.

    Raises:
        ValueError: for two vocabularies, tokens that do not fit, a model
            that raises, or one of which nothing can be recorded.
    """
    if isinstance(left, Path):
        if isinstance(right, Path):
            raise ValueError("one of the two sides must be a model that runs")
        left, right, names = right, left, names and names[::-1]
    given = None if tokens is None else as_tokens(tokens)
    if isinstance(right, Path):
        recording = Recording(right)
        if given is not None and not torch.equal(given, recording.tokens):
            raise ValueError(f"{right} was recorded from other tokens")
        subject = subject_of(left, recording.tokens.size(1), vocab_size)
        names = names or (subject.name, str(right))
        found = _diff_recording(subject, recording, names, dtype, tolerance)
        return _with_weights(found, gradients or bool(recording.stored))
    length = DRAWN if given is None else given.size(1)
    subjects = subjects_of((left, right), length, vocab_size)
    names = names or (subjects[0].name, subjects[1].name)
    sizes = [subject.vocab_size for subject in subjects]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{names[0]} has {sizes[0]:,} tokens, {names[1]} has "
            f"{sizes[1]:,}: they cannot be one function"
        )
    longest = min(subject.block_size for subject in subjects)
    if given is None:
        given = drawn(sizes[0], longest)
    require_fit(given, longest, sizes[0])
    if subjects[0].in_arrays and not subjects[1].in_arrays:
        subjects, names = subjects[::-1], names[::-1]
    if subjects[1].in_arrays:
        scores = scores_of(subjects[1], given)
        found = _diff_recording(subjects[0], scores, names, dtype, tolerance)
        return _with_weights(found, gradients)
    sides = (
        Side(subjects[0], given, dtype),
        Side(subjects[1], given, dtype),
    )
    single = [
        name
        for name, side in zip(names, sides, strict=True)
        if not side.doubled and dtype is None
    ]
    if sides[0].dtype != sides[1].dtype:
        for side in sides:
            if side.doubled:
                side.doubled = False
                side.record()
    found = _found(names, sides, match(*sides, tolerance), single)
    return _with_weights(found, gradients)


def _with_weights(found: ValueDiff, gradients: bool) -> ValueDiff:
    """Add which weights are whose, and the first gradient that differs."""
    left, right = found.sides
    ours, theirs = left.module(), right.module()
    matches: list[WeightMatch] = []
    if ours is not None and theirs is not None:
        matches = match_weights(ours, theirs)
    elif ours is not None and gradients:  # a recording has the left's names
        matches = [WeightMatch(n, "equal", (n,)) for n in right.gradients()]
    found = replace(found, weights=matches)
    if not gradients or not found.same:
        return found
    unit = min(unit_of(left, right), 2.0**-16)
    first, count = first_difference(
        left.gradients(), right.gradients(), matches, right.detached, unit
    )
    return replace(found, gradient=first, gradients=count)


def _diff_recording(
    subject: Subject,
    recording: Recording,
    names: tuple[str, str],
    dtype: torch.dtype | None,
    tolerance: float,
) -> ValueDiff:
    """Compare a model with a file, or with scores, in the dtype of these."""
    tokens = recording.tokens
    require_fit(tokens, subject.block_size, subject.vocab_size)
    if dtype is None and not recording.doubled:
        dtype = recording.dtype
    if subject.in_arrays:
        side: Side = scores_of(subject, tokens)
    else:
        side = Side(subject, tokens, dtype)
    recording.lay_out(side.values, subject.vocab_size)
    sides = side, recording
    found = _found(names, sides, match(*sides, tolerance), [])
    kind = str(side.dtype).removeprefix("torch.")
    notes = [
        f"{name} is {IN_ARRAYS}, and its scores alone are compared"
        for name, one in zip(names, sides, strict=True)
        if one.only_scores
    ]
    notes.append(f"run in {kind}, that of {names[1]}")
    if any(one.only_scores for one in sides):
        found = replace(found, alone={"left": [], "right": []})
    return replace(found, notes=[*found.notes, *notes])


def assert_same_values(
    left: Model | Path,
    right: Model | Path,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float = 0.0,
) -> None:
    """Raise AssertionError where two models are not one function.

    The message names the first line that parts. The arguments are those of
    diff_by_value, and so are its errors.
    """
    found = diff_by_value(
        left,
        right,
        tokens,
        vocab_size=vocab_size,
        dtype=dtype,
        tolerance=tolerance,
    )
    if not found.same:
        raise AssertionError(found.sentence)


def _found(
    names: tuple[str, str],
    sides: tuple[Side, Side],
    matches: Matches,
    single: Sequence[str],
) -> ValueDiff:
    left, right = sides
    same = matches.apart <= matches.rounding
    moved = {n for n, _, _ in matches.moved}
    pairs = [
        Row(
            a.place,
            b.place,
            a.shape,
            apart,
            MOVED if n in moved else "",
            (a.number, b.number),
        )
        for n, r, apart in sorted((*matches.pairs, *matches.moved))
        for a, b in [(left.values[n], right.values[r])]
        # the inside of an operation, on both sides: no line of either
        if not a.place.inside or not b.place.inside
    ]
    close = (set[int](), set[int]()) if same else matches.close
    apart = (
        {n: difference for n, _, difference in matches.pairs},
        {r: difference for _, r, difference in matches.pairs},
    )
    others = right.values, left.values
    ours, theirs = map(Flow, sides, matches.explaining, close, apart, others)
    alone = {
        "left": [
            Row(value.place, None, value.shape, None, why, (value.number, -1))
            for value, why in ours.lines_alone(theirs)
        ],
        "right": [
            Row(None, value.place, value.shape, None, why, (-1, value.number))
            for value, why in theirs.lines_alone(ours)
        ],
    }
    return ValueDiff(
        names=names,
        sides=sides,
        pairs=pairs,
        alone=alone,
        parted=None
        if same
        else find_divergence(sides, (ours, theirs), matches),
        nearest=[] if pairs else nearest_values(left, right),
        notes=_notes(names, sides, single),
        apart=matches.apart,
        rounding=matches.rounding,
        coarse=_coarse(sides, matches.apart) if same else "",
    )


def _coarse(sides: tuple[Side, Side], apart: float) -> str:
    """Return which line makes two functions equal only in a coarser dtype."""
    eps = torch.finfo(sides[0].dtype).eps
    if apart <= ROUNDING_ALONE * eps:
        return ""
    coarser = [
        (torch.finfo(dtype).eps, side, dtype)
        for side in sides
        for dtype in side.dtypes
        if torch.finfo(dtype).eps > eps
    ]
    if not coarser:
        return ""
    _, side, dtype = max(coarser, key=itemgetter(0))
    kind = str(dtype).removeprefix("torch.")
    place, single = side.dtypes[dtype]
    words = f"is a {kind} constant" if single else f"computes in {kind}"
    return f" up to {kind}: {place} {words}"


def _notes(
    names: tuple[str, str], sides: tuple[Side, Side], single: Sequence[str]
) -> list[str]:
    notes = []
    for name, side in zip(names, sides, strict=True):
        if side.scripted:
            parts = ", ".join(side.scripted[:3])
            notes.append(
                f"{name}: {parts} is scripted; its values are recorded, its "
                f"lines are not seen"
            )
        if name in single:
            kind = str(side.dtype).removeprefix("torch.")
            notes.append(f"{name} does not run in float64: both ran in {kind}")
    return notes
