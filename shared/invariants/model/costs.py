"""What calls of a model cost, and how many a check may make."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor


@dataclass
class Costs:
    """Reckons the seconds of all calls, from a few that were measured."""

    call: float = 0.0  # seconds of any call
    token: float = 0.0  # and of each token in it
    build: float = 0.0  # of a copy of the model
    heavy: bool = False  # whether the model has many weights
    began: float = field(default_factory=perf_counter)  # the first check
    reckoned: float = 0.0  # seconds of all calls so far
    calls: int = 0
    backwards: int = 0
    # of the check under way: what may be spent until it ends, how often it
    # has got time that it asked for, and lengths without, by what is done
    end: float = math.inf
    granted: int = 0
    left_out: dict[str, list[int]] = field(default_factory=dict)

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
        seconds = self.of(tokens, double=scores.dtype == torch.float64)
        self.calls += 1
        self.reckoned += seconds

        def backward(gradient: Tensor) -> None:
            self.backwards += 1
            self.reckoned += 2 * seconds

        if scores.requires_grad:
            scores.register_hook(backward)

    def has_time(
        self,
        tokens: float,
        calls: int,
        length: int,
        what: str = "",
        grad: bool = False,
        double: bool = True,
    ) -> bool:
        """Whether there is time for calls at a length, or note what is not."""
        if self.of(tokens, calls, grad, double) > self.left:
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
