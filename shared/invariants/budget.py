"""Time: the costs of calls, the calls a check may make, those it did not.

The only module that knows the clock. A check yields the rounds it would try,
the ones that find most first; the budget cuts off the end, and names it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .costs import Costs, Needs, Round
from .tokens import SHORT, spans

DEFAULT = 225.0  # seconds: meeting the model takes some, too
HEAVY = 130.0  # of a heavy model, most of whose seconds are for proofs
FORWARDS = 500  # of the longest sequence: the default of a heavy model
NAMED = 4  # ways that a report names at the same lengths
TOLD_AFTER = 15.0  # seconds without a line until a check says how far it is


def measured(
    build: Callable[[], Any],
    call: Callable[[Any, int], Tensor],
    lengths: tuple[int, int],
    heavy: bool,
) -> tuple[Costs, bool]:
    """Measure a copy and a call of the least and the longest sequence.

    Returns:
        The costs, and whether all scores are finite.
    """
    start = perf_counter()
    model = build()
    copied = perf_counter() - start
    (short, longest), seconds, finite = lengths, {}, True
    for length in (short, longest, short):  # the first call is slower
        start = perf_counter()
        scores = call(model, length)
        finite &= bool(torch.isfinite(scores).all())  # waits for the device
        seconds[length] = perf_counter() - start
    more = max(seconds[longest] - seconds[short], 0.0)
    costs = Costs(seconds[short], more / longest, copied, heavy)
    return costs, finite


class Budget:
    """Counts calls, reckons their seconds, and cuts off what is too long.

    Without a limit all is tried. One budget serves all checks of a model.
    """

    def __init__(self) -> None:
        self.costs = Costs()
        self.seconds = math.inf  # for all checks
        self.estimates: dict[str, float] = {}  # by check
        self.tell: Callable[[str], None] = lambda text: None
        self.calls = self.backwards = 0
        self._needs: Mapping[str, Needs] = {}
        self._began, self._reckoned = perf_counter(), 0.0
        self._kept: dict[object, Any] = {}
        self.start("")

    # --- For all checks of a model -------------------------------------------

    def plan(
        self,
        costs: Costs,
        needs: Mapping[str, Needs],
        longest: int,
        seconds: float | None,
    ) -> str:
        """Begin, with so many seconds for these checks.

        None is the time of FORWARDS of the longest sequence for a heavy
        model, at most HEAVY; for others DEFAULT if all would take longer.

        Returns:
            A sentence for the report where time is short, or "".
        """
        self.costs, self._needs = costs, needs
        self.estimates = {
            name: costs.of(n.rows * longest, n.calls) + n.copies * costs.build
            for name, n in needs.items()
        }
        total = sum(self.estimates.values())
        if seconds is None:
            seconds = DEFAULT
            if costs.heavy:
                seconds = min(HEAVY, FORWARDS * costs.of(longest))
            seconds += sum(self.estimates[n] for n in needs if needs[n].slow)
        if total <= seconds:
            return ""
        self.seconds = seconds
        self._began, self._reckoned = perf_counter(), 0.0
        return (
            f"one forward of {longest:,} tokens takes "
            f"{costs.of(longest):.2g} s: about {_words(seconds)}; --thorough "
            f"tries all, in {_words(total)}"
        )

    @property
    def limited(self) -> bool:
        """Whether time is short."""
        return self.seconds < math.inf

    @property
    def spent(self) -> float:
        """Seconds so far: by the clock, or more if reckoned, as on a GPU."""
        return max(self._reckoned, perf_counter() - self._began)

    def keep(self, name: object, make: Callable[[], Any]) -> Any:
        """Return what make returns, cached if a time limit applies."""
        if not self.limited:
            return make()
        if self._kept.get(name) is None:
            self._kept[name] = make()
        return self._kept[name]

    def release(self, *kept: Any) -> None:
        """Drop these from the cache, or all that is in it."""
        left = self._kept.items() if kept else ()
        self._kept = {n: k for n, k in left if all(k is not x for x in kept)}

    def charge_copy(self) -> None:
        """Count a copy of the model."""
        self._reckoned += self.costs.build

    def charge(self, scores: Tensor) -> None:
        """Count a call that gave these scores, and each backward pass."""
        tokens = scores.size(0) * scores.size(1)
        seconds = self.costs.of(tokens, double=scores.dtype == torch.float64)
        self.calls += 1
        self._reckoned += seconds
        if scores.requires_grad:
            scores.register_hook(partial(self._charge_backward, 2 * seconds))

    def _charge_backward(self, seconds: float, gradient: Tensor) -> None:
        self.backwards += 1
        self._reckoned += seconds

    # --- For the check under way ---------------------------------------------

    def start(self, name: str, others: Iterable[str] = ()) -> str:
        """Begin a check; others will follow.

        Checks with a share divide what the others leave, at least half of
        the time left.

        Returns:
            Why there is no time for it, or "".
        """
        self._name, self._shown = name, self.spent
        self._started = perf_counter()
        self._granted: set[str] = set()  # labels of rounds that had time
        self._cut = defaultdict[str, list[int]](list)
        self._tried = defaultdict[str, dict[int, tuple[set[int], int]]](dict)
        self._impossible: dict[str, str] = {}
        self.proof: Any = None  # a Proof, if the check makes one
        self._end = math.inf
        if not self.limited:
            return ""
        left, needs = self.seconds - self.spent, self._needs
        least = self.estimates[name]
        if share := needs[name].share:
            least = 0.0
            rest = [*others]
            fixed = sum(self.estimates[n] for n in rest if not needs[n].share)
            shares = share + sum(needs[n].share for n in rest)
            left = max(left - fixed, left / 2) * share / shares
        self._end = self.spent + left
        if 0 < left >= least:
            return ""
        return (
            f"no time: about {self.estimates[name]:.0f} s, {max(left, 0):.0f} "
            f"left of {self.seconds:.0f}"
        )

    @property
    def elapsed(self) -> float:
        """Seconds since the check began, by the clock."""
        return perf_counter() - self._started

    @property
    def left(self) -> float:
        """Seconds that the check under way may still spend."""
        return self._end - self.spent

    def count(self, tokens: int, double: bool) -> int:
        """Return how many calls of so many tokens fit; at least one."""
        if not self.limited:
            return tokens
        return max(1, int(self.left / self.costs.of(tokens, double=double)))

    def affordable(
        self, rounds: Iterable[Round]
    ) -> Iterator[tuple[Round, list[int]]]:
        """Yield the rounds that there is time for, and their splits.

        Of splits the ends and powers of two come first, none twice; of a
        short sequence all are tried or none.
        """
        for r in rounds:
            if not r.splits:
                if self.affords(r):
                    yield r, []
                continue
            chosen = self._choose(r)
            if chosen:
                self._granted.add(r.label)
                yield r, chosen
                self._say_how_far()

    def affords(self, r: Round) -> bool:
        """Whether there is time for a round without splits, or note it."""
        if r.seconds(self.costs, 1) > r.share * self.left:
            self._cut[r.label].append(r.time)
            return False
        self._granted.add(r.label)
        return True

    def _choose(self, r: Round) -> list[int]:
        """Return the splits of a round that fit, and note them."""
        room = r.share * self.left
        counts = self._tried[r.label]
        tried, _ = counts.setdefault(r.time, (set(), r.time - 1))
        wanted = {*r.splits} - (tried if r.time > SHORT else set())
        best = sorted(
            wanted,
            key=lambda s: (s not in (1, r.time - 1), s & (s - 1) > 0, -s),
        )
        least = len(best) if r.time <= SHORT else 1
        for count in range(len(best), least - 1, -1):
            if r.seconds(self.costs, count) <= room:
                break
        else:
            count = 0
        if count < len(best):
            self._cut[r.label].append(r.time)
        tried |= {*best[:count]}
        return sorted(best[:count])

    def give_up(self, what: str, why: str) -> None:
        """Note what cannot be tried with this model, whatever the time."""
        self._impossible[what] = why

    @property
    def tried(self) -> str:
        """Which splits were tried, of how many."""
        ways = defaultdict[str, list[str]](list)
        for label, counts in self._tried.items():
            table = {t: (len(done), of) for t, (done, of) in counts.items()}
            whole = [t for t, (done, of) in table.items() if done == of]
            parts = [f"all splits at {spans(whole)}"] if whole else []
            parts += [
                f"{done} of {of} at {t}"
                for t, (done, of) in sorted(table.items())
                if 0 < done < of
            ]
            if parts:
                ways[", ".join(parts)].append(label)
        for text, labels in ways.items():
            if len(labels) > NAMED:
                more = f"{len(labels) - NAMED} more ways (see the README)"
                ways[text] = [*labels[:NAMED], more]
        return "; ".join(
            f"{', '.join(labels)}: {text}" for text, labels in ways.items()
        )

    @property
    def not_tried(self) -> str:
        """Rounds that were not tried, and why; or ""."""
        parts = [f"{what} ({why})" for what, why in self._impossible.items()]
        cut = [
            what + f" at {spans(times)}" * (what in self._granted)
            for what, times in self._cut.items()
        ]
        if cut:
            parts.append(f"no time for rounds {', '.join(cut)}")
        return "; ".join(parts)

    @property
    def nothing_tried(self) -> bool:
        """Whether there was no time for anything that the check would try."""
        return bool(self._cut) and not self._granted

    def _say_how_far(self) -> None:
        if self.limited and self.spent - self._shown > TOLD_AFTER:
            self._shown = self.spent
            self.tell(f"{self._name}: so far {self.tried}")


def _words(seconds: float) -> str:
    by_minutes = seconds >= 120
    return f"{seconds / 60:.0f} minutes" if by_minutes else f"{seconds:.0f} s"
