"""Finds leaks: a trial is carried out, and a difference confirmed.

Texts that are equal up to a split go through in batches of equal shape;
before the split their scores must be the same.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..rounding import (
    dtype_name,
    floor_of,
    gaps,
    is_real,
    minus,
    require_finite,
    rounding,
)
from ..variant import Variant, double_on_suspicion
from .moved import moves


@dataclass(frozen=True)
class Trial:
    """Texts for one Variant, and the same ones changed from a split on.

    Attributes:
        variant: a copy of the model, bound to a case.
        base, changed: the texts.
        splits: the first position that differs, row by row.
        name: of what is tried, beside the variant.
        share: of the time left to the check, at most.
        still: where scores must not change; None: before the splits.
    """

    variant: Variant
    base: Int[Tensor, "rows time"]
    changed: Int[Tensor, "rows time"]
    splits: list[int]
    name: str = ""
    share: float = 1.0
    still: Bool[Tensor, "rows time"] | None = None

    @property
    def time(self) -> int:
        """Tokens of a text."""
        return self.base.size(1)

    @property
    def label(self) -> str:
        """The words of a report for it."""
        parts = (self.variant.case.name, self.name)
        return ", ".join(part for part in parts if part)

    def before(self, row: int) -> Int[Tensor, "count"]:
        """Return the positions that must not change in a row."""
        if self.still is not None:
            return self.still[row].nonzero()[:, 0]
        shown = self.variant.case.shown(self.time)
        split = max(shown.start, min(shown.stop, self.splits[row]))
        return torch.arange(shown.start, split)

    def some(self, rows: list[int]) -> "Trial":
        """Return the trial of these rows alone."""
        return replace(
            self,
            base=self.base[rows],
            changed=self.changed[rows],
            splits=[self.splits[i] for i in rows],
            still=None if self.still is None else self.still[rows],
        )


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
        tried: the splits that were tried, by label and length.
    """

    def __init__(self) -> None:
        self.moved = self.rows_mix = self.draws_differ = False
        self.tried: dict[str, dict[int, set[int]]] = {}

    def find(self, trial: Trial) -> Leak | None:
        """Return a leak that a trial shows, or None."""
        try:
            return self._find(trial)
        except _Suspicious:
            with trial.variant.subject.budget.overtime():
                double_on_suspicion(trial.variant)
                return self._find(trial)

    def _find(self, trial: Trial) -> Leak | None:
        variant = trial.variant
        for moved in moves(variant, trial.base, trial.changed):
            part = trial.some(moved.rows)
            tried = self.tried.setdefault(trial.label, {})
            tried.setdefault(trial.time, set()).update(part.splits)
            before = torch.zeros_like(moved.by, dtype=torch.bool)
            for row in range(len(before)):
                before[row, part.before(row)] = True
            after = moved.by.masked_fill(before, 0.0)
            self.moved |= bool(after.amax() > moved.least)
            early = moved.by.masked_fill(~before, 0.0).amax(1)
            if not early.any():
                continue
            if variant.copy.rough:
                raise _Suspicious
            for row in early.argsort(descending=True)[:3].tolist():
                if not early[row] > moved.least:
                    break
                with variant.subject.budget.overtime():
                    leak = self._confirm(part, row, rounding(moved.base))
                if leak is not None:
                    return leak
        return None

    def _confirm(self, trial: Trial, row: int, noise: float) -> Leak | None:
        """Change the one row alone, and ask whether it is more than noise."""
        variant = trial.variant
        training = variant.case.training
        steady = not training or _same_draws(trial)
        changed = trial.base.clone()
        changed[row] = trial.changed[row]
        trial = replace(trial, changed=changed)
        if training and not _same_draws(trial):
            self.draws_differ = True
            return None
        scope = trial.before(row)

        def difference() -> Tensor:
            base = variant.scores(trial.base)[row, scope]
            return minus(variant.scores(changed)[row, scope], base)

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
        at, dtype = int(scope[position]), dtype_name(delta.dtype)
        return Leak(trial, row, at, size, noise, dtype)


def _same_draws(trial: Trial) -> bool:
    draws = trial.variant.draws
    return draws(trial.base) == draws(trial.changed)
