"""The costs of a model's calls, of a check, and of one of its rounds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SHARE = 1 / 12  # of the time left: what one round may take


@dataclass(frozen=True)
class Needs:
    """The calls of a check, counted on two layers and 1,024 positions."""

    calls: int  # a backward pass counts as two, float64 doubles
    rows: int  # forwards of the longest sequence, one row
    copies: int = 2  # passes over all weights, in copies of the model
    share: int = 0  # of the time left, for a check that may be cut short
    slow: bool = False  # runs only if it is named
    implied_by: tuple[str, ...] = ()  # checks whose failure explains its own


@dataclass(frozen=True)
class Costs:
    """Seconds of calls, from a few that were measured."""

    call: float = 0.0  # of any call
    token: float = 0.0  # and of each token in it
    build: float = 0.0  # of a copy of the model
    heavy: bool = False  # whether each call reads many weights

    def of(
        self,
        tokens: float,
        calls: int = 1,
        grad: bool = False,
        double: bool = False,
    ) -> float:
        """Return the seconds of calls with so many tokens in all.

        A backward pass takes as long as two forwards, float64 twice as long.
        """
        factor = (3 if grad else 1) * (2 if double else 1)
        # a call of a heavy model reads its weights; others wait for Python
        return calls * self.call * (factor if self.heavy else 1) + (
            tokens * self.token * factor
        )


@dataclass(frozen=True)
class Round:
    """The splits that a check would try of one variant, at one length."""

    variant: Any  # a Variant; the budget reads how it is called
    time: int
    splits: tuple[int, ...] = ()  # tried one by one; none: all or nothing
    rows: int = 0  # of a call; 0: as many as the variant takes
    calls: int = 1  # of a round without splits
    apart: bool = False  # each split is a call, not a row of one
    name: str = ""  # of what is tried, if not only the variant
    grad: bool = False  # each call has a backward pass
    share: float = SHARE  # of the time left to the check, at most
    trials: Callable[[list[int]], Iterator[Any]] = iter  # of some splits

    def seconds(self, costs: Costs, count: int) -> float:
        """Return the seconds of the round with so many of its splits."""
        rows = self.rows or self.variant.rows_at_once(self.time)
        calls = self.calls
        if self.splits:
            at_once = 1 if self.apart else max(1, min(count, rows))
            calls = 1 + -(-count // at_once)  # the base first
            rows = rows if self.apart else at_once
        tokens = calls * rows * self.time
        return costs.of(tokens, calls, self.grad, self.variant.double)

    @property
    def label(self) -> str:
        """The name of the round in a report."""
        where = self.variant.conditions.lstrip(", ")
        parts = (where or "in eval mode", self.name)
        return ", ".join(part for part in parts if part)
