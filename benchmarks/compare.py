"""New results against old ones of the same machine and setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpt_duet.benchmark_results import Results, Row, Run, Value

from .machine import LIBRARIES

MOST_ROUNDS = 1000  # that a verdict may ask the user to run
# two machines are one where these agree; libraries may have been renewed
IDENTITY = ("processor", "cores", "accelerator", "system")

# settings that may be known only once the models are built
OPEN = {"threads", "vocabulary", "time", "prompt"}
OPEN |= {"shape", "layers", "heads", "width"}
Facts = dict[str, Value]
Pace = Literal["slower", "faster", "level", "unknown"]


@dataclass(frozen=True)
class Change:
    """How one row's time changed from an old file to now."""

    run: str  # the measurement, in words
    row: Row  # the model and its sizes
    ratio: float  # new median over old median: above 1 is slower
    error: float  # by how much the ratio may be wrong, in 19 of 20 cases

    def pace(self, tolerance: float) -> Pace:
        """Return the verdict; slower surely exceeds what is tolerated."""
        least, most = 1 / (1 + tolerance), 1 + tolerance
        low, high = self.ratio - self.error, self.ratio + self.error
        if low > most:
            return "slower"
        if high < least:
            return "faster"
        return "level" if low >= least and high <= most else "unknown"

    def verdict(self, tolerance: float) -> str:
        """Say "slower", "faster" or "level", or how many rounds it needs."""
        pace = self.pace(tolerance)
        if pace != "unknown":
            return pace
        least, most = 1 / (1 + tolerance), 1 + tolerance
        rounds = len(self.row.seconds)
        margin = min(abs(self.ratio - least), abs(self.ratio - most))
        if math.isinf(self.error):
            return "too noisy to say: needs at least 5 rounds"
        # the error shrinks with the root of the rounds
        needed = (rounds - 1) * (self.error / max(margin, 1e-9)) ** 2 + 1
        if needed > MOST_ROUNDS:
            return "too noisy to say, and no number of rounds will help"
        return f"too noisy to say: needs about {math.ceil(needed)} rounds"


def _uncertainty(row: Row) -> float:
    """By what part of itself the median may be wrong, 19 times in 20.

    Of normal errors the median's is 1.25 times the mean's, and quartiles are
    1.35 deviations apart.
    """
    first, median, third = row.quartiles
    rounds = len(row.seconds)
    if rounds < 2:
        return math.inf
    return 2 * 1.25 / 1.35 * (third - first) / median / (rounds - 1) ** 0.5


def compare_results(
    old: Results, new: Results
) -> tuple[list[Change], list[str]]:
    """Compare each row with the same row of the same setting before.

    The notes are what else a reader has to know: what was not compared, and
    versions that are not the old ones.
    """
    before = {_key(run.what, run.setting): run for run in old.runs}
    changes, notes = [], []
    for run in new.runs:
        name = f"{run.what}, {run.described()}"
        then = before.get(_key(run.what, run.setting))
        if then is None:
            notes.append(f"not in the old file: {name}")
            continue
        rows, were = ({r.name: r for r in x.rows} for x in (run, then))
        for row in rows.values():
            if row.name in were:
                old_row = were[row.name]
                ratio = row.median / old_row.median
                error = math.hypot(_uncertainty(row), _uncertainty(old_row))
                changes.append(Change(name, row, ratio, ratio * error))
        for where, alone in (
            ("not in the old file", rows.keys() - were.keys()),
            ("only in the old file", were.keys() - rows.keys()),
        ):
            if alone:
                notes.append(f"{where}: {', '.join(sorted(alone))} of {name}")
    for name in ("python", *LIBRARIES):
        was, now = old.machine.get(name), new.machine.get(name)
        if was != now:
            notes.append(f"{name} was {was}, is {now}")
    return changes, notes


def require_comparable(
    old: Results, machine: Facts, what: str, settings: Sequence[Facts]
) -> None:
    """Refuse old results of another machine, or without an equal setting."""
    for fact in IDENTITY:
        was, now = old.machine.get(fact), machine.get(fact)
        if was != now:
            words = f"{fact} was {was!r}, here it is {now!r}"
            raise ValueError(f"the old file is of another machine: {words}")
    planned = [Run(what, setting, [Row("", [1.0])]) for setting in settings]
    if not any(_fits(a, b) for a in old.runs for b in planned):
        was, here = (
            "; ".join(f"{run.what}, {run.described()}" for run in runs)
            for runs in (old.runs, planned)
        )
        raise ValueError(
            "nothing to compare: no equal setting is in the old file, which "
            f"has: {was}; this call has: {here}"
        )


def _fits(old: Run, planned: Run) -> bool:
    """Whether a plan, which may leave settings open, may have an old key."""
    open_ = OPEN - planned.setting.keys()
    setting = {k: v for k, v in old.setting.items() if k in open_}
    return _key(old.what, old.setting) == _key(
        planned.what, planned.setting | setting
    )


def _key(what: str, setting: Facts) -> tuple:
    """Return the settings that two runs must share to be compared."""
    return what, *sorted((k, v) for k, v in setting.items() if k != "rounds")
