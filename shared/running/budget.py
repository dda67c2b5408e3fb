"""The clock: the seconds that checks may take, and what they cut off."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from .errors import SkipCheck
from .ranks import now
from .tokens import spans

DEFAULT = 225.0  # seconds: finding out how a model is called takes some, too
HEAVY = 130.0  # of a heavy model, most of whose seconds are for proofs
NAMED = 4  # cases that a report names at the same lengths
SILENCE = 15.0  # seconds without a line until a check says how far it is


def in_short(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - NAMED
    rest = [f"{more} more cases (see the README)"] * (more > 0)
    return ", ".join([*names[:NAMED], *rest])


class OutOfTime(SkipCheck):
    """A call would begin after the end of its part."""


class Budget:
    """The seconds that the checks of a model may take.

    A check does first what finds most. Each of its parts has a share of the
    seconds left; a call that would begin later ends the part, whose name is
    kept: time cuts off the end. Outside of parts nothing is cut off once a
    part came to its end: a check that found something out says it.
    """

    def __init__(self, seconds: float = math.inf):
        self.seconds = seconds  # for all checks; infinite: everything is tried
        # called with a line, where a check takes long
        self.tell: Callable[[str], None] = lambda text: None
        self.calls = self.backwards = 0  # passes of the model
        self._began = now()
        self.start("", 1.0)

    # --- For the check under way ---------------------------------------------

    def start(self, name: str, share: float) -> None:
        """Begin a check, which may take a share of the seconds left."""
        self.name, self._started = name, now()
        self._told = self._started
        self.something_tried = False  # whether any part came to its end
        self.reached = 0  # the longest text of a part that came to its end
        self._parts = 0  # around what runs now
        self._cut = defaultdict[str, set[int]](set)  # lengths by part
        self._impossible: dict[str, str] = {}
        self._end = math.inf
        if self.limited:
            left = self._began + self.seconds - self._started
            self._end = self._started + share * left

    @property
    def limited(self) -> bool:
        """Whether there is an end."""
        return self.seconds < math.inf

    @property
    def elapsed(self) -> float:
        """Seconds since the check began."""
        return now() - self._started

    @property
    def left(self) -> float:
        """Seconds that the part under way may still take."""
        return self._end - now()

    def call(self) -> None:
        """Count a call of the model that begins now.

        Raises:
            OutOfTime: after the end of the part.
        """
        self.require()
        self.calls += 1

    def require(self) -> None:
        """Require time for what begins now: a call, or a copy."""
        if self.left <= 0 and (self._parts or not self.something_tried):
            raise OutOfTime(f"no time: {self.seconds:.0f} s for all checks")

    def count_backward(self, gradient: Tensor) -> None:
        """Count a backward pass: a hook of the scores."""
        self.backwards += 1

    @contextmanager
    def part(
        self, name: str = "", time: int = 0, share: float = 1.0
    ) -> Iterator[None]:
        """Give what runs inside a share of the time left, and end it then.

        Args:
            name: of the part, for the report; "": it is not named there.
            time: tokens of its texts.
            share: of the seconds left, at most.
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
        """Let what runs inside come to its end: something was found."""
        before, self._end = self._end, math.inf
        try:
            yield
        finally:
            self._end = before

    def cut(self, name: str, *times: int) -> None:
        """Note that there was no time for texts of some lengths."""
        self._cut[name] |= {*times}

    def give_up(self, what: str, why: str) -> None:
        """Note what cannot be tried with this model, whatever the time."""
        self._impossible[what] = why

    @property
    def not_tried(self) -> str:
        """The parts that were not tried to their end, and why; or ""."""
        parts = [f"{what} ({why})" for what, why in self._impossible.items()]
        cut: dict[str, list[str]] = {}
        for name, times in self._cut.items():
            where = f" at {spans(times)}" if max(times) else ""
            cut.setdefault(where, []).append(name)
        texts = [f"{in_short(names)}{where}" for where, names in cut.items()]
        if texts:
            parts.append(f"no time for all of {', '.join(texts)}")
        return "; ".join(parts)

    @property
    def nothing_tried(self) -> bool:
        """Whether there was no time for any part."""
        return bool(self._cut) and not self.something_tried

    def say(self, text: Callable[[], str]) -> None:
        """Say how far the check is, after some seconds without a line."""
        if self.limited and now() - self._told > SILENCE:
            self._told = now()
            self.tell(f"{self.name}: so far {text()}")
