"""A scorer of texts, and the scores that it gives, in the order it does."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .budget import Budget
from .context import seed_all
from .errors import ModelRaised, UnusableModel, during
from .model.calling import as_tensor, is_array
from .rounding import Inside, floor_of

Text = Int[Tensor, "time"]
Score = Callable[[Text], Any]


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a text's tokens, in the order of scoring.

    Attributes:
        table: in nats, by position and how often it was scored before.
        dtype: that they came in.
        unplaced: scores whose positions are not known: too many or too few.
    """

    table: dict[tuple[int, int], float]
    dtype: torch.dtype = torch.float64
    unplaced: int = 0

    @property
    def order(self) -> list[int]:
        """The positions; one that is scored twice stands there twice."""
        return [at for at, _ in self.table]

    def first(self, count: int) -> "Scores":
        """Return those that are made first."""
        return replace(self, table=dict(islice(self.table.items(), count)))

    def moved(self, other: "Scores") -> dict[tuple[int, int], float]:
        """Return how far each of the other's is; one not there infinitely."""
        there = other.table
        return {
            key: 0.0
            if one == there.get(key)
            else abs(one - there.get(key, math.inf))
            for key, one in self.table.items()
        }

    def bound(self, share: float) -> float:
        """Return a share of the largest score, or of 1."""
        finite = filter(math.isfinite, self.table.values())
        return share * max(1.0, *map(abs, finite), 0.0)


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
    found = _numbers(answer)
    pairs = found is not None and found.dim() == 2 and found.size(1) == 2
    if found is None or not (found.dim() == 1 or pairs):
        shape = "" if found is None else f" of shape {tuple(found.shape)}"
        raise UnusableModel(
            f"score returned {type(answer).__name__}{shape} for {time} "
            f"tokens; return a log-probability for each, or pairs (position, "
            f"log-probability)"
        )
    dtype = found.dtype if found.is_floating_point() else torch.float64
    values = found.double()
    if pairs:
        positions, values = values[:, 0].long().tolist(), values[:, 1]
        for at in positions:
            if not 0 <= at < time:
                raise UnusableModel(
                    f"score returned position {at} for {time} tokens"
                )
    elif len(values) not in (time, time - 1):
        return Scores({}, dtype, len(values))
    else:
        positions = [*range(time - len(values), time)]
        if positions[:1] == [0] and values[0] == 0:
            positions, values = positions[1:], values[1:]
    table, seen, unit = {}, Counter[int](), math.log(2) if bits else 1
    for at, value in zip(positions, values.tolist(), strict=True):
        if not math.isnan(value):
            table[at, seen[at]] = value * unit
            seen[at] += 1
    return Scores(table, dtype)


def _numbers(answer: Any) -> Tensor | None:
    """Return an answer as a tensor on the CPU; None: it holds no numbers."""
    if isinstance(answer, Tensor):
        return answer.detach().cpu()
    if is_array(answer):
        return as_tensor(answer)
    try:
        rows = [
            [*map(float, row)] if isinstance(row, tuple | list) else float(row)
            for row in answer
        ]
        return torch.tensor(rows, dtype=torch.float64)
    except (TypeError, ValueError):
        return None


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
    bits: bool = False
    seed: int = 0
    unit = torch.float32  # the coarsest dtype that a scorer computes in
    budget: Budget = field(default_factory=Budget, init=False)

    def fresh(self, *texts: Text, seed: int | None = None) -> Scores:
        """Return a fresh scorer's scores of a text, behind other texts."""
        seed = self.seed if seed is None else seed
        seed_all(seed)
        with during("", "make_score"):
            score = self.make_score()
        if not callable(score):
            raise UnusableModel(
                f"make_score must return score(tokens), got "
                f"{type(score).__name__}"
            )
        for text in texts:
            self.budget.call()
            seed_all(seed)
            with during("", f"score of {len(text)} tokens"):
                answer = score(text.clone())
                answer = [*answer] if isinstance(answer, Iterator) else answer
        return read_scores(answer, len(text), self.bits)

    def meet(self, text: Text) -> Scores:
        """Return the scores of a first text, and note how it rounds.

        Raises:
            UnusableModel: where there are none; its cause is the user's own.
        """
        inside = Inside()
        try:
            scores = self.fresh(text)
        except ModelRaised as error:
            raise UnusableModel(str(error)) from error.__cause__
        with suppress(ModelRaised), inside:  # compiled code runs in no mode
            self.fresh(text)
        # 8 bits hold weights, which are what they are
        found = {*inside.dtypes, scores.dtype, torch.float32}
        wide = [dtype for dtype in found if torch.finfo(dtype).bits > 8]
        self.unit = max(wide, key=lambda dtype: torch.finfo(dtype).eps)
        return scores
