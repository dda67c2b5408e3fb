"""Two sides of a comparison, run at one text."""

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
    """Two sides, a recording on the right, and how they are compared.

    Attributes:
        sides: a model or a recording each.
        names: what to call the two.
        named: names of values that a table pairs.
        tolerance: share of a value's largest number that always passes.
        vocab_size: number of tokens; 0 where the sides say it.
    """

    sides: tuple[Subject | Recording, Subject | Recording]
    names: tuple[str, str]
    named: Sequence[tuple[str, str]] = ()
    tolerance: float = 0.0
    vocab_size: int = 0

    @property
    def subjects(self) -> tuple[Subject, Subject]:
        """Both sides, where no side is a file."""
        left, right = self.sides
        assert isinstance(left, Subject)
        assert isinstance(right, Subject)
        return left, right

    @property
    def program(self) -> Program | None:
        """The right side, where it is a program of another language."""
        right = self.sides[1]
        given = right.builder.given if isinstance(right, Subject) else None
        return given if isinstance(given, Program) else None

    def at(
        self,
        tokens: Int[Tensor, "batch time"],
        dtype: torch.dtype | None = None,
    ) -> ValueDiff:
        """Compare all values of both sides at a text.

        Raises:
            ValueError: for a model that raises, or whose values cannot be
                recorded.
        """
        return self.during(Trial(Kind.FIRST, tokens), dtype)

    def during(
        self, trial: Trial, dtype: torch.dtype | None = None
    ) -> ValueDiff:
        """Compare all values of both sides in a trial, as `at` does."""
        ran = self._run(trial, dtype)
        program = self.program
        printed = PRINTED_UNITS * program.share if program else 0.0
        tolerance = max(self.tolerance, printed)
        return findings(self.names, ran, self.named, tolerance)

    def _run(
        self, trial: Trial, dtype: torch.dtype | None
    ) -> tuple[Side, Side]:
        """Run both sides in one dtype, None for float64 or a recording's."""
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
        other = copy(other)
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
    """Run a model next to a file or scores, in the dtype of these."""
    if recording.statistics and kind is not Side:
        raise ValueError("statistics are compared on one process")
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
