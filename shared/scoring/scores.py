"""Compare two scorers on one text: where they first differ, and how much."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..comparison.values.recording import TOKENS, read_arrays
from ..running.context import isolated, one_run
from ..running.errors import UnusableModel
from ..running.tokens import spans
from .scorer import (
    LN_2,
    Score,
    Scorer,
    Scores,
    differences,
    most,
    read_scores,
    rounding_of,
)

Side = Path | Callable[[], Score]


@dataclass(frozen=True)
class ScoreDiff:
    """The scores that two scorers give a text, and where they differ."""

    same: bool  # whether both score the same positions with equal scores
    sentence: str  # where they first differ, and by how much
    first: int | None  # the first position that differs by more than rounding
    tokens: list[int]  # the text
    left: dict[int, float]  # the left's scores in nats, by position
    right: dict[int, float]  # the right's scores in nats, by position
    bound: float  # the largest difference that counts as rounding


@one_run
def diff_scores(
    left: Side,
    right: Side,
    tokens: Sequence[int] | None = None,
    *,
    names: tuple[str, str] = ("left", "right"),
    tolerance: float = 0.0,
) -> ScoreDiff:
    """Compare the scores of two scorers for one text.

    Args:
        left: make_score, as for check_scorer, or a file (.npz, .safetensors).
            A file has an array of log-probabilities, (time,) or (time - 1,),
            and the ids, (time,), as `tokens`.
        right: the scorer or the file to compare with the left.
        tokens: ids of the text; None uses those of a file.
        names: the names of the two scorers, for messages.
        tolerance: differences up to this share of the largest score pass.

    Raises:
        ValueError: if a file or scorer cannot be read, or if a file has a
            different text.
    """
    files = [
        read_arrays(side) if isinstance(side, Path) else {}
        for side in (left, right)
    ]
    for arrays in files:
        if tokens is None and TOKENS in arrays:
            tokens = arrays[TOKENS].flatten().tolist()
    if not tokens:
        raise ValueError("no tokens: give a text, or ids like 1,2,3")
    sides, bound = list[dict[int, float]](), 0.0
    for name, side, arrays in zip(names, (left, right), files, strict=True):
        if isinstance(side, Path):
            scores = _from_file(name, arrays, [*tokens])
            unit = scores.dtype
        else:
            scorer = Scorer(side)
            with isolated(0):
                scores = scorer.meet(torch.tensor(tokens))
            unit = scorer.unit
        if scores.unplaced:
            raise ValueError(
                f"{name} has {scores.unplaced} scores for {len(tokens)} tokens"
            )
        bound = max(bound, scores.bound(max(tolerance, rounding_of(unit))))
        sides.append({at: s for (at, n), s in scores.table.items() if not n})
    return _compare([*tokens], sides[0], sides[1], bound)


def _compare(
    tokens: list[int],
    left: dict[int, float],
    right: dict[int, float],
    bound: float,
) -> ScoreDiff:
    both = sorted(left.keys() & right.keys())
    apart = differences({at: left[at] for at in both}, right)
    parted = [at for at in both if apart[at] > bound]
    alone = (left.keys() ^ right.keys()) - {0}
    first = parted[0] if parted else None
    said = "no position is scored on both sides"
    if first is not None:
        said = (
            f"they first differ at position {first} (token {tokens[first]}): "
            f"{left[first]:.5g} and {right[first]:.5g}; {len(parted)} of "
            f"{len(both)} scores differ"
        )
    elif both:
        said = "one scorer: scores differ"
    if both:
        said += f" {most(apart)} (rounding: {bound:.1g})"
    if alone:
        said += f"; scored on only one side: {spans(alone)}"
    for side, factor in (("left", LN_2), ("right", 1 / LN_2)):
        pairs = [(left[at] * factor, right[at]) for at in parted]
        if pairs and all(math.isclose(*pair, rel_tol=1e-4) for pair in pairs):
            said += f"; the {side} scores are in bits, the others in nats"
    same = bool(both) and not parted and not alone
    return ScoreDiff(same, said, first, tokens, left, right, bound)


def _from_file(
    name: str, arrays: dict[str, torch.Tensor], tokens: list[int]
) -> Scores:
    ids = arrays.pop(TOKENS, torch.tensor(tokens)).flatten().tolist()
    if ids != tokens:
        raise ValueError(
            f"{name} has scores of another text: {len(ids)} ids, but the "
            f"given text has {len(tokens)}"
        )
    found = [a for a in arrays.values() if a.is_floating_point()]
    if len(found) != 1:
        raise ValueError(
            f"{name} must have one array of scores, got {len(found)}"
        )
    try:
        return read_scores(found[0].squeeze(), len(tokens))
    except UnusableModel as error:
        raise ValueError(f"{name}: {error}") from None
