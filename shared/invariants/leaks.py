"""Looks for leaks: pairs of sequences, and what confirms a difference.

Two sequences that are equal up to a split go through in batches of equal
shape; before the split their scores must be the same.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from .copies import double_on_suspicion
from .rounding import (
    dtype_name,
    floor,
    floor_of,
    gaps,
    is_real,
    minus,
    require_finite,
    rounding,
)
from .variant import Variant
from .ways import Way


@dataclass(frozen=True)
class Trial:
    """Sequences that differ from others from a split on, row by row."""

    base: Int[Tensor, "rows time"]
    changed: Int[Tensor, "rows time"]
    splits: list[int]

    def before(self, row: int, way: Way) -> slice:
        """Return the positions that must not change in a row."""
        shown = way.shown(self.base.size(1))
        return slice(shown.start, min(shown.stop, self.splits[row]))

    def rows(self, index: list[int]) -> "Trial":
        """Return the trial of these rows alone."""
        splits = [self.splits[i] for i in index]
        return Trial(self.base[index], self.changed[index], splits)


@dataclass(frozen=True)
class Leak:
    """A confirmed one: in this row the position sees what follows it."""

    trial: Trial
    row: int
    position: int
    size: float
    noise: float
    dtype: str


class _Suspicious(Exception):
    """Two calls differ before the split, in a model's own precision."""


class LeakFinder:
    """Finds leaks, and what else it sees on the way.

    Attributes:
        moved: whether any change of any token has moved any score: if none
            does, nothing is shown.
        rows_mix: whether rows were seen to depend on each other.
        draws_differ: whether random draws in train mode depend on tokens.
    """

    def __init__(self) -> None:
        self.moved = self.rows_mix = self.draws_differ = False

    def find(self, variant: Variant, trial: Trial) -> Leak | None:
        """Return a leak that this trial shows, or None."""
        try:
            return self._find(variant, trial)
        except _Suspicious:
            double_on_suspicion(variant)
            return self._find(variant, trial)

    def _find(self, variant: Variant, trial: Trial) -> Leak | None:
        rows, time = trial.base.shape
        at_once = min(rows, variant.rows_at_once(time))
        same = bool((trial.base == trial.base[0]).all())
        base_scores = None
        for first in range(0, rows, at_once):
            # the last batch is filled up: only equal shapes round alike
            index = [min(first + i, rows - 1) for i in range(at_once)]
            part = trial.rows(index)
            if base_scores is None or not same:
                base_scores = variant.scores(part.base)
            leak = self._compare(variant, part, base_scores)
            if leak is not None:
                return leak
        return None

    def _compare(
        self, variant: Variant, trial: Trial, base_scores: Tensor
    ) -> Leak | None:
        scores = variant.scores(trial.changed)
        moved = gaps(scores, base_scores).cpu()
        del scores
        before = torch.zeros_like(moved, dtype=torch.bool)
        for row in range(len(before)):
            before[row, trial.before(row, variant.way)] = True
        suspicious = moved.masked_fill(~before, 0.0).amax(1)
        if not self.moved:
            after = moved.masked_fill(before, 0.0).amax()
            self.moved = bool(after > floor(base_scores))
        if not suspicious.any():
            return None
        if variant.copy.rough:
            raise _Suspicious
        for row in suspicious.argsort(descending=True)[:3].tolist():
            if suspicious[row] > floor(base_scores):
                leak = self._confirm(
                    variant, trial, row, rounding(base_scores)
                )
                if leak is not None:
                    return leak
        return None

    def _confirm(
        self, variant: Variant, trial: Trial, row: int, noise: float
    ) -> Leak | None:
        """Change the one row alone, and ask whether it is more than noise."""
        training = variant.way.training
        steady = not training or self._same_draws(variant, trial)
        alone = trial.base.clone()
        alone[row] = trial.changed[row]
        trial = replace(trial, changed=alone)
        if training and not self._same_draws(variant, trial):
            self.draws_differ = True
            return None
        scope = trial.before(row, variant.way)

        def difference() -> Tensor:
            base = variant.scores(trial.base)[row, scope]
            return minus(variant.scores(alone)[row, scope], base)

        delta = difference()
        moved = gaps(delta, torch.zeros_like(delta))
        position = int(moved.argmax())
        size = float(moved[position])
        if math.isinf(size):
            base = variant.scores(trial.base)[row, scope]
            require_finite(base, infinite=True)
        if size <= floor_of(delta.dtype) * noise:
            # other rows did it, another check's matter, or their draws
            self.rows_mix |= steady
            self.draws_differ |= not steady
            return None
        if not is_real(variant.model, lambda: difference()[position], noise):
            return None
        at, dtype = position + scope.start, dtype_name(delta.dtype)
        return Leak(trial, row, at, size, noise, dtype)

    @staticmethod
    def _same_draws(variant: Variant, trial: Trial) -> bool:
        return variant.draws(trial.base) == variant.draws(trial.changed)
