"""Which splits are tried where time is short."""

import math
from collections import defaultdict

from ..model.costs import Costs, spans
from ..model.tokens import SHORT
from .leaks import Search
from .trial import Mode

LONG = 3 / 4  # share of a mode's time that a long sequence takes at most


class Affordable:
    """Chooses splits that there is time for, and tells which were tried."""

    def __init__(self, modes: int) -> None:
        self.modes, self.end = modes, math.inf  # modes that are to come
        # by mode and length: splits, and how many of them there are
        self.tried = defaultdict[str, dict[int, tuple[set[int], int]]](dict)

    def begin(self, costs: Costs, share: int = 1) -> None:
        """Begin a mode: it gets its part of the time left, or several."""
        self.end = costs.spent + costs.left * share / max(self.modes, share)
        self.modes -= share

    def choose(
        self,
        search: Search,
        mode: Mode,
        time: int,
        splits: list[int],
        alone: bool = False,
    ) -> list[int]:
        """Return those that there is time for, and that were not tried.

        Of a short length all or none; of a longer one the ends and powers
        of two first, as many as leave time for other lengths.
        """
        costs = search.subject.costs
        name = search.conditions(mode).lstrip(", ") or "in eval mode"
        name += ", a row alone" * alone
        tried, _ = self.tried[name].setdefault(time, (set(), len(splits)))
        left = sorted(
            {*splits} - tried,
            key=lambda s: (s not in (1, time - 1), s & (s - 1) > 0, -s),
        )
        room = min(self.end - costs.spent, costs.left)
        at_once = 1 if alone else search.rows_at_once(time)
        least = len(left) if time <= SHORT else 1
        for count in range(len(left), least - 1, -1):
            rows = min(count, at_once)
            calls = 1 + -(-count // max(rows, 1))  # the base first
            tokens = calls * rows * time
            seconds = costs.of(tokens, calls, double=search.double)
            if seconds <= room * (1 if count == least else LONG):
                break
        else:
            return []
        costs.granted += bool(count)
        tried |= {*left[:count]}
        return sorted(left[:count])

    def __str__(self) -> str:
        return "; ".join(map(self._of_mode, self.tried))

    def _of_mode(self, name: str) -> str:
        counts = [(t, len(s), n) for t, (s, n) in self.tried[name].items()]
        whole = [time for time, count, wanted in counts if count >= wanted]
        none = [time for time, count, _ in counts if not count]
        words = [f"all splits at {spans(whole)}"] if whole else []
        words += [
            f"{count} of {wanted} at {time}"
            for time, count, wanted in counts
            if 0 < count < wanted
        ]
        words += [f"none at {spans(none)}"] if none else []
        return f"{name} {', '.join(words)}"
