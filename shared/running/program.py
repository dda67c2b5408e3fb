"""Use a program in any language as a model, for checks and comparisons.

`exec_program.py` starts a program and exchanges lines with it.
"""

from abc import ABC, abstractmethod

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

NO_GRADIENTS = "a program has no gradients here"
NO_WEIGHTS = "a program has no weights here: they are inside it"


class ProgramFailed(RuntimeError):
    """Raised when a program dies, hangs, or gives an unreadable answer."""


class Refused(ValueError):
    """Raised when a program refuses ids: by `error WHY`, or an exit status."""


class Program(ABC):
    """A model that is a program: call it with ids to get scores.

    Attributes:
        vocab_size: size of the vocabulary, once the program has started.
        block_size: the longest text, if the program declares one.
        has_cache: whether the program decodes by `reset` and `feed`.
        dumps: whether the program writes the arrays that it computes.
        step: size of a printed score's last digit, 0 if digits suffice for
            float32.
        share: size of the last printed digit, as a share of the largest number
            in an answer.
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
        """Return notes about the program's answers, for a report."""
        coarse = f"scores are printed in steps of {self.step:.1g}: smaller "
        coarse += "differences are not seen; nine digits (%.9g) show all"
        return [coarse] * bool(self.step)

    @abstractmethod
    def __call__(self, ids: Int[Tensor, "*rows time"]) -> np.ndarray:
        """Return the scores of a text (time,), or of several texts in turn."""

    @abstractmethod
    def reset(self) -> None:
        """Begin a new text in the program's cache."""

    @abstractmethod
    def feed(self, ids: Int[Tensor, "time"]) -> Float[np.ndarray, "time v"]:
        """Return the scores of the next ids of the text in the cache."""

    @abstractmethod
    def dump(self, ids: Int[Tensor, "time"]) -> dict[str, np.ndarray]:
        """Return the arrays that the program computes for a text, in order."""
