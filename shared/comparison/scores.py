"""Two scorers of one text: where they part first, and by how much."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..invariants.context import isolated, one_run
from ..invariants.errors import UnusableModel
from ..invariants.scores import Score, Scorer, Scores, read_scores, rounding_of
from ..invariants.tokens import spans
from .values.recording import TOKENS, read_arrays

Side = Path | Callable[[], Score]


@dataclass(frozen=True)
class ScoreDiff:
    """The scores that two sides give a text.

    Attributes:
        tokens: the text.
        left: scores in nats by position.
        right: those of the other side.
        bound: up to which a difference is rounding.
    """

    tokens: list[int]
    left: dict[int, float]
    right: dict[int, float]
    bound: float

    @property
    def apart(self) -> dict[int, float]:
        """How far both are apart where they are, by position."""
        both = sorted(self.left.keys() & self.right.keys())
        pairs = [(self.left[at], self.right[at]) for at in both]
        sizes = [0.0 if one == two else abs(one - two) for one, two in pairs]
        return dict(zip(both, sizes, strict=True))

    @property
    def alone(self) -> list[int]:
        """Positions, but the first, that one side alone scores."""
        return sorted((self.left.keys() ^ self.right.keys()) - {0})

    @property
    def parted(self) -> list[int]:
        """Positions whose scores differ by more than rounding."""
        return [at for at, size in self.apart.items() if size > self.bound]

    @property
    def same(self) -> bool:
        """Whether both score the same positions alike."""
        return bool(self.apart) and not self.parted and not self.alone

    @property
    def sentence(self) -> str:
        """Where both part first, and by how much."""
        apart, parted = self.apart, self.parted
        left, right = self.left, self.right
        if not apart:
            return "no position is scored on both sides"
        most = max(apart, key=apart.__getitem__)
        largest = f"{apart[most]:.2g} at position {most}"
        said = f"one scorer: largest difference {largest}"
        if parted:
            at = parted[0]
            said = (
                f"they part at position {at} (token {self.tokens[at]}): "
                f"{left[at]:.5g} and {right[at]:.5g}; {len(parted)} of "
                f"{len(apart)} scores differ, most by {largest}"
            )
        said += f" (rounding: {self.bound:.1g})"
        if self.alone:
            said += f"; scored on one side alone: {spans(self.alone)}"
        for power, side in ((1, "left"), (-1, "right")):
            pairs = [
                (left[k] * math.log(2) ** power, right[k]) for k in parted
            ]
            if pairs and all(math.isclose(*p, rel_tol=1e-4) for p in pairs):
                said += f"; the {side} ones are in bits, the others in nats"
        return said

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        first = self.parted[0] if self.parted else None
        found = {"same": self.same, "sentence": self.sentence, "first": first}
        return found | asdict(self)


@one_run
def diff_scores(
    left: Side,
    right: Side,
    tokens: Sequence[int] | None = None,
    *,
    names: tuple[str, str] = ("left", "right"),
    tolerance: float = 0.0,
) -> ScoreDiff:
    """Compare what two scorers give one text.

    Args:
        left: make_score, as for check_scorer, or a file (.npz,
            .safetensors) with an array of log-probabilities, (time,) or
            (time - 1,), and the ids, (time,), as `tokens`.
        right: another one.
        tokens: ids of the text; None: those of a file.
        names: of both sides, for messages.
        tolerance: share of the largest score that passes as rounding.

    Raises:
        ValueError: for files and scorers that cannot be read, and for a
            file of another text.
    """
    files = [
        read_arrays(side) if isinstance(side, Path) else {}
        for side in (left, right)
    ]
    for arrays in files:
        if tokens is None and TOKENS in arrays:
            tokens = arrays[TOKENS].flatten().tolist()
    if not tokens:
        raise ValueError("no tokens: give a text, or ids as 1,2,3")
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
    return ScoreDiff([*tokens], sides[0], sides[1], bound)


def _from_file(
    name: str, arrays: dict[str, torch.Tensor], tokens: list[int]
) -> Scores:
    ids = arrays.pop(TOKENS, torch.tensor(tokens)).flatten().tolist()
    if ids != tokens:
        raise ValueError(
            f"{name} was made of another text: {len(ids)} ids, and not the "
            f"{len(tokens)} given"
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
