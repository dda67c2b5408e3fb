"""Run the two sides of a comparison on one text."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ...running.program import Program
from ...running.subject import Subject
from ...running.tolerances import PRINTED_UNITS
from ...tracing.value import reduced
from .findings import findings
from .given import fitting
from .recording import Recording, scores_of
from .scope import Kind, Trial
from .side import Side, run_in_one_dtype
from .value_diff import ValueDiff


@dataclass(frozen=True)
class Pair:
    """The two sides of a comparison, and the comparison's settings.

    A recording is always the right side, unless both are recordings.

    Attributes:
        sides: two models or recordings.
        names: names for the two sides.
        named: names of values that the user's table pairs.
        tolerance: differences up to this share of a value's largest entry
            pass.
        vocab_size: number of tokens; 0 if the sides declare it.
    """

    sides: tuple[Subject | Recording, Subject | Recording]
    names: tuple[str, str]
    named: Sequence[tuple[str, str]] = ()
    tolerance: float = 0.0
    vocab_size: int = 0

    @property
    def subjects(self) -> tuple[Subject, Subject]:
        """Return both sides as subjects; neither may be a file."""
        left, right = self.sides
        assert isinstance(left, Subject)
        assert isinstance(right, Subject)
        return left, right

    @property
    def program(self) -> Program | None:
        """Return the right side if it is an external program, else None."""
        right = self.sides[1]
        given = right.builder.given if isinstance(right, Subject) else None
        return given if isinstance(given, Program) else None

    def at(
        self,
        tokens: Int[Tensor, "batch time"],
        dtype: torch.dtype | None = None,
    ) -> ValueDiff:
        """Compare all values of both sides on a text.

        `dtype` is the dtype to run in; None means float64 if both sides run in
        it, or else a recording's dtype.

        Raises:
            ValueError: if a model raises, or if its values cannot be
                recorded.
        """
        return self.during(Trial(Kind.FIRST, tokens), dtype)

    def during(
        self, trial: Trial, dtype: torch.dtype | None = None
    ) -> ValueDiff:
        """Compare all values of both sides in a trial (see `Trial`)."""
        ran = self._run(trial, dtype)
        program = self.program
        printed = PRINTED_UNITS * program.share if program else 0.0
        tolerance = max(self.tolerance, printed)
        return findings(self.names, ran, self.named, tolerance)

    def _run(
        self, trial: Trial, dtype: torch.dtype | None
    ) -> tuple[Side, Side]:
        """Run both sides in one dtype.

        If `dtype` is None, they run in a recording's dtype, else in float64.
        """
        one, other = self.sides
        tokens, training = trial.tokens, trial.training
        if isinstance(other, Subject) and other.in_arrays:
            assert isinstance(one, Subject)
            longest = max(one.block_size, tokens.size(1))
            one = replace(one, block_size=longest)
            other = scores_of(other, tokens)
        if isinstance(other, Subject):
            assert isinstance(one, Subject)
            models = (
                Side.run(one, tokens, dtype, training=training),
                Side.run(other, tokens, dtype, training=training),
            )
            run_in_one_dtype(models)
            return models
        other = copy(other)  # because `lay_out` changes it for this run
        if isinstance(one, Subject):
            return run_beside(one, other, dtype)
        one.lay_out(None, self.vocab_size)
        other.lay_out(one, self.vocab_size)
        return one, other


def run_beside(
    subject: Subject,
    recording: Recording,
    dtype: torch.dtype | None,
    kind: type[Side] = Side,
) -> tuple[Side, Recording]:
    """Run a model in the dtype of the recording that it is compared with."""
    if recording.statistics and kind is not Side:
        raise ValueError("statistics can be compared on one process only")
    tokens = fitting(recording.tokens, subject.block_size, subject.vocab_size)
    if dtype is None and not recording.doubled:
        dtype = recording.dtype
    if subject.in_arrays:
        side: Side = scores_of(subject, tokens)
    else:
        reduce = reduced if recording.statistics else None
        side = kind.run(subject, tokens, dtype, reduce)
    recording.lay_out(side, subject.vocab_size)
    return side, recording
