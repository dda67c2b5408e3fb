"""A program in any language as a model, as checks and comparisons see it.

`exec_program.py` starts one and speaks to it by lines.
"""

from abc import ABC, abstractmethod

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

NO_GRADIENTS = "a program has no gradients here"
NO_WEIGHTS = "a program has no weights here: they are inside it"


class ProgramFailed(RuntimeError):
    """A program died, hung, or answered what cannot be read."""


class Refused(ValueError):
    """A program refused ids: by a line `error WHY`, or an exit status."""


class Program(ABC):
    """A model that is a program: call it with ids to get scores.

    Attributes:
        vocab_size: of its answers, once it has started.
        block_size: the longest text, where it says one.
        has_cache: whether it decodes by `reset` and `feed`.
        dumps: whether it writes the arrays that it computes.
        step: the last digit of a score, 0 where it prints enough of them.
        share: the same of any array, as a share of its largest number.
    """

    vocab_size: int | None = None
    block_size: int | None = None
    has_cache = False
    dumps = False
    step = 0.0
    share = 0.0

    def __deepcopy__(self, memo: object) -> "Program":
        return self

    @property
    def notes(self) -> list[str]:
        """Return the notes of a report on its answers."""
        coarse = f"scores are printed in steps of {self.step:.1g}: smaller "
        coarse += "differences are not seen; nine digits (%.9g) show all"
        return [coarse] * bool(self.step)

    @abstractmethod
    def __call__(self, ids: Int[Tensor, "*rows time"]) -> np.ndarray:
        """Return the scores of a text (time,) or of some, one by one."""

    @abstractmethod
    def reset(self) -> None:
        """Begin a text in its cache."""

    @abstractmethod
    def feed(self, ids: Int[Tensor, "time"]) -> Float[np.ndarray, "time v"]:
        """Return the scores of the next ids of the text in its cache."""

    @abstractmethod
    def dump(self, ids: Int[Tensor, "time"]) -> dict[str, np.ndarray]:
        """Return the arrays that it computes for a text, in their order."""
