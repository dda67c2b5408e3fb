"""Limit the seconds that checks take, and record what they left out.

The share of one check is in its decorator, `@check(share=...)`; the seconds of
--quick are in shared/settings.py. The help of --budget (shared/settings.py),
the docstrings of check_model and check_scorer, and docs/explanation/time.md
repeat the seconds below. A test compares them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from .errors import SkipCheck
from .ranks import now
from .tokens import spans

DEFAULT_SECONDS = 225.0  # for all checks, and for finding how to call a model
HEAVY_SECONDS = 130.0  # the same for a large model; mostly for proofs
NAMED = 4  # most cases that a report names for one set of lengths
SILENCE = 15.0  # seconds without output after which progress is reported


def in_short(names: list[str]) -> str:
    """Return the first names and the count of the others, as a text."""
    more = len(names) - NAMED
    rest = [f"{more} more cases"] * (more > 0)
    return ", ".join([*names[:NAMED], *rest])


class OutOfTime(SkipCheck):
    """Raised when time is up, so that no further call starts."""


class Budget:
    """The seconds that the checks of a model may take.

    A check first runs the cases that find most faults. Each part of a check
    gets a share of the remaining seconds. When these seconds are over, the
    part starts no further call, and its name is recorded. Work outside of
    parts has no limit once a part has finished, so that a check can report its
    findings.
    """

    def __init__(self, seconds: float = math.inf):
        self.seconds = seconds  # seconds for all checks; infinity: no limit
        # prints a line of progress; called if a check takes long
        self.tell: Callable[[str], None] = lambda text: None
        self.calls = self.backwards = 0  # forward and backward passes so far
        self._began = now()
        self.start("", 1.0)

    # --- For the running check -----------------------------------------------

    def start(self, name: str, share: float) -> None:
        """Begin a check that may use a share of the remaining seconds."""
        self.name, self._started = name, now()
        self._told = self._started
        self.something_tried = False  # whether any part has finished
        self.reached = 0  # the longest text of a finished part
        self._parts = 0  # how many parts enclose the running code
        self._cut = defaultdict[str, set[int]](set)  # by part: lengths not run
        self._impossible: dict[str, str] = {}
        self._end = math.inf
        if self.limited:
            left = self._began + self.seconds - self._started
            self._end = self._started + share * left

    @property
    def limited(self) -> bool:
        """Return whether the time is limited."""
        return self.seconds < math.inf

    @property
    def elapsed(self) -> float:
        """Return the seconds since the check began."""
        return now() - self._started

    @property
    def left(self) -> float:
        """Return the seconds that the running part may still use."""
        return self._end - now()

    def call(self) -> None:
        """Count a call of the model that begins now.

        Raises:
            OutOfTime: if the time of the running part is over.
        """
        self.require()
        self.calls += 1

    def require(self) -> None:
        """Raise OutOfTime if no time is left to call or copy the model."""
        if self.left <= 0 and (self._parts or not self.something_tried):
            raise OutOfTime(f"no time: {self.seconds:.0f} s for all checks")

    def count_backward(self, gradient: Tensor) -> None:
        """Count a backward pass; used as a hook of the scores."""
        self.backwards += 1

    @contextmanager
    def part(
        self, name: str = "", time: int = 0, share: float = 1.0
    ) -> Iterator[None]:
        """Give the body a share of the remaining time, then stop its calls.

        Args:
            name: name of the part in the report; "" leaves it out.
            time: length of the part's texts in tokens.
            share: largest share of the remaining seconds to use.
        """
        before = self._end
        if self.limited:
            self._end = now() + share * self.left
        self._parts += 1
        try:
            yield
            self.something_tried |= bool(name)
            self.reached = max(self.reached, time)
        except OutOfTime:
            if name:
                self.cut(name, time)
        finally:
            self._parts -= 1
            self._end = before

    @contextmanager
    def overtime(self) -> Iterator[None]:
        """Let the body finish without a time limit, after a fault is found."""
        before, self._end = self._end, math.inf
        try:
            yield
        finally:
            self._end = before

    def cut(self, name: str, *times: int) -> None:
        """Record that time ran out before a part tried some lengths."""
        self._cut[name] |= {*times}

    def give_up(self, what: str, why: str) -> None:
        """Record what was not tried for a reason other than time."""
        self._impossible[what] = why

    @property
    def not_tried(self) -> str:
        """Return in words which parts are unfinished and why; "" if none."""
        parts = [f"{what} ({why})" for what, why in self._impossible.items()]
        cut: dict[str, list[str]] = {}
        for name, times in self._cut.items():
            where = f" at {spans(times)}" if max(times) else ""
            cut.setdefault(where, []).append(name)
        texts = [f"{in_short(names)}{where}" for where, names in cut.items()]
        if texts:
            parts.append(f"no time for all of these: {', '.join(texts)}")
        return "; ".join(parts)

    @property
    def nothing_tried(self) -> bool:
        """Return whether time ran out before any part could finish."""
        return bool(self._cut) and not self.something_tried

    def say(self, text: Callable[[], str]) -> None:
        """Print the check's progress after some seconds without output."""
        if self.limited and now() - self._told > SILENCE:
            self._told = now()
            self.tell(f"{self.name}: so far {text()}")
