"""Which line computes what, and where two implementations part."""

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ...invariants.errors import UnusableModel
from ...invariants.meeting.building import Builder, is_factory
from ...invariants.meeting.meet import meet
from ...invariants.subject import Subject
from .found import Found
from .matching import Matches, match
from .parting import Flow, find_parting
from .rows import Row
from .side import Side

SEED = 0  # of drawn tokens, and of weights that a factory draws
DRAWN = 16  # tokens, where none are given
NEAREST = 5  # values that are offered where nothing is shared

Model = Callable[..., Any]


def diff_by_value(
    left: Model,
    right: Model,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
    names: tuple[str, str] | None = None,
) -> Found:
    """Pair the lines of two models by the values they compute.

    Both run in eval mode on the same tokens, in float64 where both can.
    Each brings its own weights.

    Args:
        left: a model, any callable from (batch, time) ids to scores, or a
            function without arguments that builds one.
        right: another.
        tokens: ids; None: 16 drawn from a seed.
        vocab_size: number of tokens, where a model does not declare it.
        names: what to call the two; None: as their classes.

    Raises:
        ValueError: for two vocabularies, tokens that do not fit, a model
            that raises, or one of which nothing can be recorded.
    """
    given = None if tokens is None else _as_tokens(tokens)
    length = DRAWN if given is None else given.size(1)
    subjects = [_subject(model, length, vocab_size) for model in (left, right)]
    names = names or (subjects[0].name, subjects[1].name)
    sizes = [subject.vocab_size for subject in subjects]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{names[0]} has {sizes[0]:,} tokens, {names[1]} has "
            f"{sizes[1]:,}: they cannot be one function"
        )
    longest = min(subject.block_size for subject in subjects)
    if given is None:
        generator = torch.Generator().manual_seed(SEED)
        given = torch.randint(sizes[0], (1, longest), generator=generator)
    if given.size(1) > longest:
        raise ValueError(
            f"{given.size(1)} tokens are more than the {longest} that both "
            f"take"
        )
    outside = given[(given < 0) | (given >= sizes[0])]
    if outside.numel():
        raise ValueError(f"token {outside[0]} is none of the {sizes[0]:,}")
    sides = Side(subjects[0], given), Side(subjects[1], given)
    if sides[0].dtype != sides[1].dtype:
        for side in sides:
            if side.doubled:
                side.doubled = False
                side.record()
    return _found(names, sides, match(*sides))


def assert_same_values(
    left: Model,
    right: Model,
    tokens: Int[Tensor, "batch time"] | Sequence[int] | None = None,
    *,
    vocab_size: int | None = None,
) -> None:
    """Raise AssertionError where two models are not one function.

    The message names the first line that parts. The arguments are those of
    diff_by_value, and so are its errors.
    """
    found = diff_by_value(left, right, tokens, vocab_size=vocab_size)
    if not found.same:
        raise AssertionError(found.sentence)


def _as_tokens(
    tokens: Int[Tensor, "batch time"] | Sequence[int],
) -> Int[Tensor, "batch time"]:
    given = torch.as_tensor(tokens)
    whole = not given.is_floating_point() and given.dtype != torch.bool
    if given.dim() not in (1, 2) or not given.numel() or not whole:
        raise ValueError(
            f"tokens must be ids, (batch, time) or one row of them, got "
            f"{given.dtype} of shape {tuple(given.shape)}"
        )
    return given.long().reshape(-1, given.size(-1))


def _subject(model: Model, length: int, vocab_size: int | None) -> Subject:
    try:
        if is_factory(model):  # once: a loader may take longer than a run
            model = Builder(model, SEED, None).build()
        return meet(model, vocab_size=vocab_size, block_size=length)
    except UnusableModel as error:
        raise ValueError(str(error)) from error.__cause__


def _found(
    names: tuple[str, str], sides: tuple[Side, Side], matches: Matches
) -> Found:
    left, right = sides
    same = (
        left.normalised in matches.seen[0]
        and right.normalised in matches.seen[1]
    )
    pairs = [
        Row(a.place, b.place, a.shape, apart, order=(a.number, b.number))
        for n, r, apart in matches.pairs
        for a, b in [(left.values[n], right.values[r])]
        # the inside of an operation, on both sides: no line of either
        if not a.place.inside or not b.place.inside
    ]
    close = (set[int](), set[int]()) if same else matches.close
    apart = (
        {n: difference for n, _, difference in matches.pairs},
        {r: difference for _, r, difference in matches.pairs},
    )
    ours, theirs = map(Flow, sides, matches.seen, close, apart)
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
    return Found(
        names=names,
        sides=sides,
        pairs=pairs,
        alone=alone,
        parted=None if same else find_parting(sides, (ours, theirs), matches),
        nearest=[] if pairs else _nearest(left, right),
        notes=_notes(names, sides),
    )


def _nearest(left: Side, right: Side) -> list[Row]:
    """Return for lines of the left the nearest of the right, by digests."""
    found: dict[tuple[str, int], tuple[float, Row]] = {}
    for a in left.values:
        for b in right.values:
            if a.digest.trivial or a.place.inside or b.place.inside:
                continue
            apart = a.digest.distance(b.digest)
            line, size = (a.place.path, a.place.line), apart / a.digest.size
            if size < found.get(line, (math.inf,))[0]:
                found[line] = size, Row(a.place, b.place, a.shape, apart)
    nearest = sorted(found.values(), key=itemgetter(0))[:NEAREST]
    return [pair for _, pair in nearest]


def _notes(names: tuple[str, str], sides: tuple[Side, Side]) -> list[str]:
    notes = []
    for name, side in zip(names, sides, strict=True):
        if side.scripted:
            parts = ", ".join(side.scripted[:3])
            notes.append(
                f"{name}: {parts} is scripted; its values are recorded, its "
                f"lines are not seen"
            )
        if not side.doubled:
            kind = str(side.dtype).removeprefix("torch.")
            notes.append(f"{name} does not run in float64: both ran in {kind}")
    return notes
