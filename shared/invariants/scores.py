"""A scorer of texts, and the scores that it gives, in the order it does."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .budget import Budget
from .context import seed_all
from .errors import UnusableModel, place_of, sentence
from .model.calling import as_tensor, is_array
from .rounding import Inside, floor_of

Text = Int[Tensor, "time"]
Score = Callable[[Text], Any]


class ScorerRaised(Exception):
    """The scorer raised: there is no verdict."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a text's tokens, in the order of scoring.

    Attributes:
        positions: of the tokens; None: the scores are too many or too few.
        values: in nats, in float64.
        dtype: that they came in.
    """

    positions: list[int] | None
    values: Float[Tensor, "count"]
    dtype: torch.dtype = torch.float64

    @property
    def order(self) -> list[int]:
        """The positions, none where they are not known."""
        return self.positions or []

    @property
    def largest(self) -> float:
        """The size of the largest finite score."""
        return max(
            map(abs, filter(math.isfinite, self.values.tolist())), default=0.0
        )

    def by_key(self) -> dict[tuple[int, int], float]:
        """Return scores by position and how often it was scored before."""
        seen = Counter[int]()
        scores = {}
        for at, value in zip(self.order, self.values.tolist(), strict=False):
            scores[at, seen[at]] = value
            seen[at] += 1
        return scores

    def moved(self, other: "Scores") -> list[float]:
        """Return how far the other's score of each position is.

        One that is not there is infinitely far.
        """
        there = other.by_key()
        return [
            0.0
            if one == there.get(key)
            else abs(one - there.get(key, math.inf))
            for key, one in self.by_key().items()
        ]


def read_scores(answer: Any, time: int, bits: bool = False) -> Scores:
    """Read what a scorer returned for so many tokens.

    Args:
        answer: (time,), or (time - 1,) without the first token, or pairs
            (position, score). NaN, or 0 for the first token, is no score.
        time: number of tokens.
        bits: whether scores are in bits.

    Raises:
        UnusableModel: for anything else, and a position outside the text.
    """
    kind = type(answer).__name__
    table: Tensor | None
    if isinstance(answer, Tensor):
        table = answer.detach().cpu()
    elif is_array(answer):
        table = as_tensor(answer)
    else:
        try:
            rows = [
                [*map(float, row)]
                if isinstance(row, tuple | list)
                else float(row)
                for row in answer
            ]
            table = torch.tensor(rows, dtype=torch.float64)
        except (TypeError, ValueError):
            table = None
    pairs = table is not None and table.dim() == 2 and table.size(1) == 2
    if table is None or not (table.dim() == 1 or pairs):
        shape = "" if table is None else f" of shape {tuple(table.shape)}"
        raise UnusableModel(
            f"score returned {kind}{shape} for {time} tokens; return a "
            f"log-probability for each, or pairs (position, log-probability)"
        )
    dtype = table.dtype if table.is_floating_point() else torch.float64
    values = table.double()
    positions = [*range(time - len(values), time)]
    if pairs:
        positions, values = values[:, 0].long().tolist(), values[:, 1]
        for at in positions:
            if not 0 <= at < time:
                raise UnusableModel(
                    f"score returned position {at} for {time} tokens"
                )
    elif len(values) not in (time, time - 1):
        return Scores(None, values, dtype)
    elif positions[:1] == [0] and values[0] == 0:
        positions, values = positions[1:], values[1:]
    shown = ~values.isnan()
    positions = [at for at, k in zip(positions, shown, strict=True) if k]
    return Scores(
        positions, values[shown] * (math.log(2) if bits else 1), dtype
    )


def rounding_of(dtype: torch.dtype) -> float:
    """Return the share of a score that is rounding in a dtype, or float32."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return floor_of(dtype) * eps


@dataclass
class Scorer:
    """Fresh scorers of a text, each with the same random numbers.

    Attributes:
        make_score: builds one.
        bits: whether its scores are in bits.
        seed: of the random numbers.
    """

    make_score: Callable[[], Score]
    bits: bool
    seed: int
    unit = torch.float32  # the coarsest dtype that a scorer computes in
    noise = 0.0  # how far two fresh scorers are apart
    budget: Budget = field(default_factory=Budget, init=False)

    def make(self, seed: int | None = None) -> Score:
        """Return a fresh scorer."""
        seed_all(self.seed if seed is None else seed)
        try:
            score = self.make_score()
        except Exception as error:
            raise _raised("make_score", error) from error
        if not callable(score):
            raise UnusableModel(
                f"make_score must return score(tokens), got "
                f"{type(score).__name__}"
            )
        return score

    def call(
        self, score: Score, tokens: Text, seed: int | None = None
    ) -> Scores:
        """Return a scorer's scores of a text."""
        self.budget.call()
        seed_all(self.seed if seed is None else seed)
        try:
            answer = score(tokens.clone())
            if isinstance(answer, Iterable) and not hasattr(answer, "__len__"):
                answer = [*answer]
        except Exception as error:
            raise _raised(f"score of {len(tokens)} tokens", error) from error
        return read_scores(answer, len(tokens), self.bits)

    def fresh(self, tokens: Text, seed: int | None = None) -> Scores:
        """Return a fresh scorer's scores of a text."""
        return self.call(self.make(seed), tokens, seed)

    def meet(self, tokens: Text) -> Scores:
        """Return the scores of a first text, and note how it rounds.

        Raises:
            UnusableModel: where there are none; its cause is the user's own.
        """
        inside = Inside()
        try:
            scores = self.fresh(tokens)
            try:
                with inside:
                    self.fresh(tokens)
            except ScorerRaised:  # compiled code runs in no mode
                inside.dtypes.clear()
        except ScorerRaised as error:
            raise UnusableModel(str(error)) from error.__cause__
        # 8 bits hold weights, which are what they are
        found = {*inside.dtypes, scores.dtype, torch.float32}
        wide = [dtype for dtype in found if torch.finfo(dtype).bits > 8]
        self.unit = max(wide, key=lambda dtype: torch.finfo(dtype).eps)
        return scores

    def bound(self, scores: Scores) -> float:
        """Return the size up to which a difference of scores is rounding."""
        return (
            rounding_of(self.unit) * max(1.0, scores.largest) + 4 * self.noise
        )


def _raised(who: str, error: Exception) -> ScorerRaised:
    place = place_of(error)
    return ScorerRaised(
        f"{who} raised {sentence(error)}{place and f' ({place})'}"
    )
