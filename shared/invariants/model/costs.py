"""What calls of a model cost, and how many a check may make."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor


@dataclass
class Costs:
    """Reckons the seconds of all calls, from a few that were measured.

    Attributes:
        call: seconds of any call.
        token: and of each token in it.
        build: of a copy of the model.
        began: when the first check did, by the clock.
        reckoned: seconds of all calls so far.
        calls: how many.
        backwards: how many backward passes.
        tokens: in all calls.
        end: what may be spent until the check under way ends.
        granted: how often it has asked for time and got it.
        left_out: lengths that it had no time for, by what is done to them.
        heavy: whether the model has many weights.
    """

    call: float = 0.0
    token: float = 0.0
    build: float = 0.0
    began: float = field(default_factory=perf_counter)
    reckoned: float = 0.0
    calls: int = 0
    backwards: int = 0
    tokens: int = 0
    end: float = math.inf
    granted: int = 0
    left_out: dict[str, list[int]] = field(default_factory=dict)
    heavy: bool = False

    @property
    def spent(self) -> float:
        """Seconds so far: by the clock, or more if reckoned, as on a GPU."""
        return max(self.reckoned, perf_counter() - self.began)

    @property
    def limited(self) -> bool:
        """Whether time is short."""
        return self.end < math.inf

    @property
    def left(self) -> float:
        """Seconds that the check under way may still spend."""
        return self.end - self.spent

    def of(
        self,
        tokens: float,
        calls: int = 1,
        grad: bool = False,
        double: bool = False,
    ) -> float:
        """Return the seconds of calls with so many tokens in all of them.

        A backward pass takes as long as two forwards, float64 twice as long.
        """
        factor = (3 if grad else 1) * (2 if double else 1)
        # a call of a heavy model reads its weights; others wait for Python
        return calls * self.call * (factor if self.heavy else 1) + (
            tokens * self.token * factor
        )

    def charge(self, scores: Tensor) -> None:
        """Count a call that has given these, and a backward pass from them."""
        tokens = scores.size(0) * scores.size(1)
        double = scores.dtype == torch.float64
        self.calls += 1
        self.tokens += tokens
        self.reckoned += self.of(tokens, double=double)

        def backward(gradient: Tensor) -> None:
            self.backwards += 1
            self.reckoned += 2 * self.of(tokens, double=double)

        if scores.requires_grad:
            scores.register_hook(backward)

    def has_time(self, seconds: float, length: int, what: str = "") -> bool:
        """Whether there is time for a length; if not, that is kept.

        Args:
            seconds: that it takes.
            length: of the sequences.
            what: is done, or how.
        """
        if seconds > self.left:
            self.left_out.setdefault(what, []).append(length)
            return False
        self.granted += 1
        return True

    def not_tried(self) -> str:
        """Return what there was no time for, or ""."""
        return ", ".join(
            f"{what} at {spans(lengths)}".lstrip()
            for what, lengths in self.left_out.items()
        )

    def begin(self, budget: float) -> None:
        """Begin the first check, with so many seconds for all."""
        self.began, self.reckoned = perf_counter(), 0.0
        self.start(budget)

    def start(self, end: float) -> None:
        """Begin a check."""
        self.end, self.granted, self.left_out = end, 0, {}


def spans(lengths: Iterable[int]) -> str:
    """Return lengths as text: "2, 3, 5-9"."""
    runs: list[list[int]] = []
    for length in sorted(set(lengths)):
        if runs and length == runs[-1][-1] + 1:
            runs[-1].append(length)
        else:
            runs.append([length])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )
