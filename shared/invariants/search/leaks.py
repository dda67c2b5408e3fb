"""The search for a leak: pairs of sequences, and what confirms a difference.

Two sequences that are equal up to a split go through in batches of equal
shape; before the split their scores must be the same. `smallest_case` then
says what was found.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..model.building import KeptState, Model
from ..model.randomness import RecordedDraws
from ..model.subject import Subject
from ..model.tokens import rows_at_once
from .tolerance import (
    dtype_name,
    floor,
    floor_of,
    gaps,
    is_real,
    minus,
    rounding,
)
from .trial import EVAL, Leak, Mode, Trial

DROPOUT_SEED = 1234
ENOUGH = 256  # tokens of a call: with more, each costs a heavy model the same


class _Suspicious(Exception):
    """Two calls differ before the split, in a model's own precision."""


class NotFinite(Exception):
    """A copy with larger weights has scores that are NaN or infinite."""


@dataclass
class Search:
    """Looks for positions that see the future, in one copy of a model."""

    subject: Subject
    model: Model
    weights: str = ""  # what a failure says about the copy's
    # whether to raise NotFinite for scores that are not: it is no fault of a
    # model to overflow under weights it never had
    finite_only: bool = False
    # whether the model is in its own precision until two calls differ where
    # they should not: equal shapes round alike, so that any difference at
    # all is reason to go on in float64
    own_precision: bool = False
    # whether any change has moved any score: if none does, nothing is shown
    moved: bool = False
    rows_mix: bool = False  # whether rows were seen to depend on each other
    # whether random draws in train mode depend on the tokens
    draws_differ: bool = False
    _kept: KeptState | None = None

    def __post_init__(self) -> None:
        """Search in no model whose calls disturb each other."""
        self.subject.require_no_state()

    def run(
        self, tokens: Int[Tensor, "rows time"], mode: Mode = EVAL
    ) -> Float[Tensor, "rows time vocab"]:
        """Return the scores of ids, without their graph."""
        scores = self.call(tokens, mode).detach()
        if self.finite_only and not bool(torch.isfinite(scores).all()):
            raise NotFinite
        return scores

    def call(
        self,
        tokens: Int[Tensor, "rows time"],
        mode: Mode = EVAL,
        grad: bool = False,
    ) -> Float[Tensor, "rows time vocab"]:
        """Call the model on ids; in train mode always from one state."""
        mask = None
        if mode.visible is not None:
            mask = torch.zeros_like(tokens)
            mask[:, mode.shown(tokens.size(1))] = 1
        if mode.training and isinstance(self.model, nn.Module):
            self._kept = self._kept or KeptState(self.model)
            self._kept.put_back()
        return self.subject.scores(
            self.model,
            tokens,
            training=mode.training,
            grad=mode.grad or grad,
            seed=DROPOUT_SEED if mode.training else None,
            mask=mask,
        )

    def has_time(
        self,
        time: int,
        rows: int,
        calls: int,
        mode: Mode = EVAL,
        grad: bool = False,
        what: str = "",
    ) -> bool:
        """Whether there is time for calls of a size; if not, it is told."""
        what = (what + self.conditions(mode)).lstrip(", ")
        return self.subject.costs.has_time(
            calls * rows * time, calls, time, what, grad, self.double
        )

    @property
    def double(self) -> bool:
        """Whether the copy is in float64."""
        return torch.float64 in {
            p.dtype for p in getattr(self.model, "parameters", list)()
        }

    def conditions(self, mode: Mode) -> str:
        """Return what a failure says about a mode and the weights."""
        parts = (mode.description, self.weights)
        return "".join(f", {part}" for part in parts if part)

    def find(self, trial: Trial) -> Leak | None:
        """Return a leak that this trial shows, or None."""
        try:
            return self._find(trial)
        except _Suspicious:
            self.own_precision = False
            self._kept = None
            masked = trial.mode.visible is not None
            self.subject.unshare(self.model)
            self.model = self.subject.doubled(self.model, masked)
            return self._find(trial)

    def rows_at_once(self, time: int) -> int:
        """Return how many sequences of a length are given in one call.

        Of a heavy model few: the call that all others are compared with has
        as many rows.
        """
        room = rows_at_once(self.subject.vocab_size, time)
        few = max(2, ENOUGH // time)
        return min(room, few) if self.subject.heavy else room

    def _find(self, trial: Trial) -> Leak | None:
        rows, time = trial.base.shape
        at_once = min(rows, self.rows_at_once(time))
        same = bool((trial.base == trial.base[0]).all())
        base_scores = None
        for first in range(0, rows, at_once):
            # the last batch is filled up: only equal shapes round alike
            index = [min(first + i, rows - 1) for i in range(at_once)]
            part = trial.rows(index)
            if base_scores is None or not same:
                base_scores = self.run(part.base, trial.mode)
            leak = self._compare(part, base_scores)
            if leak is not None:
                return leak
        return None

    def _compare(self, trial: Trial, base_scores: Tensor) -> Leak | None:
        scores = self.run(trial.changed, trial.mode)
        moved = gaps(scores, base_scores).cpu()
        del scores
        before = torch.zeros_like(moved, dtype=torch.bool)
        for row in range(len(before)):
            before[row, trial.before(row)] = True
        suspicious = moved.masked_fill(~before, 0.0).amax(1)
        if not self.moved:
            after = moved.masked_fill(before, 0.0).amax()
            self.moved = bool(after > floor(base_scores))
        if not suspicious.any():
            return None
        if self.own_precision:
            raise _Suspicious
        for row in suspicious.argsort(descending=True)[:3].tolist():
            if suspicious[row] > floor(base_scores):
                leak = self._confirm(trial, row, rounding(base_scores))
                if leak is not None:
                    return leak
        return None

    def _confirm(self, trial: Trial, row: int, noise: float) -> Leak | None:
        """Change the one row alone, and ask whether it is more than noise."""
        training = trial.mode.training
        steady = not training or self.same_draws(
            trial.base, trial.changed, trial.mode
        )
        alone = trial.base.clone()
        alone[row] = trial.changed[row]
        trial = replace(trial, changed=alone)
        if training and not self.same_draws(trial.base, alone, trial.mode):
            self.draws_differ = True
            return None
        scope = trial.before(row)

        def difference() -> Tensor:
            base = self.run(trial.base, trial.mode)[row, scope]
            return minus(self.run(alone, trial.mode)[row, scope], base)

        delta = difference()
        moved = gaps(delta, torch.zeros_like(delta))
        position = int(moved.argmax())
        size = float(moved[position])
        if size <= floor_of(delta.dtype) * noise:
            # other rows did it, another check's matter, or their draws
            self.rows_mix |= steady
            self.draws_differ |= not steady
            return None
        if not is_real(self.model, lambda: difference()[position], noise):
            return None
        at, dtype = position + scope.start, dtype_name(delta.dtype)
        return Leak(trial, row, at, size, noise, dtype)

    def same_draws(
        self,
        base: Int[Tensor, "rows time"],
        changed: Int[Tensor, "rows time"],
        mode: Mode,
    ) -> bool:
        """Whether both calls draw random numbers of the same shapes.

        If not (a dropout inside experts, whose batches depend on the
        tokens), the same seed gives earlier positions other draws.
        """
        draws = []
        for tokens in (base, changed):
            with RecordedDraws() as seen:
                self.run(tokens, mode)
            draws.append(seen.shapes)
        return draws[0] == draws[1]
